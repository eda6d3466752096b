"""Check that keys, policies and revocations change under a running proxy, as its clients see it.

Each change is on disk or on a local issuer, and holds within the documented seconds; no test waits longer.
"""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.echo_upstream import EchoUpstream, ScriptedUpstream
from tests.integration.proxy_process import ProxyProcess, RawClient, bearer
from tests.integration.service import wait_for
from tests.integration.test_proxy_process import run_to_end
from tests.proxy.signing import claims, key_entry, policy, public_jwk, sign

FILE_SECONDS = 5.0


class Issuer:
    """Publish a key set over HTTP on a port of its own."""

    def __init__(self) -> None:
        self.document: bytes = b""
        self.status = 200
        self.num_asked = 0
        issuer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.num_asked += 1
                self.send_response(issuer.status)
                if issuer.status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(issuer.document)))
                self.end_headers()
                self.wfile.write(issuer.document)

            def log_message(self, *_arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/keys"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="issuer")
        self._thread.start()

    def publish(self, *jwks: dict[str, Any]) -> None:
        self.document = json.dumps({"keys": jwks}).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    running = Issuer()
    yield running
    running.close()


@pytest.fixture(scope="module")
def upstream() -> Iterator[EchoUpstream]:
    with EchoUpstream() as running:
        yield running


def status_of(proxy: ProxyProcess, compact: str) -> tuple[int, str]:
    """Ask for /rows with a bearer; return the status and the code of a refusal."""
    with RawClient(proxy.port) as client:
        client.send(f"GET /rows HTTP/1.1\r\nHost: proxy.test\r\nAuthorization: Bearer {compact}\r\n\r\n")
        status, headers, _body = client.read_answer()
    return status, headers.get("x-error-code", "")


def test_a_revoked_bearer_ends_its_open_streams_and_no_others(tmp_path: Path) -> None:
    revoked = tmp_path / "revoked"
    revoked.write_text("")
    with (
        ScriptedUpstream() as scripted,
        ProxyProcess(scripted.port, JWT_REVOCATION_FILE=str(revoked)) as proxy,
        RawClient(proxy.port) as cut,
        RawClient(proxy.port) as kept,
        RawClient(proxy.port) as waiting,
    ):
        exchanges = []
        for client, token_id in ((cut, "j-1"), (kept, "j-2"), (waiting, "j-1")):
            client.send(
                f"POST /inference/m HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {bearer(jti=token_id)}\r\n"
                "Content-Length: 2\r\n\r\n{}"
            )
            exchanges.append(scripted.accept())
        for client, exchange in zip((cut, kept), exchanges, strict=False):
            exchange.start_stream()
            assert client.read_head()[0] == 200
        began = time.monotonic()
        revoked.write_text("j-1\n")
        assert cut.read_to_end() == b"", "no last chunk: the truncation shows"
        status, headers, _body = waiting.read_answer()
        assert (status, headers["x-error-code"]) == (401, "jwt_revoked"), "nothing was answered yet"
        assert time.monotonic() - began < FILE_SECONDS
        for exchange in (exchanges[0], exchanges[2]):
            assert exchange.seconds_until_closed() < 1
        exchanges[1].send_chunk(b"still here")
        assert kept.read_chunk() == b"still here"
        exchanges[1].send_chunk(b"")
        assert kept.read_chunk() == b""
        assert status_of(proxy, bearer(jti="j-1")) == (401, "jwt_revoked")
        # Its connection goes on: the next request is another one's.
        waiting.request("GET", "/rows")
        scripted.accept().answer(b"{}")
        assert waiting.read_answer()[0] == 200
    lines = [line for line in proxy.lines if "jwt_revoked" in line or '"j-1"' in line]
    assert any("cut_reason=jwt_revoked" in line and "path=/inference/m" in line for line in lines), proxy.lines
    assert sum("cut_reason" in line for line in proxy.lines) == 1


def test_a_key_file_rotates_without_one_failed_request(tmp_path: Path, upstream: EchoUpstream) -> None:
    keys, rules = tmp_path / "keys.json", tmp_path / "policy.json"
    rules.write_text(json.dumps(policy(keys=None, key_file="keys.json")))
    keys.write_text(json.dumps({"keys": {"hs-1": key_entry("HS256")}}))
    old, new = sign(claims(time.time())), sign(claims(time.time()), by="ES256")
    with ProxyProcess(upstream.port, JWT_SECRET="", JWT_POLICY_FILE=str(rules)) as proxy:
        assert (status_of(proxy, old)[0], status_of(proxy, new)) == (200, (401, "jwt_key"))
        keys.write_text(json.dumps({"keys": {"hs-1": key_entry("HS256"), "es-1": key_entry("ES256")}}))
        wait_for(lambda: status_of(proxy, new)[0] == 200, FILE_SECONDS, "the new key")
        assert {status_of(proxy, compact)[0] for compact in [old, new] * 30} == {200}
        keys.write_text(json.dumps({"keys": {"es-1": key_entry("ES256")}}))
        wait_for(lambda: status_of(proxy, old) == (401, "jwt_key"), FILE_SECONDS, "the end of the old key")
        assert status_of(proxy, new)[0] == 200


def test_published_keys_are_fetched_while_requests_go_on(
    tmp_path: Path, upstream: EchoUpstream, issuer: Issuer
) -> None:
    rules = tmp_path / "policy.json"
    rules.write_text(json.dumps(policy(keys=None, jwks_url=issuer.url)))
    issuer.publish(public_jwk("ES256"))
    with ProxyProcess(upstream.port, JWT_SECRET="", JWT_POLICY_FILE=str(rules)) as proxy:
        assert status_of(proxy, sign(claims(time.time()), by="ES256"))[0] == 200
        for number in range(20):
            unknown = sign(claims(time.time()), {"alg": "ES256", "typ": "at+jwt", "kid": f"k{number}"}, by="ES256")
            assert status_of(proxy, unknown) == (401, "jwt_key")
        assert issuer.num_asked == 2, "once to check the start, once in the worker, never for a request"


def test_a_wrong_published_set_stops_the_start_and_a_silent_issuer_does_not(tmp_path: Path, issuer: Issuer) -> None:
    rules = tmp_path / "policy.json"
    rules.write_text(json.dumps(policy(keys=None, jwks_url=issuer.url)))
    issuer.publish(public_jwk("RS256", use="enc"))
    ended = run_to_end("--check", JWT_POLICY_FILE=str(rules), INTERNAL_AUTH_KEY="k" * 32)
    assert ended.returncode == 1
    assert "ERROR: jwks_url:1: keys[0].use: must be sig for a key that verifies\n" in ended.stderr
    issuer.status = 302
    ended = run_to_end("--check", JWT_POLICY_FILE=str(rules), INTERNAL_AUTH_KEY="k" * 32)
    said = "jwks_url: it answered with status 302; every bearer is refused until it is there\n"
    (line,) = ended.stderr.splitlines(keepends=True)
    assert ended.returncode == 0 and line.endswith(f"]: {said}") and " WARNING proxy[" in line


def test_a_wrong_file_stops_the_start_with_its_line(tmp_path: Path) -> None:
    rules, revoked = tmp_path / "policy.json", tmp_path / "revoked"
    rules.write_text('{"iss": "x",\n\n"surprise": 1}')
    ended = run_to_end("--check", JWT_POLICY_FILE=str(rules), INTERNAL_AUTH_KEY="k" * 32)
    assert (ended.returncode, ended.stderr) == (1, f"ERROR: {rules}:3: surprise: is no member of a policy\n")
    revoked.write_text("a b\n")
    ended = run_to_end("--check", JWT_SECRET="s" * 32, JWT_REVOCATION_FILE=str(revoked))
    assert ended.returncode == 1 and ended.stderr.startswith(f"ERROR: {revoked}:1: an id is")
    ended = run_to_end("--check", JWT_SECRET="s" * 32, JWT_REVOCATION_FILE=str(tmp_path / "none"))
    assert ended.returncode == 1 and ended.stderr.startswith("ERROR: JWT_REVOCATION_FILE: cannot read")
