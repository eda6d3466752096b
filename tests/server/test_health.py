"""Check when the service calls itself healthy, ready and alive, and with which words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from flask import Flask

from inference_api.messages import Pong
from inference_api.server.health import UNHEALTHY_TEXT
from tests.server.fakes import FakeClient


@pytest.fixture
def app(make_app: Callable[..., Flask]) -> Flask:
    return make_app(anonymous=False)


def _get(app: Flask, path: str) -> tuple[int, str]:
    response = app.test_client().get(path)
    assert response.content_type == "text/plain; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-store"
    return response.status_code, response.text


PATHS = ("/", "/health", "/health/ready")
FAULTS = {
    "warming": (lambda client: setattr(client, "ready", None), "The model is not ready yet, try again later.\n"),
    "mute": (lambda client: setattr(client, "pong", None), "The decode backend does not answer.\n"),
    "draining": (lambda client: setattr(client, "pong", Pong(1, 0.1, True, 0, 0)), "The service is stopping.\n"),
    "stuck": (
        lambda client: setattr(client, "pong", Pong(1, 2.1, False, 0, 0)),
        "The decode loop has made no step for 2.1 seconds.\n",
    ),
}


@pytest.mark.parametrize("path", [*PATHS, "/health/live"])
def test_a_healthy_service_says_ok_to_everybody(app: Flask, path: str) -> None:
    assert _get(app, path) == (200, "OK\n")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_a_503_with_its_reason(app: Flask, fake_client: FakeClient, path: str, fault: str) -> None:
    FAULTS[fault][0](fake_client)
    assert _get(app, path) == (503, FAULTS[fault][1])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_process_that_answers_is_alive_whatever_the_backend_does(app, fake_client, fault: str) -> None:
    FAULTS[fault][0](fake_client)
    assert _get(app, "/health/live") == (200, "OK\n")


def test_a_heartbeat_just_within_two_seconds_is_ready(app: Flask, fake_client: FakeClient) -> None:
    fake_client.pong = Pong(1, 2.0, False, 0, 0)
    assert _get(app, "/health/ready") == (200, "OK\n")


@pytest.mark.parametrize(("failed", "status"), [("4", 503), ("5", 500), ("6", 500), ("nonsense", 503)])
def test_five_failed_restarts_are_unhealthy_in_the_originals_words(app, fake_client, tmp_path, failed, status) -> None:
    fake_client.ready = None
    (Path(tmp_path) / "failed_restarts").write_text(failed)
    code, text = _get(app, "/health")
    assert code == status
    assert (text == UNHEALTHY_TEXT) == (status == 500)
    assert UNHEALTHY_TEXT == "Keep alive prompts failed five times. Service unhealthy."
    assert _get(app, "/health/ready")[0] == 503


def test_a_service_that_works_again_is_healthy_however_often_it_had_failed(app: Flask, tmp_path: Path) -> None:
    (tmp_path / "failed_restarts").write_text("9")
    assert _get(app, "/health") == (200, "OK\n")
