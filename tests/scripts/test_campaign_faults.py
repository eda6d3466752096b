"""Check what the parts of the campaign that break things take for a fault: each judge is shown one, and must say so."""

from __future__ import annotations

import importlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.integration.echo_upstream import Exchange, ScriptedUpstream

ROOT = Path(__file__).parents[2]
PROMPT = "abcdefgh"


@pytest.fixture(autouse=True)
def campaigns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"campaigns.{name}")


def make_context(part: str, folder: Path, **counts: int) -> Any:
    return module("part").Context(part, counts, 5, folder)


@pytest.fixture
def witness() -> Iterator[Callable[[str, Callable[[Exchange], None]], Any]]:
    """Return a function that reads one stream of a surface from an upstream that answers as it is told."""
    with ScriptedUpstream() as upstream:

        def read(surface: str, answer: Callable[[Exchange], None]) -> Any:
            found = module("faults_streams").Witness(upstream.port, surface, PROMPT, {})
            answer(upstream.accept())
            found.join()
            return found

        yield read


def stream(*chunks: bytes, whole: bool = True) -> Callable[[Exchange], None]:
    """Return an answer of these chunks, with the last one or broken off before it."""

    def answer(exchange: Exchange) -> None:
        exchange.start_stream()
        for chunk in chunks:
            exchange.send_chunk(chunk)
        if whole:
            exchange.send_chunk(b"")
        exchange.close()

    return answer


def refusal(status: str, extra: str = "") -> Callable[[Exchange], None]:
    return lambda exchange: exchange.answer(b"{}", status=status, extra=extra)


def event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


SAYS = "User: abcdefgh\nAI: "


@pytest.mark.parametrize(
    ("surface", "answer", "outcome"),
    [
        ("raw", stream(b"abcd", b"efgh"), "WHOLE"),
        ("raw", stream(b"abcd", whole=False), "CUT"),
        ("chat", stream(event("answer", {"message": SAYS}), event("close", {})), "WHOLE"),
        ("chat", stream(event("answer", {"message": "User"}), event("error", {})), "CUT"),
        ("chat", stream(event("answer", {"message": "User"}), whole=False), "CUT"),
        ("completions", stream(b'data: {"error": {}}\n\n'), "CUT"),
        ("raw", refusal("503 Unavailable", "Retry-After: 1\r\n"), "REFUSED"),
        ("raw", refusal("502 Bad Gateway"), "REFUSED"),
    ],
)
def test_a_stream_that_says_how_it_ended_has_no_fault(witness, surface: str, answer: Any, outcome: str) -> None:
    found = witness(surface, answer)
    assert (found.outcome.name, found.fault()) == (outcome, None)


@pytest.mark.parametrize(
    ("surface", "answer", "fault"),
    [
        ("raw", stream(b"abXd", whole=False), "is not its own"),
        ("raw", stream(b"abcd"), "whole after 4 of 8"),
        ("raw", stream(b"abcdefghi"), "is not its own"),
        ("chat", stream(event("answer", {"message": "User"}), event("close", {})), "whole after 4 of 19"),
        ("chat", stream(event("answer", {"message": "User"})), "ended without a sign"),
        ("chat", stream(event("close", {}), event("error", {})), "whole and that it failed"),
        ("completions", stream(b'data: {"choices": [{"text": "abc"}]}\n\n'), "ended without a sign"),
        ("raw", refusal("503 Unavailable"), "without Retry-After"),
        ("raw", refusal("500 Internal Server Error"), "status 500"),
    ],
)
def test_a_stream_that_lies_about_its_end_or_its_text_is_a_fault(
    witness, surface: str, answer: Any, fault: str
) -> None:
    assert fault in (witness(surface, answer).fault() or "")


def test_a_stream_that_hangs_is_a_fault(witness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module("faults_streams"), "HUNG_SECONDS", 0.05)
    ended = threading.Event()

    def hang(exchange: Exchange) -> None:
        exchange.start_stream()
        exchange.send_chunk(b"abc")
        ended.wait(0.3)

    found = witness("raw", hang)
    assert found.outcome.name == "HUNG" and "no byte for" in (found.fault() or "")


def test_every_way_of_breaking_a_body_is_refused_and_the_sound_one_is_not() -> None:
    malformed = module("malformed")
    rng = random.Random(3)
    for breaker in malformed.BREAKERS:
        for body in malformed.SOUND.values():
            sound = json.dumps(body).encode()
            assert breaker(rng, sound) != sound
    assert malformed.fault_of_answer("/tokenize", 400, b'{"error": 1}', is_sound=False) is None
    for status, answer in ((500, b"{}"), (200, b"{}"), (422, b"{}"), (400, b"<html>"), (400, b'"no object"')):
        assert malformed.fault_of_answer("/tokenize", status, answer, is_sound=False)
    assert malformed.fault_of_answer("/generate", 422, b"{}", is_sound=False) is None
    assert malformed.fault_of_answer("/tokenize", 400, b"{}", is_sound=True)


def test_every_route_with_a_body_has_a_sound_one() -> None:
    malformed = module("malformed")
    assert malformed.templates_of_bodies() == malformed.SOUND.keys()


def test_broken_bodies_are_sent_and_counted(tmp_path: Path) -> None:
    context = make_context("malformed", tmp_path, bodies=45, texts=2)
    totals = module("malformed").run(context)
    assert context.tally.failed == []
    assert (totals["bodies"], totals["texts"], context.tally.passed) == (45, 2, 48)


def samples(*mebibytes: float, seconds: float = 60.0) -> list[Any]:
    trend = module("soak_trend")
    return [trend.Sample(seconds * at, round(size * trend.MIB)) for at, size in enumerate(mebibytes)]


@pytest.mark.parametrize(
    "sizes",
    [
        [100.0] * 30,
        [100.0] * 15 + [104.0] * 15,
        [100.0 + index % 3 for index in range(30)],
        [100.0 + index * 0.1 for index in range(30)],
        [120.0 - index for index in range(30)],
        [100.0],
    ],
)
def test_memory_that_steps_or_swings_does_not_grow(sizes: list[float]) -> None:
    assert module("soak_trend").fault_of_growth(samples(*sizes)) is None


@pytest.mark.parametrize(
    "sizes", [[100.0 + index for index in range(30)], [20.0 + index * 0.2 + index % 2 for index in range(61)]]
)
def test_memory_that_every_call_adds_to_grows(sizes: list[float]) -> None:
    assert "grew by" in (module("soak_trend").fault_of_growth(samples(*sizes)) or "")


def test_a_planted_leak_of_64_bytes_a_call_is_found_among_200000_calls_and_the_same_without_it_is_not() -> None:
    trend = module("soak_trend")
    calls, held = 200_000, 105  # an object of 64 bytes and the place in its list
    noise = random.Random(1)
    plain = [80.0 + noise.random() for _ in range(60)]
    leaking = [size + index * calls * held / 60 / trend.MIB for index, size in enumerate(plain)]
    assert trend.fault_of_growth(samples(*plain)) is None
    assert trend.fault_of_growth(samples(*leaking)) is not None


def test_a_bearer_is_judged_by_the_clock_and_its_leeway() -> None:
    is_valid = module("faults_clock").is_valid
    assert is_valid({"iat": 1060, "exp": 2000}, 1000) and not is_valid({"iat": 1061, "exp": 2000}, 1000)
    assert is_valid({"iat": 0, "exp": 941}, 1000) and not is_valid({"iat": 0, "exp": 940}, 1000)
    assert not is_valid({"iat": 0, "nbf": 1061, "exp": 2000}, 1000)
