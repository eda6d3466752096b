"""Check the client that the programs share: addresses, cut streams, events, and what a percentile may be called."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.integration.service import free_port
from tests.live.client import Client, Target, TargetError, chat_events, digits, spread, spread_text, text_of
from tests.live.stub_service import stub_service


@pytest.mark.parametrize("url", ["http://h:1223", "http://h:1223/"])
def test_a_base_url_takes_the_route_for_instructions_and_the_original_name(url: str) -> None:
    assert Target.parse(url) == Target("http://h:1223", "", "predictions", "falcon40b")


@pytest.mark.parametrize("route", ["inference", "predictions", "chat"])
def test_a_routes_full_url_names_route_and_model(route: str) -> None:
    assert Target.parse(f"https://h/api/{route}/some-model") == Target("https://h/api", "", route, "some-model")


@pytest.mark.parametrize("url", ["", "h:1223", "ftp://h", "http://", "http://h:x", "http://[::1", "http://h/?a=1"])
def test_what_is_no_address_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(TargetError, match=r"^[^\n]*is no address of a service[^\n]*$"):
        Target.parse(url)


def test_a_bearer_with_a_line_break_is_refused_and_no_bearer_is_ever_shown() -> None:
    with pytest.raises(TargetError, match="no header may have") as caught:
        Target.parse("http://h", "Bearer secret\r\nX: y")
    assert "secret" not in str(caught.value) + repr(Target.parse("http://h", "Bearer secret"))


def test_nobody_at_the_address_is_said_with_what_to_do() -> None:
    with pytest.raises(TargetError, match=r"nothing answers at .* start it with scripts/serve"):
        Client(Target.parse(f"http://127.0.0.1:{free_port()}")).connect()


def test_a_refused_bearer_and_a_missing_one_are_told_apart() -> None:
    with stub_service(bearer="Bearer right") as url:
        with pytest.raises(TargetError, match=r"AUTHORIZATION is missing .*401"):
            Client(Target.parse(url)).connect()
        with pytest.raises(TargetError, match=r"AUTHORIZATION is not accepted .*401"):
            Client(Target.parse(url, "Bearer wrong")).connect()
        assert Client(Target.parse(url, "Bearer right")).connect().model == "stub"


def test_a_cut_stream_is_not_whole_and_a_finished_one_is() -> None:
    with stub_service({"inference": "cut"}) as url:
        client = Client(Target.parse(url)).connect()
        with client.generate("x", route="inference") as cut:
            assert (cut.read_all(), cut.whole) == (b"one", False)
        with client.generate("x", route="chat") as whole:
            assert (whole.read_all(), whole.whole) == (b"onetwo", True)
        assert [chunk.data for chunk in whole.chunks] == [b"one", b"two"]
        assert whole.ttft_seconds > 0 and len(whole.gap_seconds) == 1


def test_events_are_parsed_and_anything_else_between_them_is_an_error() -> None:
    body = b'event: answer\ndata: {"message": "a"}\n\n: ping\n\nevent: close\ndata: {"message": "bye"}\n\n'
    assert chat_events(body) == [("answer", {"message": "a"}), ("close", {"message": "bye"})]
    with pytest.raises(ValueError, match="no event"):
        chat_events(body + b"stray")
    assert text_of("chat", body[:45]) == "a"
    assert text_of("chat", body[:10]) == ""
    assert text_of("inference", "ä".encode()[:1]) == ""


def test_digits_count_positions_of_bytes() -> None:
    assert digits("x", 4) == "1234"
    assert digits("ä" * 5, 2) == "01"


def test_a_99th_percentile_needs_a_thousand_samples() -> None:
    few, many = spread([0.001] * 998 + [0.5]), spread([0.001] * 998 + [0.5, 0.6])
    assert (few["p99"], few["all_below"], many["p99"]) == (None, 500.0, 1.0)
    assert spread_text(few) == "p50 1.0, all below 500.0 (of 999)"
    assert spread_text(many) == "p50 1.0, p99 1.0 (of 1000)"
    assert spread_text(spread([])) == "none"


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b"{broken",
        b'{"models": [], "engine": "e", "digest": "d"}',
        b'{"models": ["m"], "engine": "e"}',
        b"no\nservice \x1b[2J",
    ],
)
def test_a_server_whose_info_is_not_ours_is_refused_in_one_line(body: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with pytest.raises(TargetError, match=r"^[ -~]*/info answers 200: [ -~]*$"):
        connect_to_one_that_says(head + body)


def test_a_server_that_speaks_no_http_is_refused_in_one_line() -> None:
    with pytest.raises(TargetError, match=r"^nothing answers at [ -~]*220 ready[ -~]*$"):
        connect_to_one_that_says(b"220 ready \x1b[2J\r\n")


def test_a_service_that_tells_no_number_of_tokens_is_named() -> None:
    with stub_service() as url:
        client = Client(Target.parse(url)).connect()
        with client.generate("x") as stream:
            stream.read_all()
        client.view = lambda _request_id: {}  # type: ignore[method-assign]
        with pytest.raises(TargetError, match="tells no number of tokens"):
            client.num_tokens(stream)


def connect_to_one_that_says(answer: bytes) -> None:
    """Connect a client to a server that answers its first call with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            Client(Target.parse(f"http://127.0.0.1:{listener.getsockname()[1]}"), 10.0).connect()
        finally:
            thread.join()
