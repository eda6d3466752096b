"""Say what a call's spans are: one of the server, and under it what the backend did, phase by phase.

Runs in PROCESS 1; pure. Names and attributes follow OpenTelemetry's semantic conventions for HTTP servers and for
generative AI. Holds ids, counts, words of ours and times; never a text, a path with ids, a header or a bearer. Knows no
exporter.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence

from inference_api.messages import NO_TIMING, Finished, Submit
from inference_api.server.trace_context import Trace

NANOSECONDS = 1_000_000_000

AttributeValue = str | int | float | Sequence[str]

MAX_PHASED_RUNS = 32
"""Generations of a call whose phases are told; the call's own span counts all of them."""

CHAT_ENDPOINTS = frozenset({"native.chat", "openai.chat", "openai_responses.create", "anthropic.messages"})
"""Views whose input is a conversation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One span, ended. Times are Unix nanoseconds, ids hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    is_server: bool = False
    failed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One generation of a call: what was asked for, when, and how it ended, if it was taken and its end is known."""

    submit: Submit
    submitted_at: float
    finished: Finished | None


@dataclasses.dataclass(frozen=True, slots=True)
class EndedCall:
    """What is known of a call at its end. Times are monotonic seconds of this worker."""

    trace: Trace
    method: str
    route: str | None
    endpoint: str | None
    status: int
    began_at: float
    ended_at: float
    error_code: str | None = None
    """The stable code of what went wrong, whoever's fault; a client that left is `client_left`."""
    failed: bool = False
    """Whether it went wrong on our side."""
    tenant: str | None = None
    request_id: str | None = None
    model: str | None = None
    runs: Sequence[Run] = ()


def spans_of(call: EndedCall, now_ns: int) -> list[Span]:
    """Return the spans of a call that ended at the Unix time `now_ns`, the server's own first.

    Times of the worker's monotonic clock are counted back from there, so that a step of the wall clock bends nothing.
    """
    span_id = secrets.token_hex(8)

    def unix_ns(at: float) -> int:
        return now_ns - round((call.ended_at - at) * NANOSECONDS)

    server = Span(
        name=f"{call.method} {call.route}" if call.route is not None else call.method,
        trace_id=call.trace.trace_id,
        span_id=span_id,
        parent_id=call.trace.parent_id,
        start_ns=unix_ns(call.began_at),
        end_ns=now_ns,
        attributes=_server_attributes(call),
        is_server=True,
        failed=call.failed,
    )
    spans = [server]
    for run in call.runs[:MAX_PHASED_RUNS]:
        spans += _phases(run, server, unix_ns(run.submitted_at))
    return spans


def _phases(run: Run, server: Span, start_ns: int) -> list[Span]:
    """Return queue, prefill and decode, one after the other, as far as the sequence came.

    The backend tells durations only: clocks do not cross processes. They are laid end to end from the moment at which
    this worker submitted, which is late by as much as the Submit was under way.
    """
    if run.finished is None or run.finished.timing == NO_TIMING:
        return []
    timing = run.finished.timing
    seconds = {"queue": timing.queue_seconds}
    if timing.prefill_seconds > 0:
        seconds["prefill"] = timing.prefill_seconds
    if run.finished.num_completion_tokens > 0:
        seconds["decode"] = timing.decode_seconds
    attributes: dict[str, dict[str, AttributeValue]] = {
        "prefill": {
            "gen_ai.usage.input_tokens": run.submit.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": run.finished.num_cached_tokens,
        },
        "decode": {"gen_ai.usage.output_tokens": run.finished.num_completion_tokens},
    }
    spans = []
    for name, duration in seconds.items():
        end_ns = start_ns + round(duration * NANOSECONDS)
        told: dict[str, AttributeValue] = {"inference_api.choice": run.submit.choice, **attributes.get(name, {})}
        spans.append(Span(name, server.trace_id, secrets.token_hex(8), server.span_id, start_ns, end_ns, told))
        start_ns = end_ns
    return spans


def _server_attributes(call: EndedCall) -> dict[str, AttributeValue]:
    """Return HTTP's attributes (conventions 1.x, "HTTP server span"), ours, and those of what was generated."""
    known: dict[str, AttributeValue | None] = {
        "http.request.method": call.method,
        "http.route": call.route,
        "http.response.status_code": call.status,
        "url.scheme": "http",
        "error.type": call.error_code,
        "inference_api.tenant": call.tenant,
        "inference_api.request_id": call.request_id,
    }
    attributes = {name: value for name, value in known.items() if value is not None}
    return attributes | _generation_attributes(call) if call.runs else attributes


def _generation_attributes(call: EndedCall) -> dict[str, AttributeValue]:
    """Return the attributes of the GenAI conventions: the request's parameters, what was used, and how it ended.

    Each prompt counts once, whatever the number of its answers, as `usage` has it.
    """
    submits = [run.submit for run in call.runs]
    first, sampling = submits[0], submits[0].sampling
    ends = [run.finished for run in call.runs if run.finished is not None]
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _operation(call.endpoint),
        "gen_ai.provider.name": "inference_api",
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.usage.input_tokens": sum(submit.num_prompt_tokens for submit in submits if submit.choice == 0),
    }
    if call.model is not None:
        attributes["gen_ai.request.model"] = call.model
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if len(submits) > 1:
        attributes["gen_ai.request.choice.count"] = 1 + max(submit.choice for submit in submits)
        attributes["inference_api.num_sequences"] = len(submits)
    if ends:
        attributes["gen_ai.usage.output_tokens"] = sum(end.num_completion_tokens for end in ends)
        attributes["gen_ai.response.finish_reasons"] = [end.reason.value for end in ends]
    return attributes


def _operation(endpoint: str | None) -> str:
    """Return the word of `gen_ai.operation.name` for what a view does."""
    if endpoint is not None and endpoint.startswith("embeddings."):
        return "embeddings"
    return "chat" if endpoint in CHAT_ENDPOINTS else "text_completion"
