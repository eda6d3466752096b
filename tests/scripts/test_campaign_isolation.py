"""Check that the parts `canary`, `leaving` and `overload` find what they look for; the campaign runs them."""

from __future__ import annotations

import base64
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORD = "kanarienvogel"


@pytest.fixture(autouse=True)
def campaigns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"campaigns.{name}")


def make_context(part: str, folder: Path, **counts: int) -> Any:
    return module("part").Context(part, counts, 5, folder)


@pytest.mark.parametrize(
    "written",
    [
        f"INFO server: prompt={WORD}qab",
        f"INFO server: {WORD.upper()}",
        json.dumps({"token_ids": list(f"x{WORD}y".encode())}),
        str(list(WORD.encode())).replace(" ", ""),
        WORD.encode().hex(),
        *(base64.b64encode(b"\xff" * shift + f"{WORD}qab".encode()).decode() for shift in range(3)),
        "Authorization: Bearer eyJhbGciOiJIUzI1NiJ9.e30.c2ln",
    ],
)
def test_a_planted_line_is_found_in_every_shape(written: str) -> None:
    canary = module("canary")
    log = f"INFO supervisor: ready\n{written}\nINFO supervisor: done\n".encode()
    assert list(canary.find_traces(log, canary.secrets()))


def test_lines_without_a_canary_are_not_found() -> None:
    canary = module("canary")
    log = b'INFO server: request path=/inference/mock status=200 tenant=tenant-1 ids=[107, 97, 110]\n{"level": "info"}'
    assert not list(canary.find_traces(log, canary.secrets()))


def test_every_request_carries_its_canary_and_most_are_good() -> None:
    requests = module("canary_requests")
    rng = make_context("canary", ROOT).random
    made = [requests.make_request(number, rng, "s" * 32) for number in range(400)]
    for number, request in enumerate(made):
        canary = requests.canary_of(number)
        assert canary in request.headers["X-Note"]
        assert canary not in request.path.partition("?")[0]
    assert {request.path.partition("?")[0] for request in made} == {path for path, _ in requests.SURFACES}
    assert sum(request.leaves for request in made) > 0
    # Ids stand for the text on /detokenize, and some bodies are cut.
    assert sum(requests.PREFIX.encode() in request.body for request in made) > 0.85 * len(made)


def test_a_row_that_is_not_free_in_time_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaving, points = module("leaving"), module("leave_points")
    stays = points.LeavePoint("stays", lambda client: None, holds="row", ways=(lambda client: None,))

    class Held:
        proxy_port = 0

        def __init__(self) -> None:
            self.rows_told = iter([1, 1, *[1] * 10_000])

        def rows(self) -> dict[str, int]:
            return {"num_rows_in_use": next(self.rows_told), "num_waiting": 0}

    monkeypatch.setattr(leaving, "STATE_SECONDS", 0.02)
    monkeypatch.setattr(leaving, "RawClient", Unconnected)
    fault, _ = leaving._leave_once(Held(), stays, 0, context_random(tmp_path))
    assert fault is not None and fault.startswith("not free")


class Unconnected:
    """Stand in for a client."""

    def __init__(self, port: int, *, receive_buffer_bytes: int | None) -> None:
        pass

    def __enter__(self) -> Unconnected:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def context_random(folder: Path) -> Any:
    return make_context("leaving", folder).random


@pytest.mark.parametrize(
    ("status", "fault", "told"),
    [(200, "a 200 with b''", "request: a 200"), (500, None, "are neither"), (503, "no Retry-After", "no Retry-After")],
)
def test_a_request_that_is_neither_answered_nor_refused_is_a_fault(
    tmp_path: Path, status: int, fault: str | None, told: str
) -> None:
    overload = module("overload")
    outcomes = [
        overload.Outcome(200, 1.0, None),
        overload.Outcome(503, 0.01, None),
        overload.Outcome(status, 0.1, fault),
    ]
    context = make_context("overload", tmp_path)
    overload._judge(context, outcomes, [0.01])
    assert told in " ".join(context.tally.failed)


@pytest.mark.parametrize("look_seconds", [0.01, 0.2])
def test_a_refusal_that_is_slower_than_the_machine_is_a_fault(tmp_path: Path, look_seconds: float) -> None:
    overload = module("overload")
    context = make_context("overload", tmp_path)
    outcomes = [overload.Outcome(200, 1.0, None), overload.Outcome(503, 0.4, None)]
    overload._judge(context, outcomes, [look_seconds])
    expected = ["refusals are fast: 0.400 s at the 99th percentile"] if look_seconds < 0.1 else []
    assert context.tally.failed == expected
