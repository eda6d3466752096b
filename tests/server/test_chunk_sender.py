"""Check chunks that are sent from a foreign thread: their framing, a full socket, a client that is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from inference_api.server.chunk_sender import ChunkSender

ENVIRON = {"SERVER_PROTOCOL": "HTTP/1.1", "wsgi.url_scheme": "http"}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, server = socket.socketpair()
    client.settimeout(10.0)
    yield client, server
    client.close()
    server.close()


def test_each_offer_is_one_chunk(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    sender = ChunkSender(server)
    assert sender.offer(b"a") and sender.offer(b"0123456789abcdef")
    assert client.recv(100) == b"1\r\na\r\n10\r\n0123456789abcdef\r\n"


def test_a_full_socket_is_told_and_the_rest_is_sent_by_the_one_who_may_wait(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, data = ChunkSender(server), b"x" * 1000
    num_offers = 1
    while sender.offer(data):
        num_offers += 1
    received = bytearray()
    while len(received) < 1007 * (num_offers - 1):
        received += client.recv(65536)
    sender.settle()
    sender.settle()
    while len(received) < 1007 * num_offers:
        received += client.recv(65536)
    assert received == (b"3e8\r\n" + data + b"\r\n") * num_offers


def test_a_client_that_is_gone_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    client.close()
    with pytest.raises(BrokenPipeError):
        ChunkSender(server).offer(b"a")


@pytest.mark.parametrize("change", [{"SERVER_PROTOCOL": "HTTP/1.0"}, {"wsgi.url_scheme": "https"}])
def test_there_is_no_sender_where_gunicorn_writes_no_chunks_to_a_plain_socket(
    change: dict[str, str], pair: tuple[socket.socket, socket.socket]
) -> None:
    environ = {**ENVIRON, "gunicorn.socket": pair[1]}
    assert ChunkSender.of(environ) is not None
    assert ChunkSender.of({**environ, **change}) is None
    assert ChunkSender.of(ENVIRON) is None
