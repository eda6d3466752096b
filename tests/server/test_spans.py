"""Check what a call's spans say: names, parents, places in time, attributes, and what they never hold."""

from __future__ import annotations

import dataclasses

from inference_api.messages import NO_TIMING, ErrorInfo, Finished, FinishReason, Submit, Timing
from inference_api.sampling_params import SamplingParams
from inference_api.server.spans import MAX_PHASED_RUNS, EndedCall, Run, spans_of
from inference_api.server.trace_context import Trace

TRACE = Trace("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True)
TIMING = Timing(queue_seconds=0.125, prefill_seconds=0.25, decode_seconds=0.5, batch_size=3, context_tokens=16)
NOW_NS = 1_700_000_000_000_000_000
SECOND = 1_000_000_000


def submit(choice: int = 0) -> Submit:
    return Submit(
        session_id="s",
        request_id="req_1",
        tenant="alpha",
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        max_tokens=8,
        sampling=SamplingParams(temperature=0.5, top_k=0, top_p=0.9, seed=7),
        stop_sequences=[b"canary"],
        queue_seconds=60.0,
        first_token_seconds=60.0,
        total_seconds=60.0,
        choice=choice,
    )


def run(end: Finished | None, choice: int = 0) -> Run:
    return Run(submit(choice), 100.5, end)


CALL = EndedCall(
    trace=TRACE,
    method="POST",
    route="/v1/requests/<request_id>",
    endpoint="openai.chat",
    status=200,
    began_at=100.0,
    ended_at=102.0,
    tenant="alpha",
    request_id="req_1",
    model="mock",
    runs=[run(Finished(FinishReason.STOP, 6, TIMING, num_cached_tokens=2))],
)


def test_the_servers_span_is_named_by_its_route_and_goes_on_under_the_callers() -> None:
    server = spans_of(CALL, NOW_NS)[0]
    assert (server.name, server.is_server, server.failed) == ("POST /v1/requests/<request_id>", True, False)
    assert (server.trace_id, server.parent_id) == (TRACE.trace_id, TRACE.parent_id)
    assert (server.start_ns, server.end_ns) == (NOW_NS - 2 * SECOND, NOW_NS)
    nowhere = spans_of(dataclasses.replace(CALL, route=None, runs=[]), NOW_NS)[0]
    assert nowhere.name == "POST" and "http.route" not in nowhere.attributes


def test_the_phases_lie_end_to_end_from_the_submit_under_the_servers_span() -> None:
    server, *phases = spans_of(CALL, NOW_NS)
    start = NOW_NS - 2 * SECOND + SECOND // 2
    assert [(span.name, span.start_ns - start, span.end_ns - start) for span in phases] == [
        ("queue", 0, SECOND // 8),
        ("prefill", SECOND // 8, 3 * SECOND // 8),
        ("decode", 3 * SECOND // 8, 7 * SECOND // 8),
    ]
    assert {(span.parent_id, span.trace_id, span.is_server) for span in phases} == {
        (server.span_id, TRACE.trace_id, False)
    }
    assert len({span.span_id for span in (server, *phases)}) == 4


def test_attributes_are_those_of_the_conventions() -> None:
    server, _queue, prefill, decode = spans_of(CALL, NOW_NS)
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/requests/<request_id>",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "inference_api.tenant": "alpha",
        "inference_api.request_id": "req_1",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "inference_api",
        "gen_ai.request.model": "mock",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert prefill.attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert decode.attributes["gen_ai.usage.output_tokens"] == 6
    for endpoint, word in [("native.inference", "text_completion"), ("embeddings.embed", "embeddings")]:
        told = spans_of(dataclasses.replace(CALL, endpoint=endpoint), NOW_NS)[0].attributes
        assert told["gen_ai.operation.name"] == word


def test_no_stop_sequence_and_no_prompt_is_told() -> None:
    assert "canary" not in repr(spans_of(CALL, NOW_NS))


def test_a_prompt_with_several_answers_counts_once_and_each_answer_has_its_phases() -> None:
    ends = [Finished(FinishReason.STOP, 6, TIMING), Finished(FinishReason.LENGTH, 8, TIMING)]
    call = dataclasses.replace(CALL, runs=[run(end, choice) for choice, end in enumerate(ends)])
    server, *phases = spans_of(call, NOW_NS)
    assert server.attributes["gen_ai.usage.input_tokens"] == 3
    assert server.attributes["gen_ai.usage.output_tokens"] == 14
    assert server.attributes["gen_ai.response.finish_reasons"] == ["stop", "length"]
    assert server.attributes["gen_ai.request.choice.count"] == server.attributes["inference_api.num_sequences"] == 2
    assert [span.attributes["inference_api.choice"] for span in phases] == [0, 0, 0, 1, 1, 1]


def test_the_phases_of_very_many_generations_are_not_all_told() -> None:
    end = Finished(FinishReason.STOP, 1, TIMING)
    server, *phases = spans_of(dataclasses.replace(CALL, runs=[run(end)] * 1000), NOW_NS)
    assert len(phases) == 3 * MAX_PHASED_RUNS and server.attributes["inference_api.num_sequences"] == 1000


def test_a_sequence_that_never_had_a_row_has_waited_and_nothing_more() -> None:
    waited = Timing(60.0, 0.0, 0.0, 0, 0)
    end = Finished(FinishReason.ERROR, 0, waited, error=ErrorInfo("deadline", "late"))
    names = [span.name for span in spans_of(dataclasses.replace(CALL, runs=[run(end)]), NOW_NS)[1:]]
    assert names == ["queue"]


def test_an_end_without_the_backends_figures_has_no_phases() -> None:
    for end in (None, Finished(FinishReason.ERROR, 2, NO_TIMING, error=ErrorInfo("backend_lost", "lost"))):
        assert len(spans_of(dataclasses.replace(CALL, runs=[run(end)]), NOW_NS)) == 1


def test_an_error_is_told_by_its_code() -> None:
    call = dataclasses.replace(CALL, status=503, error_code="overloaded", failed=True, runs=[run(None)])
    server = spans_of(call, NOW_NS)[0]
    assert server.failed and server.attributes["error.type"] == "overloaded"
    assert "gen_ai.response.finish_reasons" not in server.attributes


def test_a_trace_that_begins_here_has_no_parent() -> None:
    assert spans_of(dataclasses.replace(CALL, trace=Trace("1" * 32)), NOW_NS)[0].parent_id is None
