"""Check scripts/doctor as it is used: each fault is made for real, found, and told with what to do."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_api import half_finished, prepare
from inference_api.backend.engine_choice import KV_BITS, WEIGHT_BITS
from inference_api.model_image import build_mock_image
from inference_api.model_source import find_source
from inference_api.model_variant import WHOLE_MODEL
from scripts.doctor_machine import check_cores, check_folder, check_packages, check_python
from tests.integration.service import free_port, running_service

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_PYTHON = Path(sys.base_prefix) / "bin" / "python3"
SECRET = "a-secret-for-tests-of-at-least-32-bytes"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Return settings with which a start works, apart from every other service on this machine."""
    return {
        "PATH": os.environ["PATH"],
        "INFERENCE_API_CACHE_DIR": str(tmp_path / "cache"),
        "INFERENCE_API_RUN_DIR": str(tmp_path / "run"),
        "INFERENCE_API_PORT": str(free_port()),
        "PROXY_PORT": str(free_port()),
        "JWT_SECRET": SECRET,
    }


def report(environ: dict[str, str], *arguments: str, root: Path = ROOT) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the doctor; return its exit status and the worst finding of each check."""
    command = [str(root / "scripts" / "doctor"), "--json", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["starts"] == (done.returncode == 0)
    assert SECRET not in done.stdout
    order = ["ok", "note", "warning", "fault"]
    found = sorted(answer["findings"], key=lambda finding: order.index(finding["level"]))
    for finding in found:
        assert finding["advice"] or finding["level"] == "ok", finding
    return done.returncode, {finding["check"]: finding for finding in found}


def test_a_sound_machine_is_ok_in_every_check(environ: dict[str, str]) -> None:
    status, found = report(environ, "--mock")
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
        status, found = report(environ, "--mock")
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


def test_a_missing_model_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    status, found = report(environ, "--model", str(tmp_path / "nowhere"))
    assert status == 1 and "nowhere" in found["model"]["text"]


def test_a_model_that_is_only_half_there_names_the_missing_shard(environ: dict[str, str], tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002.safetensors"}}')
    status, found = report(environ, "--model", str(checkpoint))
    assert status == 1 and "shard 'model-00002.safetensors' of its index is missing" in found["model"]["text"]


def test_cut_downloads_and_half_finished_images_are_told(environ: dict[str, str]) -> None:
    cache = Path(environ["INFERENCE_API_CACHE_DIR"])
    blobs = cache / "hf_cache" / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123.incomplete").write_bytes(b"x")
    assert "1 cut downloads" in report(environ, "--model", "a/b")[1]["model"]["text"]
    (cache / "photos.partial-20240101").mkdir()
    half = half_finished.make(cache / "b-v1")
    finding = report(environ, "--mock")[1]["model"]
    assert (finding["text"], finding["advice"]) == (f"half-finished: {half.name}", "scripts/clean removes them")


def test_a_default_model_that_is_not_there_needs_room_for_it(environ: dict[str, str]) -> None:
    status, found = report({**environ, "INFERENCE_API_ROWS": "2", "INFERENCE_API_CONTEXT_TOKENS": "100"})
    assert found["model"]["level"] == "note" and "is not prepared" in found["model"]["text"]
    assert "701 MiB needed" in found["cache"]["text"]
    kv_bytes = 2 * 100 * 46_080
    needed_bytes = (prepare.DEFAULT_WEIGHT_BYTES * WEIGHT_BITS + kv_bytes * KV_BITS) // 32
    assert found["memory"]["text"].startswith(f"{needed_bytes / 2**20:.0f} MiB for weights")
    assert found["engine"] == {"check": "engine", "level": "ok", "text": "fused", "advice": ""}
    assert status == 0


def test_memory_that_nobody_has_is_told_before_the_first_start_too(environ: dict[str, str], checkout: Path) -> None:
    given = {**environ, "INFERENCE_API_ROWS": "1024", "INFERENCE_API_CONTEXT_TOKENS": "1048576"}
    assert "INFERENCE_API_ROWS (1024)" in report(given)[1]["memory"]["text"]
    status, found = report({**given, "SERVE_PYTHON": f"{SYSTEM_PYTHON}"}, root=checkout)
    assert (status, found["memory"]["level"]) == (1, "fault")
    assert "INFERENCE_API_CONTEXT_TOKENS (8192)" in found["memory"]["text"]


def test_a_broken_image_is_a_warning_for_the_next_start_builds_it_again(environ: dict[str, str]) -> None:
    image = Path(environ["INFERENCE_API_CACHE_DIR"]) / find_source(None, print, WHOLE_MODEL, None).image_name
    image.mkdir(parents=True)
    found = report(environ)[1]
    assert (found["model"]["level"], found["model"]["advice"]) == ("warning", "the next start builds it again")
    assert "701 MiB needed" in found["cache"]["text"]


def test_a_broken_image_of_another_model_does_not_ask_for_the_default_models_room(
    environ: dict[str, str], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    name = find_source(str(checkpoint), print, WHOLE_MODEL, None).image_name
    (Path(environ["INFERENCE_API_CACHE_DIR"]) / name).mkdir(parents=True)
    found = report(environ, "--model", str(checkpoint))[1]
    assert found["model"]["advice"] == "the next start builds it again"
    assert " 0 MiB needed" in found["cache"]["text"]


def test_a_saved_image_that_is_asked_for_and_not_there_is_a_fault(environ: dict[str, str]) -> None:
    status, found = report({**environ, "FALCON_40B_LOAD": "1"})
    place = Path(environ["INFERENCE_API_CACHE_DIR"]) / "tti_cache" / "smollm2-135m-instruct-v0"
    assert status == 1
    assert found["model"]["text"] == f"provided tti path does not exist: {place}, cannot load tti"


def test_a_saved_image_that_would_be_written_over_is_a_fault(environ: dict[str, str]) -> None:
    place = Path(environ["INFERENCE_API_CACHE_DIR"]) / "tti_cache" / "smollm2-135m-instruct-v0"
    place.mkdir(parents=True)
    status, found = report({**environ, "FALCON_40B_SAVE": "1"})
    assert status == 1
    assert f"provided tti path exists: {place}, cannot save over existing tti" in found["model"]["text"]


def test_memory_that_the_settings_need_and_nobody_has_names_them(environ: dict[str, str]) -> None:
    cache = Path(environ["INFERENCE_API_CACHE_DIR"])
    image = build_mock_image(cache).path.rename(cache / find_source(None, print, WHOLE_MODEL, None).image_name)
    manifest = json.loads((image / "manifest.json").read_text())
    manifest["facts"]["kv_bytes_per_token"] = 2**30
    (image / "manifest.json").write_text(json.dumps(manifest))
    status, found = report(environ)
    assert status == 1
    assert "INFERENCE_API_ROWS (32)" in found["memory"]["text"]


def test_the_engine_that_a_start_would_take_is_told_with_the_reason(environ: dict[str, str], tmp_path: Path) -> None:
    for name in ("bash", "dirname", "uname", "ldconfig"):
        if found := shutil.which(name):
            (tmp_path / name).symlink_to(found)
    finding = report({**environ, "PATH": str(tmp_path)})[1]["engine"]
    assert finding["level"] == "warning"
    assert finding["text"] == "fused, without its fast library: g++ is not installed"
    assert finding["advice"] == "on Debian and Ubuntu: apt-get install g++"
    finding = report({**environ, "INFERENCE_API_DTYPE": "fp32"})[1]["engine"]
    assert (finding["level"], finding["text"]) == ("ok", "transformers, because INFERENCE_API_DTYPE is fp32")


def test_a_model_that_the_fast_engine_does_not_compute_is_told_and_refused_where_that_is_named(
    environ: dict[str, str],
) -> None:
    cache = Path(environ["INFERENCE_API_CACHE_DIR"])
    image = build_mock_image(cache).path.rename(cache / find_source(None, print, WHOLE_MODEL, None).image_name)
    (image / "config.json").write_text('{"model_type": "gpt2"}')
    status, found = report(environ)
    text = "the engine fused does not compute the architecture 'gpt2' (it computes llama, mistral, qwen2, qwen3)"
    assert (status, found["engine"]["text"]) == (0, f"transformers, because {text}")
    status, found = report({**environ, "INFERENCE_API_ENGINE": "fused"})
    assert (status, found["engine"]["level"]) == (1, "fault")
    assert found["engine"]["text"].startswith(text)


def test_more_threads_than_cores_are_a_warning(environ: dict[str, str]) -> None:
    finding = report({**environ, "INFERENCE_API_TORCH_THREADS": "4096"})[1]["cores"]
    assert finding["level"] == "warning" and "4096 threads on " in finding["text"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of what the doctor reads, without .venv."""
    copy = tmp_path / "checkout"
    for folder in ("scripts", "inference_api", "proxy"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def test_before_the_first_start_it_works_with_the_systems_python_alone(environ: dict[str, str], checkout: Path) -> None:
    status, found = report({**environ, "SERVE_PYTHON": f"{SYSTEM_PYTHON}"}, "--mock", root=checkout)
    assert status == 0
    assert (found["venv"]["level"], found["venv"]["text"]) == ("note", "no .venv yet")
    assert "2048 MiB needed" in found["disk"]["text"]


def test_a_python_that_can_make_no_environment_names_the_package_to_install(
    environ: dict[str, str], checkout: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ensurepip'] = None\n")
    given = {**environ, "SERVE_PYTHON": f"{SYSTEM_PYTHON}", "PYTHONPATH": str(tmp_path)}
    status, found = report(given, "--mock", root=checkout)
    assert status == 1
    assert "apt-get install python3-venv" in found["venv"]["advice"]


def test_an_old_or_missing_python_is_told_before_anything_is_run_with_it(
    environ: dict[str, str], checkout: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old-python"
    old.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\n[ "$2" = "" ] && exit 0\nexit 1\n'
    )
    old.chmod(0o755)
    status, found = report({**environ, "SERVE_PYTHON": str(old)}, root=checkout)
    assert (status, found["python"]["text"]) == (1, "Python 3.9.2 is too old")
    status, found = report({**environ, "SERVE_PYTHON": "no-such-python"}, root=checkout)
    assert (status, found["python"]["text"]) == (1, "no-such-python is not installed")


def test_a_package_that_is_not_the_pinned_one_is_named_with_both_versions(
    environ: dict[str, str], checkout: Path
) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (checkout / ".venv" / "bin" / "python").chmod(0o755)
    project = (checkout / "pyproject.toml").read_text().replace('"flask==', '"no-such-package==1.0", "flask==9.')
    (checkout / "pyproject.toml").write_text(project)
    status, found = report(environ, "--mock", root=checkout)
    assert status == 0 and found["packages"]["level"] == "note"
    digest = subprocess.run(
        "cat pyproject.toml scripts/constraints.txt | sha256sum | cut -d' ' -f1",
        shell=True,
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (checkout / ".venv" / ".installed").write_text(f"{digest} \n")
    status, found = report(environ, "--mock", root=checkout)
    assert status == 1 and found["packages"]["level"] == "fault"
    assert found["packages"]["text"].startswith("no-such-package is not installed; flask is ")
    assert ".venv/.installed" in found["packages"]["advice"]


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
        status, found = report(environ, "--mock")
        port = listener.getsockname()[1]
    assert status == 1
    start = f"another service runs in {environ['INFERENCE_API_RUN_DIR']}, on port "
    ports, _, wanted = found["service"]["text"].removeprefix(start).partition(" and not on ")
    assert str(port) in ports.split(", ") and wanted == environ["INFERENCE_API_PORT"]
    assert "INFERENCE_API_RUN_DIR" in found["service"]["advice"]


def test_an_environment_that_cannot_be_entered_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rights stop a user, but not root, whom the checks may run as.
    def refuse(path: Path, **_options: bool) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    findings = check_python(tmp_path)
    assert [finding.level for finding in findings] == ["ok", "fault"]
    assert findings[1].text == ".venv cannot be entered: Permission denied"
    assert check_packages(tmp_path, ()) == []
