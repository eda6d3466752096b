"""Check the windows that are counted in Redis, with a real one, and with what answers wrongly in its place."""

from __future__ import annotations

import time
from collections.abc import Iterator

import gevent
import pytest

from proxy.answers import Refusal
from proxy.counted_windows import CountedWindow, CountUnavailable, WindowState
from proxy.redis_windows import BUDGET_SECONDS, RedisWindows
from tests.redis_server import RedisServer, answering, require_redis, running_redis


@pytest.fixture(scope="module", autouse=True)
def _event_loop() -> None:
    """Make the thread's event loop, which stays, before a test is watched for what it leaves."""
    gevent.get_hub()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    require_redis()
    with running_redis() as server:
        yield server


class Client:
    """A client with a budget that a busy machine keeps, unless a test says otherwise."""

    def __init__(self, url: str, budget_seconds: float = 5.0) -> None:
        self.windows = RedisWindows(url, budget_seconds)

    def take(self, *windows: CountedWindow) -> list[WindowState]:
        return self.windows.take(windows)[0]


@pytest.fixture
def client(redis: RedisServer) -> Iterator[Client]:
    redis.command("FLUSHALL")
    client = Client(redis.url)
    yield client
    client.windows.close()


def test_a_window_lets_its_count_pass_and_says_when_again(client: Client) -> None:
    window = CountedWindow("a", 3, 60)
    states = [client.take(window)[0] for _ in range(4)]
    assert [(state.remaining, state.is_full) for state in states] == [(2, False), (1, False), (0, False), (0, True)]
    assert 50 < states[-1].reset_seconds <= 60


def test_a_window_is_exact_at_its_edge(client: Client) -> None:
    window = CountedWindow("a", 1, 1)
    client.take(window)
    (state,) = client.take(window)
    assert state.is_full
    began = time.monotonic()
    while state.is_full:
        time.sleep(min(0.9, max(0.001, state.reset_seconds)))
        (state,) = client.take(window)
    assert 0.5 < time.monotonic() - began < 3.0


def test_a_call_is_counted_in_all_windows_or_in_none(client: Client) -> None:
    wide, narrow = CountedWindow("a", 3, 60), CountedWindow("b", 1, 60)
    client.take(wide, narrow)
    assert [state.is_full for state in client.take(wide, narrow)] == [False, True]
    assert client.take(wide)[0].remaining == 1


def test_two_proxies_count_together(redis: RedisServer, client: Client) -> None:
    other, window = Client(redis.url), CountedWindow("a", 4, 60)
    passed = [proxy.take(window)[0].is_full for proxy in (client, other) * 4].count(False)
    other.windows.close()
    assert passed == 4


def test_a_lower_count_of_a_key_does_not_forget_what_a_higher_one_counted(client: Client) -> None:
    for _ in range(3):
        client.take(CountedWindow("a", 4, 60))
    assert client.take(CountedWindow("a", 1, 60))[0].is_full
    assert client.take(CountedWindow("a", 4, 60))[0].remaining == 0
    assert client.take(CountedWindow("a", 4, 60))[0].is_full


def test_what_nobody_asks_for_is_forgotten(redis: RedisServer, client: Client) -> None:
    client.take(CountedWindow("a", 3, 60))
    remaining = int(redis.command("PTTL", "inference_api:window:a:60")[1:])
    assert 0 < remaining <= 60_000


def test_it_tells_since_when_it_has_counted(redis: RedisServer, client: Client) -> None:
    client.take(CountedWindow("a", 3, 60))
    time.sleep(0.2)
    assert client.windows.probe() >= 0.2
    redis.command("FLUSHALL")
    assert client.windows.probe() < 0.2


def test_a_clock_that_was_put_back_holds_nobody(redis: RedisServer, client: Client) -> None:
    to_come = str(int((time.time() + 3600) * 1_000_000))
    redis.command("LPUSH", "inference_api:window:a:60", to_come)
    redis.command("SET", "inference_api:windows_began", to_come)
    assert not client.take(CountedWindow("a", 1, 60))[0].is_full
    assert client.windows.probe() < 60


def test_a_script_that_was_forgotten_is_sent_again(redis: RedisServer, client: Client) -> None:
    client.take(CountedWindow("a", 3, 60))
    redis.command("SCRIPT", "FLUSH")
    assert client.take(CountedWindow("a", 3, 60))[0].remaining == 1


def frame(*numbers: int) -> bytes:
    return b"*%d\r\n" % len(numbers) + b"".join(b":%d\r\n" % number for number in numbers)


WRONG = {
    "word": b"+OK\r\n",
    "number": b":1\r\n",
    "nothing": b"$-1\r\n",
    "error": b"-ERR canary\r\n",
    "no redis": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "garbage": b":x\r\n",
    "cut": b"*4\r\n:1\r\n",
    "short": frame(1, 0),
    "texts": b"*4\r\n$1\r\n1\r\n$1\r\n0\r\n$1\r\n1\r\n$1\r\n0\r\n",
    "passed too many": frame(1, 0, 4, 0),
    "passed none": frame(1, 0, 0, 0),
    "refused for nothing": frame(0, 0, 1, 0),
    "neither": frame(2, 0, 1, 0),
    "negative": frame(1, 0, -1, 0),
    "free before now": frame(1, 0, 1, -5),
    "counted from tomorrow": frame(1, -5, 1, 0),
    "too long": frame(0, 0, 3, 61_000_000),
    "closes": b"",
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_no_count(answer: bytes) -> None:
    with answering(answer) as port:
        client = Client(f"redis://127.0.0.1:{port}/0", 0.5)
        with pytest.raises(CountUnavailable) as caught:
            client.take(CountedWindow("a", 3, 60))
        client.windows.close()
    assert "canary" not in str(caught.value)


def test_an_answer_without_an_end_is_given_up_before_its_time_is_over() -> None:
    with answering(b"+" + b"x" * 40_000) as port:
        client = Client(f"redis://127.0.0.1:{port}/0", 2.0)
        with pytest.raises(CountUnavailable, match=r"^WrongAnswer$"):
            client.take(CountedWindow("a", 3, 60))
        client.windows.close()


def test_a_right_answer_of_the_stand_in_would_be_a_count() -> None:
    with answering(frame(1, 5_000_000, 2, 1_500_000)) as port:
        client = Client(f"redis://127.0.0.1:{port}/0")
        states, counted_seconds = client.windows.take([CountedWindow("a", 3, 60)])
        client.windows.close()
    assert (states, counted_seconds) == ([WindowState(1, 1.5, False)], 5.0)


def test_silence_costs_the_budget_and_no_more() -> None:
    with answering(None) as port:
        client = Client(f"redis://127.0.0.1:{port}/0", BUDGET_SECONDS)
        began = time.monotonic()
        with pytest.raises(CountUnavailable):
            client.take(CountedWindow("a", 3, 60))
        took_seconds = time.monotonic() - began
        client.windows.close()
    assert 0.04 < took_seconds < 0.5


def test_a_call_that_is_cut_while_it_waits_tells_nothing_of_redis(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(**_arguments: object) -> None:
        raise Refusal(401, "jwt_revoked", "JWT has been revoked.")

    monkeypatch.setattr(client.windows, "_take", cut)
    with pytest.raises(Refusal):
        client.take(CountedWindow("a", 3, 60))


def test_nobody_there_is_no_count() -> None:
    client = Client("redis://127.0.0.1:1/0")
    with pytest.raises(CountUnavailable, match="ConnectionError"):
        client.take(CountedWindow("a", 3, 60))
