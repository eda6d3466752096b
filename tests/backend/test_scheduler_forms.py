"""Check sequences that keep to a form, beside others that do not: their ids, their ends, preemption and resuming.

The engine is the mock, which takes the lowest allowed id where its script's own is not, or one that draws any allowed
id, so that every way through a form is gone by chance.
"""

from __future__ import annotations

import json
import queue
import random
import re
import threading

import pytest

from inference_api.backend import mask_lanes
from inference_api.backend.engines.base import MaskError, RowPlan, RowResult, StepPlan, StepResult
from inference_api.backend.grammar_masks import GrammarMask
from inference_api.backend.grammars import GrammarCompiler
from inference_api.backend.inbox_messages import MaskedSubmit, MaskReady
from inference_api.backend.mask_lanes import MaskLanes
from inference_api.backend.step_planning import SchedulerOptions
from inference_api.messages import FinishReason, Grammar, GrammarKind, QueryKind
from tests.backend.factories import DIGITS, EOS_ID, NOISE, Rig, ScriptedEngine, make_image, make_submit
from tests.backend.json_schemas import keeps_to, make_schema

NUM_SCHEMAS = 30
"""Random schemas of each sort; 500 of each take two minutes."""

WAIT_SECONDS = 10.0
LONG_TOKENS = 300
CLOSING_IDS = (EOS_ID, *b'"}]')

COMPILER = GrammarCompiler(make_image())
OBJECT = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99},'
    ' "w": {"enum": ["red", "blue"]}}, "required": ["n", "w"], "additionalProperties": false}',
)
NAME = Grammar(GrammarKind.REGEX, "[A-Z][a-z]{2,7}")


class MaskFoundHere:
    """A mask whose bits are found by whom asks for them."""

    def __init__(self, mask: GrammarMask) -> None:
        self.guess, self.forced_id, self.takes = mask.guess, mask.forced_id, mask.takes
        self.allowed, self._prepare = mask.allowed, mask.prepare

    def is_late(self, ids: object) -> bool:
        return False

    def expect(self, ids: list[int], draft_ids: tuple[int, ...] = (), *, surely: bool = False) -> None:
        self._prepare(ids, draft_ids)


def submit_formed(
    rig: Rig,
    session_id: str,
    grammar: Grammar,
    prompt: bytes = b"hello",
    *,
    lanes: MaskLanes | None = None,
    **changes: object,
) -> None:
    """Hand a Submit over with the mask of its grammar, as the intake does; with `lanes` that is found there."""
    submit = make_submit(session_id, prompt, grammar=grammar, **{"max_tokens": 400, **changes})
    rig.admission.take(len(submit.token_ids))
    rig._known[session_id] = len(submit.token_ids) - submit.num_prompt_tokens
    mask = COMPILER.compile(grammar, submit.num_prompt_tokens)
    found = MaskFoundHere(mask) if lanes is None else lanes.ahead(mask)
    rig.scheduler.apply([("worker-1", MaskedSubmit(submit, found))], rig.now)


def figure(rig: Rig, name: str) -> float:
    return rig.query(QueryKind.METRICS).metrics.get(name, 0.0)


def answer(rig: Rig, session_id: str) -> str:
    """Return what a session said before its end."""
    assert rig.ends[session_id].reason is FinishReason.STOP, rig.ends[session_id]
    ids = rig.ids[session_id]
    assert ids[-1] in (EOS_ID, 258)
    return bytes(ids[:-1]).decode()


def draw_anything(rig: Rig) -> None:
    """Let the rig's engine draw any id that a row's mask allows, by chance, and come to an end if that takes long."""

    def drawn(row: RowPlan) -> RowResult:
        sample = row.sample
        assert sample is not None and sample.mask is not None
        bits = int.from_bytes(sample.mask.allowed(sample.known_ids), "little")
        ids = [token_id for token_id in range(259) if bits >> token_id & 1]
        assert ids, "nothing may come next"
        closing = [token_id for token_id in CLOSING_IDS if token_id in ids]
        if closing and sample.position > LONG_TOKENS:
            return RowResult(row.row, (closing[0],))
        return RowResult(row.row, (random.Random(repr((sample.params.seed, sample.position))).choice(ids),))

    def result_of(plan: StepPlan) -> StepResult:
        return StepResult(tuple(drawn(row) for row in plan.rows if row.sample is not None))

    rig.engine = ScriptedEngine(rig.engine, result_of)


def test_an_answer_keeps_to_its_schema_and_ends() -> None:
    rig = Rig(2, script=DIGITS, context_tokens=512)
    submit_formed(rig, "s0", OBJECT)
    rig.run()
    value = json.loads(answer(rig, "s0"))
    assert value.keys() == {"n", "w"} and value["w"] in ("red", "blue") and 0 <= value["n"] <= 99


@pytest.mark.parametrize("bounded", [True, False], ids=["mock", "drawn"])
def test_every_answer_to_a_random_schema_is_valid_and_none_gets_stuck(bounded: bool) -> None:
    rng = random.Random(17)
    schemas = {f"s{number}": make_schema(rng, bounded=bounded) for number in range(NUM_SCHEMAS)}
    rig = Rig(8, script=DIGITS if bounded else NOISE, context_tokens=4096, queue=(NUM_SCHEMAS, 65536))
    if not bounded:
        draw_anything(rig)
    for number, (session_id, schema) in enumerate(schemas.items()):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        submit_formed(rig, session_id, grammar, max_tokens=4000, seed=number)
    rig.run(100_000)
    for session_id, schema in schemas.items():
        text = answer(rig, session_id)
        assert keeps_to(json.loads(text), schema), (schema, text)


@pytest.mark.parametrize("seed", range(8))
def test_regular_expressions_and_choices_are_kept_to_whatever_is_drawn(seed: int) -> None:
    rig = Rig(2)
    draw_anything(rig)
    words = ["ja", "jaja", "日本"]
    submit_formed(rig, "name", NAME, seed=seed)
    submit_formed(rig, "word", Grammar(GrammarKind.CHOICE, json.dumps(words)), seed=seed)
    rig.run()
    assert re.fullmatch(NAME.text, answer(rig, "name"))
    assert answer(rig, "word") in words


def test_rows_beside_a_form_say_what_they_say_alone() -> None:
    alone = Rig(4, context_tokens=512)
    beside = Rig(4, context_tokens=512)
    submit_formed(beside, "formed", OBJECT)
    for rig in (alone, beside):
        for number in range(3):
            rig.submit(f"s{number}", f"prompt {number}".encode(), seed=number, max_tokens=40)
        rig.run()
    assert [alone.ids[f"s{number}"] for number in range(3)] == [beside.ids[f"s{number}"] for number in range(3)]
    with_others = answer(beside, "formed")
    alone = Rig(4, context_tokens=512)
    submit_formed(alone, "formed", OBJECT)
    alone.run()
    assert answer(alone, "formed") == with_others


def test_a_row_that_made_room_goes_on_in_its_form() -> None:
    form = Grammar(GrammarKind.REGEX, "([a-f]{5}-){5}x")
    tight = Rig(3, script=NOISE, context_tokens=64, options=SchedulerOptions(70))
    roomy = Rig(3, script=NOISE, context_tokens=64)
    for rig in (tight, roomy):
        for number in range(3):
            submit_formed(rig, f"s{number}", form, b"hello world, good day", seed=number)
        rig.run()
    assert figure(tight, "preemptions") > 0
    answers = [answer(tight, f"s{number}") for number in range(3)]
    assert answers == [answer(roomy, f"s{number}") for number in range(3)]
    assert all(re.fullmatch(form.text, text) for text in answers)


def test_a_second_attempt_goes_on_where_the_first_one_was_cut() -> None:
    whole = Rig(1, context_tokens=512)
    submit_formed(whole, "s0", OBJECT)
    whole.run()
    known = whole.ids["s0"][:7]
    rig = Rig(1, context_tokens=512)
    token_ids = [*b"hello", *known]
    submit_formed(rig, "s0", OBJECT, token_ids=token_ids, num_prompt_tokens=5, attempt=1)
    rig.run()
    assert known + rig.ids["s0"] == whole.ids["s0"]
    assert rig.ends["s0"].reason is FinishReason.STOP


@pytest.mark.parametrize("seed", range(NUM_SCHEMAS))
def test_what_a_form_guesses_ahead_changes_no_answer_and_spares_steps(seed: int) -> None:
    rng = random.Random(seed)
    schemas = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(make_schema(rng, bounded=True))) for _ in range(2)]
    forms = [*schemas, Grammar(GrammarKind.REGEX, "(abcd){9}x"), Grammar(GrammarKind.REGEX, "([a-c]{2} ){12}")]
    plain, guessing = (Rig(2, context_tokens=1024, options=SchedulerOptions(draft_tokens=count)) for count in (0, 4))
    for rig in (plain, guessing):
        for number, form in enumerate(forms):
            submit_formed(rig, f"s{number}", form, b"ab ac bc" * 3, seed=seed, max_tokens=300)
        rig.run()
    assert guessing.ids == plain.ids
    assert figure(guessing, "accepted_draft_tokens") > 30
    assert len(guessing.plans) < len(plain.plans)


class LateMask:
    """Allow everything, but later than its step."""

    late = False

    def is_late(self, ids: object) -> bool:
        return self.late

    def guess(self, ids: object, proposal: object, max_tokens: int) -> tuple[int, ...]:
        return ()

    def expect(self, ids: object, draft_ids: object = (), *, surely: bool = False) -> None:
        assert not self.late

    def forced_id(self, ids: object) -> int | None:
        return None

    def takes(self, ids: object, token_id: int) -> bool:
        return True

    def allowed(self, ids: object) -> bytes:
        return b"\xff" * 33


def submit_late(rig: Rig) -> LateMask:
    rig.admission.take(5)
    mask = LateMask()
    rig.scheduler.apply([("worker-1", MaskedSubmit(make_submit("late", max_tokens=9), mask))], rig.now)
    return mask


def test_a_row_whose_mask_is_late_sits_out_and_says_in_the_end_what_it_always_says() -> None:
    prompt = Rig(2)
    submit_late(prompt)
    prompt.run()
    rig = Rig(2)
    mask = submit_late(rig)
    rig.submit("other", max_tokens=20)
    for number in range(40):
        mask.late = number % 3 > 0
        rig.step()
    assert rig.ids["late"] == prompt.ids["late"]
    assert [len(plan.rows) for plan in rig.plans[:7]] == [2, 1, 1, 2, 1, 1, 2]
    assert rig.ends["other"].reason is FinishReason.LENGTH


def test_a_backend_whose_rows_all_sit_out_waits_until_one_may_go_on() -> None:
    rig = Rig(2)
    mask = submit_late(rig)
    rig.step()
    assert rig.scheduler.next_wake(rig.now) == 0
    mask.late = True
    rig.step()
    assert rig.scheduler.next_wake(rig.now) == 1
    rig.scheduler.apply([("", MaskReady())], rig.now)
    assert rig.scheduler.next_wake(rig.now) == 0
    mask.late = False
    rig.run()
    assert rig.ends["late"].reason is FinishReason.LENGTH


def test_a_slow_form_keeps_the_decode_thread_waiting_once_and_says_what_it_always_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask_lanes, "SLOW_SECONDS", -1.0)
    threads: list[str] = []
    prepare = GrammarMask.prepare

    def noted(mask: GrammarMask, ids: list[int], draft_ids: tuple[int, ...] = ()) -> None:
        threads.append(threading.current_thread().name)
        prepare(mask, ids, draft_ids)

    told: queue.SimpleQueue[None] = queue.SimpleQueue()
    lanes = MaskLanes(lambda: told.put(None))
    prompt, rig = Rig(1), Rig(1)
    submit_formed(prompt, "s0", OBJECT)
    prompt.run()
    monkeypatch.setattr(GrammarMask, "prepare", noted)
    submit_formed(rig, "s0", OBJECT, lanes=lanes)
    while not rig.scheduler.is_empty:
        if not rig.step().rows:
            told.get(timeout=WAIT_SECONDS)
    lanes.close()
    assert rig.ids == prompt.ids
    assert threads == ["masks", *["slow masks"] * (len(threads) - 1)]
    assert len(threads) == len(rig.ids["s0"])


def test_max_tokens_cuts_a_form_and_says_so() -> None:
    rig = Rig(1)
    submit_formed(rig, "s0", OBJECT, max_tokens=5)
    rig.run()
    assert rig.ends["s0"].reason is FinishReason.LENGTH


def test_a_stop_sequence_ends_a_form_where_it_comes() -> None:
    rig = Rig(1)
    submit_formed(rig, "s0", OBJECT, stop_sequences=[b'"w'])
    rig.run()
    assert (rig.ends["s0"].reason, rig.ends["s0"].stop) == (FinishReason.STOP, b'"w')


def test_a_form_that_fails_ends_its_own_row_only() -> None:
    class Dead(LateMask):
        def allowed(self, ids: object) -> bytes:
            raise MaskError("it is too complex.")

    rig = Rig(2)
    rig.submit("plain")
    rig.admission.take(5)
    rig.scheduler.apply([("worker-1", MaskedSubmit(make_submit("dead"), Dead()))], rig.now)
    rig.run()
    assert rig.ends["plain"].reason is FinishReason.LENGTH
    assert rig.ends["dead"].reason is FinishReason.ERROR
    assert "it is too complex." in rig.ends["dead"].error.message
