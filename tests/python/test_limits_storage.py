"""tidegate.limits_storage: the `limits` package, flask-limiter and slowapi count in tidegate's tables."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import limits
import limits.aio.strategies
import pytest
import tidegate.limits_storage
from limits.errors import ConfigurationError, StorageError
from limits.storage import storage_from_string
from limits.strategies import STRATEGIES
from tidegate import Gate, ManualClock

from servers import Server
from test_fastapi_store import standing_still

numbers = itertools.count()
NAMES = list(STRATEGIES)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["sync", "async"])
def strategy(request: pytest.FixtureRequest, clock: ManualClock) -> Callable[..., Any]:
    """strategy(name): the one of limits, or of limits.aio behind calls that run it to its end."""
    number = next(numbers)

    def made(name: str, **options: Any) -> Any:
        scheme = "async+tidegate" if request.param == "async" else "tidegate"
        storage = storage_from_string(f"{scheme}+memory://limits-{number}", clock=clock, **options)
        if request.param == "sync":
            return STRATEGIES[name](storage)
        real = limits.aio.strategies.STRATEGIES[name](storage)

        class Run:
            """Each call in an event loop of its own."""

            def __getattr__(self, method: str) -> Any:
                async def call(*arguments: Any, **named: Any) -> Any:
                    return await getattr(real, method)(*arguments, **named)

                return lambda *arguments, **named: asyncio.run(call(*arguments, **named))

        return Run()

    return made


FIVE = limits.parse("5/minute")


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_admits_the_limit_tells_what_is_left_and_opens_again(
    strategy: Callable[..., Any], clock: ManualClock, name: str
) -> None:
    one = strategy(name)
    told = []
    for _ in range(7):
        told.append((one.test(FIVE, "ann"), one.hit(FIVE, "ann"), one.get_window_stats(FIVE, "ann").remaining))
    assert told == [(True, True, 4 - n) for n in range(5)] + [(False, False, 0)] * 2
    assert one.hit(FIVE, "bob") is True
    clock.advance(120)
    assert (one.hit(FIVE, "ann"), one.get_window_stats(FIVE, "ann").remaining) == (True, 4)


@pytest.mark.parametrize("name", NAMES)
def test_a_cost_is_taken_whole_or_not_at_all_and_clear_forgets_one_key(
    strategy: Callable[..., Any], name: str
) -> None:
    one = strategy(name)
    assert [one.hit(FIVE, "ann", cost=cost) for cost in (3, 3, 2, 1, 9)] == [True, False, True, False, False]
    assert one.hit(FIVE, "bob", cost=5) is True
    one.clear(FIVE, "ann")
    assert one.get_window_stats(FIVE, "ann").remaining == 5
    assert one.get_window_stats(FIVE, "bob").remaining == 0


def test_a_fixed_window_resets_when_the_first_hits_window_ends(strategy: Callable[..., Any], clock: ManualClock) -> None:
    one = strategy("fixed-window")
    begun = clock.now_us / 1e6
    one.hit(FIVE, "ann")
    clock.advance(25)
    one.hit(FIVE, "ann")
    assert one.get_window_stats(FIVE, "ann").reset_time == pytest.approx(begun + 60)


def test_a_moving_window_resets_when_its_oldest_hit_leaves(strategy: Callable[..., Any], clock: ManualClock) -> None:
    one = strategy("moving-window")
    begun = clock.now_us / 1e6
    for wait in (10, 20, 0):
        one.hit(FIVE, "ann")
        clock.advance(wait)
    assert one.get_window_stats(FIVE, "ann") == (pytest.approx(begun + 60), 2)
    clock.advance(31)  # the first has left
    assert one.get_window_stats(FIVE, "ann") == (pytest.approx(begun + 70), 3)


def test_a_sliding_counter_tells_both_of_its_counts(clock: ManualClock) -> None:
    storage: Any = storage_from_string(f"tidegate+memory://limits-{next(numbers)}", clock=clock)
    pick = random.Random(5)
    period_us = 60_000_000
    for trial in range(120):
        previous, current = pick.choice([0, 1, 2, 5, 300, 70_000]), pick.choice([0, 1, 2, 3, 100, 50_000])
        key, start = f"key-{trial}", clock.now_us - clock.now_us % period_us
        clock.now_us = start + period_us // 3
        assert not previous or storage.acquire_sliding_window_entry(key, 10**9, 60, previous)
        clock.now_us = start + period_us + pick.randrange(period_us)
        assert not current or storage.acquire_sliding_window_entry(key, 10**9, 60, current)
        rest_us = period_us - clock.now_us % period_us
        told = storage.get_sliding_window(key, 60)
        if 0 < previous * rest_us <= period_us:
            previous = 1  # what weighs less than one unit is told as one
        rest = rest_us / 1e6
        assert told == (previous, rest if previous else 0, current, rest + 60 if current else 0), trial


def test_a_moving_window_never_lets_more_through_in_any_period_than_its_limit(clock: ManualClock) -> None:
    storage: Any = storage_from_string(f"tidegate+memory://limits-{next(numbers)}", clock=clock)
    pick, admitted = random.Random(7), []
    for _ in range(3000):
        clock.advance_us(pick.randrange(4_000_000))
        if storage.acquire_entry("key", 5, 60):
            admitted.append(clock.now_us)
    assert all(later - earlier >= 60_000_000 for earlier, later in zip(admitted, admitted[5:], strict=False))
    assert len(admitted) > 400


def test_a_refused_hit_of_a_fixed_window_takes_nothing_though_the_count_it_asked_for_is_told(clock: ManualClock) -> None:
    storage: Any = storage_from_string(f"tidegate+memory://limits-{next(numbers)}", clock=clock)
    key = FIVE.key_for("ann")
    assert [storage.incr(key, 60) for _ in range(7)] == [1, 2, 3, 4, 5, 6, 6]
    assert storage.get(key) == 5


def test_keys_that_do_not_tell_their_limit_count_on_and_end_after_their_own_time(clock: ManualClock) -> None:
    storage: Any = storage_from_string(f"tidegate+memory://limits-{next(numbers)}", clock=clock)
    now = clock.now_us / 1e6
    assert [storage.incr("mine", 10), storage.incr("mine", 10, 5), storage.incr("other", 99)] == [1, 6, 1]
    assert (storage.get("mine"), storage.get("other"), storage.get("nobody")) == (6, 1, 0)
    assert (storage.get_expiry("mine"), storage.get_expiry("nobody")) == (pytest.approx(now + 10), pytest.approx(now))
    storage.clear("other")
    clock.advance(10)
    assert (storage.get("mine"), storage.get("other")) == (0, 0)
    # Looks like the key of a limit, but is asked for with another time: the caller's own.
    assert [storage.incr("x/1/1/minute", 10) for _ in range(3)] == [1, 2, 3]


def test_a_reset_begins_anew_for_every_process_that_shares_the_store(tmp_path: Path) -> None:
    uri = f"tidegate+shared://{tmp_path}/table?size=1MiB"
    one, other = (STRATEGIES["fixed-window"](storage_from_string(uri)) for _ in range(2))
    for round_ in range(3):
        assert [one.hit(FIVE, "ann", cost=5), other.hit(FIVE, "ann")] == [True, False], round_
        (one if round_ % 2 else other).storage.reset()
    assert one.storage.check() is True


def test_times_are_since_1970_though_the_table_counts_from_boot(tmp_path: Path) -> None:
    one = STRATEGIES["fixed-window"](storage_from_string(f"tidegate+shared://{tmp_path}/table?size=1MiB"))
    one.hit(FIVE, "ann")
    assert one.get_window_stats(FIVE, "ann").reset_time == pytest.approx(time.time() + 60, abs=5)


def test_threads_at_once_get_the_limit_and_not_one_more(clock: ManualClock) -> None:
    hundred = limits.parse("100/hour")
    for name in NAMES:
        one = STRATEGIES[name](storage_from_string(f"tidegate+memory://limits-{next(numbers)}", clock=clock))
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(lambda _, one=one: one.hit(hundred, "ann"), range(400))) == 100, name


def test_a_log_too_large_for_its_table_merges_neighbours_and_lets_no_more_through(tmp_path: Path) -> None:
    storage: Any = storage_from_string(f"tidegate+shared://{tmp_path}/table?size=1MiB")
    many = limits.parse("1000000/hour")
    one = STRATEGIES["moving-window"](storage)
    assert one.hit(many, "ann", cost=999_999) and one.hit(many, "ann") and not one.hit(many, "ann")


def test_what_is_wrong_is_a_configuration_error_that_says_what_was_expected() -> None:
    with pytest.raises(ConfigurationError, match="size"):
        storage_from_string("tidegate+memory://x?size=many")
    with pytest.raises(ConfigurationError, match="unknown storage option 'colour', expected one of clock"):
        storage_from_string("tidegate+memory://x", colour="red")
    with pytest.raises(ConfigurationError, match="on_store_failure is 'maybe', expected 'open'"):
        storage_from_string("tidegate+memory://x", on_store_failure="maybe")
    storage: Any = storage_from_string(f"tidegate+memory://limits-{next(numbers)}")
    with pytest.raises(ConfigurationError, match="cannot be counted"):
        storage.acquire_entry("key", 5, 10**10)


@pytest.mark.parametrize(("policy", "told"), [("open", True), ("closed", False), ("raise", StorageError)])
def test_a_store_that_does_not_answer_is_what_the_option_says(
    make: Callable[..., None], build: Path, tmp_path: Path, policy: str, told: Any
) -> None:
    holder = build / "tests" / "fcgi" / "hold_store"
    make(str(holder))
    rules, uri = tmp_path / "rules.yaml", f"shared://{tmp_path}/table?size=128KiB"  # one lock for all of it
    rules.write_text("policies: [{name: stalling, rules: 1000/hour}]\n")
    Gate(rules, store=uri).judge_wsgi({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"})
    storage: Any = storage_from_string(f"tidegate+{uri}", on_store_failure=policy, wrap_exceptions=True)
    assert storage.incr("a/9/1/minute", 60) == 1
    with standing_still(holder, rules, uri):
        if told is StorageError:
            with pytest.raises(StorageError):
                storage.incr("a/9/1/minute", 60)
        else:
            assert (storage.incr("a/9/1/minute", 60) <= 9) is told
            assert storage.acquire_entry("b/9/1/minute", 9, 60) is told
        assert storage.check() is False


# ---- the two that people have ----

FLASK_LIMITER = """
from flask import Flask
from flask_limiter import Limiter
from flask_limiter.util import get_remote_address
import tidegate.limits_storage

app = Flask(__name__)
limiter = Limiter(
    get_remote_address, app=app, storage_uri="tidegate+shared://{folder}/limits?size=1MiB", strategy="{strategy}",
    headers_enabled=True,
)

@app.get("/")
@limiter.limit("7/hour")
def root():
    return "ok"
"""

SLOWAPI = """
from fastapi import FastAPI, Request, Response
from slowapi import Limiter, _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded
from slowapi.util import get_remote_address
import tidegate.limits_storage

limiter = Limiter(
    key_func=get_remote_address, storage_uri="tidegate+shared://{folder}/limits?size=1MiB", strategy="{strategy}",
    headers_enabled=True,
)
app = FastAPI()
app.state.limiter = limiter
app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)

@app.get("/")
@limiter.limit("7/hour")
async def root(request: Request, response: Response):
    return "ok"
"""


@pytest.mark.parametrize("strategy", ["fixed-window", "moving-window"])
@pytest.mark.parametrize("site", ["flask-limiter", "slowapi"])
def test_four_workers_of_an_existing_site_share_one_count_after_one_import_and_one_uri(
    tmp_path: Path, site: str, strategy: str
) -> None:
    flask = site == "flask-limiter"
    (tmp_path / "site_app.py").write_text((FLASK_LIMITER if flask else SLOWAPI).format(folder=tmp_path, strategy=strategy))
    command = ("gunicorn", "--workers", "4", "site_app:app") if flask else ("uvicorn", "--workers", "4", "site_app:app")
    with Server(tmp_path, *command, workers=4) as server:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: server.ask("GET", "/"), range(24)))
    assert Counter(status for status, _, _ in answers) == {200: 7, 429: 17}, server.log.read_text()
    left = sorted(int(headers["X-RateLimit-Remaining"]) for status, headers, _ in answers if status == 200)
    # The strategy asks for what is left after the hit, in a call of its own: others may have hit in between.
    assert len(left) == 7 and all(number <= 6 for number in left)
    resets = {float(headers["X-RateLimit-Reset"]) for _, headers, _ in answers}
    assert all(abs(reset - time.time()) < 3700 for reset in resets) and math.isfinite(max(resets))


def test_the_package_registers_its_schemes_when_it_is_imported() -> None:
    assert tidegate.limits_storage.TidegateStorage.STORAGE_SCHEME == ["tidegate+shared", "tidegate+memory"]
    assert type(storage_from_string("async+tidegate+memory://x")).__name__ == "AsyncTidegateStorage"
