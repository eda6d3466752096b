"""Run scripts/serve as a stranger does: the card is the last thing printed, its curl works, Ctrl-C ends everything."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import requests

from tests.integration.service import ROOT, command_line, free_ports, running_service, wait_for

READY_SECONDS = 3.0
END_SECONDS = 5.0


def test_serve_mock_makes_a_secret_prints_a_working_curl_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    (port, proxy_port), log = free_ports(2), tmp_path / "log"
    environ = {name: value for name, value in os.environ.items() if name != "JWT_SECRET"}
    environ |= {"INFERENCE_API_PORT": str(port), "PROXY_PORT": str(proxy_port)}
    environ |= {"INFERENCE_API_RUN_DIR": str(tmp_path / "run"), "INFERENCE_API_CACHE_DIR": str(tmp_path / "cache")}
    with log.open("wb") as out:
        serve = subprocess.Popen(["scripts/serve", "--mock"], cwd=ROOT, env=environ, stdout=out, stderr=out)
    try:
        wait_for(lambda: "Ready http" in log.read_text() or serve.poll() is not None, 60.0, "the card")
        card = log.read_text()
        assert card.rstrip().endswith("}'"), "the card is the last thing printed"
        curl = card[card.index("curl -N") :]
        assert f"http://127.0.0.1:{proxy_port}/inference/mock" in curl
        answer = subprocess.run(["bash", "-euc", curl.replace("curl ", "curl -sS --fail ")], capture_output=True)
        assert re.fullmatch(rb"[0-9]{32}", answer.stdout), answer.stderr
        secret = tmp_path / "cache" / "jwt_secret"
        assert secret.stat().st_mode & 0o777 == 0o600 and len(secret.read_text().strip()) == 64
    finally:
        serve.send_signal(signal.SIGINT)
        began = time.monotonic()
        status = serve.wait(2 * END_SECONDS)
    assert status == 0
    assert time.monotonic() - began < END_SECONDS
    assert not (tmp_path / "run").exists()


def test_the_mock_is_ready_in_time_and_loads_neither_torch_nor_transformers() -> None:
    began = time.monotonic()
    with running_service(proxy=True) as service:
        assert time.monotonic() - began < READY_SECONDS
        assert service.ask("/inference/mock", {"text": "x", "max_tokens": 1}) == "1"
        pids = service.pids()
        assert len(pids) >= 5, "supervisor, backend, gunicorn's two, the proxy's two"
        for pid in pids:
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "torch" not in maps, f"torch in {command_line(pid)}"
        assert requests.get(service.proxy_url + "/health/live", timeout=5).text == "OK\n"


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    environ = {**os.environ, "INFERENCE_API_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        ["scripts/serve", "--mock", "--wrokers", "2"], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "ERROR: unrecognized arguments: --wrokers 2; see scripts/serve --help\n"


def test_serve_says_its_options_and_starts_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "INFERENCE_API_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(["scripts/serve", "--help"], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for option in ("--host", "--port", "--proxy-bind", "--proxy-port", "--layers", "--no-weights", "--load-image"):
        assert option in done.stdout
