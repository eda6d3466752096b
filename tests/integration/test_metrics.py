"""Check what a whole service of two workers tells of a known run: figures, headers and traces, through the proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.service import Service, bearer, in_parallel, running_service, wait_for

LINE_SECONDS = 2.0
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
NUM_REQUESTS = 12
NUM_TOKENS = 20

Samples = dict[str, float]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of two workers behind its proxy that makes 1,000 tokens a second and says one JSON line a request."""
    with running_service(
        proxy=True,
        INFERENCE_API_WORKERS="2",
        INFERENCE_API_LOG_LEVEL="info",
        INFERENCE_API_LOG_FORMAT="json",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="1000",
    ) as running:
        wait_for(lambda: len(running.worker_pids) == 2, 5.0, "two workers")
        yield running


def told(service: Service) -> Samples:
    """Return the samples of vLLM's names by name, without those of single buckets and reasons."""
    answer = requests.get(service.proxy_url + "/metrics", headers=bearer(scope="metrics"), timeout=10)
    assert answer.status_code == 200
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    return {sample.name: sample.value for sample in samples if sample.labels == {"model_name": "mock"}}


def ask(service: Service, path: str, body: object, **headers: str) -> requests.Response:
    """POST through the proxy as the tenant alpha."""
    return requests.post(service.proxy_url + path, json=body, headers=bearer("alpha") | headers, timeout=30)


def chat_body(text: str, **members: object) -> dict[str, object]:
    """Return the body of a chat completion."""
    return {"model": "mock", "messages": [{"role": "user", "content": text}], "max_tokens": 5, **members}


def test_a_known_run_is_counted_once_whichever_worker_tells_it(service: Service) -> None:
    before = told(service)
    body = {"text": "hello", "max_tokens": NUM_TOKENS}
    answers = in_parallel([lambda: ask(service, "/inference/mock", body)] * NUM_REQUESTS)
    assert {len(answer.text) for answer in answers} == {NUM_TOKENS}
    after = told(service)
    grown = {name: after[name] - before[name] for name in after}
    expected = {
        "vllm:prompt_tokens_total": 5 * NUM_REQUESTS,
        "vllm:generation_tokens_total": NUM_TOKENS * NUM_REQUESTS,
        "vllm:inter_token_latency_seconds_count": (NUM_TOKENS - 1) * NUM_REQUESTS,
        "vllm:request_prompt_tokens_sum": 5 * NUM_REQUESTS,
        "vllm:request_generation_tokens_sum": NUM_TOKENS * NUM_REQUESTS,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
    }
    phases = ("queue_time", "prefill_time", "decode_time")
    names = ["time_to_first_token", "e2e_request_latency", *(f"request_{phase}" for phase in phases)]
    expected |= {f"vllm:{name}_seconds_count": NUM_REQUESTS for name in names}
    assert {name: grown[name] for name in expected} == expected
    whole = sum(grown[f"vllm:request_{phase}_seconds_sum"] for phase in phases)
    assert whole == pytest.approx(grown["vllm:e2e_request_latency_seconds_sum"])
    assert grown["vllm:time_to_first_token_seconds_sum"] < whole
    assert all(told(service) == after for _ in range(8)), "each of the calls may be another worker's"


def test_a_running_request_is_a_share_of_the_kv_cache(service: Service) -> None:
    body = {"text": "hello", "max_tokens": 2000}
    with requests.post(service.url + "/inference/mock", json=body, stream=True, timeout=30) as answer:
        assert answer.raw.read(1)
        samples = told(service)
        assert samples["vllm:num_requests_running"] == 1
        assert 0 < samples["vllm:kv_cache_usage_perc"] < 2048 / (32 * 2048)
    wait_for(lambda: service.num_rows_in_use() == 0, LINE_SECONDS, "a free row")


def test_the_figures_of_a_whole_answer_come_through_the_proxy(service: Service) -> None:
    answer = ask(service, "/v1/chat/completions", chat_body("hello"))
    usage = answer.json()["usage"]
    view = requests.get(
        f"{service.proxy_url}/v1/requests/{answer.headers['Request-Id']}", headers=bearer("alpha"), timeout=10
    ).json()
    assert int(answer.headers["x-inference-prompt-tokens"]) == usage["prompt_tokens"] == view["num_prompt_tokens"]
    assert int(answer.headers["x-inference-completion-tokens"]) == usage["completion_tokens"] == 5
    times = [float(answer.headers[f"x-inference-{phase}-ms"]) for phase in ("queue", "prefill", "decode")]
    seconds = [view["timing"][f"{phase}_seconds"] for phase in ("queue", "prefill", "decode")]
    assert times == pytest.approx([1000 * second for second in seconds], abs=0.001)
    assert int(answer.headers["openai-processing-ms"]) >= int(sum(times))


def test_a_fault_says_through_the_proxy_whether_to_try_again(service: Service) -> None:
    answer = ask(service, "/v1/chat/completions", chat_body("hello", max_tokens=0))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
    assert answer.headers["openai-processing-ms"].isdigit()


def test_usage_tells_how_much_of_a_prompt_its_tenants_rows_held(service: Service) -> None:
    text = "what a row of this tenant alone will hold"
    usages = [ask(service, "/v1/chat/completions", chat_body(text)).json()["usage"] for _ in range(2)]
    num_prompt_tokens = usages[0]["prompt_tokens"]
    assert [usage["prompt_tokens"] for usage in usages] == [num_prompt_tokens] * 2
    first, second = (usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert first < num_prompt_tokens - 1 == second, "all but the last id, which must be computed"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = ask(service, "/v1/chat/completions", chat_body(text, **options))
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["usage"] == usages[1]
    several = ask(service, "/v1/chat/completions", chat_body(text + " now", n=3)).json()["usage"]
    assert several["prompt_tokens_details"]["cached_tokens"] < several["prompt_tokens"]


def lines_of(service: Service, path: str) -> dict[str, dict[str, Any]]:
    """Return the server's and the proxy's newest JSON line of a path by their messages."""
    lines = [json.loads(line) for line in service.log.read_text().split("\n")[:-1] if line.startswith("{")]
    return {line["message"]: line for line in lines if line.get("path") == path}


@pytest.mark.parametrize(
    ("traceparent", "path", "goes_on"),
    [
        (f"00-{TRACE_ID}-{PARENT_ID}-01", "/inference/trace-goes-on", True),
        (f"00-{TRACE_ID}-{'0' * 16}-01", "/inference/trace-is-new", False),
    ],
)
def test_a_call_has_one_trace_in_both_log_lines(service: Service, traceparent: str, path: str, goes_on: bool) -> None:
    assert ask(service, path, {"text": "x"}, traceparent=traceparent).status_code == 404
    wait_for(lambda: len(lines_of(service, path)) == 2, LINE_SECONDS, "both lines")
    lines = lines_of(service, path)
    assert lines["request"]["trace_id"] == lines["transaction"]["trace_id"]
    assert (lines["request"]["trace_id"] == TRACE_ID) == goes_on
