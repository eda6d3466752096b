"""Check when a child that died starts again: at once after a good time, ever later when it dies again and again."""

from __future__ import annotations

from inference_api.restarts import BACKOFF_SECONDS, SETTLED_SECONDS, RestartPolicy


def test_deaths_in_a_row_wait_longer_and_the_last_wait_repeats() -> None:
    policy = RestartPolicy()
    assert [policy.dies(0.0) for _ in range(7)] == [*BACKOFF_SECONDS, BACKOFF_SECONDS[-1], BACKOFF_SECONDS[-1]]
    assert policy.num_failed_restarts == 6


def test_a_death_after_a_good_time_costs_no_wait_and_is_no_failed_restart() -> None:
    policy = RestartPolicy()
    policy.dies(0.0)
    policy.dies(1.0)
    policy.serves(2.0)
    assert policy.dies(2.0 + SETTLED_SECONDS) == 0.0
    assert policy.num_failed_restarts == 0


def test_to_be_ready_for_a_moment_is_not_to_have_recovered() -> None:
    policy = RestartPolicy()
    policy.dies(0.0)
    policy.serves(1.0)
    assert policy.dies(1.0 + SETTLED_SECONDS / 2) == BACKOFF_SECONDS[1]
    assert policy.num_failed_restarts == 1


def test_a_child_that_never_served_for_a_while_has_not_settled() -> None:
    policy = RestartPolicy()
    policy.serves(0.0)
    policy.dies(SETTLED_SECONDS / 2)
    assert not policy.has_settled
    policy.serves(10.0)
    policy.dies(10.0 + SETTLED_SECONDS)
    assert policy.has_settled
