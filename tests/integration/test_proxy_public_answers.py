"""Check on the real proxy process that strangers who do not read a public page hold nothing of the server."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator

import pytest

from tests.integration.echo_upstream import Exchange, ScriptedUpstream
from tests.integration.proxy_process import ProxyProcess, RawClient, seconds_since
from tests.integration.service import wait_for

NUM_STRANGERS = 5
NUM_PUBLIC_TURNS = 4
DEADLINE_SECONDS = 2.0
MAX_BYTES = 4 * 2**20
PAGE = bytes(range(256)) * 8192  # 2 MiB, more than the kernel takes for a client that does not read
ASK = "GET /docs HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def proxy(shared_upstream: ScriptedUpstream) -> Iterator[ProxyProcess]:
    settings = {
        "PROXY_BODY_DEADLINE_SECONDS": str(DEADLINE_SECONDS),
        "PROXY_MAX_BUFFERED_ANSWER_BYTES": str(MAX_BYTES),
    }
    with ProxyProcess(shared_upstream.port, **settings) as running:
        yield running


def send_page(exchange: Exchange, *, chunked: bool) -> None:
    """Answer with the page and leave the connection open."""
    if chunked:
        exchange.start_stream("text/html")
        exchange.send_chunk(PAGE)
        exchange.send_chunk(b"")
    else:
        exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(PAGE) + PAGE)


@pytest.mark.parametrize("chunked", [False, True])
def test_strangers_who_do_not_read_hold_no_upstream_connection_and_get_the_whole_page_later(
    proxy: ProxyProcess, upstream: ScriptedUpstream, chunked: bool
) -> None:
    with contextlib.ExitStack() as strangers:
        clients = []
        for _ in range(NUM_STRANGERS):
            clients.append(strangers.enter_context(RawClient(proxy.port, receive_buffer_bytes=4096)))
            clients[-1].send(ASK)
            exchange = upstream.accept()
            send_page(exchange, chunked=chunked)
            assert exchange.seconds_until_closed() < DEADLINE_SECONDS / 2
        status, headers, body = clients[-1].read_answer()
        assert (status, headers["content-length"], body) == (200, str(len(PAGE)), PAGE)


def drip(client: RawClient, seconds: float) -> None:
    """Read 2 KiB at a time, with a rest after each, until the time is over or the connection."""
    started = time.monotonic()
    while seconds_since(started) < seconds:
        assert client.sock.recv(2048)
        time.sleep(0.02)


def test_a_stranger_who_drips_is_cut_and_told_of(proxy: ProxyProcess, upstream: ScriptedUpstream) -> None:
    with RawClient(proxy.port, receive_buffer_bytes=4096) as client:
        client.send(ASK)
        send_page(upstream.accept(), chunked=False)
        started = time.monotonic()
        with pytest.raises(ConnectionResetError):
            drip(client, 4 * DEADLINE_SECONDS)
        assert seconds_since(started) > DEADLINE_SECONDS * 0.9
    wait_for(lambda: any(line.endswith(" cut_reason=write_overdue") for line in proxy.lines), 2.0, "a reason")


def test_a_page_that_breaks_off_or_is_too_large_is_a_502(proxy: ProxyProcess, upstream: ScriptedUpstream) -> None:
    with RawClient(proxy.port) as client:
        client.send(ASK)
        exchange = upstream.accept()
        exchange.start_stream("text/html")
        exchange.send_chunk(b"half")
        exchange.close()
        status, headers, _body = client.read_answer()
        assert (status, headers["x-error-code"]) == (502, "upstream_broken")
        client.send(ASK)
        exchange = upstream.accept()
        with contextlib.suppress(OSError):
            exchange.answer(bytes(MAX_BYTES + 1), content_type="text/html")
        status, headers, _body = client.read_answer()
        assert (status, headers["x-error-code"]) == (502, "upstream_too_large")


def test_the_head_of_a_page_says_its_length_and_the_connection_serves_on(
    proxy: ProxyProcess, upstream: ScriptedUpstream
) -> None:
    with RawClient(proxy.port) as client:
        client.send(ASK.replace("GET", "HEAD") + ASK)
        exchange = upstream.accept()
        exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(PAGE))
        assert exchange.seconds_until_closed() < DEADLINE_SECONDS / 2
        status, headers = client.read_head()
        assert (status, headers["content-length"]) == (200, str(len(PAGE)))
        send_page(upstream.accept(), chunked=False)
        assert client.read_answer()[2] == PAGE


def take_all_turns(
    proxy: ProxyProcess, upstream: ScriptedUpstream, cleanup: contextlib.ExitStack
) -> tuple[list[RawClient], list[Exchange]]:
    """Return strangers of whom all but two have a turn, and the exchanges of those who have."""
    clients = [cleanup.enter_context(RawClient(proxy.port)) for _ in range(NUM_PUBLIC_TURNS + 2)]
    exchanges = []
    for client in clients[:NUM_PUBLIC_TURNS]:
        client.send(ASK)
        exchanges.append(upstream.accept())
    return clients, exchanges


def test_strangers_wait_for_strangers_and_a_bearer_for_none_of_them(
    proxy: ProxyProcess, upstream: ScriptedUpstream
) -> None:
    with contextlib.ExitStack() as cleanup:
        clients, exchanges = take_all_turns(proxy, upstream, cleanup)
        for client in clients[NUM_PUBLIC_TURNS:]:
            client.send(ASK)
        with RawClient(proxy.port) as team:
            team.request("GET", "/rows")
            exchange = upstream.accept()
            assert exchange.request_line.startswith("GET /rows ")
            exchange.answer(b"{}")
            assert team.read_answer()[0] == 200
        assert not upstream.has_caller()
        exchanges[0].answer(b"page", content_type="text/html")
        assert clients[0].read_answer()[2] == b"page"
        assert upstream.accept().request_line.startswith("GET /docs "), "the place of the first went to one who waited"
        (refused,), _, _ = select.select([client.sock for client in clients[NUM_PUBLIC_TURNS:]], [], [], 10.0)
        status, headers, _body = next(client for client in clients if client.sock is refused).read_answer()
        assert (status, headers["x-error-code"], headers["retry-after"]) == (503, "public_busy", "1")


def test_health_is_asked_once_for_all_who_wait_and_anew_for_who_comes_later(
    proxy: ProxyProcess, upstream: ScriptedUpstream
) -> None:
    ask = "GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\n\r\n"
    with contextlib.ExitStack() as cleanup:
        clients, exchanges = take_all_turns(proxy, upstream, cleanup)
        first, second = clients[NUM_PUBLIC_TURNS:]
        first.send(ask)
        second.send(ask.replace("mine", "yours"))
        time.sleep(0.2)  # both wait for a turn
        exchanges[0].answer(b"page", content_type="text/html")
        upstream.accept().answer(b"fine", content_type="text/plain", extra="Request-Id: req_theirs\r\n")
        answers = [client.read_answer() for client in (first, second)]
        assert [(status, body) for status, _headers, body in answers] == [(200, b"fine")] * 2
        assert [headers["x-request-id"] for _status, headers, _body in answers] == ["mine", "yours"]
        assert answers[0][1]["request-id"] != answers[1][1]["request-id"]
        assert not upstream.has_caller()
        first.send(ask)
        assert upstream.accept().request_line.startswith("GET /health "), "what was said before is not about now"
