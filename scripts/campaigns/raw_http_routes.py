"""Open the three ways into the service for the part `raw_http`, and speak raw bytes to them.

The proxy before an upstream that records what it gets; Debian's nginx before another such proxy, with connections to it
kept open between clients; the server itself. Each is a child process of the campaign on a free port of loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benches.service import free_port

from campaigns.part import CampaignError, Context
from campaigns.raw_http_cases import Identify
from proxy.auth import Claims, mint_assertion
from tests.integration.echo_upstream import EchoUpstream
from tests.integration.proxy_process import INTERNAL_KEY, ProxyProcess

ANSWER_SECONDS = 10.0
"""How long a connection may last; every way in ends or falls silent long before."""

_START_SECONDS = 10.0
_CLAIMS = Claims("team-a", "id-1", frozenset({"inference"}), expires_at=None, quotas={})
# What stops in the middle is waited for this long, so that a part of hundreds of such cases takes seconds.
_PROXY_PATIENCE: dict[str, Any] = {"PROXY_HEADER_DEADLINE_SECONDS": "0.5", "PROXY_BODY_GRACE_SECONDS": "0.3"}
_NGINX_CONFIGURATION = """
daemon off;
master_process off;
pid nginx.pid;
error_log error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    client_header_timeout 1s;
    client_body_timeout 1s;
    keepalive_timeout 1s;
    merge_slashes off;
    underscores_in_headers on;
    upstream proxied {{ server 127.0.0.1:{proxy_port}; keepalive 4; keepalive_timeout 2s; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://proxied;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_request_buffering off;
            proxy_buffering off;
        }}
    }}
}}
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """A way in: its port, and the upstream behind it if it records."""

    name: str
    port: int
    upstream: EchoUpstream | None = None
    silence_seconds: float = ANSWER_SECONDS
    """After so long it has nothing more to say."""
    identify: Identify = lambda _method, _path, _nonce: []
    reads_alone: bool = True
    """Whether it is ours alone to say what a request is: nginx takes some that others refuse, and frames them anew."""


@contextlib.contextmanager
def proxy_route() -> Iterator[Route]:
    """Run the proxy alone."""
    with EchoUpstream() as upstream, ProxyProcess(upstream.port, **_PROXY_PATIENCE) as proxy:
        yield Route("proxy", proxy.port, upstream)


@contextlib.contextmanager
def nginx_route(program: str, folder: Path) -> Iterator[Route]:
    """Run nginx before a proxy; `folder` is for its files. Raises CampaignError if it does not come up."""
    port = free_port()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with EchoUpstream() as upstream, ProxyProcess(upstream.port) as proxy:
        (folder / "nginx.conf").write_text(_NGINX_CONFIGURATION.format(proxy_port=proxy.port, port=port))
        command = [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
        nginx = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_until_listening(nginx, port)
            yield Route("nginx", port, upstream, reads_alone=False)
        finally:
            nginx.terminate()
            nginx.wait()


@contextlib.contextmanager
def server_route(context: Context) -> Iterator[Route]:
    """Run the whole service; this way in is its server, which has no deadlines of its own for a client."""
    with context.service(INTERNAL_AUTH_KEY=INTERNAL_KEY) as service:
        port = int(service.direct_url.rpartition(":")[2])
        yield Route("server", port, silence_seconds=0.4, identify=_assert_identity)


def _assert_identity(method: str, path: str, nonce: str) -> list[str]:
    request_id = f"req_{nonce[1:] * 2}"
    assertion = mint_assertion(
        INTERNAL_KEY.encode(), _CLAIMS, method=method, path=path, request_id=request_id, now=time.time()
    )
    return [f"Request-Id: {request_id}", f"X-Internal-Assertion: {assertion}"]


def find_nginx(folder: Path) -> str | None:
    """Return the program nginx: the machine's, or one unpacked from Debian's package (blocking); None without either.

    Unpacked and not installed: the installation would start a server of its own.
    """
    installed = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if installed:
        return installed
    unpacked = folder / "usr" / "sbin" / "nginx"
    if not unpacked.exists() and os.geteuid() == 0 and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "--quiet", "update"], capture_output=True, check=False)
        subprocess.run(["apt-get", "--quiet", "download", "nginx"], cwd=folder, capture_output=True, check=False)
        for package in folder.glob("nginx_*.deb"):
            subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], capture_output=True, check=False)
    return str(unpacked) if unpacked.exists() else None


async def exchange(route: Route, pieces: tuple[bytes, ...]) -> bytes:
    """Send pieces over a connection of their own and return all that came until it ended or fell silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", route.port)
    received = bytearray()

    async def receive() -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            while data := await asyncio.wait_for(reader.read(65536), route.silence_seconds):
                received.extend(data)

    receiving = asyncio.create_task(receive())
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        # Refused before all was sent; what was answered has been received.
        pass
    await receiving
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return bytes(received)


def _wait_until_listening(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.02)
    raise CampaignError("nginx did not come up")
