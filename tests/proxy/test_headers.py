"""Check that headers cross by name only, that ids come from the proxy, and how an error answer looks."""

from __future__ import annotations

import contextlib
import json
import string

import pytest

from proxy.answers import Refusal, raw_error_answer
from proxy.headers import AnswerFault, answer_headers, upstream_headers, valid_request_id
from proxy.trace_context import Trace

TRACE = Trace("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1)


def test_only_named_headers_go_upstream() -> None:
    client = {
        "content-type": "application/json",
        "cookie": "a=b",
        "authorization": "Bearer a.b.c",
        "x-internal-assertion": "forged",
        "request-id": "forged",
        "x-request-id": "mine",
        "te": "trailers",
        "traceparent": "forged",
        "tracestate": "vendor=1",
    }
    built = upstream_headers(client, request_id="req_1", assertion="ours", trace=TRACE)
    assert built == {
        "Accept": "*/*",
        "Content-Type": "application/json",
        "X-Request-Id": "mine",
        "Request-Id": "req_1",
        "traceparent": str(TRACE),
        "X-Internal-Assertion": "ours",
        "Accept-Encoding": "identity",
        "User-Agent": "inference-proxy",
        "Connection": "close",
    }


@pytest.mark.parametrize("value", ["a\x7f", "é", "a" * 1025])
def test_a_header_value_beyond_printable_ascii_is_a_400(value: str) -> None:
    with pytest.raises(Refusal) as caught:
        upstream_headers({"accept": value}, request_id="req_1", assertion=None, trace=TRACE)
    assert caught.value.status == 400


@pytest.mark.parametrize("value", ["", "a b", "a,b", "a\n", "é", "a" * 129, None])
def test_a_request_id_of_another_alphabet_is_not_taken(value: str | None) -> None:
    assert valid_request_id(value) is None


def test_a_request_id_is_made_of_letters_digits_and_four_marks() -> None:
    taken = {character for character in map(chr, range(256)) if valid_request_id(character)}
    assert taken == set(string.ascii_letters + string.digits + "._:-")


def test_a_value_is_made_of_printable_ascii_and_tabs_in_both_directions() -> None:
    up, down = set(), set()
    for character in map(chr, range(256)):
        with contextlib.suppress(Refusal):
            up |= set(upstream_headers({"accept": character}, request_id="r", assertion=None, trace=TRACE)["Accept"])
        with contextlib.suppress(AnswerFault):
            down |= set(answer_headers([("Allow", character)], request_id="r", client_id=None)[0][1])
    assert up == down == {"\t", *map(chr, range(0x20, 0x7F))}


def test_the_servers_request_id_is_taken_in_one_spelling_alone() -> None:
    for digit in map(chr, range(128)):
        told = answer_headers([("Request-Id", f"req_{digit * 32}")], request_id="req_1", client_id=None)
        assert told[0][1] == (f"req_{digit * 32}" if digit in "0123456789abcdef" else "req_1")
    echoed = [("X-Inference-Echo", "req_" + "0" * 32)]
    assert answer_headers(echoed, request_id="req_1", client_id=None)[1:] == [
        ("Request-Id", "req_1"),
        ("X-Request-Id", "req_1"),
    ]
    for other in ("req_" + "0" * 31, "req_" + "0" * 33, "xreq_" + "0" * 32):
        assert answer_headers([("Request-Id", other)], request_id="req_1", client_id=None)[0] == ("Request-Id", "req_1")


def test_only_named_headers_come_back() -> None:
    upstream = [
        ("Set-Cookie", "a"),
        ("Server", "x"),
        ("X-Inference-Seed", "1"),
        ("cache-control", "no-cache"),
        ("OpenAI-Processing-Ms", "12"),
        ("X-Should-Retry", "true"),
        ("traceparent", str(TRACE)),
        ("Date", "d"),
    ]
    assert answer_headers(upstream, request_id="req_1", client_id=None) == [
        ("X-Inference-Seed", "1"),
        ("cache-control", "no-cache"),
        ("OpenAI-Processing-Ms", "12"),
        ("X-Should-Retry", "true"),
        ("Request-Id", "req_1"),
        ("X-Request-Id", "req_1"),
    ]


def test_the_request_id_that_the_server_made_of_an_idempotency_key_is_told() -> None:
    made = "req_" + "0f" * 16
    upstream = [("Request-Id", made), ("Idempotent-Replayed", "true")]
    assert answer_headers(upstream, request_id="req_1", client_id=None) == [
        ("Idempotent-Replayed", "true"),
        ("Request-Id", made),
        ("X-Request-Id", made),
    ]
    assert answer_headers([("Request-Id", "req_x\r\na: b")], request_id="req_1", client_id="mine") == [
        ("Request-Id", "req_1"),
        ("X-Request-Id", "mine"),
    ]


def test_the_servers_half_of_the_rate_limits_goes_on_and_the_proxys_half_is_its_own() -> None:
    tokens, requests = ("x-ratelimit-remaining-tokens", "7"), ("x-ratelimit-remaining-requests", "7")
    selected = answer_headers([tokens, requests], request_id="req_1", client_id=None)
    assert tokens in selected and requests not in selected


def test_an_idempotency_key_goes_on_as_it_came() -> None:
    headers = upstream_headers({"idempotency-key": '"a,b"'}, request_id="req_1", assertion=None, trace=TRACE)
    assert headers["Idempotency-Key"] == '"a,b"'


@pytest.mark.parametrize("value", ["a\r\nSet-Cookie: b", "a\nb", "a\x00"])
def test_a_header_that_holds_a_line_end_is_a_fault_of_the_upstream(value: str) -> None:
    with pytest.raises(AnswerFault):
        answer_headers([("Cache-Control", value)], request_id="req_1", client_id=None)


def test_an_error_answer_has_two_keys_a_code_and_a_length() -> None:
    head, _, body = raw_error_answer(Refusal(401, "a_code", "A text.", {"Retry-After": "1"})).partition(b"\r\n\r\n")
    assert json.loads(body) == {"status_code": 401, "message": "A text."}
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 401 Unauthorized",
        b"Content-Type: application/json",
        b"X-Error-Code: a_code",
        b"Retry-After: 1",
        b"WWW-Authenticate: Bearer",
        b"Content-Length: %d" % len(body),
        b"Connection: close",
    ]


def test_what_is_not_there_is_not_sent() -> None:
    built = upstream_headers({"x-request-id": "not valid"}, request_id="req_1", assertion=None, trace=TRACE)
    assert built.keys() == {"Accept", "Request-Id", "traceparent", "Accept-Encoding", "User-Agent", "Connection"}


def test_values_are_taken_up_to_their_bounds() -> None:
    longest = "\t" + "~" * 1023
    client = {"accept": longest, "content-type": "", "x-request-id": "a" * 128}
    built = upstream_headers(client, request_id="req_1", assertion="ours", trace=TRACE)
    assert (built["Accept"], built["Content-Type"], built["X-Request-Id"]) == (longest, "", "a" * 128)
    with pytest.raises(Refusal, match=r"^Accept must be at most 1024 printable ASCII characters\.$") as caught:
        upstream_headers({"accept": longest + "~"}, request_id="req_1", assertion=None, trace=TRACE)
    assert (caught.value.status, caught.value.code) == (400, "header_invalid")


@pytest.mark.parametrize(
    "name",
    [
        "X-Accel-Buffering",
        "Retry-After",
        "Allow",
        "X-Client-Session-Id",
        "X-Error-Code",
        "Content-Type",
        "X-RateLimit-Limit-Tokens",
        "X-RateLimit-Remaining-Tokens",
        "X-RateLimit-Reset-Tokens",
    ],
)
def test_each_named_header_comes_back(name: str) -> None:
    assert (name, "v") in answer_headers([(name, "v")], request_id="req_1", client_id=None)


def test_two_types_of_content_are_a_fault_of_the_upstream() -> None:
    kinds = [("Content-Type", "text/plain"), ("content-type", "text/html")]
    with pytest.raises(AnswerFault, match=r"^the upstream answer has two types of content$"):
        answer_headers(kinds, request_id="req_1", client_id=None)
    with pytest.raises(
        AnswerFault, match=r"^header cache-control of the upstream answer is not one line of printable ASCII$"
    ):
        answer_headers([("Cache-Control", "a" * 1025)], request_id="req_1", client_id=None)
