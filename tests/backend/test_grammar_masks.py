"""Check what a mask foretells: ids that its form forces, drafts that keep to it, and bits that no draft changes."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable

import pytest
from llguidance import LLExecutor, LLMatcher, LLParserLimits

from inference_api.backend.engines.base import MaskError
from inference_api.backend.grammar_masks import GrammarMask, UnlockedSteps
from inference_api.backend.grammars import GrammarCompiler
from inference_api.messages import Grammar, GrammarKind
from tests.backend.factories import EOS_ID, make_image
from tests.backend.json_schemas import make_schema

PROMPT = list(b"say:")
COMPILER = GrammarCompiler(make_image())
NAME = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type": "object", "properties": {"name": {"enum": ["Ada", "Alan"]}}, "required": ["name"],'
    ' "additionalProperties": false}',
)
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{4}x?")
NUM_SCHEMAS = 20
AMBIGUOUS = "start: a0\n" + "".join(f'a{n}: a{n + 1} a{n + 1} | "x" a{n + 1} | a{n + 1} "x" | "x"\n' for n in range(12))
AMBIGUOUS += 'a12: "x" | a0 a0'
HEAVY_STEPS = range(40, 48)
"""Of AMBIGUOUS: tens of milliseconds each without the bound on Lark grammars."""


def make_mask(grammar: Grammar) -> GrammarMask:
    return COMPILER.compile(grammar, len(PROMPT))


def ids_of(bits: bytes) -> list[int]:
    return [token_id for token_id in range(8 * len(bits)) if bits[token_id // 8] >> token_id % 8 & 1]


def test_what_a_form_forces_is_guessed_as_far_as_asked() -> None:
    mask = make_mask(NAME)
    begun = [*PROMPT, *b'{"']
    assert bytes(mask.guess(begun, (), 4)) == b"name"
    assert bytes(mask.guess(begun, (1, 2), 20)) == b'name":'[:5]
    assert mask.allowed(begun) == make_mask(NAME).allowed(begun)


def test_of_what_is_proposed_the_beginning_that_keeps_to_the_form_is_guessed() -> None:
    mask = make_mask(DIGITS)
    assert mask.guess(PROMPT, tuple(b"12ab"), 4) == tuple(b"12")
    assert mask.guess(PROMPT, tuple(b"1234"), 3) == tuple(b"123")
    assert mask.guess(PROMPT, tuple(b"ab"), 4) == ()
    assert mask.guess([*PROMPT, *b"123"], (ord("4"), EOS_ID, EOS_ID), 4) == (ord("4"),)


def test_an_answer_outside_its_form_guesses_nothing_and_says_so_when_it_is_drawn() -> None:
    mask = make_mask(DIGITS)
    lost = [*PROMPT, *b"z"]
    assert mask.guess(lost, tuple(b"12"), 2) == ()
    mask.prepare(lost)
    with pytest.raises(MaskError, match="cannot go on in its form"):
        mask.allowed(lost)


@pytest.mark.parametrize("seed", range(NUM_SCHEMAS))
def test_bits_are_the_same_with_drafts_and_without(seed: int) -> None:
    rng = random.Random(seed)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(make_schema(rng, bounded=True)))
    drafted, single = make_mask(grammar), make_mask(grammar)
    ids = list(PROMPT)
    while True:
        drafts = drafted.guess(ids, tuple(rng.choices(b'abc{}[]":,0123', k=4)), 4)
        drafted.prepare(ids, drafts)
        kept = rng.randint(0, len(drafts))
        for count in range(kept + 1):
            if count:
                ids.append(drafts[count - 1])
            bits = single.allowed(ids)
            assert drafted.allowed(ids) == bits
        drawn = rng.choice(ids_of(bits))
        if drawn >= EOS_ID:
            return
        ids.append(drawn)


def test_a_draft_that_leaves_the_form_fails_where_it_stands_and_harms_nothing_before_or_after() -> None:
    mask = make_mask(DIGITS)
    mask.prepare(PROMPT, tuple(b"1z9"))
    assert ids_of(mask.allowed([*PROMPT, *b"1"])) == list(b"0123456789")
    with pytest.raises(MaskError):
        mask.allowed([*PROMPT, *b"1z"])
    mask.prepare([*PROMPT, *b"12"])
    assert ids_of(mask.allowed([*PROMPT, *b"12"])) == list(b"0123456789")


def test_a_lark_grammar_is_followed_and_guesses_nothing() -> None:
    mask = make_mask(Grammar(GrammarKind.LARK, 'start: "hello" " " ("a" | "b")'))
    assert mask.guess(PROMPT, tuple(b"hello"), 4) == ()
    assert ids_of(mask.allowed([*PROMPT, *b"hello "])) == list(b"ab")


def stalled_share(consume: Callable[[LLMatcher, bytes], bool]) -> float:
    """Take heavy steps with `consume`; return in which share of their time no other thread got to run."""
    limits = LLParserLimits(max_items_in_row=10_000)
    matcher = LLMatcher(COMPILER._tokenizer, AMBIGUOUS, log_level=0, limits=limits)
    assert consume(matcher, b"x" * HEAVY_STEPS.start)
    beats, is_over = [time.monotonic()], threading.Event()

    def beat() -> None:
        while not is_over.is_set():
            beats.append(time.monotonic())

    other = threading.Thread(target=beat)
    other.start()
    stalled_seconds = taken_seconds = 0.0
    for _ in HEAVY_STEPS:
        del beats[:-1]
        began = time.monotonic()
        assert consume(matcher, b"x")
        taken_seconds += time.monotonic() - began
        stalled_seconds += max((later - earlier for earlier, later in itertools.pairwise(beats[:])), default=0.0)
    is_over.set()
    other.join()
    return stalled_seconds / taken_seconds


def test_other_threads_run_while_an_ambiguous_grammar_steps_and_would_not_otherwise() -> None:
    steps = UnlockedSteps(LLExecutor(1), LLMatcher(COMPILER._tokenizer, "", log_level=0))
    assert stalled_share(steps.consume) < 0.5
    assert stalled_share(lambda matcher, ids: matcher.consume_tokens(list(ids))) > 0.6


def follow(mask: GrammarMask, ids: list[int], next_id: int) -> None:
    """Ask for the bits after `ids` and after each of 200 equal ids more."""
    for _ in range(200):
        mask.allowed(ids)
        ids.append(next_id)


def test_an_ambiguous_lark_grammar_ends_its_answer_before_it_costs_much() -> None:
    mask = make_mask(Grammar(GrammarKind.LARK, AMBIGUOUS))
    began = time.process_time()
    with pytest.raises(MaskError, match=r"too many items|max is"):
        follow(mask, list(PROMPT), ord("x"))
    assert time.process_time() - began < 2
