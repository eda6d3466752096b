"""Check the original's environment names, one test a name: what each changes in a service that was started with it.

One mock service with a proxy carries most of them, started with no other name for the same settings. The development
variants' names act on a real model's image: test_variants.py. Names of log and debug modes are read here only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest
import requests

from inference_api.config import Settings
from tests.integration.service import Service, command_line, free_ports, running_command, wait_for

OWN_SECRET = "a-secret-of-this-module-of-32-bytes-or-more"
FLASK_SECRET = "a-flask-secret-of-this-module"
NEWER_NAMES = ("INFERENCE_API_PORT", "INFERENCE_API_CACHE_DIR", "CACHE_ROOT", "INFERENCE_API_ENGINE")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weka")


@pytest.fixture(scope="module")
def service(cache: Path) -> Iterator[Service]:
    port, proxy_port = free_ports(2)
    names = {
        "MODEL_WEKA_DIR": str(cache),
        "JWT_SECRET": OWN_SECRET,
        "FLASK_SECRET": FLASK_SECRET,
        "MOCK_MODEL": "1",
        "SERVICE_PORT": str(port),
    }
    command = ["env", *(f"--unset={name}" for name in NEWER_NAMES)]
    command += [sys.executable, "-m", "inference_api.supervisor", "--proxy-port", str(proxy_port)]
    with running_command(command, names, own_cache=False) as service:
        service.port, service.proxy_port = port, proxy_port
        wait_for(
            lambda: "Ready http" in service.log.read_text() or service.process.poll() is not None, 20.0, "the card"
        )
        assert service.process.poll() is None, service.log.read_text()
        yield service


def test_service_port_is_the_servers(service: Service) -> None:
    assert f"server   http://127.0.0.1:{service.port} " in service.log.read_text()
    assert service.get("/health").status_code == 200


def test_mock_model_chooses_the_mock(service: Service) -> None:
    assert service.get("/info").json()["engine"] == "mock"


def test_model_weka_dir_is_the_cache_root(service: Service, cache: Path) -> None:
    assert [path.name for path in cache.iterdir()] == ["mock-v1"]
    assert (service.run_dir / "model_image").resolve() == cache / "mock-v1"


def test_jwt_secret_is_the_proxys(service: Service) -> None:
    def status_with(secret: str) -> int:
        bearer = jwt.encode({"team_id": "a", "token_id": "b", "exp": 1 << 32}, secret, "HS256")
        headers = {"Authorization": f"Bearer {bearer}"}
        body = {"text": "x", "max_tokens": 2}
        return requests.post(f"{service.proxy_url}/inference/mock", json=body, headers=headers, timeout=30).status_code

    assert status_with(OWN_SECRET) == 200
    assert status_with(OWN_SECRET[::-1]) == 401


def test_flask_secret_reaches_the_server_and_no_backend_and_sets_no_cookie(service: Service) -> None:
    def knows(pid: int) -> bool:
        return FLASK_SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes()

    assert all(knows(pid) for pid in service.worker_pids)
    assert not knows(service.backend_pid), command_line(service.backend_pid)
    answers = [service.get(path) for path in ("/", "/health", "/info", "/nothing")]
    answers.append(service.post("/chat/mock", {"text": "x", "max_tokens": 2}))
    assert [answer.headers.get("Set-Cookie") for answer in answers] == [None] * len(answers)
    assert FLASK_SECRET not in service.log.read_text()


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("MODEL_WEKA_DIR", "/a", "cache_dir", "/a"),
        ("HF_CACHE", "/a", "hf_cache_path", Path("/a")),
        ("FLASK_SECRET", "x", "flask_secret", "x"),
        ("MOCK_MODEL", "1", "engine", "mock"),
        ("FALCON_40B_LOG_LEVEL_DEBUG", "1", "log_level", "debug"),
        ("FRONTEND_DEBUG_MODE", "1", "frontend_debug", True),
        ("BACKEND_DEBUG_MODE", "1", "backend_debug", True),
        ("SERVICE_PORT", "7001", "port", 7001),
        ("FALCON_40B_2LAYER", "1", "layers", 2),
        ("FALCON_40B_PYTORCH_NO_WEIGHTS", "1", "no_weights", True),
        ("FALCON_40B_SAVE", "1", "save_image", True),
        ("FALCON_40B_LOAD", "1", "load_image", True),
        ("FALCON_40B_TTI_SUFFIX", "v7", "image_suffix", "v7"),
    ],
)
def test_each_name_is_read(name: str, text: str, field: str, value: object) -> None:
    assert getattr(Settings.from_environ({name: text}), field) == value


def test_downloads_go_where_the_users_hub_folders_say_unless_a_setting_does() -> None:
    def folder(**environ: str) -> Path:
        return Settings.from_environ({"CACHE_ROOT": "/root-of-caches", **environ}).hf_cache_path

    assert folder() == Path("/root-of-caches/hf_cache")
    assert folder(HF_HOME="/h") == Path("/h/hub")
    assert folder(HF_HOME="/h", HF_HUB_CACHE="/c") == Path("/c")
    assert folder(HF_HOME="/h", HF_HUB_CACHE="/c", HF_CACHE="/own") == Path("/own")
    settings = Settings.from_environ({"HF_HOME": "/h"})
    assert Settings.from_environ({**os.environ, "HF_HOME": "/other", **settings.to_environ()}) == settings
