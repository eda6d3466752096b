"""Check the proxy's output as a process: all of it is JSON where that is wanted, and a full disk stops nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import requests

from tests.integration.echo_upstream import ScriptedUpstream
from tests.integration.proxy_process import INTERNAL_KEY, ROOT, TIMEOUT_SECONDS, ProxyProcess, RawClient


def test_as_json_every_line_is_an_object() -> None:
    with (
        ScriptedUpstream() as upstream,
        ProxyProcess(upstream.port, LOG_FORMAT="json", INTERNAL_AUTH_KEY="") as proxy,
        RawClient(proxy.port) as client,
    ):
        client.request("POST", "/inference/m", body=b"{}")
        exchange = upstream.accept()
        exchange.start_stream()
        exchange.close()
        client.read_to_end()
        assert proxy.stop() == 0
    lines = [json.loads(line) for line in proxy.lines]
    assert all(line["process"] == "proxy" and line["pid"] and line["time"] for line in lines)
    told = [(line["level"], line["message"].partition(":")[0]) for line in lines]
    assert ("warning", "INTERNAL_AUTH_KEY is not set") in told and ("warning", "answer given up") in told
    assert ("info", "transaction") in told and told[-1] == ("info", "http server stopped.")


def test_a_disk_that_is_full_for_its_output_keeps_it_neither_from_starting_nor_from_answering() -> None:
    environment = {"PATH": os.environ["PATH"], "JWT_SECRET": "weak", "INTERNAL_AUTH_KEY": INTERNAL_KEY}
    with socket.create_server(("127.0.0.1", 0)) as listener, open("/dev/full", "wb") as full:
        port = listener.getsockname()[1]
        command = [sys.executable, "proxy/proxy.py", "--fd", str(listener.fileno()), "--hostname", "http://127.0.0.1:9"]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=full, stderr=full, pass_fds=(listener.fileno(),)
        )
        try:
            status = requests.get(f"http://127.0.0.1:{port}/rows", timeout=TIMEOUT_SECONDS).status_code
            process.send_signal(signal.SIGTERM)
            assert (status, process.wait(TIMEOUT_SECONDS)) == (401, 0)
        finally:
            process.kill()
            process.wait()
