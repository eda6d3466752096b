"""Check when the service calls itself healthy, ready and alive, and with which words."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flask import Flask

from inference_api.config import Settings
from inference_api.logs import OWN_LOGGERS, set_up_logging
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


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Give the loggers back their handlers and levels."""
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, OWN_LOGGERS)]
    handlers, levels = root.handlers[:], [logger.level for logger in loggers]
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    logging.captureWarnings(False)


def test_readiness_warns_of_a_log_that_cannot_be_written_until_it_can_again(
    app: Flask, restored_logging, tmp_path
) -> None:
    with open("/dev/full", "w") as full:
        set_up_logging(Settings(), "server", quote_errors=False, stream=full)
        logging.getLogger("inference_api").warning("lost")
        warning = "Warning: the log cannot be written: No space left on device.\n"
        assert _get(app, "/health/ready") == (200, f"OK\n{warning}")
        assert _get(app, "/health") == (200, "OK\n")
        with (tmp_path / "log").open("w") as file:
            os.dup2(file.fileno(), full.fileno())
            logging.getLogger("inference_api").warning("kept")
        assert _get(app, "/health/ready") == (200, "OK\n")
        assert (tmp_path / "log").read_text().endswith("kept\n")


@pytest.mark.parametrize(("free_blocks", "warnings"), [(0, "disk of the run folder is full"), (15, "full"), (16, "")])
def test_readiness_warns_of_a_run_folder_on_a_full_disk(
    app: Flask, monkeypatch, free_blocks: int, warnings: str
) -> None:
    disk = os.statvfs_result((4096, 4096, 1000, free_blocks, free_blocks, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda place: disk)
    status, text = _get(app, "/health/ready")
    assert status == 200 and text.startswith("OK\n")
    assert warnings in text and (text == "OK\n") == (not warnings)
