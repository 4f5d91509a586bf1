"""Faults that users met in other limiters, each in the words of docs/faults.md, held through Python on both embedded
stores. Time is a ManualClock: the whole file sleeps nowhere."""

from __future__ import annotations

import math
import pathlib
import random

import pytest

from tidegate import Limiter, ManualClock, RuleError
from tidegate._core import judge_asgi

SECOND = 1_000_000
DAY = 86_400
WINDOWS = ["fixed_window", "sliding_log", "sliding_counter"]
BUCKETS = ["token_bucket", "leaky_bucket"]
ALL = [*WINDOWS, *BUCKETS]
START_US = 1_000_000 * SECOND


class World:
    """A store and its clock; time in seconds from the start of the test."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.clock = ManualClock(START_US)

    def limiter(self, rules: str, **options: object) -> Limiter:
        return Limiter(rules, store=self.uri, clock=self.clock, **options)  # type: ignore[arg-type]

    def at(self, seconds: float) -> None:
        self.clock.now_us = START_US + round(seconds * SECOND)


@pytest.fixture(params=["memory", "shared"])
def world(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> World:
    return World("memory://faults" if request.param == "memory" else f"shared://{tmp_path}/table?size=16MiB")


# ---- arithmetic, costs and edge limits


@pytest.mark.fault("R22")
@pytest.mark.parametrize("algorithm", ALL)
def test_a_cost_above_the_limit_is_denied_and_leaves_the_state_alone(world: World, algorithm: str) -> None:
    one = world.limiter(f"10/minute {algorithm}")
    denied = one.hit("a", cost=11)
    assert not denied and denied.remaining == 10 and denied.retry_after == math.inf
    allowed = one.hit("a", cost=10)
    assert allowed and allowed.remaining == 0


@pytest.mark.fault("R25")
@pytest.mark.parametrize("algorithm", BUCKETS)
def test_a_cost_equal_to_the_capacity_is_possible_once_the_bucket_is_empty(world: World, algorithm: str) -> None:
    one = world.limiter(f"5/minute {algorithm}")
    one.hit("a")
    assert one.hit("a", cost=5).retry_after == 12.0
    world.at(12)
    assert one.hit("a", cost=5)


@pytest.mark.fault("R28")
@pytest.mark.parametrize("limit", [8000, 1_000_000])
@pytest.mark.parametrize("algorithm", ALL)
def test_thousands_a_second_all_pass_with_falling_remaining_and_not_one_more(world: World, limit: int, algorithm: str) -> None:
    step = max(1, limit // 1000)
    one = world.limiter(f"{limit}/second {algorithm}{' resolution 1ms' if algorithm == 'sliding_log' else ''}")
    for left in range(limit - step, -1, -step):
        decision = one.hit("a", cost=step)
        assert decision and decision.remaining == left
    assert not one.hit("a")


@pytest.mark.fault("R28")
def test_ten_million_a_second_and_one_a_year_are_both_exact(world: World) -> None:
    fast = world.limiter("10000000/second token_bucket", name="fast")
    fast.hit("a", cost=10_000_000)
    assert fast.hit("a").retry_after_us == 1
    slow = world.limiter("1/year", name="slow")
    slow.hit("a")
    assert slow.hit("a").retry_after_us == 365 * DAY * SECOND


@pytest.mark.fault("R29")
def test_a_client_that_backs_off_a_tenth_of_a_second_gets_its_rate_and_no_more(world: World) -> None:
    one = world.limiter("100/second burst 11")
    allowed = 0
    elapsed_us = 0
    while elapsed_us < 3_600_000:
        world.clock.now_us = START_US + elapsed_us
        if one.hit("a"):
            allowed += 1
        else:
            elapsed_us += 100_000
    assert allowed <= 371


@pytest.mark.fault("R31")
@pytest.mark.parametrize("algorithm", ALL)
def test_the_largest_limit_and_costs_fill_it_exactly_and_it_stays_shut(world: World, algorithm: str) -> None:
    one = world.limiter(f"10000000000/year {algorithm}{' resolution 1 week' if algorithm == 'sliding_log' else ''}")
    assert one.hit("a", cost=9_999_999_999).remaining == 1
    assert one.hit("a").remaining == 0
    for _ in range(2):
        assert not one.hit("a")
        assert not one.hit("a", cost=10_000_000_000)


@pytest.mark.fault("R32")
@pytest.mark.parametrize("algorithm", BUCKETS)
def test_a_busy_client_drains_as_fast_as_a_quiet_one(world: World, algorithm: str) -> None:
    one = world.limiter(f"10 per 30 s {algorithm}")
    for second in range(10):
        world.at(second)
        decision = one.hit("a")
    assert decision.remaining == 3


@pytest.mark.fault("R34")
def test_a_fractional_window_is_refused_when_the_limiter_is_made(world: World) -> None:
    with pytest.raises(RuleError, match="600.001|\\."):
        world.limiter("5 per 600.001 ms")


# ---- windows and clocks


@pytest.mark.fault("R37")
@pytest.mark.parametrize("phase", range(0, 60, 7))
def test_the_default_algorithm_lets_no_second_burst_through_at_a_window_edge(world: World, phase: int) -> None:
    one = world.limiter("60/minute")
    assert one.rules == ("60/minute sliding_log",)
    world.at(phase + 59)
    assert sum(bool(one.hit("a")) for _ in range(60)) == 60
    world.at(phase + 61)
    assert sum(bool(one.hit("a")) for _ in range(60)) == 0


@pytest.mark.fault("R37")
@pytest.mark.parametrize("algorithm", ["sliding_counter", "token_bucket"])
def test_at_most_two_pass_two_seconds_after_a_full_burst(world: World, algorithm: str) -> None:
    one = world.limiter(f"60/minute {algorithm}")
    origin = 60 - START_US // SECOND % 60  # the counter's windows are multiples of a minute on the store's clock
    world.at(origin + 59)
    assert sum(bool(one.hit("a")) for _ in range(60)) == 60
    world.at(origin + 61)
    assert sum(bool(one.hit("a")) for _ in range(60)) <= 2


@pytest.mark.fault("R38")
def test_the_previous_window_weighs_in_the_decision_and_in_remaining(world: World) -> None:
    one = world.limiter("100/minute sliding_counter")
    origin = 60 - START_US // SECOND % 60
    world.at(origin + 30)
    one.hit("a", cost=50)
    world.at(origin + 66)
    assert one.hit("a", cost=10).remaining == 45
    assert [bool(one.hit("a")) for _ in range(46)] == [True] * 45 + [False]


@pytest.mark.fault("R40")
def test_a_hit_counts_for_exactly_one_period(world: World) -> None:
    one = world.limiter("10/hour")
    one.hit("a")
    world.at(59 * 60)
    one.hit("a", cost=8)
    world.at(61 * 60)
    assert [bool(one.hit("a")) for _ in range(3)] == [True, True, False]


@pytest.mark.fault("R40")
@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log", "token_bucket", "leaky_bucket"])
def test_one_a_second_passes_again_after_a_second(world: World, algorithm: str) -> None:
    one = world.limiter(f"1/second {algorithm}")
    assert one.hit("a")
    world.at(0.999999)
    assert not one.hit("a")
    world.at(1.000001)
    assert one.hit("a")


@pytest.mark.fault("R41")
@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log", "token_bucket", "leaky_bucket"])
def test_a_daily_limit_stays_shut_for_the_whole_day(world: World, algorithm: str) -> None:
    one = world.limiter(f"1/day {algorithm}")
    assert one.hit("a")
    for seconds in (301, 2 * 3600, DAY - 1):
        world.at(seconds)
        assert not one.hit("a")
    world.at(DAY)
    assert one.hit("a")


@pytest.mark.fault("R43")
@pytest.mark.parametrize("algorithm", ALL)
def test_a_clock_that_goes_back_locks_nobody_out(world: World, algorithm: str) -> None:
    one = world.limiter(f"5 per 10 s {algorithm}")
    world.at(100)
    one.hit("a", cost=3)
    world.at(40)
    assert [bool(one.hit("a")) for _ in range(3)] == [True, True, False]
    denied = one.hit("a")
    limit = 20 if algorithm == "sliding_counter" else 10  # the counter forgets over two of its windows
    assert denied.remaining == 0 and denied.retry_after <= limit
    world.at(100 + denied.retry_after)
    assert one.hit("a")


@pytest.mark.fault("R47")
def test_a_month_is_30_days_and_says_so(world: World) -> None:
    one = world.limiter("1/month")
    assert one.hit("a").rules[0].period_us == 2_592_000 * SECOND


@pytest.mark.fault("R47")
def test_a_day_is_24_hours_from_the_hit_not_a_calendar_day(world: World) -> None:
    one = world.limiter("1/day")
    world.at(23 * 3600 + 59 * 60)
    assert one.hit("a")
    world.at(DAY + 23 * 3600 + 59 * 60 - 0.000001)
    assert not one.hit("a")
    world.at(DAY + 23 * 3600 + 59 * 60)
    assert one.hit("a")


@pytest.mark.fault("R49")
@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log"])
def test_a_year_is_not_over_after_24_days(world: World, algorithm: str) -> None:
    one = world.limiter(f"5 per 365 d {algorithm}")
    assert all(one.hit("a") for _ in range(5))
    for day in (1 / 24, 25, 50, 364.999):
        world.at(day * DAY)
        assert not one.hit("a")
    world.at(365 * DAY)
    assert one.hit("a")


@pytest.mark.fault("R50")
@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log"])
def test_looking_at_an_entry_does_not_keep_it_shut(world: World, algorithm: str) -> None:
    one = world.limiter(f"1/minute {algorithm}")
    one.hit("a")
    for second in range(60):
        world.at(second)
        assert not one.peek("a")
        assert not one.hit("a")  # knocking does not either
    world.at(60)
    assert one.hit("a")


@pytest.mark.fault("R52")
@pytest.mark.parametrize("algorithm", ALL)
def test_a_client_that_returns_once_a_period_never_piles_up(world: World, algorithm: str) -> None:
    one = world.limiter(f"2/minute {algorithm}")
    origin = 60 - START_US // SECOND % 60
    for turn in range(100):
        world.at(origin + 60 * turn)
        decision = one.hit("a")
        # the counter's previous window still weighs whole at the very start of the next one
        assert decision and decision.remaining == (0 if algorithm == "sliding_counter" and turn else 1)


# ---- reported values


@pytest.mark.fault("R53")
@pytest.mark.parametrize("algorithm", ALL)
def test_who_waits_as_long_as_told_passes_and_a_microsecond_earlier_does_not(world: World, algorithm: str) -> None:
    one = world.limiter(f"7/minute {algorithm}")
    at = random.Random(53)
    now_us = START_US
    refusals = 0
    while refusals < 1000:
        now_us += at.randrange(2 * SECOND)
        world.clock.now_us = now_us
        cost = at.randint(1, 3)
        decision = one.hit("a", cost=cost)
        if decision:
            continue
        refusals += 1
        wait_us = decision.retry_after_us
        assert wait_us is not None and 1 <= wait_us <= 120 * SECOND
        world.clock.now_us = now_us + wait_us - 1
        assert not one.peek("a", cost=cost)
        world.clock.now_us = now_us + wait_us
        assert one.peek("a", cost=cost)


def header(limiter: Limiter, name: bytes) -> int | None:
    scope = {
        "type": "http",
        "method": "GET",
        "raw_path": b"/",
        "client": ("192.0.2.1", 50000),
        "headers": [],
    }
    found = dict(judge_asgi([limiter], scope).fields).get(name)
    return None if found is None else int(found)


@pytest.mark.fault("R53")
def test_a_retry_after_header_is_a_whole_number_from_1_after_which_the_request_passes(world: World) -> None:
    one = world.limiter("3 per 20 s", by="ip")
    at = random.Random(54)
    now_us = START_US
    refusals = 0
    while refusals < 1000:
        now_us += at.randrange(5 * SECOND)
        world.clock.now_us = now_us
        seconds = header(one, b"retry-after")
        if seconds is None:
            continue
        refusals += 1
        assert 1 <= seconds <= 20
        world.clock.now_us = now_us + seconds * SECOND
        assert one.peek(dims={"ip": "192.0.2.1"})


@pytest.mark.fault("R56")
def test_a_tenth_of_a_second_is_announced_as_one_second(world: World) -> None:
    one = world.limiter("10/second", by="ip")
    one.hit(dims={"ip": "192.0.2.1"}, cost=10)
    world.at(1 - 0.106)
    assert header(one, b"retry-after") == 1


@pytest.mark.fault("R58")
def test_retry_after_is_what_is_left_of_the_window_not_the_whole_of_it(world: World) -> None:
    one = world.limiter("1 per 15 s fixed_window", by="ip")
    assert header(one, b"retry-after") is None
    world.at(10)
    assert header(one, b"retry-after") == 5


@pytest.mark.fault("R61")
def test_a_log_reckons_from_the_hit_whose_departure_makes_room(world: World) -> None:
    one = world.limiter("2/minute")
    one.hit("a")
    world.at(10)
    one.hit("a")
    world.at(20)
    assert one.hit("a").retry_after == 40.0
    world.at(60)
    assert one.hit("a")


@pytest.mark.fault("R62")
def test_retry_is_the_next_place_and_reset_the_empty_bucket(world: World) -> None:
    one = world.limiter("1/second burst 5")
    one.hit("a", cost=5)
    denied = one.hit("a")
    assert (denied.retry_after, denied.reset_after) == (1.0, 5.0)


@pytest.mark.fault("R64")
def test_the_time_until_empty_reckons_every_hit_and_not_one_second_more(world: World) -> None:
    leaky = world.limiter("10 per 10 s leaky_bucket")
    for _ in range(7):
        decision = leaky.hit("a")
    assert decision.reset_after == 7.0
    assert world.limiter("30/minute token_bucket").hit("a").reset_after == 2.0
