"""Check what `raw_http` and `slow_clients` decide by themselves: what they send, and what they count as a fault."""

from __future__ import annotations

import collections
import importlib
import json
import random
import socket
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.integration.echo_upstream import Exchange

ROOT = Path(__file__).parents[2]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
NONCE = "n0123456789abcdef"
RECORDING = SimpleNamespace(name="proxy", upstream=object(), reads_alone=True)


@pytest.fixture(autouse=True)
def campaigns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"campaigns.{name}")


def nobody(_method: str, _path: str, _nonce: str) -> list[str]:
    return []


def echo_of(path: str, request_id: str = "req_1", told_id: str = "req_1") -> bytes:
    body = json.dumps({"line": f"GET {path} HTTP/1.1", "headers": [["Request-Id", request_id]], "size": 0}).encode()
    head = f"HTTP/1.1 200 OK\r\nRequest-Id: {told_id}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def judge(received: bytes, **members: Any) -> str | None:
    cases = module("raw_http_cases")
    raw = members.pop("raw", cases.canary(NONCE, nobody))
    case = cases.Case("case", NONCE, raw, (raw,), **members)
    fault: str | None = module("raw_http")._judge(RECORDING, case, received, collections.Counter())
    return fault


def test_whole_answers_in_a_row_are_read_and_a_continue_is_counted() -> None:
    read = module("raw_http_reading").read_answers
    assert [answer.status for answer in read(OK + OK)] == [200, 200]
    (answer,) = read(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)
    assert (answer.status, answer.num_continues, answer.body) == (200, 1, b"{}")
    assert read(b"") == []


@pytest.mark.parametrize(
    "received",
    [
        OK[:-1],
        OK + b"x",
        OK.replace(b"200 OK", b"101 Switching Protocols"),
        b"HTTP/1.1 200 OK\r\n\r\nto the end",
        OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + OK,
        OK.replace(b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 3"),
    ],
)
def test_what_is_no_whole_answer_is_a_fault(received: bytes) -> None:
    reading = module("raw_http_reading")
    with pytest.raises(reading.AnswerFault):
        reading.read_answers(received)


def test_requests_are_counted_as_far_as_a_strict_reader_follows() -> None:
    read = module("raw_http_reading").read_requests
    good = b"GET /a?b HTTP/1.1\r\nHost: x\r\n\r\n"
    assert [request.path for request in read(good + good)] == ["/a", "/a"]
    assert len(read(good.replace(b"Host: x", b"Connection: close\r\nHost: x") + good)) == 1
    assert len(read(good + b"GET /a HTTP/1.1\r\nHost : x\r\n\r\n" + good)) == 1
    assert read(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n") == []


def test_an_answer_to_ones_own_request_is_right_and_to_any_other_a_fault() -> None:
    assert judge(echo_of(f"/v1/models/{NONCE}")) is None
    assert judge(echo_of("/v1/models/n0000000000000000"))
    assert judge(echo_of(f"/v1/models/{NONCE}", told_id="req_2"))
    assert judge(echo_of(f"/v1/models/{NONCE}").replace(b"Connection: close\r\n", b"") + echo_of(f"/v1/models/{NONCE}"))


def test_a_forgery_that_changes_what_becomes_of_a_request_is_a_fault() -> None:
    assert judge(echo_of(f"/v1/models/{NONCE}"), is_spoof=True) is None
    assert judge(OK, is_spoof=True)


def test_a_vector_that_reaches_the_upstream_against_its_expectation_is_a_fault() -> None:
    refused = {"id": "cl-plus", "expect": "400-or-close"}
    assert judge(b"", vector=refused) is None
    assert judge(echo_of(f"/v1/models/{NONCE}"), vector=refused)


def test_a_seed_draws_the_same_requests_again_and_every_piece_is_of_them() -> None:
    cases = module("raw_http_cases")
    first, again, other = (
        [*cases.vector_cases(rng, nobody), *cases.mutants(rng, 50, nobody)]
        for rng in (random.Random(1), random.Random(1), random.Random(2))
    )
    assert [case.raw for case in first] == [case.raw for case in again] != [case.raw for case in other]
    assert all(b"".join(case.pieces) == case.raw for case in first)
    assert len({case.nonce for case in first}) == len(first)
    assert len(cases.SPOOFS) == 15


def test_first_tokens_may_take_twice_as_long_and_noise_is_no_fault() -> None:
    fault_of = module("slow_clients").fault_of_tokens
    assert fault_of([0.15] * 1000, [0.30] * 1000, 2.0) is None
    assert fault_of([0.15] * 1000, [0.15] * 980 + [0.35] * 20, 2.0)
    assert fault_of([0.15] * 1000, [0.15] * 980 + [0.35] * 20, 4.0) is None
    assert fault_of([0.001] * 1000, [0.03] * 1000, 2.0) is None
    assert fault_of([0.15] * 10, [0.15] * 9 + [0.35], 2.0), "of few, the longest counts"


def test_a_probe_that_fails_or_takes_too_long_is_a_fault() -> None:
    fault_of = module("slow_clients").fault_of_health
    assert fault_of(SimpleNamespace(seconds=[0.1], faults=[])) is None
    assert fault_of(SimpleNamespace(seconds=[0.1, 9.0], faults=[]))
    assert fault_of(SimpleNamespace(seconds=[0.1, 0.1], faults=["HTTP/1.1 503"]))
    assert fault_of(SimpleNamespace(seconds=[], faults=[]))


def test_an_upstream_that_saw_more_than_was_answered_or_somebody_else_is_a_fault(tmp_path: Path) -> None:
    context = module("part").Context("raw_http", {}, 5, tmp_path)
    forged = Exchange(
        socket.socket(), "GET /v1/models/x HTTP/1.1", [("X-Internal-Assertion", "x"), ("Request-Id", "x")], b""
    )
    with forged.sock:
        route = SimpleNamespace(name="proxy", upstream=SimpleNamespace(seen=[forged]))
        module("raw_http")._check_upstream(context, route, collections.Counter())
    counts, identity = context.tally.failed
    assert "0 were answered, the upstream saw 1" in counts
    assert "assertion is refused" in identity
    assert route.upstream.seen == []
