"""Check forms over the real model's vocabulary, whose ids are many bytes long and cut texts in every place."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from inference_api.backend.grammars import GrammarCompiler
from inference_api.messages import Grammar, GrammarKind
from inference_api.model_image import ModelImage
from tests.backend.json_schemas import keeps_to, make_schema

pytestmark = pytest.mark.model

NUM_SCHEMAS = 20
"""Random schemas a run; a thousand take a minute."""

MAX_TOKENS = 600


def say(compiler: GrammarCompiler, image: ModelImage, schema: object, rng: random.Random) -> str:
    """Return the text of a completion of ids drawn evenly of those that are allowed."""
    mask = compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), 1)
    ids = [1]
    while len(ids) < MAX_TOKENS:
        token_id = rng.choice(_set_bits(mask.allowed(ids)))
        if token_id in image.stop_ids:
            return b"".join(image.token_bytes[token_id] for token_id in ids[1:]).decode()
        ids.append(token_id)
    raise AssertionError(f"no end after {MAX_TOKENS} ids of {schema}")


def _set_bits(bits: bytes) -> list[int]:
    return [index for index, bit in enumerate(reversed(f"{int.from_bytes(bits, 'little'):b}")) if bit == "1"]


def test_whatever_ids_are_drawn_the_text_is_valid(model_image_path: Path) -> None:
    image = ModelImage.open(model_image_path)
    compiler = GrammarCompiler(image)
    rng = random.Random(11)
    for _ in range(NUM_SCHEMAS):
        schema = make_schema(rng, bounded=True)
        text = say(compiler, image, schema, rng)
        assert keeps_to(json.loads(text), schema), (schema, text)


FORMS = (
    Grammar(GrammarKind.REGEX, "([a-z]{1,8} )+"),
    Grammar(GrammarKind.REGEX, "(abc|abd|hello world){2,5}"),
    Grammar(GrammarKind.CHOICE, '["London Bridge", "London", "Größe €"]'),
    Grammar(GrammarKind.LARK, 'start: (w " ")+ "."\nw: /[a-z]+/ | "<|im_end|>"'),
    Grammar(GrammarKind.JSON_OBJECT, ""),
)


def worth_asking(image: ModelImage, bits: bytes, forced: bytes, rng: random.Random) -> set[int]:
    """Return ids at random, some that are allowed, all ends, and all that a forced text begins with."""
    allowed = _set_bits(bits)
    begins = [token_id for token_id, text in enumerate(image.token_bytes) if text and forced.startswith(text)]
    some = [*rng.sample(range(image.vocab_size), 30), *rng.sample(allowed, min(30, len(allowed)))]
    return {*some, *image.stop_ids, *list(image.special_ids)[:9], *begins}


def test_a_form_takes_the_ids_whose_bits_are_set_and_no_others(model_image_path: Path) -> None:
    image = ModelImage.open(model_image_path)
    compiler = GrammarCompiler(image)
    rng = random.Random(12)
    schemas = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(make_schema(rng, bounded=True))) for _ in range(10)]
    num_forced = 0
    for grammar in (*FORMS, *schemas):
        found, asked, ids = compiler.compile(grammar, 1), compiler.compile(grammar, 1), [1]
        while len(ids) < 40 and ids[-1] not in image.stop_ids:
            bits = found.allowed(ids)
            asked.takes(ids, 5)
            forced = asked._matcher.compute_ff_bytes()
            num_forced += bool(forced)
            assert asked.forced_id(ids) is None or [asked.forced_id(ids)] == _set_bits(bits)
            for token_id in worth_asking(image, bits, forced, rng):
                assert asked.takes(ids, token_id) is bool(bits[token_id // 8] >> token_id % 8 & 1), (grammar, ids)
            ids.append(rng.choice(_set_bits(bits)))
    assert num_forced > 20
