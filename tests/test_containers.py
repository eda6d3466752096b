"""Check the images' files by reading them, and their entry point by running it without a container.

Building the images and running them is done by hand: docs/containers.md has the commands and the figures.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import jwt
import pytest
import requests
import yaml

from inference_api import built_in_images, half_finished
from inference_api.config import Settings
from inference_api.errors import ModelError
from tests.integration.service import SECRET, free_port, running_command, wait_for

ROOT = Path(__file__).resolve().parent.parent
ENTRY = ROOT / "scripts" / "container"
DOCKERFILES = ("Dockerfile", "Dockerfile-local")
FILES = (*DOCKERFILES, "docker-compose.yml", ".env", ".dockerignore", "scripts/container", "docs/containers.md")
SHOW = 'import os, sys; print(sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith("JWT_SECRET")})'


def instructions(name: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions, continuation lines joined and comments left out."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def values(name: str, instruction: str) -> list[str]:
    """Return the values of one kind of instruction, in order."""
    return [rest for word, rest in instructions(name) if word == instruction]


def copied(name: str) -> set[str]:
    """Return what a Dockerfile takes from the checkout."""
    sources = [shlex.split(rest)[:-1] for rest in values(name, "COPY") if not rest.startswith("--from")]
    return {source for group in sources for source in group}


def compose() -> dict[str, Any]:
    """Return docker-compose.yml, its anchors merged."""
    parsed: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return parsed


def entry(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point to its end, with the settings given and none of a service's besides."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    return subprocess.run(
        [str(ENTRY), *arguments],
        env={**kept, "PATH": path, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def checkout_that_shows(folder: Path, program: str = SHOW) -> str:
    """Make a checkout whose supervisor says what it was started with; return its folder."""
    package = folder / "checkout" / "inference_api"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "supervisor.py").write_text(program)
    (package.parent / "proxy").mkdir()
    for name in ("__init__.py", "proxy.py"):
        (package.parent / "proxy" / name).touch()
    return str(package.parent)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line with which the entry point gave up."""
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("ERROR: ")
    return line


# The files


@pytest.mark.parametrize("name", FILES)
def test_no_host_is_named_but_this_machine(name: str) -> None:
    hosts = re.findall(r"https?://([\w.$-]+)", (ROOT / name).read_text())
    assert set(hosts) <= {"127.0.0.1"}


@pytest.mark.parametrize("name", FILES)
def test_no_secret_has_a_default(name: str) -> None:
    text = (ROOT / name).read_text()
    given = re.findall(r"(?<!\{)\b(?:JWT_SECRET|INTERNAL_AUTH_KEY|FLASK_SECRET)\b[=:][ '\"]*([^\s'\"]*)", text)
    assert [value for value in given if not value.startswith(("$(", "\\$(", "$SECRET"))] == []


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_stage_starts_from_a_named_release_or_from_another_stage(name: str) -> None:
    stages: set[str] = set()
    for value in values(name, "FROM"):
        image, _, stage = value.partition(" AS ")
        assert image in stages or re.fullmatch(r"debian:bookworm-slim", image), image
        stages.add(stage)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_a_numbered_user_and_ends_at_sigterm(name: str) -> None:
    last_stage = instructions(name)[[word for word, _ in instructions(name)].index("FROM") :]
    assert [rest for word, rest in last_stage if word == "USER"] == ["10001:10001"]
    assert values(name, "STOPSIGNAL") == ["SIGTERM"]
    assert json.loads(values(name, "ENTRYPOINT")[0]) == ["/app/scripts/container"]
    assert values(name, "CMD") == []


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_checks_its_health_through_the_proxy(name: str) -> None:
    (value,) = values(name, "HEALTHCHECK")
    options, _, command = value.partition(" CMD ")
    assert json.loads(command) == ["/app/scripts/container", "health"]
    assert {option.split("=")[0] for option in options.split()} >= {"--interval", "--timeout", "--start-period"}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_an_image_copies_is_there_and_executable_where_it_is_a_program(name: str) -> None:
    assert copied(name) >= {"inference_api", "proxy", "pyproject.toml", "scripts/container"}
    for source in copied(name):
        assert (ROOT / source).exists(), source
    assert os.access(ENTRY, os.X_OK)


def test_a_build_sees_exactly_what_the_images_copy() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*", "everything is left out that is not named"
    assert {line[1:] for line in lines if line.startswith("!")} == copied("Dockerfile") | copied("Dockerfile-local")
    last = lines[lines.index("!scripts/jwt_util.py") + 1 :]
    for name in ("inference_api/__pycache__", "proxy/app.pyc"):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in last), name


def test_the_mocks_image_has_neither_torch_nor_a_model() -> None:
    text = (ROOT / "Dockerfile-local").read_text()
    assert "optional-dependencies" not in text
    assert "inference_api.prepare" not in text
    assert "MOCK_MODEL=1" in text
    assert "MOCK_MODEL" not in (ROOT / "Dockerfile").read_text()


def test_a_plain_compose_up_starts_the_mock_and_the_model_has_a_profile_of_its_own() -> None:
    services = compose()["services"]
    assert "COMPOSE_PROFILES=mock" in (ROOT / ".env").read_text().splitlines()
    assert {name: service.get("profiles") for name, service in services.items()} == {
        "secret": None,
        "mock": ["mock"],
        "real": ["real"],
    }
    assert services["mock"]["build"]["dockerfile"] == "Dockerfile-local"
    assert services["real"]["build"]["dockerfile"] == "Dockerfile"
    for service in services.values():
        assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("name", ["mock", "real"])
def test_a_composed_service_waits_for_its_secret_checks_its_health_and_has_time_to_drain(name: str) -> None:
    service = compose()["services"][name]
    assert service["depends_on"] == {"secret": {"condition": "service_completed_successfully"}}
    assert service["healthcheck"]["test"] == ["CMD", "/app/scripts/container", "health"]
    assert int(service["stop_grace_period"].removesuffix("s")) > Settings().grace_seconds + 10
    assert service["ports"] == ["${PUBLISHED_ADDRESS:-127.0.0.1}:${PUBLISHED_PORT:-1223}:1223"]
    assert service["tmpfs"] == ["/tmp"]


def test_every_composed_service_is_hardened_and_finds_the_same_secret() -> None:
    parsed = compose()
    paths = set()
    for service in parsed["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        (mount,) = service["volumes"]
        volume, folder = mount.split(":")[:2]
        assert volume in parsed["volumes"]
        paths.add((folder, service["environment"]["JWT_SECRET_FILE"]))
    ((folder, secret_path),) = paths
    assert str(Path(secret_path).parent) == folder
    assert all(f"{folder}\n" in (ROOT / name).read_text() for name in DOCKERFILES), "the images own the folder"


# The entry point: the secret


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


def test_a_secret_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "jwt_secret"
    assert f"JWT_SECRET_FILE={path} cannot be written" in refusal(entry("secret", JWT_SECRET_FILE=str(path)))
    assert "JWT_SECRET_FILE is not set" in refusal(entry("secret"))


# The entry point: everything else


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


def _cache_environ(tmp_path: Path, cache: Path) -> dict[str, str]:
    built_in = tmp_path / "built-in"
    (built_in / "model-v1").mkdir(parents=True)
    (built_in / "model-v1" / "manifest.json").write_text("{}")
    checkout = checkout_that_shows(tmp_path)
    return {
        "CONTAINER_MODEL_IMAGES": str(built_in),
        "CONTAINER_CHECKOUT": checkout,
        "JWT_SECRET": SECRET,
        "MODEL_WEKA_DIR": str(built_in),
        "CACHE_ROOT": str(cache),
    }


def test_a_cache_of_ones_own_gets_the_images_model_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environ = _cache_environ(tmp_path, cache)
    assert entry(**environ).returncode == 0
    assert [path.relative_to(cache).as_posix() for path in sorted(cache.rglob("*"))] == [
        "model-v1",
        "model-v1/manifest.json",
    ]
    (cache / "model-v1" / "manifest.json").write_text("kept")
    assert entry(**environ).returncode == 0
    assert (cache / "model-v1" / "manifest.json").read_text() == "kept"


@pytest.mark.parametrize("engine", ["auto", "mock"])
@pytest.mark.parametrize("model", ["", "somebody/something"])
def test_a_cache_of_ones_own_gets_the_engines_library_for_any_model(tmp_path: Path, engine: str, model: str) -> None:
    cache = tmp_path / "cache"
    environ = _cache_environ(tmp_path, cache)
    artefacts = tmp_path / "built-in" / "tvm_cache"
    artefacts.mkdir()
    for name in ("fused-0-1.so", "packed-0-1-2.bin"):
        (artefacts / name).write_text(name)
    for _ in range(2):
        assert entry(**environ, INFERENCE_API_ENGINE=engine, INFERENCE_API_MODEL=model).returncode == 0
    expected = [] if engine == "mock" else ["fused-0-1.so", "packed-0-1-2.bin"] if not model else ["fused-0-1.so"]
    assert sorted(path.name for path in cache.glob("tvm_cache/*")) == expected


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ([], {"INFERENCE_API_MODEL": "somebody/something"}),
        ([], {"MOCK_MODEL": "1"}),
        ([], {"MOCK_MODEL": "True"}),
        ([], {"INFERENCE_API_ENGINE": "mock"}),
        ([], {"INFERENCE_API_LOAD_IMAGE": "1"}),
        ([], {"FALCON_40B_LOAD": "TRUE"}),
        (["--mock"], {}),
        (["--load-image"], {}),
        (["--model", "somebody/something"], {}),
        (["--model=somebody/something"], {}),
    ],
)
def test_a_cache_for_another_model_or_the_mock_gets_nothing(
    tmp_path: Path, options: list[str], other: dict[str, str]
) -> None:
    cache = tmp_path / "cache"
    assert entry(*options, **_cache_environ(tmp_path, cache), **other).returncode == 0
    assert not cache.exists()


def test_what_a_killed_first_start_left_is_swept_and_a_users_folder_is_not(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environ = _cache_environ(tmp_path, cache)
    cache.mkdir()
    left, mine = half_finished.make(cache / "model-v1"), cache / "model-v1.partial-20240101"
    (left / "model.safetensors").write_text("half of it")
    mine.mkdir()
    assert entry(**environ).returncode == 0
    assert sorted(path.name for path in cache.iterdir()) == ["model-v1", mine.name]
    assert [path.name for path in (cache / "model-v1").iterdir()] == ["manifest.json"]


def test_of_two_first_starts_at_once_one_waits_for_the_other(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environ = _cache_environ(tmp_path, cache)
    cache.mkdir()
    descriptor = os.open(cache, os.O_RDONLY)
    command = [sys.executable, "-m", "inference_api.built_in_images", environ["CONTAINER_MODEL_IMAGES"]]
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with subprocess.Popen(command, env=environ, cwd=ROOT, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stderr is not None
            assert waiting.stderr.readline() == "waiting for another start that prepares a model\n"
            assert list(cache.iterdir()) == []
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            assert waiting.stderr.readline() == f"copying the model image model-v1 into {cache}\n"
            assert waiting.wait(20) == 0
    finally:
        os.close(descriptor)
    assert (cache / "model-v1" / "manifest.json").is_file()


def test_a_disk_without_room_for_the_copy_is_named_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = _cache_environ(tmp_path, tmp_path / "cache")
    monkeypatch.setattr(built_in_images, "free_disk_bytes", lambda _folder: 1)
    with pytest.raises(ModelError, match=r"no disk space: the model image model-v1 needs 2 bytes in .*, 1 are free"):
        built_in_images.copy_images(Path(environ["CONTAINER_MODEL_IMAGES"]), tmp_path / "cache", lambda _stage: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_disk_that_is_full_in_the_middle_is_told_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = _cache_environ(tmp_path, tmp_path / "cache")

    def fill(_source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(ModelError, match=r"No space left on device.*; free some space") as caught:
        built_in_images.copy_images(Path(environ["CONTAINER_MODEL_IMAGES"]), tmp_path / "cache", lambda _stage: None)
    assert "writable" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wrong_option_or_setting_is_told_once_before_anything_is_copied(tmp_path: Path) -> None:
    environ = _cache_environ(tmp_path, tmp_path / "cache")
    done = entry("--frobnicate", **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ERROR: unrecognized arguments: --frobnicate; see scripts/serve --help\n"
    assert "INFERENCE_API_ROWS=0 is outside" in refusal(entry(**environ, INFERENCE_API_ROWS="0"))
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_one_line_and_nothing_half_written(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("a file where the folder should be")
    line = refusal(entry(**_cache_environ(tmp_path, cache)))
    assert f"no model image can be made in {cache}: " in line and "make it writable" in line
    assert cache.read_text() == "a file where the folder should be"


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
