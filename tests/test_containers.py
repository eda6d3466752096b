"""Check the entry point of the images by running it without a container.

Building the images and running them is done by hand: docs/containers.md has the commands and the figures.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from pathlib import Path

import jwt
import pytest
import requests

from tests.container_entry import ENTRY, checkout_that_shows, entry, refusal
from tests.integration.service import SECRET, free_port, running_command, wait_for


def test_no_secret_is_one_line_that_says_what_to_add() -> None:
    assert "JWT_SECRET is not set; add: -e JWT_SECRET=" in refusal(entry())


def test_a_missing_secret_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    assert f"JWT_SECRET_FILE={path} cannot be read" in refusal(entry(JWT_SECRET_FILE=str(path)))


def test_an_empty_secret_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert f"JWT_SECRET_FILE={path} is empty" in refusal(entry(JWT_SECRET_FILE=str(path)))


def test_a_secret_and_a_secret_file_together_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    line = refusal(entry(JWT_SECRET=SECRET, JWT_SECRET_FILE=str(path)))
    assert "both set" in line and SECRET not in line


def test_a_secret_file_reaches_the_supervisor_as_the_secret_and_options_reach_it_too(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    checkout = checkout_that_shows(tmp_path)
    done = entry("--workers", "2", CONTAINER_CHECKOUT=checkout, JWT_SECRET_FILE=str(path), PROXY_PORT="4321")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['--proxy-port', '4321', '--workers', '2']")
    assert f"'JWT_SECRET': '{SECRET}'" in done.stdout


def test_help_needs_no_secret() -> None:
    done = entry("--help", CONTAINER_CHECKOUT="/nonexistent")
    assert done.returncode == 0 and "--proxy-port" in done.stdout


def test_the_secret_is_written_once_for_its_owner_alone_with_a_token_that_it_signs(tmp_path: Path) -> None:
    path = tmp_path / "jwt_secret"
    first, second = (entry("secret", JWT_SECRET_FILE=str(path), PUBLISHED_PORT="4321") for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = path.read_text().strip()
    assert len(secret) == 64 and secret not in first.stdout
    assert "wrote a random secret" in first.stdout and "wrote a random secret" not in second.stdout
    for done in (first, second):
        bearer = re.search(r"export AUTHORIZATION='Bearer (\S+)'", done.stdout)
        assert bearer is not None
        assert jwt.decode(bearer.group(1), secret, ["HS256"])["team_id"] == "dev"
        assert "curl -N http://127.0.0.1:4321/" in done.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["jwt_secret"]


def test_the_key_between_proxy_and_server_is_written_too_where_it_has_a_place(tmp_path: Path) -> None:
    secret, key = tmp_path / "jwt_secret", tmp_path / "internal_auth_key"
    given = {"JWT_SECRET_FILE": str(secret), "INTERNAL_AUTH_KEY_FILE": str(key)}
    assert entry("secret", **given).returncode == 0
    written = key.read_text()
    assert len(written.strip()) == 64 and written != secret.read_text()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    done = entry("secret", **given)
    assert done.returncode == 0 and key.read_text() == written
    assert written.strip() not in done.stdout
    absent = {"INTERNAL_AUTH_KEY_FILE": str(tmp_path / "absent" / "key")}
    assert "INTERNAL_AUTH_KEY_FILE=" in refusal(entry("secret", **{**given, **absent}))


@pytest.mark.parametrize("name", ["JWT_POLICY_FILE", "JWT_REVOCATION_FILE", "PROXY_TENANTS_FILE"])
def test_an_access_file_that_is_missing_or_wrong_is_one_line_before_anything_starts(tmp_path: Path, name: str) -> None:
    key, path = tmp_path / "key", tmp_path / "given"
    key.write_text("k" * 32)
    key.chmod(0o600)
    given = {"JWT_SECRET": SECRET, "INTERNAL_AUTH_KEY_FILE": str(key), "MOCK_MODEL": "1", name: str(path)}
    environ = {"CONTAINER_CHECKOUT": "/nonexistent", **given}
    assert f"{name}: cannot read {path}" in refusal(entry(**environ))
    path.write_text("{")
    assert f"{path}" in refusal(entry(**environ))


def test_a_secret_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "jwt_secret"
    assert f"JWT_SECRET_FILE={path} cannot be written" in refusal(entry("secret", JWT_SECRET_FILE=str(path)))
    assert "JWT_SECRET_FILE is not set" in refusal(entry("secret"))


def test_any_other_program_runs_in_place_of_the_service() -> None:
    done = entry("bash", "-c", 'echo "$0 has $#"', "shell", "one")
    assert (done.returncode, done.stdout) == (0, "shell has 1\n")


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "190000 100000\n"}, 1),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "99900000 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_the_engines_threads_follow_the_quota_and_the_cpu_set(
    tmp_path: Path, files: dict[str, str], most: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = entry("printenv", "INFERENCE_API_TORCH_THREADS", CONTAINER_CGROUP=str(tmp_path))
    assert int(done.stdout) == (most or len(os.sched_getaffinity(0)))


def test_two_cores_of_quota_are_two_threads_where_the_cpu_set_has_more(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    (tmp_path / "nproc").write_text("#!/bin/sh\necho 8\n")
    (tmp_path / "nproc").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = entry("printenv", "INFERENCE_API_TORCH_THREADS", CONTAINER_CGROUP=str(tmp_path), PATH=path)
    assert done.stdout == "2\n"


def test_a_number_of_threads_that_is_given_is_kept() -> None:
    assert entry("printenv", "INFERENCE_API_TORCH_THREADS", INFERENCE_API_TORCH_THREADS="7").stdout == "7\n"


def test_a_checkout_that_is_mounted_runs_in_place_of_the_images_code(tmp_path: Path) -> None:
    checkout = checkout_that_shows(tmp_path, "print(__file__)")
    done = entry(CONTAINER_CHECKOUT=checkout, JWT_SECRET=SECRET)
    assert done.stdout == f"{checkout}/inference_api/supervisor.py\n"
    assert f"the checkout in {checkout} runs" in done.stderr


def test_health_fails_when_nothing_listens() -> None:
    port = free_port()
    line = f"ERROR: nothing answers on 127.0.0.1:{port}; the service is not running, or not yet\n"
    done = entry("health", PROXY_PORT=str(port))
    assert (done.returncode, done.stderr) == (1, line)


def test_a_secret_file_that_is_a_folder_or_holds_a_nul_byte_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"x" * 32 + b"\0y")
    assert f"JWT_SECRET_FILE={file} holds a NUL byte" in refusal(entry("--mock", JWT_SECRET_FILE=str(file)))
    assert f"JWT_SECRET_FILE={file} holds a NUL byte" in refusal(entry("secret", JWT_SECRET_FILE=str(file)))
    assert f"JWT_SECRET_FILE={tmp_path} is a folder" in refusal(entry("--mock", JWT_SECRET_FILE=str(tmp_path)))


def test_the_whole_service_with_the_mock_serves_through_the_proxy_is_healthy_and_stops() -> None:
    port = str(free_port())
    environ = {"MOCK_MODEL": "1", "PROXY_PORT": port, "CONTAINER_CHECKOUT": "/nonexistent", "PROXY_BIND": "0.0.0.0"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with running_command([str(ENTRY)], {**environ, "PATH": path}) as service:
        wait_for(lambda: "Ready http" in service.log.read_text(), 20.0, "ready card")
        assert f"Ready http://127.0.0.1:{port}." in service.log.read_text()
        assert entry("health", PROXY_PORT=port, PROXY_BIND="0.0.0.0").returncode == 0
        bearer = jwt.encode({"team_id": "t", "token_id": "i", "exp": 2**40}, SECRET, "HS256")
        answer = requests.post(
            f"http://127.0.0.1:{port}/inference/falcon40b",
            json={"text": "x", "max_tokens": 12},
            headers={"Authorization": f"Bearer {bearer}"},
            timeout=20,
        )
        assert (answer.status_code, answer.text) == (200, "123456789012")
        assert len(service.worker_pids) == 1
        service.process.terminate()
        assert service.process.wait(20) == 0


def test_a_weak_secret_is_the_proxys_own_line_before_anything_starts() -> None:
    environ = {"PROXY_BIND": "0.0.0.0", "CONTAINER_CHECKOUT": "/nonexistent", "MOCK_MODEL": "1"}
    line = refusal(entry(JWT_SECRET="short", **environ))
    assert line.startswith("ERROR: JWT_SECRET has 5 bytes: it needs at least 32 random bytes")


def test_the_outermost_process_collects_a_worker_whose_arbiter_was_killed() -> None:
    # A child subreaper (prctl(2), 36) is handed orphans as the PID 1 of a container is; it stays one over an exec.
    program = "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", program, sys.executable, "-m", "inference_api.supervisor", "--mock"]
    with running_command(command, {}) as service:
        wait_for(lambda: "Ready http" in service.log.read_text(), 20.0, "ready card")
        (worker,) = service.worker_pids
        (arbiter,) = set(service.pids_of("gunicorn")) - {worker}
        os.kill(arbiter, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{worker}").exists(), 15.0, "the worker's end, and no zombie of it")
