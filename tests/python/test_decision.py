"""Decision, RuleResult and ManualClock: what they show and what they refuse."""

from __future__ import annotations

import copy
import math
import pickle

import pytest

from tidegate import Decision, Limiter, ManualClock, RuleResult


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now_us=1_000_000_000)


def limiter(rules: str, clock: ManualClock | None = None, **options: str) -> Limiter:
    return Limiter(rules, store="memory://test", clock=clock or ManualClock(), **options)  # type: ignore[arg-type]


def test_seconds_are_floats_of_the_exact_microseconds() -> None:
    one = limiter("3/second token_bucket")
    one.hit("a", cost=3)
    decision = one.hit("a")
    assert decision.retry_after_us == 333334 and decision.retry_after == 0.333334
    assert decision.reset_after_us == 1_000_000 and decision.reset_after == 1.0
    assert isinstance(decision.retry_after, float) and isinstance(decision.retry_after_us, int)
    assert isinstance(decision.delay, float) and decision.delay_us == 0


def test_a_leaky_bucket_tells_how_long_to_hold_a_hit() -> None:
    one = limiter("2/second burst 4 leaky_bucket")
    assert [one.hit("a").delay for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]


def test_never_is_none_in_microseconds_and_infinite_in_seconds() -> None:
    decision = limiter("5/minute").hit("a", cost=6)
    assert decision.retry_after_us is None
    assert decision.retry_after == math.inf


def test_a_decision_is_true_when_allowed() -> None:
    one = limiter("1/minute")
    assert bool(one.hit("a")) is True
    assert bool(one.hit("a")) is False


def test_the_reported_rule_is_the_tightest_when_allowed_and_the_longest_when_denied() -> None:
    one = limiter("2/second; 3/minute")
    first = one.hit("a")
    assert (first.rule, first.limit, first.remaining) == ("2/second sliding_log", 2, 1)
    one.hit("a")
    denied = one.hit("a")
    assert denied.rule == "2/second sliding_log"
    assert [(item.rule, item.allowed, item.remaining) for item in denied.rules] == [
        ("2/second sliding_log", False, 0),
        ("3/minute sliding_log", True, 1),
    ]


def test_each_rule_tells_its_own_numbers() -> None:
    decision = limiter("10/minute burst 4; 100/hour fixed_window").hit("a")
    bucket, window = decision.rules
    assert isinstance(bucket, RuleResult)
    assert (bucket.algorithm, bucket.limit, bucket.burst, bucket.period_us) == ("token_bucket", 10, 4, 60_000_000)
    assert (bucket.remaining, bucket.retry_after, bucket.reset_after, bucket.delay) == (3, 0.0, 6.0, 0.0)
    assert (bucket.retry_after_us, bucket.reset_after_us, bucket.delay_us) == (0, 6_000_000, 0)
    assert (window.algorithm, window.limit, window.burst, window.remaining) == ("fixed_window", 100, 100, 99)
    assert (decision.burst, decision.limit) == (4, 10)


def test_several_dimensions_give_a_result_each() -> None:
    decision = limiter("5/minute").hit(dims={"user": "a", "ip": "192.0.2.1"})
    assert [item.remaining for item in decision.rules] == [4, 4]


def test_a_decision_of_the_largest_size_keeps_all_its_results() -> None:
    rules = "; ".join(f"{100 + i}/{i + 1}s fixed_window" for i in range(4))
    dims = {f"header:X-{i}": "v" * 64 for i in range(8)}
    one = limiter(rules)
    decision = one.hit(dims=dims)
    assert len(decision.rules) == 32
    assert [item.limit for item in decision.rules[:5]] == [100, 101, 102, 103, 100]
    decision.refund()
    assert one.peek(dims=dims).remaining == 100


# ---- refund


def test_refund_gives_back_once(clock: ManualClock) -> None:
    one = limiter("5/minute", clock)
    first, second = one.hit("a", cost=2), one.hit("a")
    assert first.refund() is None
    assert one.peek("a").remaining == 4
    first.refund()
    assert one.peek("a").remaining == 4
    second.refund()
    assert one.peek("a").remaining == 5


def test_refund_of_a_denied_or_peeked_decision_does_nothing(clock: ManualClock) -> None:
    one = limiter("1/minute", clock)
    one.hit("a")
    one.hit("a").refund()
    one.peek("a").refund()
    assert one.peek("a").remaining == 0


def test_refund_takes_its_own_stamp_out_of_a_log(clock: ManualClock) -> None:
    one = limiter("2/minute", clock)
    one.hit("a")
    clock.advance(30)
    late = one.hit("a")
    late.refund()
    assert one.peek("a").remaining == 1
    clock.advance(30)
    assert one.peek("a").remaining == 2  # what was left was the first hit


def test_refund_reaches_every_rule_and_dimension() -> None:
    one = limiter("5/minute; 10/hour token_bucket")
    dims = {"user": "a", "ip": "192.0.2.1"}
    one.hit(dims=dims, cost=3).refund()
    assert [item.remaining for item in one.peek(dims=dims).rules] == [5, 10, 5, 10]


def test_a_decision_keeps_its_limiter_and_store_alive() -> None:
    clock = ManualClock()
    one = limiter("5/minute", clock)
    decision = one.hit("a")
    del one
    decision.refund()
    assert limiter("5/minute", clock).peek("a").remaining == 5
    del decision
    assert limiter("5/minute", clock).peek("a").remaining == 5


def test_the_numbers_of_a_decision_stay_as_they_were() -> None:
    one = limiter("5/minute")
    decision = one.hit("a")
    for _ in range(10):
        one.hit("a")
    decision.refund()
    assert decision.remaining == 4


# ---- what they refuse


def test_decisions_are_made_by_limiters_only() -> None:
    for kind in (Decision, RuleResult):
        with pytest.raises(TypeError, match="cannot create"):
            kind()
        with pytest.raises(TypeError):
            type("Mine", (kind,), {})


def test_a_decision_cannot_be_written_to() -> None:
    decision = limiter("5/minute").hit("a")
    with pytest.raises(AttributeError):
        decision.allowed = True  # type: ignore[misc]
    with pytest.raises(AttributeError):
        decision.note = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_is_a_type_error_that_says_what_to_do(protocol: int) -> None:
    one = limiter("5/minute")
    decision = one.hit("a")
    for thing in (one, decision, decision.rules[0], ManualClock()):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(thing, protocol)
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.copy(decision)


def test_errors_can_be_pickled() -> None:
    from tidegate import RuleError

    with pytest.raises(RuleError) as caught:
        limiter("5/fortnight")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.offset, again.code) == (str(caught.value), 2, "TG_E_RULE")


def test_reprs_say_what_was_decided() -> None:
    one = limiter("1/minute")
    assert repr(one.hit("a")) == "<Decision allowed by '1/minute sliding_log': remaining=0, retry_after=0.0>"
    denied = one.hit("a")
    assert repr(denied) == "<Decision denied by '1/minute sliding_log': remaining=0, retry_after=60.0>"
    assert repr(denied.rules[0]) == "RuleResult('1/minute sliding_log', allowed=False, remaining=0, retry_after=60.0)"


# ---- ManualClock


def test_a_manual_clock_moves_only_when_told(clock: ManualClock) -> None:
    assert clock.now_us == 1_000_000_000
    clock.advance(1.5)
    assert clock.now_us == 1_001_500_000
    clock.advance_us(1)
    assert clock.now_us == 1_001_500_001
    clock.now_us = 7
    assert clock.now_us == 7
    assert repr(clock) == "ManualClock(now_us=7)"
    assert ManualClock().now_us == 1_700_000_000_000_000


def test_seconds_are_rounded_to_the_nearest_microsecond() -> None:
    clock = ManualClock(0)
    for _ in range(10):
        clock.advance(0.1)
    assert clock.now_us == 1_000_000
    clock.advance(0.000_000_6)
    assert clock.now_us == 1_000_001


@pytest.mark.parametrize("seconds", [-1, -0.001, math.nan, math.inf, 1e30])
def test_a_clock_does_not_advance_by_what_is_no_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="go back"):
        ManualClock().advance(seconds)


@pytest.mark.parametrize(
    ("value", "error"),
    [(-1, ValueError), (2**63, ValueError), (2**70, ValueError), (1.5, TypeError), ("1", TypeError), (True, TypeError)],
)
def test_microseconds_are_ints_from_0_to_63_bits(value: object, error: type[Exception]) -> None:
    clock = ManualClock()
    with pytest.raises(error):
        ManualClock(now_us=value)  # type: ignore[arg-type]
    with pytest.raises(error):
        clock.now_us = value  # type: ignore[assignment]
    with pytest.raises(error):
        clock.advance_us(value)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        del clock.now_us


def test_a_clock_that_is_advanced_past_its_end_stays_there() -> None:
    clock = ManualClock(2**63 - 10)
    clock.advance_us(100)
    assert clock.now_us == 2**63 - 1


@pytest.mark.fault("R169")
def test_two_limiters_of_one_clock_see_the_same_time(clock: ManualClock) -> None:
    one = limiter("1/minute", clock)
    assert one.hit("a") and not one.hit("a")
    clock.advance(60)
    assert limiter("1/minute", clock).hit("a")
