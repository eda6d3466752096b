"""Check the images' files, and the one that composes them, by reading them.

Building the images and running them is done by hand: docs/containers.md has the commands and the figures.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference_api.config import Settings
from proxy.config import read_settings

ROOT = Path(__file__).resolve().parent.parent
ENTRY = ROOT / "scripts" / "container"
DOCKERFILES = ("Dockerfile", "Dockerfile-local")
FILES = (*DOCKERFILES, "docker-compose.yml", ".env", ".dockerignore", "scripts/container", "docs/containers.md")


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
        "redis": ["redis"],
    }
    assert services["mock"]["build"]["dockerfile"] == "Dockerfile-local"
    assert services["real"]["build"]["dockerfile"] == "Dockerfile"
    for service in services.values():
        assert "build" not in service or (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("name", ["mock", "real"])
def test_a_composed_service_waits_for_its_secret_checks_its_health_and_has_time_to_drain(name: str) -> None:
    service = compose()["services"][name]
    assert service["depends_on"] == {"secret": {"condition": "service_completed_successfully"}}
    assert service["healthcheck"]["test"] == ["CMD", "/app/scripts/container", "health"]
    assert int(service["stop_grace_period"].removesuffix("s")) > Settings().grace_seconds + 10
    assert service["ports"] == ["${PUBLISHED_ADDRESS:-127.0.0.1}:${PUBLISHED_PORT:-1223}:1223"]
    assert service["tmpfs"] == ["/tmp"]


def test_redis_is_reached_by_the_other_services_alone_keeps_nothing_and_never_forgets_a_count() -> None:
    parsed = compose()
    redis = parsed["services"]["redis"]
    command = redis["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert command[0] == "redis-server" and options["--port"] == "6380"
    assert (options["--save"], options["--maxmemory-policy"]) == ("", "noeviction")
    assert "ports" not in redis and "network_mode" not in redis
    assert redis["user"] == "10001:10001" and "/" not in redis["image"]
    assert redis["healthcheck"]["test"] == ["CMD", "redis-cli", "-p", "6380", "ping"]
    for name in ("mock", "real"):
        environment = parsed["services"][name]["environment"]
        assert environment["REDIS_URL"] == "${REDIS_URL:-}", "without the profile there is none"
        given = {"JWT_SECRET": "x" * 32, "REDIS_URL": "redis://redis:6380", "PROXY_REPLICAS": "1"}
        assert read_settings(given, port=0, upstream_url="http://127.0.0.1:1").redis_url == "redis://redis:6380"
    assert "REDIS_URL=redis://redis:6380" in (ROOT / "docs" / "containers.md").read_text()


def test_every_composed_service_is_hardened_and_finds_the_same_secret() -> None:
    parsed = compose()
    paths = set()
    for service in parsed["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        if "JWT_SECRET_FILE" not in service.get("environment", {}):
            assert "volumes" not in service, "nothing that is not told of the secret has its volume"
            continue
        mount, *others = service["volumes"]
        volume, folder = mount.split(":")[:2]
        assert volume in parsed["volumes"]
        paths |= {(folder, service["environment"][key]) for key in ("JWT_SECRET_FILE", "INTERNAL_AUTH_KEY_FILE")}
        assert all(other.endswith(":ro") for other in others)
    assert {name for _, name in paths} == {f"{folder}/jwt_secret", f"{folder}/internal_auth_key"}
    assert all(f"{folder}\n" in (ROOT / name).read_text() for name in DOCKERFILES), "the images own the folder"


@pytest.mark.parametrize("name", ["mock", "real"])
def test_a_composed_service_reads_its_access_files_from_one_folder_that_is_empty_unless_it_is_named(name: str) -> None:
    parsed = compose()
    service = parsed["services"][name]
    files = ("JWT_POLICY_FILE", "JWT_REVOCATION_FILE", "PROXY_TENANTS_FILE")
    assert {key: service["environment"][key] for key in files} == {key: f"${{{key}:-}}" for key in files}
    assert service["volumes"][1:] == ["${ACCESS_FOLDER:-access}:/access:ro"] and "access" in parsed["volumes"]
    given = {"JWT_SECRET": "x" * 32} | dict.fromkeys(files, "")
    settings = read_settings(given, port=0, upstream_url="http://127.0.0.1:1")
    assert (settings.jwt_policy_file, settings.jwt_revocation_file, settings.tenants_file) == (None, None, None)
    for page in ("containers.md", "access.md"):
        assert "ACCESS_FOLDER" in (ROOT / "docs" / page).read_text()
