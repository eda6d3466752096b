"""Own the headers that cross the proxy: both directions are built from an allow-list, nothing is copied.

Pure. It knows header names and what a value may contain; it does not know bodies, routes or who calls. Identity
headers (`X-Internal-Assertion`, `Request-Id`) come from the proxy alone, so a client's are never looked at; a client's
trace goes on as trace_context.py says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from proxy.answers import Refusal
from proxy.trace_context import TRACEPARENT_HEADER, Trace

_CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_OWN_REQUEST_ID = re.compile(r"req_[0-9a-f]{32}")
# RFC 9110 section 5.5: field-vchar, SP and HTAB; without obs-text, which no header of ours needs.
_VALUE = re.compile(r"[\t\x20-\x7e]{0,1024}")

_UPSTREAM_REQUEST_NAMES = ("Content-Type", "Accept", "Idempotency-Key")
_ANSWER_NAMES = frozenset(
    {
        "content-type",
        "cache-control",
        "x-accel-buffering",
        "retry-after",
        "allow",
        "x-client-session-id",
        "idempotent-replayed",
        "x-error-code",
        "x-should-retry",
        "openai-processing-ms",
        # The server's half of these; the proxy adds the one of requests.
        "x-ratelimit-limit-tokens",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-tokens",
    }
)
_ANSWER_PREFIX = "x-inference-"


class AnswerFault(ValueError):
    """Refuse an upstream answer whose headers cannot be passed on; the caller makes it a 502."""


def valid_request_id(value: str | None) -> str | None:
    """Return a client's request id when it is 1 to 128 of `A-Z a-z 0-9 . _ : -`, else None."""
    return value if value is not None and _CLIENT_REQUEST_ID.fullmatch(value) else None


def upstream_headers(
    headers: Mapping[str, str], *, request_id: str, assertion: str | None, trace: Trace
) -> dict[str, str]:
    """Build the header set sent upstream from lower-case client headers; raise Refusal for a value beyond ASCII."""
    built = {"Accept": "*/*"}
    for name in _UPSTREAM_REQUEST_NAMES:
        value = headers.get(name.lower())
        if value is None:
            continue
        if _VALUE.fullmatch(value) is None:
            raise Refusal(400, "header_invalid", f"{name} must be at most 1024 printable ASCII characters.")
        built[name] = value
    client_id = valid_request_id(headers.get("x-request-id"))
    if client_id is not None:
        built["X-Request-Id"] = client_id
    built["Request-Id"] = request_id
    built[TRACEPARENT_HEADER] = str(trace)
    if assertion is not None:
        built["X-Internal-Assertion"] = assertion
    # A compressed stream could not be passed on byte by byte as it comes.
    built["Accept-Encoding"] = "identity"
    built["User-Agent"] = "inference-proxy"
    # One connection a request; closing it is how the server learns that the client left.
    built["Connection"] = "close"
    return built


def answer_headers(
    upstream: Iterable[tuple[str, str]], *, request_id: str, client_id: str | None
) -> list[tuple[str, str]]:
    """Select the headers of an upstream answer that go on, add the ids.

    Raises AnswerFault for a value of more than one line, or two types of content, of which each reader takes another.
    A call with an idempotency key has a request id that the server makes of it; that one is told then.
    """
    selected = []
    for name, value in upstream:
        lower = name.lower()
        if lower == "request-id" and _OWN_REQUEST_ID.fullmatch(value):
            request_id = value
        if lower in _ANSWER_NAMES or lower.startswith(_ANSWER_PREFIX):
            if _VALUE.fullmatch(value) is None:
                raise AnswerFault(f"header {lower} of the upstream answer is not one line of printable ASCII")
            selected.append((name, value))
    if sum(name.lower() == "content-type" for name, _value in selected) > 1:
        raise AnswerFault("the upstream answer has two types of content")
    return selected + identity_headers(request_id, client_id)


def identity_headers(request_id: str, client_id: str | None) -> list[tuple[str, str]]:
    """Name the request to its client: our id, and theirs when it was valid."""
    return [("Request-Id", request_id), ("X-Request-Id", client_id or request_id)]
