"""Check how the proxy starts, refuses to start, reports and stops, as a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.echo_upstream import EchoUpstream, ScriptedUpstream
from tests.integration.proxy_process import (
    INTERNAL_KEY,
    JWT_SECRET,
    ROOT,
    ProxyProcess,
    RawClient,
    bearer,
    seconds_since,
)
from tests.integration.service import wait_for


@pytest.fixture(scope="module")
def upstream() -> Iterator[EchoUpstream]:
    with EchoUpstream() as running:
        yield running


def run_to_end(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "proxy/proxy.py", "--port", "0", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.parametrize(("cwd", "script"), [(ROOT, "proxy/proxy.py"), (ROOT / "proxy", "proxy.py")])
def test_it_starts_and_streams_from_the_root_and_from_its_folder_and_stops_with_0(cwd: Path, script: str) -> None:
    with (
        ScriptedUpstream() as scripted,
        ProxyProcess(scripted.port, cwd=cwd, script=script) as proxy,
        RawClient(proxy.port) as client,
    ):
        client.request("POST", "/inference/m", body=b"{}")
        exchange = scripted.accept()
        exchange.start_stream()
        assert client.read_head()[0] == 200
        for piece in (b"one", b"two"):
            exchange.send_chunk(piece)
            assert client.read_chunk() == piece, "each before the next is made"
        exchange.send_chunk(b"")
        assert client.read_chunk() == b""
        assert proxy.stop() == 0
        assert f"http server is starting on 127.0.0.1 port {proxy.port}" in proxy.lines
        assert f"http server is running as reverse proxy to http://127.0.0.1:{scripted.port}" in proxy.lines
        assert proxy.lines[-1] == "http server stopped."


def test_a_taken_port_is_one_line_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_to_end("--port", str(port), JWT_SECRET="a" * 32)
    expected = f"ERROR: --bind, --port: cannot listen on 127.0.0.1:{port}: Address already in use; take another port\n"
    assert (ended.returncode, ended.stderr) == (1, expected)


@pytest.mark.parametrize("option", ["--prot", "--hostnam"])
def test_an_unknown_option_is_one_line_that_names_it_and_the_help(option: str) -> None:
    ended = run_to_end(option, "1")
    assert ended.returncode == 2
    assert ended.stderr == f"ERROR: unrecognized arguments: {option} 1; see proxy.py --help\n"


def test_without_a_secret_it_exits_with_1_and_says_so() -> None:
    ended = run_to_end()
    assert (ended.returncode, ended.stderr) == (1, "ERROR: Expected JWT_SECRET environment variable to be provided\n")


def test_a_weak_secret_is_refused_on_a_public_bind() -> None:
    ended = run_to_end("--bind", "0.0.0.0", JWT_SECRET="test-secret-456")
    assert ended.returncode == 1
    assert ended.stderr.startswith("ERROR: JWT_SECRET is a well-known example")
    assert "test-secret-456" not in ended.stderr


@pytest.mark.parametrize(
    "settings", [{"PROXY_BIND": "127.0.0.1"}, {"PROXY_BIND": "0.0.0.0", "INSECURE_DEV": "1"}], ids=["loopback", "flag"]
)
def test_a_weak_secret_is_a_warning_where_it_is_accepted(upstream: EchoUpstream, settings: dict[str, str]) -> None:
    with ProxyProcess(upstream.port, JWT_SECRET="weak", INTERNAL_AUTH_KEY="", **settings) as proxy:
        assert any(" WARNING proxy[" in line and "]: JWT_SECRET has 4 bytes" in line for line in proxy.lines)


def test_a_stream_is_finished_after_sigterm_and_new_connections_are_refused() -> None:
    with ScriptedUpstream() as scripted, ProxyProcess(scripted.port) as proxy, RawClient(proxy.port) as client:
        client.request("POST", "/inference/m", body=b"{}")
        exchange = scripted.accept()
        exchange.start_stream()
        client.read_head()
        with RawClient(proxy.port) as idle:
            idle.request("GET", "/rows")
            scripted.accept().answer(b"{}")
            assert idle.read_answer()[0] == 200
            proxy.process.send_signal(signal.SIGTERM)
            # An idle connection is closed as soon as the drain has begun, not when its next head is overdue.
            started = time.monotonic()
            assert idle.read_to_end() == b""
            assert seconds_since(started) < 5
        with pytest.raises(ConnectionRefusedError):
            RawClient(proxy.port)
        exchange.send_chunk(b"still here")
        assert client.read_chunk() == b"still here"
        exchange.send_chunk(b"")
        assert client.read_chunk() == b""
        assert client.read_to_end() == b""
        assert proxy.wait() == 0


def test_a_stream_longer_than_the_grace_is_cut_visibly() -> None:
    with (
        ScriptedUpstream() as scripted,
        ProxyProcess(scripted.port, PROXY_DRAIN_GRACE_SECONDS="1") as proxy,
        RawClient(proxy.port) as client,
    ):
        client.request("POST", "/inference/m", body=b"{}")
        exchange = scripted.accept()
        exchange.start_stream()
        client.read_head()
        proxy.process.send_signal(signal.SIGTERM)
        assert client.read_to_end() == b""
        assert proxy.wait() == 0
        exchange.close()


def test_sighup_renews_the_worker_without_one_failed_request_and_ends_streams_in_their_own_time(
    upstream: EchoUpstream,
) -> None:
    with ScriptedUpstream() as scripted, ProxyProcess(scripted.port) as proxy, RawClient(proxy.port) as client:
        client.request("POST", "/inference/m", body=b"{}")
        exchange = scripted.accept()
        exchange.start_stream()
        client.read_head()
        (old,) = workers_of(proxy)
        for reload in range(2):
            proxy.process.send_signal(signal.SIGHUP)
            for _ in range(20):
                ask_for_rows(proxy, scripted)
            exchange.send_chunk(b"%d" % reload)
            assert client.read_chunk() == b"%d" % reload
        assert old in workers_of(proxy), "the old worker lives as long as its stream"
        exchange.send_chunk(b"")
        assert client.read_chunk() == b""
        wait_for(lambda: len(workers_of(proxy)) == 1, 10.0, "the end of the workers that were replaced")
        assert workers_of(proxy) != [old]
        ask_for_rows(proxy, scripted)


def test_sighup_with_a_file_that_is_wrong_by_now_leaves_the_worker_in_place(
    upstream: EchoUpstream, tmp_path: Path
) -> None:
    revoked = tmp_path / "revoked"
    revoked.write_text("")
    with ProxyProcess(upstream.port, JWT_REVOCATION_FILE=str(revoked)) as proxy, RawClient(proxy.port) as client:
        client.request("GET", "/rows")
        assert client.read_answer()[0] == 200
        before = workers_of(proxy)
        revoked.write_text("two ids\n")
        proxy.process.send_signal(signal.SIGHUP)
        refused = ":1: an id is 1 to 128 characters of A-Z a-z 0-9 . _ : -; the worker is not renewed"
        wait_for(lambda: any(line.endswith(refused) for line in proxy.lines), 5.0, "a line about the wrong list")
        client.request("GET", "/rows")
        assert client.read_answer()[0] == 200
        assert workers_of(proxy) == before


@pytest.mark.parametrize("late_seconds", [0.0, 2.5])
def test_a_first_request_that_was_on_its_way_when_the_drain_began_is_answered(
    upstream: EchoUpstream, late_seconds: float
) -> None:
    with ProxyProcess(upstream.port) as proxy, RawClient(proxy.port) as used, RawClient(proxy.port) as fresh:
        used.request("GET", "/rows")
        assert used.read_answer()[0] == 200
        proxy.process.send_signal(signal.SIGTERM)
        assert used.read_to_end() == b"", "the drain has begun"
        time.sleep(late_seconds)
        fresh.request("GET", "/rows")
        status, headers, _body = fresh.read_answer()
        assert (status, headers["connection"]) == (200, "close")
        assert proxy.wait() == 0


def ask_for_rows(proxy: ProxyProcess, scripted: ScriptedUpstream) -> None:
    with RawClient(proxy.port) as client:
        client.request("GET", "/rows")
        scripted.accept().answer(b"{}")
        assert client.read_answer()[0] == 200


def workers_of(proxy: ProxyProcess) -> list[int]:
    """Return the ids of the arbiter's children (proc_tid_children(5))."""
    pid = proxy.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_tenant_over_its_window_gets_429_and_others_do_not(upstream: EchoUpstream) -> None:
    with ProxyProcess(upstream.port, PROXY_REQUESTS_PER_MINUTE="2") as proxy, RawClient(proxy.port) as client:
        got = []
        for _ in range(3):
            client.request("GET", "/rows")
            status, headers, _body = client.read_answer()
            got.append((status, "retry-after" in headers))
        assert got == [(200, False), (200, False), (429, True)]
        client.send(f"GET /rows HTTP/1.1\r\nHost: x\r\nAuthorization: bEaReR {bearer(team_id='team-b')}\r\n\r\n")
        assert client.read_answer()[0] == 200


def test_scopes_decide_and_errors_have_their_fixed_shape(upstream: EchoUpstream) -> None:
    with ProxyProcess(upstream.port) as proxy, RawClient(proxy.port) as client:
        client.request("GET", "/metrics")
        assert client.read_answer()[0] == 403
        client.send(f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {bearer(scope='metrics')}\r\n\r\n")
        assert client.read_answer()[0] == 200
        client.send("GET /rows HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers, body = client.read_answer()
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert json.loads(body) == {"status_code": 401, "message": "Must provide Authorization header."}
        client.request("DELETE", "/rows")
        status, headers, _body = client.read_answer()
        assert (status, headers["allow"]) == (405, "GET")


def test_no_secret_and_no_request_text_is_in_the_output(upstream: EchoUpstream) -> None:
    with ProxyProcess(upstream.port) as proxy:
        with RawClient(proxy.port) as client:
            client.request("POST", "/inference/m?canary=1", "X-Canary: canary", body=b"canary")
            client.read_answer()
            client.send("GET /rows HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer canary\r\n\r\n")
            client.read_answer()
            client.send("GET /%1b[31m%0acanary HTTP/1.1\r\nHost: x\r\ncanary\r\n\r\n")
            client.read_to_end()
        assert proxy.stop() == 0
        output = "\n".join(proxy.lines)
        for secret in ("canary", JWT_SECRET, INTERNAL_KEY, "eyJ"):
            assert secret not in output


def test_thirty_two_streams_at_once_keep_to_themselves() -> None:
    with ScriptedUpstream() as scripted, ProxyProcess(scripted.port) as proxy:
        clients = [RawClient(proxy.port) for _ in range(32)]
        for number, client in enumerate(clients):
            client.request("POST", "/inference/m", body=b"%d" % number)
        exchanges = [scripted.accept() for _ in clients]
        for exchange in exchanges:
            exchange.start_stream()
        for step in range(20):
            for exchange in exchanges:
                exchange.send_chunk(b"%s:%d" % (exchange.body, step))
        for exchange in exchanges:
            exchange.send_chunk(b"")
        for number, client in enumerate(clients):
            expected = "".join(f"{number}:{step}" for step in range(20))
            assert client.read_answer()[2].decode() == expected
            client.sock.close()


def test_ctrl_c_ends_it_at_once_with_0_and_without_a_traceback() -> None:
    # In a terminal the arbiter and its worker both get the signal, and the worker gets the arbiter's on top.
    with ScriptedUpstream() as scripted, ProxyProcess(scripted.port, start_new_session=True) as proxy:
        with RawClient(proxy.port) as client:
            client.request("POST", "/inference/m", body=b"{}")
            scripted.accept().start_stream()
            client.read_head()
            os.killpg(proxy.process.pid, signal.SIGINT)
            started = time.monotonic()
            assert proxy.wait() == 0
            assert seconds_since(started) < 5
        # The arbiter says so where its worker is still ending when it looks; a traceback is what must not be here.
        lines = [line for line in proxy.lines if not line.endswith("was sent SIGQUIT!")]
        assert [line for line in lines if not line.startswith(("http server ", "[Transaction] "))] == []
