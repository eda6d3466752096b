"""Make requests that carry a canary wherever a caller's text can stand: the requests of the part `canary`.

Good ones on every surface, and bad ones made of them. A canary also stands in claims that are no id, in headers that
are nobody's business and in the query. Never in a path or in X-Request-Id, which are logged and documented to be. Pure.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import jwt

PREFIX = "kanarienvogel"
MODEL = "mock"
FAULTS = "nan:setoffnan,error:setofferror,crash:setoffcrash"
"""What the mock does at these words in a prompt (INFERENCE_API_MOCK_FAULTS)."""

MODEL_BODY: Mapping[str, Any] = {"model": MODEL, "max_tokens": 3}


@dataclasses.dataclass(frozen=True, slots=True)
class CanaryRequest:
    """One request as it is sent; `may_fail` if it sets off a fault of the engine's."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    may_fail: bool = False
    leaves: bool = False


def _schema(canary: str) -> dict[str, Any]:
    member = {"type": "string", "enum": [canary], "description": canary}
    return {"type": "object", "properties": {canary: member}, "required": [canary], "additionalProperties": False}


def _turns(canary: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": f"s{canary}"},
        {"role": "user", "content": [{"type": "text", "text": f"u{canary}"}]},
        {"role": "assistant", "content": f"a{canary}"},
        {"role": "user", "content": canary},
    ]


def _tool_turns(canary: str) -> dict[str, Any]:
    function = {"name": canary, "description": canary, "parameters": _schema(canary)}
    call = {"id": canary, "type": "function", "function": {"name": canary, "arguments": json.dumps({canary: canary})}}
    return {
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {"role": "user", "content": canary},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": canary, "content": canary},
        ],
    }


def _chat(**members: Any) -> Callable[[str], Any]:
    return lambda canary: {**MODEL_BODY, "messages": _turns(canary), "stop": [f"x{canary}"], "user": canary, **members}


SURFACES: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("/inference/mock", lambda it: {"text": it, "stop_sequence": f"x{it}", "max_tokens": 3}),
    ("/predictions/mock", lambda it: {"text": it, "max_tokens": 3}),
    ("/chat/mock", lambda it: {"text": it, "max_tokens": 2, "return_prompt": True}),
    ("/v1/chat/completions", _chat()),
    ("/v1/chat/completions", _chat(stream=True, logprobs=True, top_logprobs=2)),
    ("/v1/chat/completions", lambda it: {**MODEL_BODY, **_tool_turns(it)}),
    ("/v1/chat/completions", lambda it: {**_chat()(it), "structured_outputs": {"choice": [it]}}),
    ("/v1/chat/completions", lambda it: {**_chat()(it), "structured_outputs": {"regex": f"({it}"}}),
    (
        "/v1/chat/completions",
        lambda it: {
            **_chat()(it),
            "response_format": {"type": "json_schema", "json_schema": {"name": it, "schema": _schema(it)}},
        },
    ),
    ("/v1/completions", lambda it: {**MODEL_BODY, "prompt": it, "stop": f"x{it}", "echo": True, "logprobs": 1}),
    ("/v1/completions", lambda it: {**MODEL_BODY, "prompt": [it, f"z{it}"], "stream": True, "user": it}),
    ("/v1/embeddings", lambda it: {"model": MODEL, "input": [it], "user": it}),
    ("/v1/messages", lambda it: {**MODEL_BODY, "system": it, "messages": _turns(it)[1:], "stop_sequences": [f"x{it}"]}),
    ("/v1/messages/count_tokens", lambda it: {"model": MODEL, "messages": _turns(it)[1:]}),
    ("/v1/responses", lambda it: {"model": MODEL, "input": it, "instructions": it, "max_output_tokens": 3}),
    ("/v1/responses", lambda it: {"model": MODEL, "input": it, "metadata": {"k": it}, "stream": True}),
    ("/generate", lambda it: {"inputs": it, "parameters": {"max_new_tokens": 3, "stop": [f"x{it}"]}}),
    ("/generate_stream", lambda it: {"inputs": it, "parameters": {"max_new_tokens": 3}}),
    ("/", lambda it: {"inputs": it, "parameters": {"max_new_tokens": 3}}),
    ("/tokenize", lambda it: {"content": it}),
    ("/detokenize", lambda it: {"tokens": list(it.encode())}),
    ("/apply-template", lambda it: {"messages": _turns(it)}),
    ("/inference/mock", lambda it: {"text": f"setoffnan {it}"}),
    ("/v1/completions", lambda it: {**MODEL_BODY, "prompt": f"setofferror {it}"}),
)


def canary_of(number: int) -> str:
    """Return the canary of one request: letters, which no encoding of text changes."""
    digits = "".join("abcdefghij"[int(digit)] for digit in str(number))
    return f"{PREFIX}q{digits}"


def make_request(number: int, rng: random.Random, secret: str) -> CanaryRequest:
    """Return request `number`: good or broken in one of several ways, maybe one whose client leaves."""
    canary = canary_of(number)
    path, make = rng.choice(SURFACES)
    body = make(canary)
    content = json.dumps(body).encode()
    headers = _headers(canary, number, secret)
    breaker = rng.choice(BREAKERS) if rng.random() < 0.3 else None
    if breaker is not None:
        content = breaker(body, content, headers, canary)
    query = f"?{canary}={canary}" if rng.random() < 0.2 else ""
    may_fail = b"setoff" in content
    return CanaryRequest(path + query, content, headers, may_fail, leaves=rng.random() < 0.05)


def make_crash(number: int, secret: str) -> CanaryRequest:
    """Return a request that crashes the decode backend, with a traceback."""
    canary = canary_of(number)
    body = json.dumps({"text": f"setoffcrash {canary}"}).encode()
    return CanaryRequest("/inference/mock", body, _headers(canary, number, secret), may_fail=True)


def _headers(canary: str, number: int, secret: str) -> dict[str, str]:
    claims = {
        "team_id": f"tenant-{number % 4}",
        "token_id": f"id-{number}",
        "name": canary,
        "email": f"{canary}@x",
        "exp": time.time() + 3600,
    }
    return {
        "Authorization": f"Bearer {jwt.encode(claims, secret, 'HS256')}",
        "Content-Type": "application/json",
        "User-Agent": canary,
        "Referer": f"http://x/{canary}",
        "Cookie": f"session={canary}",
        "X-Forwarded-For": canary,
        "traceparent": canary,
        "X-Note": canary,
        **({"Idempotency-Key": canary} if number % 7 == 0 else {}),
    }


Breaker = Callable[[dict[str, Any], bytes, dict[str, str], str], bytes]


def _unknown_member(body: dict[str, Any], _content: bytes, _headers: dict[str, str], canary: str) -> bytes:
    return json.dumps({**body, canary: canary}).encode()


def _wrong_types(body: dict[str, Any], _content: bytes, _headers: dict[str, str], canary: str) -> bytes:
    return json.dumps({name: {canary: [canary]} for name in body}).encode()


def _wrong_number(body: dict[str, Any], _content: bytes, _headers: dict[str, str], canary: str) -> bytes:
    return json.dumps({**body, "temperature": canary, "max_tokens": canary}).encode()


def _cut(_body: dict[str, Any], content: bytes, _headers: dict[str, str], _canary: str) -> bytes:
    return content[: len(content) * 3 // 4]


def _bad_utf8(_body: dict[str, Any], content: bytes, _headers: dict[str, str], _canary: str) -> bytes:
    return content + b"\xff\xfe"


def _twice(_body: dict[str, Any], content: bytes, _headers: dict[str, str], canary: str) -> bytes:
    return b'{"%s": 1, "%s": 2, ' % (canary.encode(), canary.encode()) + content[1:]


def _too_long(body: dict[str, Any], _content: bytes, _headers: dict[str, str], canary: str) -> bytes:
    return json.dumps({name: canary * 200 if isinstance(it, str) else it for name, it in body.items()}).encode()


def _other_type(_body: dict[str, Any], content: bytes, headers: dict[str, str], canary: str) -> bytes:
    headers["Content-Type"] = f"application/{canary}"
    return content


def _bad_bearer(_body: dict[str, Any], content: bytes, headers: dict[str, str], canary: str) -> bytes:
    headers["Authorization"] = f"Bearer {canary}.{canary}.{canary}"
    return content


def _foreign_bearer(_body: dict[str, Any], content: bytes, headers: dict[str, str], canary: str) -> bytes:
    headers["Authorization"] = f"Bearer {jwt.encode({'team_id': canary}, 'k' * 32, 'HS256')}"
    return content


def _odd_scheme(_body: dict[str, Any], content: bytes, headers: dict[str, str], canary: str) -> bytes:
    headers["Authorization"] = f"{canary} {canary}"
    return content


def _other_model(body: dict[str, Any], _content: bytes, _headers: dict[str, str], canary: str) -> bytes:
    return json.dumps({**body, "model": canary}).encode()


BREAKERS: tuple[Breaker, ...] = (
    *(_unknown_member, _wrong_types, _wrong_number, _cut, _bad_utf8, _twice, _too_long, _other_type),
    *(_bad_bearer, _foreign_bearer, _odd_scheme, _other_model),
)
