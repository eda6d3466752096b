"""Check that scripts/prove-isolation finds a planted fault, passes a sound service, and judges answers as it says."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.integration.service import Service, running_command, wait_for

ROOT = Path(__file__).parents[2]
ENTRIES = {
    "sound": "_mock_inference_api_server:create_test_server()",
    "crossed": "tests.scripts.crossed_router:create_mock_server()",
}
PROGRAM = "import sys; sys.path.insert(0, 'scripts'); from campaigns.prove_isolation import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def campaigns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"campaigns.{name}")


@pytest.fixture(params=ENTRIES)
def service(request: pytest.FixtureRequest) -> Iterator[tuple[str, Service]]:
    """A plain gunicorn with the mock behind it: a sound one, and one with the planted fault."""
    command = [sys.executable, "-m", "gunicorn", "--config", "gunicorn.conf.py", ENTRIES[request.param]]
    environ = {"INFERENCE_API_MOCK_MODE": "echo", "INFERENCE_API_ENGINE": "mock"}
    with running_command(command, {**environ, "INFERENCE_API_MOCK_TOKENS_PER_SECOND": "2000"}) as running:
        wait_for(running.is_healthy, 30.0, "health")
        yield request.param, running


def prove(*options: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-c", PROGRAM, *options, "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_a_planted_fault_of_the_router_is_found_and_a_sound_service_passes(service: tuple[str, Service]) -> None:
    kind, running = service
    status, told, said = prove("--url", running.url, "--requests", "200", "--clients", "16")
    assert told["requests"] == sum(told[name] for name in module("self_identifying").OUTCOMES) == 200
    if kind == "sound":
        assert (status, told["foreign"], told["short"], told["broken"], said) == (0, 0, 0, 0, "")
    else:
        assert status == 1 and told["foreign"] > 0
        assert re.search(r"^FAILED foreign: request [0-9a-f]+ was told ", said, re.MULTILINE)


def test_without_an_address_a_mock_is_started_and_eight_tenants_ask_it() -> None:
    status, told, said = prove("--requests", "40", "--clients", "8", "--leaving", "0")
    assert (status, told["answered"], told["tenants"], told["by"], said) == (0, 40, 8, "echo", "")


def test_where_nobody_answers_nothing_is_proven() -> None:
    status, told, said = prove("--url", "http://127.0.0.1:1", "--requests", "1")
    assert (status, told) == (2, {})
    assert said.startswith("ERROR: nothing could be tried: ")


@pytest.mark.parametrize("url", ["127.0.0.1:1223", "localhost", "ftp://127.0.0.1", "http://"])
def test_an_address_that_is_no_url_is_told_as_such(url: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{url!r} is no URL such as http://")):
        module("self_identifying").Target(url, [])


@pytest.mark.parametrize(
    ("texts", "is_whole", "outcome"),
    [
        (["[1é][1é]"], True, "answered"),
        (["[1é][1é]", "[1é][1é]"], True, "answered"),
        (["[1é]["], True, "short"),
        ([], True, "short"),
        (["[1é][1é]", "[1é]"], True, "short"),
        (["[1é]["], False, "broken"),
        ([], False, "broken"),
        (["[1é][1é]["], False, "foreign"),
        (["[2é]"], False, "foreign"),
        (["[1é][1é]", "[1é][2é]"], True, "foreign"),
    ],
)
def test_an_answer_holds_nothing_but_the_beginning_of_its_own_text(
    texts: list[str], is_whole: bool, outcome: str
) -> None:
    assert module("self_identifying").judge(texts, "[1é][1é]", whole=is_whole) == outcome


def test_an_answer_about_anothers_request_is_a_leak_and_a_server_that_is_away_is_none() -> None:
    result = module("self_identifying").Result()
    result.peeks.update({404: 5, 503: 2})
    assert result.faults == 0
    result.peeks[200] += 1
    assert (result.leaks, result.faults) == (1, 1)
