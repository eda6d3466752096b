"""Check the routes that look at the service: what they ask the backend, and what they tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flask import Flask

import inference_api
from inference_api.messages import FinishReason, QueryKind, RequestView, RowView, Snapshot, Timing
from inference_api.server.inspection import request_body
from tests.server.fakes import FakeClient

TIMING = Timing(queue_seconds=0.5, prefill_seconds=0.25, decode_seconds=2.0, batch_size=3, context_tokens=16)
VIEW = RequestView("req_1", "finished", 5, 11, None, 2, FinishReason.LENGTH, TIMING)


TGI_MEMBERS = {
    "model_id": "mock",
    "model_sha": None,
    "model_pipeline_tag": "text-generation",
    "max_concurrent_requests": 4 + 96,
    "max_best_of": 32,
    "max_stop_sequences": 16,
    "max_input_tokens": 63,
    "max_total_tokens": 64,
    "validation_workers": 1,
    "max_client_batch_size": 32,
    "router": "inference_api",
    "sha": None,
    "docker_label": None,
}


@pytest.fixture
def app(make_app: Callable[..., Flask]) -> Flask:
    return make_app()


def test_rows_are_asked_for_as_the_caller_and_told_as_they_are(app: Flask, fake_client: FakeClient) -> None:
    fake_client.snapshot = Snapshot(1, 2, 2, 1, [RowView(0, "other"), RowView(1, "free")])
    body = app.test_client().get("/rows").get_json()
    assert (body["num_rows"], body["num_rows_in_use"], body["num_waiting"]) == (2, 1, 2)
    assert [row["state"] for row in body["rows"]] == ["other", "free"]
    assert body["rows"][0]["request_id"] == ""
    assert fake_client.queries == [(QueryKind.ROWS, "local", "")]


def test_info_describes_model_engine_and_numeric_path(app: Flask) -> None:
    body = app.test_client().get("/info").get_json()
    assert body["models"] == ["mock", "alias"]
    assert (body["engine"], body["digest"], body["num_rows"], body["context_tokens"]) == ("mock", "digest-1", 4, 64)
    assert body["row_independent"] is True
    assert "type" not in body


def test_info_has_what_tgis_clients_look_for_beside_our_own_members(app: Flask) -> None:
    body = app.test_client().get("/info").get_json()
    assert body["version"] == inference_api.__version__
    assert {name: body[name] for name in TGI_MEMBERS} == TGI_MEMBERS


def test_a_request_is_told_with_the_originals_figures(app: Flask, fake_client: FakeClient) -> None:
    fake_client.snapshot = Snapshot(1, 0, 2, 0, request=VIEW)
    body = app.test_client().get("/v1/requests/req_1").get_json()
    assert (body["state"], body["finish_reason"], body["row"]) == ("finished", "length", 2)
    assert body["stats"] == {
        "user_ttft_ms": 250.0,
        "user_ttft_e2e_ms": 750.0,
        "user_tps": 5.0,
        "prefill": {"tokens_prefilled": 5, "tps": 20.0},
        "decode": {"tokens_decoded": 11, "tps": 5.0},
        "batch_size": 3,
        "context_length": 16,
    }
    assert fake_client.queries == [(QueryKind.REQUEST, "local", "req_1")]


def test_a_waiting_request_has_no_figures_yet() -> None:
    body = request_body(RequestView("req_1", "waiting", 5, 0, place=3, timing=TIMING))
    assert body["place"] == 3
    assert "stats" not in body


def test_no_figure_divides_by_zero() -> None:
    zero = Timing(0.0, 0.0, 0.0, 1, 5)
    stats = request_body(RequestView("req_1", "finished", 5, 0, None, 0, FinishReason.ABORT, zero))["stats"]
    assert (stats["user_tps"], stats["prefill"]["tps"]) == (0.0, 0.0)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_foreign_or_unknown_request_is_not_found_and_nothing_is_aborted(app, fake_client, method: str) -> None:
    response = app.test_client().open("/v1/requests/req_9", method=method)
    assert response.status_code == 404
    assert response.get_json() == {"status_code": 404, "message": "Unknown request 'req_9'."}
    assert fake_client.aborts == []


def test_deleting_a_request_aborts_it_as_its_tenant(app: Flask, fake_client: FakeClient) -> None:
    fake_client.snapshot = Snapshot(1, 0, 2, 1, request=RequestView("req_1", "decoding", 5, 3, row=0))
    response = app.test_client().delete("/v1/requests/req_1")
    assert (response.status_code, response.get_json()) == (202, {"request_id": "req_1", "state": "decoding"})
    assert fake_client.aborts == [("req_1", "local")]


@pytest.mark.parametrize("path", ["/rows", "/metrics", "/v1/requests/req_1"])
def test_a_backend_that_does_not_answer_is_a_503_with_a_time_to_retry(app, fake_client, path: str) -> None:
    fake_client.snapshot = None
    response = app.test_client().get(path)
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "1"


def test_info_without_a_backend_is_a_503(app: Flask, fake_client: FakeClient) -> None:
    fake_client.ready = None
    assert app.test_client().get("/info").status_code == 503


def test_metrics_are_prometheus_text(app: Flask, fake_client: FakeClient) -> None:
    fake_client.snapshot = Snapshot(1, 2, 4, 1, metrics={"steps": 9.0})
    response = app.test_client().get("/metrics")
    assert response.content_type.startswith("text/plain")
    assert b"inference_api_steps_total 9.0" in response.data
