"""Check the fetch of a published key set against real servers: size, time, redirects, TLS, and what is not read."""

from __future__ import annotations

import datetime
import http.server
import ipaddress
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from proxy import jwks_fetch
from proxy.policy import KeyPlace
from proxy.published_keys import FetchFault, fetch_published

PATHS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "/keys": (200, {}, b'{"keys": []}'),
    "/largest": (200, {}, b" " * 65536),
    "/larger": (200, {}, b" " * 65537),
    "/moved": (302, {"Location": "/keys"}, b""),
    "/missing": (404, {}, b"{}"),
    "/plain": (200, {"Content-Encoding": "Identity"}, b"{}"),
    "/packed": (200, {"Content-Encoding": "gzip"}, b"packed"),
}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answer by path; `/slow` sends a byte every 0.3 s for as long as it is let; `/silent` says nothing."""

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        ended: threading.Event = self.server.ended  # type: ignore[attr-defined]
        if self.path == "/silent":
            ended.wait()
            return
        if self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            try:
                while not ended.wait(0.3):
                    self.wfile.write(b" ")
            except OSError:
                return
        status, headers, body = PATHS.get(self.path, (500, {}, b""))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


class Issuer(http.server.ThreadingHTTPServer):
    """Serve `PATHS` until closed; keeps what was asked."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.ended = threading.Event()
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.base = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), name="issuer")
        self._thread.start()

    def handle_error(self, *_arguments: object) -> None:
        """Say nothing of a client that hangs up on a certificate."""

    def close(self) -> None:
        self.ended.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    running = Issuer()
    yield running
    running.close()


def fetch(issuer: Issuer, path: str, ca_file: str = "") -> bytes:
    return fetch_published(KeyPlace(url=issuer.base + path, ca_file=ca_file))


def fault(issuer: Issuer, path: str, ca_file: str = "") -> str:
    with pytest.raises(FetchFault) as caught:
        fetch(issuer, path, ca_file)
    return str(caught.value)


def test_a_document_comes_as_it_is_up_to_64_kib(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing of the environment decides where the keys come from.
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert fetch(issuer, "/keys") == b'{"keys": []}'
    assert fetch(issuer, "/largest") == b" " * 65536
    headers = issuer.seen[0][1]
    assert headers["Accept"] == "application/jwk-set+json, application/json"
    assert headers["Accept-Encoding"] == "identity" and "Authorization" not in headers and "Cookie" not in headers


def test_the_environment_of_the_child_itself_would_decide_nothing(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login a password b\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert jwks_fetch.fetch(issuer.base + "/keys", None) == b'{"keys": []}'
    assert "Authorization" not in issuer.seen[0][1]
    assert jwks_fetch.fetch(issuer.base + "/plain", None) == b"{}"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/larger", "its answer is larger than 65536 bytes"),
        ("/moved", "it answered with status 302"),
        ("/missing", "it answered with status 404"),
        ("/packed", "it sent a compressed answer"),
    ],
)
def test_another_answer_is_none(issuer: Issuer, path: str, told: str) -> None:
    assert fault(issuer, path) == told
    assert [seen for seen, _headers in issuer.seen] == [path]


def test_an_issuer_that_is_silent_is_given_up_even_without_the_alarm(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks_fetch, "TOTAL_SECONDS", 0.05)
    with pytest.raises(jwks_fetch.FetchFault, match=r"^it did not answer in time$"):
        jwks_fetch.fetch(issuer.base + "/silent", None)


@pytest.fixture
def deaf_to_alarms() -> Iterator[None]:
    """Ignore and block SIGALRM, which a child inherits."""
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGALRM, handler)


@pytest.mark.usefixtures("deaf_to_alarms")
def test_an_answer_that_drips_is_given_up_after_two_seconds(issuer: Issuer) -> None:
    began = time.monotonic()
    assert fault(issuer, "/slow") == "it did not answer in time"
    assert time.monotonic() - began < 5


def test_an_issuer_that_is_not_there_is_told(issuer: Issuer) -> None:
    issuer.close()
    assert fault(issuer, "/keys") == "it gave no answer (ConnectionError)"


@pytest.mark.parametrize("arguments", [[], ["http://127.0.0.1:9/", "ca.pem", "more"]], ids=len)
def test_a_url_and_at_most_its_certificates_are_taken(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-I", jwks_fetch.__file__, *arguments], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"a URL is needed\n")


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "issuer.test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "ca.pem", folder / "key.pem"
    certificate_file.write_bytes(certificate.public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate_file, key_file


def test_a_certificate_must_be_one_of_the_list(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    issuer = Issuer(context)
    try:
        assert fetch(issuer, "/keys", str(certificate)) == b'{"keys": []}'
        assert fault(issuer, "/keys") == "its certificate is not valid"
        assert fault(issuer, "/keys", str(tmp_path / "none.pem")).startswith("it gave no answer")
    finally:
        issuer.close()
