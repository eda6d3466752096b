"""Check how much each of several proxies lets pass around an outage: never more than 1.2 times the limit together."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest

from proxy.counted_windows import CountedWindow, CountUnavailable, LocalWindows, WindowState
from proxy.outage_shares import OutageShares
from proxy.shared_windows import SharedWindows

SECONDS = 60
LIMIT = 60


def shares_of(num_proxies: int) -> OutageShares:
    shares = OutageShares(num_proxies)
    shares.hear(-1000.0)
    return shares


def test_one_proxy_has_the_whole_limit_in_an_outage_too() -> None:
    shares = shares_of(1)
    shares.go(100.0)
    assert shares.own_limit(50, SECONDS, 100.0) == 50
    assert not shares.is_blind(SECONDS, 100.0)


def test_without_a_shared_count_each_has_its_share_from_the_start() -> None:
    shares = OutageShares(4)
    assert shares.own_limit(50, SECONDS, 0.0) == 12
    assert not shares.is_blind(SECONDS, 0.0)


def test_where_there_never_is_a_shared_count_a_share_is_at_least_one() -> None:
    shares = OutageShares(4, least_share=1)
    assert [shares.own_limit(count, SECONDS, 0.0) for count in (1, 3, 4, 8)] == [1, 1, 1, 2]


def test_in_an_outage_a_limit_smaller_than_the_proxies_lets_none_pass() -> None:
    shares = shares_of(4)
    shares.go(100.0)
    assert shares.blind_limit(3) == 0
    assert shares.own_limit(3, SECONDS, 165.0) == 0


@pytest.mark.parametrize("count", [1, 2, 3, 5, 60])
def test_proxies_that_never_had_redis_let_the_limit_pass_or_one_each(count: int) -> None:
    proxies = [SharedWindows(3, None, lambda: 0.0) for _ in range(3)]
    window = [CountedWindow("a", count, SECONDS)]
    passed = sum(not proxy.take(window)[0].is_full for proxy in proxies for _ in range(count + 1))
    assert passed == max(3, count // 3 * 3)


@pytest.mark.parametrize("count", [1, 2])
def test_an_outage_never_lets_one_call_of_each_proxy_pass_beyond_a_small_limit(count: int) -> None:
    redis = FakeRedis()
    proxies = [SharedWindows(3, lambda: FakeClient(redis), redis.now) for _ in range(3)]
    redis.seconds = 200.0
    for proxy in proxies:
        proxy.refresh()
    redis.is_away = True
    for proxy in proxies:
        proxy.refresh()
    for moment in (200.0, 300.0):
        redis.seconds = moment
        window = [CountedWindow("a", count, SECONDS)]
        assert sum(not proxy.take(window)[0].is_full for proxy in proxies) <= count * 1.2


def test_the_first_window_of_an_outage_is_blind_and_the_next_ones_have_the_share() -> None:
    shares = shares_of(2)
    assert shares.own_limit(50, SECONDS, 99.0) == 50
    shares.go(100.0)
    assert shares.is_blind(SECONDS, 164.9) and shares.blind_limit(50) == 5
    assert not shares.is_blind(SECONDS, 165.0) and shares.own_limit(50, SECONDS, 165.0) == 25


def test_the_shared_count_decides_alone_once_it_knows_a_whole_window() -> None:
    shares = shares_of(2)
    shares.go(100.0)
    shares.come(500.0, began=-1000.0)
    assert not shares.is_blind(SECONDS, 500.0)
    assert not shares.is_counted_together(SECONDS, 564.9)
    assert shares.is_counted_together(SECONDS, 565.0)
    assert shares.is_counted_together(5, 510.0)


def test_a_shared_count_that_comes_back_empty_leaves_the_window_blind() -> None:
    shares = shares_of(2)
    shares.go(100.0)
    shares.come(110.0, began=109.0)
    assert shares.is_blind(SECONDS, 164.9)
    assert not shares.is_blind(SECONDS, 165.0)


def test_a_shared_count_that_lost_its_memory_unseen_is_an_outage() -> None:
    shares = shares_of(2)
    shares.hear(-999.1)
    assert shares.is_counted_together(SECONDS, 200.0)
    shares.hear(200.0)
    assert shares.is_blind(SECONDS, 264.0) and shares.blind_limit(50) == 5
    assert shares.is_counted_together(SECONDS, 265.0) and not shares.is_blind(SECONDS, 265.0)


class FakeRedis:
    """Count for all, unless it is away; where all proxies are is where its clock is."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_away = False
        self.restart()

    def now(self) -> float:
        return self.seconds

    def restart(self) -> None:
        """Lose what was counted."""
        self.windows = LocalWindows(self.now)
        self.began = self.seconds


class FakeClient:
    def __init__(self, redis: FakeRedis) -> None:
        self.redis = redis

    def take(self, windows: Sequence[CountedWindow]) -> tuple[list[WindowState], float]:
        return self.redis.windows.take(windows), self.probe()

    def probe(self) -> float:
        if self.redis.is_away:
            raise CountUnavailable("away")
        return self.redis.seconds - self.redis.began

    def close(self) -> None:
        pass


def busiest_window(redis: FakeRedis, proxies: Sequence[SharedWindows], rng: random.Random) -> int:
    """Send thousands of calls to any of the proxies while Redis comes and goes; return the most in any 10 s."""
    passed, next_look, busiest = list[float](), 1.0, 0
    for _ in range(3000):
        redis.seconds += rng.expovariate(20)
        if rng.random() < (0.01 if redis.is_away else 0.002):
            redis.is_away = not redis.is_away
            if rng.random() < 0.5:
                redis.restart()
        if redis.seconds >= next_look:
            next_look += 2.0
            for proxy in proxies:
                proxy.refresh()
        (state,) = rng.choice(proxies[: rng.randint(1, len(proxies))]).take([CountedWindow("a", LIMIT, 10)])
        if not state.is_full:
            passed.append(redis.seconds)
            busiest = max(busiest, sum(redis.seconds - moment < 10 for moment in passed[-3 * LIMIT :]))
    return busiest


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_proxies", [1, 2, 3])
def test_no_window_lets_more_than_a_fifth_too_many_pass_whatever_redis_does(num_proxies: int, seed: int) -> None:
    logging.getLogger("proxy").setLevel(logging.ERROR)
    redis = FakeRedis()
    proxies = [SharedWindows(num_proxies, lambda: FakeClient(redis), redis.now) for _ in range(num_proxies)]
    busiest = busiest_window(redis, proxies, random.Random(f"{seed} {num_proxies}"))
    logging.getLogger("proxy").setLevel(logging.NOTSET)
    assert LIMIT * 0.7 <= busiest <= LIMIT * (1.0 if num_proxies == 1 else 1.2)
