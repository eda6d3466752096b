"""Print the ready card: what runs where, and a curl that works.

Called by the supervisor once the backend is ready. Knows the settings and the Ready message only.
"""

from __future__ import annotations

import http.client
import sys
import time
from http import HTTPStatus
from typing import TextIO

import jwt

from inference_api import __version__
from inference_api.config import Settings, url_host
from inference_api.lossy_stream import LossyStream
from inference_api.messages import Ready

READY_SECONDS = 30.0
RETRY_SECONDS = 0.02

TOKEN_SECONDS = 86400
"""Life of the token in the card's curl."""

_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - looked up, not bound
"""Where a bind to every address is reached from the same machine: 0.0.0.0 in a URL works on Linux alone."""


def format_card(
    settings: Settings, ready: Ready, *, proxy: tuple[str, int] | None, secret: str | None, now: float
) -> str:
    """Return the card's text; with a proxy and its secret the curl carries a token of the tenant 'dev'."""
    name = settings.served_model_names[0] if settings.served_model_names else ready.model
    variant = f" ({ready.variant})" if ready.variant else ""
    server = settings.url
    lines = [
        f"inference_api {__version__}",
        f"  model    {name}{variant}, {ready.num_rows} rows x {ready.context_tokens} tokens",
        f"  engine   {ready.engine} on {ready.device}, digest {ready.digest[:16]}",
        f"  server   {server}   health {server}/health",
    ]
    url, header = server, ""
    if proxy is not None:
        url = f"http://{url_host(_REACHED_AT.get(proxy[0], proxy[0]))}:{proxy[1]}"
        lines.append(f"  proxy    {url}   (bearer token needed)")
        if secret:
            claims = {"team_id": "dev", "token_id": "ready-card", "iat": int(now), "exp": int(now) + TOKEN_SECONDS}
            header = f"  -H 'Authorization: Bearer {jwt.encode(claims, secret, 'HS256')}' \\\n"
    lines += [
        "",
        f"Ready {url}. Try (Ctrl-C here ends everything):",
        "",
        f"curl -N {url}/inference/{name} \\",
        header + "  -H 'Content-Type: application/json' \\",
        """  -d '{"text": "The capital of France is", "max_tokens": 32}'""",
    ]
    return "\n".join(lines) + "\n"


def wait_until_served(address: tuple[str, int], timeout_seconds: float) -> bool:
    """Ask /health at the public address until it says 200; return False if it never does.

    For the start only: the listening sockets are open already, so that most of the wait is one blocking answer.
    """
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(*address, timeout=timeout_seconds)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == HTTPStatus.OK:
                return True
        except OSError:
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(RETRY_SECONDS)
    return False


def print_card(
    settings: Settings, ready: Ready, *, proxy: tuple[str, int] | None, secret: str | None, out: TextIO | None = None
) -> None:
    """Print the card on standard output, once the service answers: the last thing that a start prints."""
    if not wait_until_served(proxy or (settings.bind, settings.port), READY_SECONDS):
        LossyStream(sys.stderr).write(f"WARNING: /health did not answer 200 within {READY_SECONDS:g} seconds\n")
    stream = LossyStream(sys.stdout if out is None else out)
    stream.write(format_card(settings, ready, proxy=proxy, secret=secret, now=time.time()))
