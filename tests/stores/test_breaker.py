"""The circuit breaker, with time in the test's hands."""

from __future__ import annotations

import pytest

from warmprefix_redis.breaker import CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(first_pause=1, longest_pause=5, clock=clock)


def test_breaker_is_closed_until_a_failure(breaker: CircuitBreaker) -> None:
    assert all(breaker.admits() for _ in range(10))
    breaker.succeeded()
    assert breaker.admits()
    assert not breaker.is_open


def test_one_failure_opens_the_breaker(breaker: CircuitBreaker) -> None:
    breaker.failed()
    assert breaker.is_open
    assert not breaker.admits()


def test_one_probe_is_admitted_after_the_pause(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failed()
    clock.now += 1
    assert [breaker.admits() for _ in range(3)] == [True, False, False]


def test_success_closes_the_breaker(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failed()
    clock.now += 1
    assert breaker.admits()
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.admits()
    assert breaker.admits()


def test_pauses_double_up_to_the_longest(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failed()
    started = clock.now
    probes: list[float] = []
    while len(probes) < 5:
        clock.now += 0.25
        if breaker.admits():
            breaker.failed()
            probes.append(clock.now - started)
    assert probes == [1, 3, 7, 12, 17]


def test_simultaneous_failures_open_the_breaker_once(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(50):
        breaker.failed()
    clock.now += 1
    assert breaker.admits()


def test_unreported_probe_is_followed_by_another(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failed()
    clock.now += 1
    assert breaker.admits()
    clock.now += 2
    assert breaker.admits()


def test_later_failure_starts_with_the_first_pause(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.failed()
    clock.now += 1
    breaker.admits()
    breaker.failed()
    clock.now += 2
    breaker.admits()
    breaker.succeeded()
    breaker.failed()
    clock.now += 1
    assert breaker.admits()


@pytest.mark.parametrize(("first", "longest"), [(-1, 5), (6, 5)])
def test_invalid_pauses_are_refused(first: float, longest: float) -> None:
    with pytest.raises(ValueError, match="first_pause must be 0 to longest_pause"):
        CircuitBreaker(first, longest)
