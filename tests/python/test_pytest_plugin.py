"""tidegate.pytest_plugin in projects of its users: clocks, fresh counts, the switch, parallel runs, event loops."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from server import server

pytest_plugins = ["pytester"]

# A project as people have them: the limits are made when the module is imported.
SHOP = """
from fastapi import Depends, FastAPI
from tidegate import Limiter
from tidegate.fastapi import install, rate_limit

app = FastAPI()
install(app)
logins = Limiter("2/minute", name="logins")

@app.get("/", dependencies=[Depends(rate_limit("2/day"))])
def root():
    return "ok"

def create():
    return Limiter("2/minute", name="made in a test")
"""

TESTS = """
import asyncio, time
import pytest
from fastapi.testclient import TestClient
from tidegate import Limiter
from tidegate._core import switch_off
import shop

@pytest.mark.parametrize("number", range(12))
def test_each_begins_with_fresh_counts(number):
    client = TestClient(shop.app)
    assert [client.get("/").status_code for _ in range(3)] == [200, 200, 429]

def test_only_the_test_moves_the_time(tidegate_clock):
    assert [shop.logins.hit("ann").allowed for _ in range(3)] == [True, True, False]
    tidegate_clock.advance(59)
    assert not shop.logins.hit("ann")
    tidegate_clock.advance(1)
    assert shop.logins.hit("ann")

def test_counts_can_begin_anew_within_a_test(tidegate_reset):
    for _ in range(3):
        assert [shop.logins.hit("ann").allowed for _ in range(3)] == [True, True, False]
        tidegate_reset()

def test_nothing_is_limited(tidegate_off):
    client = TestClient(shop.app)
    answers = [client.get("/") for _ in range(9)]
    assert {answer.status_code for answer in answers} == {200}
    assert "X-RateLimit-Limit" not in answers[0].headers
    assert all(shop.logins.hit("ann") for _ in range(9))
    assert shop.logins.hit("ann").remaining == 2

def test_nothing_waits_reserves_or_asks_a_store(tidegate_off):
    full = Limiter("1/hour", name="full")
    nobody = Limiter("1/hour token_bucket", name="nobody", store="redis://127.0.0.1:1/?timeout_ms=2000")

    async def in_a_loop(limiter):
        for _ in range(3):
            told = [await ask("ann") for ask in (limiter.hit_async, limiter.wait_async, limiter.peek_async)]
            assert [(one.allowed, one.degraded, one.remaining) for one in told] == [(True, False, 1)] * 3
            async with limiter.reserve("ann") as reservation:
                assert reservation and await reservation.settle_async(5) and reservation.decision.remaining == 1
        await limiter.refund_async("ann")
        await limiter.reset_async("ann")

    for limiter in full, nobody:
        begun = time.monotonic()
        for _ in range(3):
            told = limiter.hit("ann"), limiter.wait("ann", timeout=0), limiter.peek("ann", cost=9)
            assert [(one.allowed, one.degraded, one.remaining) for one in told] == [(True, False, 1)] * 3
            with limiter.reserve("ann", cost=9) as reservation:
                assert reservation and reservation.settle(5) and reservation.decision.remaining == 1
        limiter.refund("ann")
        limiter.reset("ann")
        limiter.override("deny", seconds=60)
        limiter.pause(60)
        asyncio.run(in_a_loop(limiter))
        assert time.monotonic() - begun < 1

def test_and_what_was_reserved_before_is_still_settled():
    limiter = Limiter("9/hour", name="reserved")
    with limiter.reserve("ann", cost=5) as reservation:
        was = switch_off(True)
        reservation.settle(2)
        switch_off(was)
    assert limiter.peek("ann").remaining == 7

def test_and_is_again_afterwards():
    assert [shop.logins.hit("ann").allowed for _ in range(3)] == [True, True, False]
"""

INI = "[pytest]\ntidegate_clock = manual\ntidegate_reset = true\n"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("TIDEGATE_STORE", "TIDEGATE_ENABLED", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(shop=SHOP, test_shop=TESTS)
    pytester.makeini(INI)
    return pytester


def test_with_a_manual_clock_every_test_begins_with_fresh_counts_and_only_tests_move_time(
    project: pytest.Pytester,
) -> None:
    project.runpytest_subprocess("-q").assert_outcomes(passed=18)


@pytest.mark.fault("R169")
def test_parallel_runs_are_as_deterministic_and_touch_no_table_of_the_machine(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_maps="""
        import shop

        def test_no_table_of_the_machine_is_mapped():
            assert shop.logins.hit("ann")
            maps = open("/proc/self/maps").read()
            assert not [line for line in maps.splitlines() if "tidegate" in line and ".so" not in line]
        """
    )
    project.runpytest_subprocess("-q", "-n", "2").assert_outcomes(passed=19)


def test_in_any_order_the_outcomes_are_the_same(project: pytest.Pytester) -> None:
    names = ["test_and_is_again_afterwards", "test_nothing_is_limited", "test_only_the_test_moves_the_time"]
    project.runpytest_subprocess("-q", *(f"test_shop.py::{name}" for name in names)).assert_outcomes(passed=3)


def test_without_settings_a_test_that_asks_has_a_clock_for_what_it_makes_and_others_have_none(
    project: pytest.Pytester,
) -> None:
    project.makeini("[pytest]\n")
    project.makepyfile(
        test_shop="""
        import time
        import shop

        def test_what_a_test_makes_counts_by_its_clock(tidegate_clock, monkeypatch):
            monkeypatch.setenv("TIDEGATE_STORE", "memory://mine")
            limiter = shop.create()
            assert [limiter.hit("ann").allowed for _ in range(3)] == [True, True, False]
            tidegate_clock.advance(60)
            assert limiter.hit("ann")

        def test_the_next_one_has_another(tidegate_clock, tidegate_reset, monkeypatch):
            monkeypatch.setenv("TIDEGATE_STORE", "memory://mine")
            limiter = shop.create()
            assert [limiter.hit("ann").allowed for _ in range(3)] == [True, True, False]

        def test_others_have_real_time(monkeypatch):
            monkeypatch.setenv("TIDEGATE_STORE", "memory://mine")
            limiter = shop.create()
            first = limiter.hit("ann").reset_after_us
            time.sleep(0.01)
            assert limiter.peek("ann").reset_after_us < first
        """
    )
    os.environ["TIDEGATE_STORE"] = f"memory://shop-{os.getpid()}"
    project.runpytest_subprocess("-q").assert_outcomes(passed=3)
    del os.environ["TIDEGATE_STORE"]


@pytest.mark.parametrize(
    ("ini", "words"),
    [
        ("tidegate_clock = sundial", "*tidegate_clock is 'sundial', expected 'manual' or 'real'*"),
        ("tidegate_reset = true", "*needs tidegate_clock = manual*"),
    ],
)
def test_a_wrong_setting_stops_the_run_and_says_what_was_expected(
    project: pytest.Pytester, ini: str, words: str
) -> None:
    project.makeini(f"[pytest]\n{ini}\n")
    done = project.runpytest_subprocess("-q")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([words])


def test_the_plugin_comes_with_the_package() -> None:
    found = {point.name: point.value for point in importlib.metadata.entry_points(group="pytest11")}
    assert found.get("tidegate") == "tidegate.pytest_plugin"


def test_event_loops_opened_and_closed_for_each_test_leave_nothing_behind(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_shop="""
        import asyncio, os
        import httpx
        import pytest
        import shop

        async def ask():
            transport = httpx.ASGITransport(shop.app, client=("192.0.2.1", 5))
            async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
                told = [(await client.get("/")).status_code for _ in range(3)]
            return told, [bool(await shop.logins.hit_async("ann")) for _ in range(3)]

        @pytest.mark.parametrize("number", range(40))
        def test_in_a_loop_of_its_own(number):
            before = len(os.listdir("/proc/self/fd"))
            loop = asyncio.new_event_loop()
            try:
                assert loop.run_until_complete(ask()) == ([200, 200, 429], [True, True, False])
            finally:
                loop.close()
            assert len(os.listdir("/proc/self/fd")) <= before
        """
    )
    project.runpytest_subprocess("-q", "-W", "error").assert_outcomes(passed=40)


def test_one_limiter_on_redis_lives_through_fifty_tests_each_with_a_loop_of_its_own(project: pytest.Pytester) -> None:
    project.makeini("[pytest]\n")
    project.makepyfile(
        test_shop="""
        import asyncio, gc, os
        import pytest
        import uvloop
        from fastapi import Depends, FastAPI
        from fastapi.testclient import TestClient
        from tidegate import Limiter
        from tidegate.fastapi import install, rate_limit

        store = os.environ["SHOP_REDIS"]
        limiter = Limiter("1000/hour", name="all", store=store)
        app = FastAPI()
        install(app)
        most = []

        @app.get("/", dependencies=[Depends(rate_limit("1000/hour", name="page", store=store))])
        async def root():
            return "ok"

        async def ask(number):
            told = await asyncio.gather(*(limiter.hit_async("ann") for _ in range(3)))
            assert [(one.degraded, one.remaining) for one in told] == [(False, 999 - number * 3 - k) for k in range(3)]
            left = limiter.hit_async("bob")  # nobody awaits it, and the loop closes
            if number % 2:
                await asyncio.sleep(0)
                return left

        @pytest.mark.parametrize("number", range(50))
        def test_in_a_loop_of_its_own(number):
            before = len(os.listdir("/proc/self/fd"))
            loop = (uvloop if number % 3 == 0 else asyncio).new_event_loop()
            loop.run_until_complete(ask(number))
            loop.close()
            del loop
            gc.collect()
            assert limiter.peek("ann").remaining == 997 - number * 3
            # Starlette's client opens a loop for each request.
            told = [TestClient(app).get("/").headers["X-RateLimit-Remaining"] for _ in range(2)]
            assert told == [str(999 - number * 2), str(998 - number * 2)]
            # What all share; who carries counts takes one more where the others are busy.
            most.append(before + 4 + 1)
            assert len(os.listdir("/proc/self/fd")) <= most[0]
        """
    )
    with server() as redis:
        os.environ["SHOP_REDIS"] = redis.patient
        project.runpytest_subprocess("-q", "-W", "error").assert_outcomes(passed=50)
        del os.environ["SHOP_REDIS"]
