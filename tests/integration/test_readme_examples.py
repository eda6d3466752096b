"""Run the README's own curl lines, through the proxy, against a service with the mock engine."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service import ROOT, SECRET, Service, running_service

README = (ROOT / "README.md").read_text("utf-8")


def _examples(kind: str) -> list[str]:
    return re.findall(rf"<!-- run: {kind} -->\n```sh\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running_service(proxy=True, SERVED_MODEL_NAMES="smollm2-135m-instruct", INFERENCE_API_INSECURE_DEV="0") as it:
        yield it


@pytest.fixture(scope="module")
def authorization(service: Service, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Mint the bearer with the README's own lines."""
    home = tmp_path_factory.mktemp("home")
    (home / ".cache" / "inference_api").mkdir(parents=True)
    (home / ".cache" / "inference_api" / "jwt_secret").write_text(SECRET)
    return _run(_examples("mint")[0] + 'printf %s "$AUTHORIZATION"', HOME=str(home))


def _run(script: str, **environ: str) -> str:
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env={**os.environ, **environ}, capture_output=True, check=True, text=True
    )
    return done.stdout


def test_there_are_examples() -> None:
    assert len(_examples("curl")) >= 3


@pytest.mark.parametrize("example", _examples("curl"))
def test_the_curl_example_answers(example: str, service: Service, authorization: str) -> None:
    script = example.replace("127.0.0.1:1223", f"127.0.0.1:{service.proxy_port}").replace("curl ", "curl -sS --fail ")
    answer = _run(script, AUTHORIZATION=authorization)
    if "/v1/chat/" in example:
        assert answer.startswith("data: {") and answer.endswith("data: [DONE]\n\n")
    elif "/chat/" in example:
        assert answer.endswith('event: close\ndata: {"message": "Connection closed"}\n\n')
    elif "/inference/" in example:
        assert len(answer) == 32 and answer.isdigit()
    else:
        assert '"num_rows": 32' in answer


def test_the_cards_curl_answers(service: Service) -> None:
    curl = re.search(r"curl -N .*?\}'", service.log.read_text(), re.DOTALL)
    assert curl is not None
    assert re.fullmatch(r"[0-9]{32}", _run(curl.group().replace("curl ", "curl -sS --fail ")))


def test_the_readme_names_no_folder_of_one_machine() -> None:
    assert str(Path.home()) not in README and str(ROOT) not in README
