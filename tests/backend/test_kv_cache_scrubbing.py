"""Check which rows hold what nobody may begin with any more, and that they are zeroed before the next step runs."""

from __future__ import annotations

import pytest

from inference_api.backend.decode_loop import DecodeLoop, Inbox
from inference_api.backend.engines.base import StepPlan, StepResult
from inference_api.backend.engines.mock import MockScript
from inference_api.backend.kv_cache import RowPool
from inference_api.backend.step_planning import SchedulerOptions
from inference_api.messages import Message
from tests.backend.factories import WORKER, Rig, make_submit
from tests.backend.test_kv_cache import TEXT, Owner, remembered

PROMPT = "a prompt of more than sixteen ids"


class WatchedEngine:
    """The mock's engine; `held` is what all rows held when each plan came."""

    def __init__(self, rig: Rig) -> None:
        self._engine = rig.engine
        self.info = rig.engine.info
        self.release = rig.engine.release
        self.scrub = rig.engine.scrub
        self.held: list[list[bytes]] = []

    @property
    def rows(self) -> list[bytes]:
        """What each row holds now."""
        return [bytes(token_id for token_id in ids if token_id < 256) for ids in self._engine._rows]

    def execute(self, plan: StepPlan) -> StepResult:
        self.held.append(self.rows)
        return self._engine.execute(plan)


class Nowhere:
    """An outbox that sends to nobody."""

    def send(self, worker: str, message: Message) -> None:
        pass


def run(rig: Rig, engine: WatchedEngine, *, scrubs: bool, texts: list[tuple[str, str]]) -> None:
    """Let one sequence after another run to its end: (tenant, prompt)."""
    inbox = Inbox()
    loop = DecodeLoop(rig.scheduler, engine, inbox, Nowhere(), lambda: rig.now, scrubs=scrubs)
    for number, (tenant, text) in enumerate(texts):
        rig.admission.take(len(text))
        inbox.put(WORKER, make_submit(f"s{number}", text.encode(), tenant=tenant, max_tokens=2))
        while not rig.scheduler.is_empty or inbox._items:
            loop.step()


def remembering(num_rows: int = 1, script: MockScript | None = None) -> Rig:
    options = SchedulerOptions(prefix_reuse=True)
    return Rig(num_rows, options=options) if script is None else Rig(num_rows, options=options, script=script)


@pytest.mark.parametrize("scrubs", [True, False])
def test_a_row_is_zeroed_before_another_tenant_begins_in_it(scrubs: bool) -> None:
    rig = remembering()
    engine = WatchedEngine(rig)
    run(rig, engine, scrubs=scrubs, texts=[("alpha", PROMPT), ("beta", "other words")])
    first_of_alpha, second_of_alpha, first_of_beta, _ = [rows[0] for rows in engine.held]
    assert first_of_alpha == b""
    assert second_of_alpha == PROMPT.encode()
    assert first_of_beta.startswith(PROMPT.encode()) != scrubs
    assert first_of_beta == b"" or not scrubs


def test_a_tenant_still_begins_with_what_it_left() -> None:
    rig = remembering()
    engine = WatchedEngine(rig)
    run(rig, engine, scrubs=True, texts=[("alpha", PROMPT), ("alpha", PROMPT + " and more")])
    assert rig.scheduler._metrics["prefix_hits"] == 1


def test_without_reuse_a_row_is_zeroed_at_its_end() -> None:
    rig = Rig(1)
    engine = WatchedEngine(rig)
    run(rig, engine, scrubs=True, texts=[("alpha", PROMPT)])
    assert engine.rows == [b""]
    rig = Rig(1)
    engine = WatchedEngine(rig)
    run(rig, engine, scrubs=False, texts=[("alpha", PROMPT)])
    assert engine.rows[0].startswith(PROMPT.encode())


def test_a_row_on_which_the_engine_failed_is_zeroed_though_rows_remember() -> None:
    rig = remembering(script=MockScript(faults={b"bad": "nan"}))
    engine = WatchedEngine(rig)
    run(rig, engine, scrubs=True, texts=[("alpha", "a bad prompt of more than sixteen ids")])
    assert engine.rows == [b""]


def test_the_idle_check_runs_in_a_zeroed_row() -> None:
    rig = remembering()
    engine = WatchedEngine(rig)
    run(rig, engine, scrubs=True, texts=[("alpha", PROMPT)])
    loop = DecodeLoop(rig.scheduler, engine, Inbox(), Nowhere(), lambda: rig.now, scrubs=True)
    rig.now += 120.0
    assert loop.check_idle_engine(60.0)
    assert engine.held[-1] == [b""]


def test_a_row_is_unclean_for_another_tenant_and_not_for_its_own() -> None:
    rows = RowPool(1, remembers=True)
    remembered(rows, tenant="alpha")
    assert rows.take_unclean() == []
    Owner(list(TEXT), "alpha").take_row(rows).compute(rows)
    rows.free(0)
    assert rows.take_unclean() == []
    Owner(list(TEXT), "beta").take_row(rows).compute(rows)
    assert rows.take_unclean() == [0]
    assert rows.take_unclean() == []


def test_a_row_that_another_tenant_owned_and_never_began_in_stays_as_it_was() -> None:
    rows = RowPool(1, remembers=True)
    remembered(rows, tenant="alpha")
    Owner(list(TEXT), "beta").take_row(rows)
    rows.free(0)
    assert rows.take_unclean() == []
    owner = Owner(list(TEXT), "alpha").take_row(rows)
    assert owner.compute(rows) is not None
