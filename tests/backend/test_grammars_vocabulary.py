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
