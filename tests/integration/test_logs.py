"""Check what a whole service writes about its requests: one true line each, quiet by default, never their content."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from inference_api.server.identity import ASSERTION_HEADER
from tests.integration.raw_http import RawStream
from tests.integration.service import (
    SECRET,
    SLOW_START,
    Service,
    bearer,
    in_parallel,
    new_request_id,
    running_command,
    running_service,
    wait_for,
)

NUM_AT_ONCE = 100
LINE_SECONDS = 2.0
RECOVERY_SECONDS = 10.0
START_SECONDS = 10.0
CANARY = "canary-words"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of two workers behind its proxy that says one JSON line a request."""
    with running_service(
        proxy=True,
        INFERENCE_API_WORKERS="2",
        INFERENCE_API_LOG_LEVEL="info",
        INFERENCE_API_LOG_FORMAT="json",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="20000",
    ) as running:
        yield running


def json_lines(service: Service) -> list[dict[str, Any]]:
    """Return every JSON line of the service; all that its processes log is one, but for the ready card."""
    return [json.loads(line) for line in service.log.read_text().split("\n")[:-1] if line.startswith("{")]


def line_of(service: Service, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the one request line that is wanted, once it is there."""

    def found() -> list[dict[str, Any]]:
        return [line for line in json_lines(service) if line["message"] == "request" and wanted(line)]

    wait_for(found, LINE_SECONDS, "the request's line")
    (line,) = found()
    return line


def test_every_line_is_json_but_for_the_stages_of_the_start_and_the_ready_card(service: Service) -> None:
    wait_for(lambda: "Ready http" in service.log.read_text(), START_SECONDS, "ready card")
    request_id = new_request_id()
    service.ask("/inference/mock", {"text": "hello", "max_tokens": 1}, headers={"Request-Id": request_id})
    line_of(service, lambda line: line["request_id"] == request_id)
    log = re.sub(r"(?ms)^inference_api [0-9.]+$.*?^  -d [^\n]*$", "", service.log.read_text())
    others = [line for line in log.splitlines() if line and not line.startswith("backend: ")]
    processes = {json.loads(line)["process"] for line in others}
    assert {"server", "proxy"} <= processes


def test_a_line_says_what_the_service_says_of_the_request(service: Service) -> None:
    request_id = new_request_id()
    body = {"text": "hello", "max_tokens": 50}
    assert len(service.ask("/inference/mock", body, headers={"Request-Id": request_id})) == 50
    line = line_of(service, lambda line: line["request_id"] == request_id)
    view = service.view(request_id)
    stats = view["stats"]
    assert line["level"] == "info" and line["process"] == "server" and line["pid"] in service.worker_pids
    assert (line["method"], line["path"], line["status"]) == ("POST", "/inference/mock", 200)
    assert (line["tenant"], line["row"], line["finish"]) == ("local", view["row"], view["finish_reason"])
    assert line["queue_ms"] == round(view["timing"]["queue_seconds"] * 1000, 3)
    assert (line["ttft_ms"], line["tokens_per_second"]) == (stats["user_ttft_e2e_ms"], stats["user_tps"])
    assert (line["prompt_tokens"], line["completion_tokens"]) == (5, 50)
    assert line["ttft_ms"] < line["duration_ms"]


def test_a_client_that_leaves_has_its_line_with_what_was_made_until_then(service: Service) -> None:
    request_id = new_request_id()
    with RawStream(service.port, "/chat/mock", {"text": "x", "max_tokens": 2000}, {"Request-Id": request_id}) as stream:
        assert stream.read_chunk()
    line = line_of(service, lambda line: line["request_id"] == request_id)
    view = service.view(request_id)
    assert (line["status"], line["finish"], view["finish_reason"]) == (499, "abort", "abort")
    assert line["completion_tokens"] == view["num_completion_tokens"] > 0
    assert line["ttft_ms"] == view["stats"]["user_ttft_e2e_ms"]


def test_a_hundred_requests_at_once_are_a_hundred_whole_lines(service: Service) -> None:
    ids = [new_request_id() for _ in range(NUM_AT_ONCE)]

    def ask(request_id: str) -> str:
        return service.ask("/inference/mock", {"text": "x", "max_tokens": 8}, headers={"Request-Id": request_id})

    answers = in_parallel([lambda request_id=request_id: ask(request_id) for request_id in ids])
    assert {len(answer) for answer in answers} == {8}

    def lines() -> list[dict[str, Any]]:
        return [line for line in json_lines(service) if line.get("request_id") in ids]

    wait_for(lambda: len(lines()) >= NUM_AT_ONCE, LINE_SECONDS, "every line")
    assert sorted(line["request_id"] for line in lines()) == sorted(ids)
    assert {line["completion_tokens"] for line in lines()} == {8}
    assert all(isinstance(line["row"], int) and line["queue_ms"] >= 0 for line in lines())


@pytest.mark.parametrize(
    ("body", "headers", "status", "finish"),
    [
        ({"text": "x", "top_k": 0}, {}, 400, "invalid_request"),
        ({"text": "x"}, {ASSERTION_HEADER: "forged"}, 401, "unauthenticated"),
        ({"text": "x" * 3000}, {}, 400, "context_length_exceeded"),
    ],
)
def test_a_refusal_has_its_line(
    service: Service, body: dict[str, Any], headers: dict[str, str], status: int, finish: str
) -> None:
    num_lines = len(json_lines(service))
    assert service.post("/predictions/mock", body, headers=headers).status_code == status
    wait_for(lambda: len(json_lines(service)) > num_lines, LINE_SECONDS, "the line")
    (line,) = json_lines(service)[num_lines:]
    assert (line["status"], line["finish"], line["path"]) == (status, finish, "/predictions/mock")
    assert line["row"] is line["ttft_ms"] is None


def test_a_call_through_the_proxy_has_one_json_line_of_each_under_the_same_names(service: Service) -> None:
    path = "/inference/nobody%0A%1B[2J"
    answer = requests.post(service.proxy_url + path, json={"text": "x"}, headers=bearer("alpha"), timeout=30)
    assert answer.status_code == 404
    answer = requests.post(
        service.proxy_url + "/inference/mock", json={"text": "x"}, headers=bearer("alpha"), timeout=30
    )
    line = line_of(service, lambda line: line["request_id"] == answer.headers["X-Request-Id"])
    assert (line["tenant"], line["status"]) == ("alpha", 200)

    def transactions() -> list[dict[str, Any]]:
        lines = [line for line in json_lines(service) if line["message"] == "transaction"]
        return [line for line in lines if line["path"].startswith("/inference/")]

    wait_for(lambda: len(transactions()) == 2, LINE_SECONDS, "the proxy's lines")
    assert [line["status_code"] for line in transactions()] == [404, 200]
    assert transactions()[1]["jwt"] == {"team_id": "alpha", "token_id": "alpha-1"}
    assert isinstance(transactions()[1]["duration_ms"], float)
    log = service.log.read_text()
    assert "\x1b" not in log and " ERROR " not in log and " WARNING " not in log


def test_at_the_default_level_nothing_is_said_of_a_request_and_nothing_of_a_stop() -> None:
    with running_service() as service:
        wait_for(lambda: "  -d " in service.log.read_text(), LINE_SECONDS, "the end of the ready card")
        card = service.log.read_text()
        assert service.ask("/inference/mock", {"text": "x", "max_tokens": 3}) == "123"
        assert service.post("/inference/mock", {}).status_code == 400
        assert service.get("/nowhere").status_code == 404
        assert service.get("/health").status_code == 200
        with RawStream(service.port, "/chat/mock", {"text": "x", "max_tokens": 2000}) as stream:
            assert stream.read_chunk()
        wait_for(lambda: service.num_rows_in_use() == 0, LINE_SECONDS, "free rows")
        assert service.stop() == 0
        assert service.log.read_text() == card
    assert not re.search(r" (DEBUG|INFO|WARNING|ERROR) ", card)


def test_what_is_wrong_is_said_at_the_default_level() -> None:
    with running_service() as service:
        os.kill(service.backend_pid, signal.SIGKILL)
        text = "backend is started again in 0 s"
        wait_for(lambda: text in service.log.read_text(), LINE_SECONDS, "the warning")
        log = service.log.read_text()
    assert "ERROR supervisor[" in log and "backend ended with status -9" in log


@contextlib.contextmanager
def debugged_service() -> Iterator[Service]:
    """Run a service with both debug modes on, which echoes prompts and has scripted faults."""
    with (
        tempfile.TemporaryDirectory(prefix="ia-cache-") as cache,
        running_service(
            proxy=True,
            **SLOW_START,
            FALCON_40B_LOG_LEVEL_DEBUG="1",
            FRONTEND_DEBUG_MODE="1",
            BACKEND_DEBUG_MODE="1",
            INFERENCE_API_CACHE_DIR=cache,
            INFERENCE_API_MOCK_MODE="echo",
            INFERENCE_API_MOCK_FAULTS=f"nan:nan-{CANARY},crash:crash-{CANARY},hang:hang-{CANARY}",
            INFERENCE_API_WATCHDOG_SECONDS="4",
        ) as service,
    ):
        yield service


def debug_folder(service: Service) -> Path:
    """Return the folder of a running service's debug files."""
    environ = Path(f"/proc/{service.process.pid}/environ").read_bytes().split(b"\0")
    (cache,) = [entry.partition(b"=")[2] for entry in environ if entry.startswith(b"INFERENCE_API_CACHE_DIR=")]
    return Path(cache.decode()) / "debug_logs"


def events_of(service: Service, side: str) -> list[dict[str, Any]]:
    """Return the events that one side has written so far, in order."""
    paths = sorted(debug_folder(service).glob(f"{side}-*.jsonl"), key=lambda path: path.stat().st_mtime)
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_the_backend_runs_with_both_debug_modes_on_and_nothing_that_is_said_anywhere_tells_a_text() -> None:
    with debugged_service() as service:
        key = (service.run_dir / "internal_auth_key").read_text()
        header = bearer("alpha")
        ids = []
        for body, status in (
            ({"text": CANARY, "stop_sequence": f"stop-{CANARY}", "max_tokens": 20}, 200),
            ({"text": CANARY, "top_k": f"field-{CANARY}"}, 400),
            ({"text": f"nan-{CANARY}"}, 500),
            ({"text": f"crash-{CANARY}"}, 503),
            ({"text": f"hang-{CANARY}"}, 503),
        ):
            wait_for(lambda: service.get("/health").status_code == 200, RECOVERY_SECONDS, "health")
            answer = requests.post(
                f"{service.proxy_url}/inference/mock?{CANARY}", json=body, headers=header, timeout=30
            )
            assert answer.status_code == status, answer.text
            assert (answer.text == CANARY) == (status == 200)
            ids.append(answer.headers["X-Request-Id"])
        wait_for(lambda: service.get("/health").status_code == 200, RECOVERY_SECONDS, "health")
        assert_traced(service, ids)
        folder = debug_folder(service)
        modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert (stat.S_IMODE(folder.stat().st_mode), modes) == (0o700, {0o600})
        assert_stacks((folder / f"stack_trace-{service.port}").read_text())
        assert service.stop() == 0
        said = [service.log.read_text(), *(path.read_text() for path in folder.iterdir())]
    assert said[0].count("request method=POST") == 5
    token_ids = ", ".join(str(byte) for byte in CANARY.encode())
    for secret in (CANARY, token_ids, SECRET, key, header["Authorization"].removeprefix("Bearer ")):
        assert not [text for text in said if secret in text], secret


def assert_stacks(trace: str) -> None:
    """Check the frames of the crash and, after them, of the hang alone: one dump, with the hung request in it."""
    crash, timeout, hang = trace.partition("Timeout (")
    assert "RuntimeError: scripted crash" in crash
    assert timeout and "Timeout (" not in hang
    (decoding,) = [frames for frames in re.split(r"(?m)^(?=Thread |Current thread )", hang) if "in _fault" in frames]
    assert "in execute" in decoding and "in step" in decoding


def assert_traced(service: Service, ids: list[str]) -> None:
    """Check the events of an answered, a refused by validation, a failed, a crashed and a hung request."""
    frontend, backend = events_of(service, "frontend"), events_of(service, "backend")
    opened = {event["request_id"]: event["session_id"] for event in frontend if event["event"] == "opened"}
    assert list(opened) == [ids[0], *ids[2:]]
    answered, failed, crashed, hung = opened.values()

    def names(events: list[dict[str, Any]], session_id: str) -> list[str]:
        return [event["event"] for event in events if event["session_id"] == session_id]

    assert names(frontend, answered) == ["opened", "accepted", "first_token", "closed"]
    assert names(backend, answered) == ["queued", "first_token", "ended"]
    assert names(backend, failed) == ["queued", "ended"]
    for session_id in (crashed, hung):
        assert names(backend, session_id) == ["queued"]
        assert names(frontend, session_id)[-1] == "closed"
    codes = [event["code"] for event in frontend if event["event"] == "closed"]
    assert codes == [None, "generation_failed", "backend_lost", "backend_lost"]


def test_a_debug_folder_that_cannot_be_written_stops_the_start_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "debug_logs").write_text("a file stands here")
    command = [sys.executable, "-m", "inference_api.supervisor", "--mock"]
    environ = {"INFERENCE_API_CACHE_DIR": str(tmp_path), "BACKEND_DEBUG_MODE": "1"}
    with running_command(command, environ) as service:
        assert service.process.wait(START_SECONDS) == 1
        (line,) = service.log.read_text().splitlines()
    assert line.startswith("ERROR: ") and "BACKEND_DEBUG_MODE" in line and str(tmp_path / "debug_logs") in line
