"""Check on the running service who may call what, and what a tenant sees and ends of its own requests.

The service runs without the development switch: each call carries an assertion as the proxy mints it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from proxy.auth import Claims, mint_assertion
from tests.integration.raw_http import RawStream
from tests.integration.service import Service, new_request_id, running_service, wait_for

BODY = {"text": "x", "max_tokens": 4}
TENANT_ROUTES = [
    ("POST", "/inference/mock"),
    ("POST", "/predictions/mock"),
    ("POST", "/chat/mock"),
    ("GET", "/rows"),
    ("GET", "/info"),
    ("GET", "/metrics"),
    ("GET", "/v1/requests/req_00000000000000000000000000000000"),
    ("DELETE", "/v1/requests/req_00000000000000000000000000000000"),
]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of two rows behind a proxy's assertions; 20 tokens a second."""
    with running_service(
        INFERENCE_API_INSECURE_DEV="",
        INFERENCE_API_ROWS="2",
        INFERENCE_API_PREFILL_CHUNK_TOKENS="1",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="20",
    ) as running:
        yield running


class Caller:
    """A tenant whose calls come through the proxy."""

    def __init__(self, service: Service, tenant: str, *scopes: str) -> None:
        self._service = service
        self._key = (service.run_dir / "internal_auth_key").read_bytes().strip()
        self._claims = Claims(tenant, None, frozenset(scopes or {"inference"}), None, {})

    def headers(
        self, method: str, path: str, request_id: str | None = None, age_seconds: float = 0.0
    ) -> dict[str, str]:
        """Return the headers that the proxy adds to a call."""
        own_id = request_id or new_request_id()
        assertion = mint_assertion(
            self._key, self._claims, method=method, path=path, request_id=own_id, now=time.time() - age_seconds
        )
        return {"X-Internal-Assertion": assertion, "Request-Id": own_id}

    def call(self, method: str, path: str, **options: Any) -> requests.Response:
        """Send a call and return its answer."""
        url = self._service.url + path
        return requests.request(method, url, headers=self.headers(method, path), timeout=30, **options)

    def view(self, request_id: str) -> dict[str, Any]:
        """Return what the tenant sees of a request."""
        answer: dict[str, Any] = self.call("GET", f"/v1/requests/{request_id}").json()
        return answer

    def stream(self, body: object, request_id: str, path: str = "/inference/mock") -> RawStream:
        """Start a generation under a known id."""
        return RawStream(self._service.port, path, body, self.headers("POST", path, request_id))


@pytest.fixture
def tenant(service: Service) -> Caller:
    return Caller(service, "team-a")


@pytest.mark.parametrize(("method", "path"), TENANT_ROUTES)
def test_no_tenant_route_answers_without_an_assertion(service: Service, method: str, path: str) -> None:
    answer = requests.request(method, service.url + path, json=BODY, timeout=30)
    assert answer.status_code == 401
    assert answer.headers["X-Error-Code"] == "unauthenticated"
    assert set(answer.json()) == {"status_code", "message"}


@pytest.mark.parametrize("path", ["/", "/health", "/health/live", "/health/ready"])
def test_health_is_open_to_everybody(service: Service, path: str) -> None:
    assert (service.get(path).status_code, service.get(path).text) == (200, "OK\n")


def test_an_assertion_holds_for_one_call_only(service: Service, tenant: Caller) -> None:
    path = "/inference/mock"
    headers = tenant.headers("POST", path)
    assert service.post(path, BODY, headers=headers).content == b"1234"
    signature = headers["X-Internal-Assertion"].rpartition(".")[2]
    other_signature = tenant.headers("POST", path)["X-Internal-Assertion"].rpartition(".")[2]
    forged = headers["X-Internal-Assertion"].removesuffix(signature) + other_signature
    refused = {
        "forged": {**headers, "X-Internal-Assertion": forged},
        "empty": {**headers, "X-Internal-Assertion": ""},
        "expired": tenant.headers("POST", path, age_seconds=40.0),
        "from the future": tenant.headers("POST", path, age_seconds=-40.0),
        "of another path": tenant.headers("POST", "/chat/mock"),
        "of another method": tenant.headers("GET", path),
        "of another request": {**headers, "Request-Id": new_request_id()},
        "without a request id": {"X-Internal-Assertion": headers["X-Internal-Assertion"]},
    }
    statuses = {name: service.post(path, BODY, headers=bad).status_code for name, bad in refused.items()}
    assert statuses == dict.fromkeys(refused, 401)


def test_metrics_need_their_own_scope(service: Service, tenant: Caller) -> None:
    assert tenant.call("GET", "/metrics").status_code == 403
    assert Caller(service, "ops", "metrics").call("GET", "/metrics").status_code == 200
    assert Caller(service, "ops", "metrics").call("POST", "/inference/mock", json=BODY).status_code == 403


def test_a_request_shows_its_states_and_then_its_figures(service: Service, tenant: Caller) -> None:
    first_id, second_id, third_id = new_request_id(), new_request_id(), new_request_id()
    with tenant.stream({"text": "x", "max_tokens": 30}, first_id) as first:
        assert first.read_chunk()  # while a row decodes, a step takes its time; prompts alone would not
        with tenant.stream({"text": "y" * 120, "max_tokens": 2}, second_id) as second:
            wait_for(lambda: tenant.view(second_id).get("state") == "prefilling", 2.0, "prefill")
            with tenant.stream(BODY, third_id) as third:
                wait_for(lambda: tenant.view(third_id).get("state") == "waiting", 2.0, "a place in the queue")
                assert tenant.view(third_id)["place"] == 1
                assert tenant.view(first_id)["state"] == "decoding"
                assert third.read_all() == b"1234"
            second.read_all()
    view = tenant.view(third_id)
    assert (view["state"], view["finish_reason"]) == ("finished", "length")
    assert (view["num_prompt_tokens"], view["num_completion_tokens"]) == (1, 4)
    stats = view["stats"]
    assert set(stats) == {
        *("user_ttft_ms", "user_ttft_e2e_ms", "user_tps", "prefill", "decode", "batch_size", "context_length")
    }
    assert stats["prefill"]["tokens_prefilled"] == 1
    assert stats["decode"]["tokens_decoded"] == 4
    assert stats["context_length"] == 5
    assert 0 < stats["user_ttft_ms"] < stats["user_ttft_e2e_ms"]
    assert 5 < stats["user_tps"] < 21


@pytest.mark.parametrize("path", ["/inference/mock", "/chat/mock"])
def test_delete_ends_a_stream_visibly_and_frees_its_row(service: Service, tenant: Caller, path: str) -> None:
    request_id = new_request_id()
    with tenant.stream({"text": "x", "max_tokens": 2000}, request_id, path) as stream:
        assert stream.read_chunk()
        deleted = tenant.call("DELETE", f"/v1/requests/{request_id}")
        assert (deleted.status_code, deleted.json()["request_id"]) == (202, request_id)
        body = stream.read_all()
        if path == "/chat/mock":
            assert b"event: error" in body
            assert b"event: close" not in body
        else:
            assert not stream.whole
    assert tenant.view(request_id)["finish_reason"] == "abort"
    assert tenant.call("GET", "/rows").json()["num_rows_in_use"] == 0
    again = tenant.call("DELETE", f"/v1/requests/{request_id}")
    assert (again.status_code, again.json()["state"]) == (202, "finished")


def test_delete_of_a_waiting_request_answers_its_caller_with_a_status(service: Service, tenant: Caller) -> None:
    request_id = new_request_id()
    body = {"text": "x", "max_tokens": 2000}
    with tenant.stream(body, new_request_id()) as first, tenant.stream(body, new_request_id()) as second:
        assert first.read_chunk() and second.read_chunk()
        with tenant.stream(body, request_id) as waiting:
            wait_for(lambda: tenant.view(request_id).get("state") == "waiting", 2.0, "a place in the queue")
            assert tenant.call("DELETE", f"/v1/requests/{request_id}").status_code == 202
            assert waiting.status == 409
    wait_for(lambda: tenant.call("GET", "/rows").json()["num_rows_in_use"] == 0, 2.0, "free rows")


def test_a_foreign_request_is_as_unknown_as_one_that_never_was(service: Service, tenant: Caller) -> None:
    request_id, never_id = new_request_id(), new_request_id()
    stranger = Caller(service, "team-b")
    with tenant.stream({"text": "x", "max_tokens": 20}, request_id) as stream:
        assert stream.read_chunk()
        for method in ("GET", "DELETE"):
            foreign = stranger.call(method, f"/v1/requests/{request_id}")
            never = stranger.call(method, f"/v1/requests/{never_id}")
            assert foreign.status_code == never.status_code == 404
            assert foreign.text.replace(request_id, "") == never.text.replace(never_id, "")
        rows = stranger.call("GET", "/rows")
        assert request_id not in rows.text and "team-a" not in rows.text
        assert rows.json()["num_rows_in_use"] == 1
        assert request_id in tenant.call("GET", "/rows").text
        assert stream.read_all() == b"1234567890" * 2
        assert stream.whole


def test_the_callers_own_request_id_is_echoed_and_is_no_key(service: Service, tenant: Caller) -> None:
    path, request_id = "/inference/mock", new_request_id()
    headers = {**tenant.headers("POST", path, request_id), "X-Request-Id": "mine"}
    answer = service.post(path, BODY, headers=headers)
    assert (answer.headers["X-Request-Id"], answer.headers["Request-Id"]) == ("mine", request_id)
    assert tenant.call("GET", "/v1/requests/mine").status_code == 404
