"""Check the ready card: what it says, that its curl carries a working token, and that it waits for the service."""

from __future__ import annotations

import http.server
import io
import re
import shlex
import threading
from collections.abc import Iterator

import jwt
import msgspec
import pytest

from inference_api.card import TOKEN_SECONDS, format_card, print_card, wait_until_served
from inference_api.config import Settings
from inference_api.messages import Ready

READY = Ready("incarnation-1", "digest-1", "mock", "mock", "none", 32, 2048, True)
SECRET = "s" * 32
NOW = 1_700_000_000.0


class Health(http.server.BaseHTTPRequestHandler):
    """Say 503 once, then 200."""

    def do_GET(self) -> None:
        self.server.num_calls += 1
        self.send_response(200 if self.server.num_calls > 1 else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Keep quiet."""


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Health)
    server.num_calls = 0
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _curl(card: str) -> list[str]:
    return shlex.split(card[card.index("curl ") :].replace("\\\n", " "))


def test_without_a_proxy_the_curl_goes_to_the_server_and_carries_no_token() -> None:
    card = format_card(Settings(port=7001), READY, proxy=None, secret=SECRET, now=NOW)
    curl = _curl(card)
    assert curl[:3] == ["curl", "-N", "http://127.0.0.1:7001/inference/mock"]
    assert "Authorization" not in card and "proxy" not in card
    assert "32 rows x 2048 tokens" in card and "digest-1" in card


def test_with_a_proxy_the_curl_goes_there_with_a_token_of_a_day() -> None:
    card = format_card(Settings(), READY, proxy=("127.0.0.1", 1223), secret=SECRET, now=NOW)
    curl = _curl(card)
    assert curl[2] == "http://127.0.0.1:1223/inference/mock"
    bearer = re.search(r"Bearer (\S+)", " ".join(curl))
    assert bearer is not None
    claims = jwt.decode(bearer.group(1), SECRET, ["HS256"], options={"verify_exp": False, "verify_iat": False})
    assert claims["team_id"] == "dev"
    assert claims["exp"] - claims["iat"] == TOKEN_SECONDS
    assert SECRET not in card


def test_with_a_proxy_and_no_secret_there_is_no_token_to_give() -> None:
    card = format_card(Settings(), READY, proxy=("127.0.0.1", 1223), secret=None, now=NOW)
    assert "Bearer" not in card
    assert "http://127.0.0.1:1223" in card


def test_the_first_served_name_is_the_one_that_the_curl_uses() -> None:
    card = format_card(Settings(served_model_names=("own", "alias")), READY, proxy=None, secret=None, now=NOW)
    assert "/inference/own" in card


def test_a_development_variant_is_named_beside_the_model() -> None:
    ready = msgspec.structs.replace(READY, variant="layers 2, random weights")
    card = format_card(Settings(), ready, proxy=None, secret=None, now=NOW)
    assert "mock (layers 2, random weights), 32 rows" in card and "/inference/mock \\\n" in card


def test_the_card_is_printed_once_health_says_ok(server: http.server.HTTPServer) -> None:
    out = io.StringIO()
    print_card(Settings(port=server.server_port), READY, proxy=None, secret=None, out=out)
    assert server.num_calls == 2
    assert out.getvalue().startswith("inference_api ")


def test_waiting_for_a_service_that_never_answers_ends() -> None:
    assert not wait_until_served(("127.0.0.1", 9), 0.0)
