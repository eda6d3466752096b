"""Check beam search on the running service: its plumbing on the mock, what it computes, and a client that leaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.raw_http import RawStream
from tests.integration.service import SLOW_START, Service, new_request_id, running_service, wait_for

ROUTE = "/v1/completions"
PROMPT = "0123456789" * 6 + "01234"
BODY = {"model": "mock", "prompt": PROMPT, "use_beam_search": True, "temperature": 0, "max_tokens": 10}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of two rows that makes 100 tokens a second."""
    with running_service(INFERENCE_API_MOCK_TOKENS_PER_SECOND="100", **SLOW_START) as running:
        yield running


def test_a_search_answers_the_same_each_time_and_its_beams_compute_what_is_new(service: Service) -> None:
    first = service.post(ROUTE, {**BODY, "n": 2}).json()
    queried, found = (service.metric(f"inference_api_prefix_{name}_total") for name in ("queried_tokens", "tokens"))
    again = service.post(ROUTE, {**BODY, "n": 2}).json()
    assert first["choices"][0]["text"] == "5678901234"
    assert again["choices"] == first["choices"]
    assert again["usage"]["completion_tokens"] == 1 + 2 * 9
    num_queried = service.metric("inference_api_prefix_queried_tokens_total") - queried
    num_found = service.metric("inference_api_prefix_tokens_total") - found
    assert num_found > 0.9 * num_queried


def test_a_client_that_leaves_ends_its_search(service: Service) -> None:
    def rounds_beside_five_requests() -> float:
        before = service.metric("inference_api_requests_total")
        for _ in range(5):
            service.ask("/inference/mock", {"text": "x", "max_tokens": 1})
        return service.metric("inference_api_requests_total") - before - 5

    headers = {"Request-Id": new_request_id()}
    with RawStream(service.port, ROUTE, {**BODY, "n": 2, "max_tokens": 1900}, headers) as stream:
        wait_for(lambda: rounds_beside_five_requests() > 2, 5.0, "a few rounds")
        stream.close()
        wait_for(lambda: rounds_beside_five_requests() == 0, 5.0, "the end of the search")
