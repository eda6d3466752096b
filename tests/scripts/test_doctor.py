"""Check scripts/doctor as it is used: each fault is made for real, found, and told with what to do."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.doctor_machine import check_cores, check_folder
from tests.integration.service import running_service
from tests.scripts.doctoring import ROOT, SECRET, report


def test_a_sound_machine_is_ok_in_every_check(environ: dict[str, str]) -> None:
    status, found = report(environ, "--mock", root=ROOT)
    assert status == 0
    assert {finding["level"] for finding in found.values()} == {"ok"}
    assert found.keys() == {"python", "venv", "settings", "packages", "secret", "proxy", "port", "cache", "model"}


def test_the_report_for_people_has_a_line_a_check_and_the_verdict_last(environ: dict[str, str]) -> None:
    done = subprocess.run([ROOT / "scripts/doctor", "--mock"], env=environ, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok       python     Python 3.") and lines[-1] == "a start should work"
    wrong = {**environ, "INFERENCE_API_ROWS": "0"}
    done = subprocess.run([ROOT / "scripts/doctor"], env=wrong, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-3:] == [
        "FAULT    settings   INFERENCE_API_ROWS=0 is outside bounds, 1 <= INFERENCE_API_ROWS <= 1024.",
        "                    -> docs/settings.md lists names and bounds",
        "a start would fail",
    ]


@pytest.mark.parametrize("name", ["INFERENCE_API_PORT", "PROXY_PORT"])
def test_a_taken_port_is_told_with_the_process_that_has_it(environ: dict[str, str], name: str) -> None:
    with socket.create_server(("127.0.0.1", int(environ[name]))):
        status, found = report(environ, "--mock", root=ROOT)
    assert status == 1
    assert f"127.0.0.1:{environ[name]} is taken by process {os.getpid()} (" in found["port"]["text"]
    assert name in found["port"]["advice"]


def test_a_running_service_is_told_with_its_state_and_that_another_start_would_fail(environ: dict[str, str]) -> None:
    with running_service() as service:
        given = {**environ, "INFERENCE_API_PORT": str(service.port), "INFERENCE_API_RUN_DIR": str(service.run_dir)}
        status, found = report(given, "--mock")
        command = [ROOT / "scripts/doctor", "--mock"]
        shown = subprocess.run(command, env=given, capture_output=True, text=True, check=False).stdout
        # The verdict is what a start does.
        start = [sys.executable, "-m", "inference_api.supervisor", "--mock"]
        started = subprocess.run(start, env=given, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert status == 1 and "port" not in found
    assert found["service"]["text"] == f"runs already on {service.url}: /health says 200 OK"
    assert shown.splitlines()[-1] == "the service runs already; another start would fail"
    assert started.returncode != 0 and "another service runs in" in started.stderr


@pytest.fixture
def lock_held(environ: dict[str, str]) -> Iterator[None]:
    """Hold the lock that a running service holds."""
    run_dir = Path(environ["INFERENCE_API_RUN_DIR"])
    run_dir.mkdir()
    with (run_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("lock_held")
def test_a_service_that_does_not_answer_is_told_too(environ: dict[str, str]) -> None:
    assert "/health does not answer yet" in report(environ, "--mock")[1]["service"]["text"]


@pytest.mark.usefixtures("lock_held")
def test_a_service_that_does_not_speak_http_is_told_too(environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", int(environ["INFERENCE_API_PORT"]))) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 ready\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        found = report(environ, "--mock")[1]
        thread.join()
    assert found["service"]["text"].endswith("/health does not answer yet (220 ready)")


def test_an_unknown_option_is_one_line_and_exit_status_2(environ: dict[str, str]) -> None:
    command = [ROOT / "scripts" / "doctor", "--frobnicate"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ERROR: unrecognized arguments: --frobnicate; see scripts/doctor --help\n"


@pytest.mark.parametrize(
    ("secret", "bind", "level", "text"),
    [
        ("short", "127.0.0.1", "warning", "JWT_SECRET has 5 bytes: accepted on this bind, never elsewhere"),
        ("test-secret-456", "0.0.0.0", "fault", "is a well-known example: refused on PROXY_BIND=0.0.0.0"),
        ("a-string-secret-at-least-256-bits-long", "127.0.0.1", "warning", "is a well-known example"),
    ],
)
def test_a_weak_secret_is_judged_and_never_printed(
    environ: dict[str, str], secret: str, bind: str, level: str, text: str
) -> None:
    status, found = report({**environ, "JWT_SECRET": secret, "PROXY_BIND": bind}, "--mock")
    assert found["secret"]["level"] == level and text in found["secret"]["text"]
    assert status == (level == "fault")
    assert secret not in json.dumps(found)


def test_a_kept_secret_that_others_can_read_is_a_warning(environ: dict[str, str]) -> None:
    del environ["JWT_SECRET"]
    assert "none yet" in report(environ, "--mock")[1]["secret"]["text"]
    kept = Path(environ["INFERENCE_API_CACHE_DIR"]) / "jwt_secret"
    kept.parent.mkdir()
    kept.write_text(SECRET)
    kept.chmod(0o644)
    finding = report(environ, "--mock")[1]["secret"]
    assert (finding["level"], finding["advice"]) == ("warning", f"chmod 600 {kept}")
    kept.write_text("test-secret-456")
    finding = report({**environ, "PROXY_BIND": "0.0.0.0"}, "--mock")[1]["secret"]
    assert finding["level"] == "fault" and f"{kept} is a well-known example" in finding["text"]
    kept.write_text(SECRET)
    kept.chmod(0o600)
    assert report(environ, "--mock")[1]["secret"]["level"] == "ok"


@pytest.mark.parametrize("place", ["file/cache", "/proc/1/cache"])
def test_a_cache_that_cannot_be_written_to_is_a_fault(environ: dict[str, str], tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    status, found = report({**environ, "INFERENCE_API_CACHE_DIR": str(tmp_path / place)}, "--mock")
    assert status == 1
    assert "cannot be written to: " in found["cache"]["text"] and "INFERENCE_API_CACHE_DIR" in found["cache"]["advice"]


def test_a_disk_without_room_is_a_fault_with_both_numbers(tmp_path: Path) -> None:
    (finding,) = check_folder("cache", tmp_path / "new" / "folder", 2**60, "INFERENCE_API_CACHE_DIR")
    assert finding.level == "fault" and f"{2**40} MiB needed" in finding.text
    assert "scripts/clean" in finding.advice and not (tmp_path / "new").exists()


def test_a_quota_of_the_cgroup_counts_as_cores(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (finding,) = check_cores(1, tmp_path)
    assert (finding.level, finding.text) == ("warning", "1 threads on 0.5 cores")


def test_more_threads_than_cores_are_a_warning(environ: dict[str, str]) -> None:
    finding = report({**environ, "INFERENCE_API_TORCH_THREADS": "4096"})[1]["cores"]
    assert finding["level"] == "warning" and "4096 threads on " in finding["text"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PROXY_REQUESTS_PER_MINUTE", "many"),
        ("PROXY_HEADER_DEADLINE_SECONDS", "-1"),
        ("JWT_POLICY_FILE", "/nope"),
    ],
)
def test_a_setting_that_the_proxy_would_refuse_is_a_fault(environ: dict[str, str], name: str, text: str) -> None:
    status, found = report({**environ, name: text}, "--mock")
    assert status == 1 and name in found["proxy"]["text"]


def test_one_port_for_server_and_proxy_is_a_fault(environ: dict[str, str]) -> None:
    status, found = report({**environ, "PROXY_PORT": environ["INFERENCE_API_PORT"]}, "--mock")
    assert status == 1 and found["port"]["text"] == f"server and proxy both want port {environ['INFERENCE_API_PORT']}"


def test_what_the_mock_cannot_have_is_a_fault_as_at_a_start(environ: dict[str, str]) -> None:
    status, found = report({**environ, "FALCON_40B_SAVE": "1"}, "--mock")
    assert status == 1 and "is for a model, and the engine is the mock" in found["settings"]["text"]


@pytest.mark.usefixtures("lock_held")
def test_a_service_on_another_port_in_the_same_run_folder_is_told_with_its_own(environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        status, found = report(environ, "--mock", root=ROOT)
        port = listener.getsockname()[1]
    assert status == 1
    start = f"another service runs in {environ['INFERENCE_API_RUN_DIR']}, on port "
    ports, _, wanted = found["service"]["text"].removeprefix(start).partition(" and not on ")
    assert str(port) in ports.split(", ") and wanted == environ["INFERENCE_API_PORT"]
    assert "INFERENCE_API_RUN_DIR" in found["service"]["advice"]
