"""Check on the running service that a caller orders its own waiting requests, and says how long they may take."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from tests.integration.raw_http import RawStream
from tests.integration.service import SLOW_START, Service, bearer, in_parallel, running_service, wait_for

TOTAL_SECONDS = 30
COMPLETIONS = "/v1/completions"
HOLDER = {"model": "mock", "prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}
SURFACES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"model": "mock", "prompt": "x", "max_tokens": 1000}),
    ("/v1/chat/completions", {"model": "mock", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1000}),
    ("/v1/responses", {"model": "mock", "input": "x", "max_output_tokens": 1000}),
]
STRICT_SURFACES: list[tuple[str, dict[str, Any]]] = [
    ("/inference/mock", {"text": "x"}),
    ("/v1/messages", {"model": "mock", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
    ("/generate", {"inputs": "x"}),
]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of one row behind a proxy that makes 50 tokens a second."""
    with running_service(
        proxy=True,
        **{**SLOW_START, "INFERENCE_API_ROWS": "1", "INFERENCE_API_PREFILL_CHUNK_TOKENS": "64"},
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="50",
        INFERENCE_API_TOTAL_SECONDS=str(TOTAL_SECONDS),
        SERVED_MODEL_NAMES="mock",
    ) as running:
        yield running


def ask(service: Service, path: str, body: dict[str, Any], tenant: str = "alpha") -> requests.Response:
    """Make a call behind the proxy."""
    return requests.post(service.proxy_url + path, json=body, headers=bearer(tenant), timeout=60)


@contextlib.contextmanager
def row_held(service: Service) -> Iterator[RawStream]:
    """Hold the one row for a while."""
    assert service.proxy_port is not None
    with RawStream(service.proxy_port, COMPLETIONS, HOLDER, bearer("holder")) as holder:
        assert holder.read_chunk()
        yield holder


def num_waiting(service: Service) -> int:
    """Return how many requests wait."""
    return int(service.rows()["num_waiting"])


def test_a_tenants_urgent_request_goes_before_its_own_others_and_before_nobody_elses(service: Service) -> None:
    ended: list[str] = []

    def waiter(name: str, tenant: str, priority: int, place: int) -> Callable[[], None]:
        def wait() -> None:
            wait_for(lambda: num_waiting(service) == place, 10.0, f"{place} waiting")
            body = {"model": "mock", "prompt": "y", "max_tokens": 10, "ignore_eos": True, "priority": priority}
            assert ask(service, COMPLETIONS, body, tenant).status_code == 200
            ended.append(name)

        return wait

    arrivals = [("slack", "alpha", 5), ("other", "beta", 0), ("plain", "alpha", 0), ("urgent", "alpha", -100)]
    with row_held(service) as holder:
        waiters = [waiter(name, tenant, priority, place) for place, (name, tenant, priority) in enumerate(arrivals)]

        def release() -> None:
            wait_for(lambda: num_waiting(service) == len(arrivals), 10.0, "all of them waiting")
            holder.close()

        in_parallel([*waiters, release])
    assert ended == ["urgent", "other", "plain", "slack"]


@pytest.mark.parametrize(("path", "body"), SURFACES)
def test_a_deadline_in_the_queue_is_a_504_before_the_head(service: Service, path: str, body: dict[str, Any]) -> None:
    with row_held(service):
        bodies = [{**body, "deadline": 0.4, "stream": stream} for stream in (True, False)]
        answers = in_parallel([functools.partial(ask, service, path, body) for body in bodies])
    for answer in answers:
        assert (answer.status_code, answer.headers["X-Error-Code"]) == (504, "deadline_exceeded")
        assert "0.4 seconds" in answer.text


@pytest.mark.parametrize(("path", "body"), SURFACES)
def test_a_deadline_after_the_head_is_the_surfaces_error_event_and_frees_the_row(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    answer = ask(service, path, {**body, "deadline": 0.7, "stream": True})
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "took longer than 0.7 seconds" in json.dumps(events[-1])
    assert "deadline_exceeded" in json.dumps(events[-1])
    assert service.num_rows_in_use() == 0
    whole = ask(service, path, {**body, "deadline": 0.7})
    assert (whole.status_code, whole.headers["X-Error-Code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(("path", "body"), SURFACES)
def test_a_deadline_over_the_services_own_is_refused_with_the_bound(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    answer = ask(service, path, {**body, "deadline": TOTAL_SECONDS + 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "deadline"
    assert f"over the limit of {TOTAL_SECONDS} seconds" in answer.json()["error"]["message"]


@pytest.mark.parametrize("member", ["priority", "deadline"])
@pytest.mark.parametrize(("path", "body"), STRICT_SURFACES)
def test_a_surface_that_knows_no_such_member_refuses_it_by_name(
    service: Service, path: str, body: dict[str, Any], member: str
) -> None:
    answer = ask(service, path, {**body, member: 1})
    assert answer.status_code in (400, 422)
    assert member in answer.text
