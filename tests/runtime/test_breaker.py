"""The breaker alone: a pure object, with the time brought by the test."""

from __future__ import annotations

from tiering.runtime.breaker import Breaker, BreakerState


def make() -> Breaker:
    return Breaker(trial="probe", failures_max=3, cooldown_s=0.5, cooldown_max_s=5.0)


def fail(breaker: Breaker, kind: str, now_s: float, times: int = 1) -> None:
    for _ in range(times):
        breaker.failed(kind, breaker.generation, now_s)


def test_opens_at_the_third_failure_in_a_row() -> None:
    breaker = make()
    assert [breaker.failed("load", breaker.generation, 10.0) for _ in range(3)] == [False, False, True]
    assert breaker.state is BreakerState.OPEN
    assert breaker.retry_at_s == 10.5


def test_a_success_between_starts_the_count_again() -> None:
    breaker = make()
    for _ in range(5):
        fail(breaker, "load", 0.0, 2)
        breaker.succeeded("load", breaker.generation)
    assert breaker.state is BreakerState.CLOSED


def test_success_of_one_kind_does_not_hide_failures_of_another() -> None:
    """A full disk: stores fail, deletes work."""
    breaker = make()
    for _ in range(3):
        fail(breaker, "store", 0.0)
        breaker.succeeded("delete", breaker.generation)
    assert breaker.state is BreakerState.OPEN


def test_is_half_open_only_once_the_cooldown_is_over() -> None:
    breaker = make()
    fail(breaker, "probe", 1.0, 3)
    assert not breaker.half_open(1.49)
    assert breaker.half_open(1.5)
    assert breaker.state is BreakerState.HALF_OPEN


def test_cooldown_doubles_up_to_its_cap_and_starts_again_after_recovery() -> None:
    """Row 9: the pauses grow, but never beyond 5 s, so a server that came back is found within that."""
    breaker = make()
    now_s = 0.0
    fail(breaker, "probe", now_s, 3)
    pauses = []
    for _ in range(6):
        pauses.append(breaker.retry_at_s - now_s)
        now_s = breaker.retry_at_s
        assert breaker.half_open(now_s)
        assert breaker.failed("probe", breaker.generation, now_s)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    breaker.half_open(breaker.retry_at_s)
    assert breaker.succeeded("probe", breaker.generation)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, "probe", 100.0, 3)
    assert breaker.retry_at_s == 100.5


def test_pauses_keep_growing_while_only_the_trial_works() -> None:
    """Lookups are answered, loads are not: the trial closes the breaker, but proves nothing about loads."""
    breaker = make()
    fail(breaker, "load", 0.0, 3)
    breaker.half_open(0.5)
    breaker.succeeded("probe", breaker.generation)
    fail(breaker, "load", 1.0, 3)
    assert breaker.retry_at_s == 2.0
    breaker.half_open(2.0)
    breaker.succeeded("probe", breaker.generation)
    breaker.succeeded("load", breaker.generation)
    fail(breaker, "load", 3.0, 3)
    assert breaker.retry_at_s == 3.5


def test_only_the_trial_kind_closes_and_any_failure_opens_again() -> None:
    breaker = make()
    fail(breaker, "load", 0.0, 3)
    breaker.half_open(0.5)
    assert not breaker.succeeded("load", breaker.generation)
    assert breaker.failed("load", breaker.generation, 0.6)
    assert breaker.state is BreakerState.OPEN


def test_results_from_before_it_moved_say_nothing() -> None:
    breaker = make()
    old = breaker.generation
    fail(breaker, "load", 0.0, 3)
    assert not breaker.succeeded("probe", old)
    breaker.half_open(0.5)
    assert not breaker.failed("load", old, 0.6)
    assert not breaker.succeeded("probe", old)
    assert breaker.state is BreakerState.HALF_OPEN


def test_while_open_nothing_counts() -> None:
    breaker = make()
    fail(breaker, "load", 0.0, 3)
    assert not breaker.failed("load", breaker.generation, 0.3)
    assert not breaker.succeeded("probe", breaker.generation)
    assert breaker.state is BreakerState.OPEN
    assert breaker.retry_at_s == 0.5
