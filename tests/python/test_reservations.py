"""Reservations: random traces against the reference on every store, and what people do with Limiter.reserve."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tidegate import Limiter, ManualClock, Reservation

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "reference"), str(TESTS / "redis")]
import traces
from server import Server, server
from test_redis_conformance import within_clock
from test_traces import SEED, Made, compare, run_program

CASE_COUNT = 200
ASKED_PER_CASE = 90


@pytest.fixture(scope="module")
def made() -> Made:
    seeds = [f"reserve {SEED}:{i}" for i in range(CASE_COUNT)]
    make = functools.partial(traces.random_case, asked_count=ASKED_PER_CASE, reserves=True)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(make, seeds, chunksize=20))


def test_random_reservations_are_many_and_of_every_kind(made: Made) -> None:
    text = "".join(case.text() for case, _ in made)
    for verb, least in {"reserve": 5000, "settle": 2000, "renew": 500, "reset": 100, "rule": 500}.items():
        assert text.count(f"\n{verb} ") > least, verb
    held = [traces.Player() for _ in made]
    lapsed = 0
    for player, (case, _) in zip(held, made, strict=True):
        for step in case.steps:
            before = len(player.table.leases)
            player.play(step)
            lapsed += step.verb in ("hit", "peek") and len(player.table.leases) < before
    assert lapsed > 500, "leases end without being settled"


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_reservations_on_a_table_equal_the_reference(
    kind: str, made: Made, tmp_path: Path, build: Path, make: Callable[..., None]
) -> None:
    make(str(build / "tests" / "replay"))
    store = "memory://" if kind == "memory" else f"shared://{tmp_path}/table"
    compare(made, run_program(build / "tests" / "replay", store))


def test_reservations_under_sanitizers_equal_the_reference(made: Made, build: Path, make: Callable[..., None]) -> None:
    program = build / "asan" / "tests" / "replay"
    make(str(program), "asan")
    compare(made[:100], run_program(program, "memory://"))


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


def test_reservations_on_redis_equal_the_reference(
    redis: Server, made: Made, build: Path, make: Callable[..., None]
) -> None:
    make(str(build / "tests" / "replay"))
    some = [(case, expected) for case, expected in made if within_clock(case)]
    assert len(some) > CASE_COUNT // 2
    compare(some, run_program(build / "tests" / "replay", redis.patient))
    assert not redis.keys(), "a case's reset leaves nothing"


# ---- what people do ----


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["sliding_log", "fixed_window", "sliding_counter", "token_bucket", "leaky_bucket"])
def limiter(request: pytest.FixtureRequest, clock: ManualClock) -> Limiter:
    return Limiter(f"10000/minute {request.param}" + (" resolution 1 s" if request.param == "sliding_log" else ""),
                   store="memory://", clock=clock)  # fmt: skip


def left(limiter: Limiter) -> int:
    return limiter.peek("u").remaining


def test_settling_makes_it_what_it_really_was(limiter: Limiter) -> None:
    with limiter.reserve("u", cost=4000) as one:
        assert isinstance(one, Reservation) and one and one.decision.remaining == 6000
        assert left(limiter) == 6000
        assert one.settle(1000)
        assert left(limiter) == 9000
        assert one.settle(9), "a second call does nothing"
        assert left(limiter) == 9000
    assert left(limiter) == 9000
    with limiter.reserve("u", cost=4000) as one:
        one.settle(8999)
    assert left(limiter) == 1
    with limiter.reserve("u", cost=1) as one:
        one.settle(501)
    assert left(limiter) == 0, "work that is done is charged beyond the limit"
    assert not limiter.hit("u")


def test_left_by_an_exception_all_comes_back_and_left_without_a_word_the_estimate_stands(limiter: Limiter) -> None:
    with pytest.raises(ZeroDivisionError), limiter.reserve("u", cost=4000):
        1 / 0  # noqa: B018
    assert left(limiter) == 10000
    with limiter.reserve("u", cost=4000):
        pass
    assert left(limiter) == 6000
    with pytest.raises(ZeroDivisionError), limiter.reserve("u", cost=4000) as one:
        one.settle(3000)
        1 / 0  # noqa: B018
    assert left(limiter) == 3000, "what was settled stays settled"


def test_what_is_refused_holds_nothing(limiter: Limiter) -> None:
    with limiter.reserve("u", cost=9000):
        with limiter.reserve("u", cost=2000) as other:
            assert not other and other.decision.retry_after > 0
            assert other.settle(5), "nothing to settle"
        assert left(limiter) == 1000


def test_a_lease_that_ends_gives_back_to_the_very_next_hit(limiter: Limiter, clock: ManualClock) -> None:
    one = limiter.reserve("u", cost=10000, lease=5)
    one.__enter__()
    clock.advance_us(4_999_999)
    assert not limiter.peek("u", cost=9000)
    clock.advance_us(1)
    assert limiter.hit("u", cost=9000), "to the microsecond, all of it is back"
    assert not one.renew(60), "it has ended"
    before = left(limiter)
    assert one.settle(700)
    assert left(limiter) == before - 700, "what has come back is charged whole"


def test_renewing_moves_the_end(limiter: Limiter, clock: ManualClock) -> None:
    with limiter.reserve("u", cost=10000, lease=2) as one:
        clock.advance(1.5)
        assert one.renew(2)
        clock.advance(1.5)
        assert not limiter.peek("u", cost=9500)
        one.settle(0)
        assert not one.renew(2)
    assert limiter.hit("u", cost=9500)


def test_a_refund_of_the_decision_gives_nothing_twice(limiter: Limiter) -> None:
    with limiter.reserve("u", cost=4000) as one:
        one.decision.refund()
        assert left(limiter) == 6000, "that is what settle(0) is for"
        one.settle(0)
        one.decision.refund()
    assert left(limiter) == 10000


def test_several_identities_are_held_together(clock: ManualClock) -> None:
    limiter = Limiter("10/minute token_bucket; 15/hour", store="memory://", clock=clock)
    with limiter.reserve(dims={"ip": "192.0.2.1", "user": "u"}, cost=8) as one:
        assert len(one.decision.rules) == 4
        assert limiter.peek(dims={"user": "u"}).remaining == 2
        one.settle(3)
    for dims in ({"user": "u"}, {"ip": "192.0.2.1"}):
        assert limiter.peek(dims=dims).remaining == 7
    limiter.reset(dims={"user": "u"})
    with limiter.reserve(dims={"ip": "192.0.2.1", "user": "u"}, cost=4) as one:
        limiter.reset(dims={"user": "u"})
        one.settle(1)
    assert limiter.peek(dims={"user": "u"}).remaining == 10, "what was reset owes nothing"
    assert limiter.peek(dims={"ip": "192.0.2.1"}).remaining == 6


def test_reserving_on_an_event_loop(limiter: Limiter) -> None:
    async def main() -> None:
        async with limiter.reserve("u", cost=4000) as one:
            assert one and left(limiter) == 6000
            one.settle(1000)
            assert left(limiter) == 9000
            assert await one.settle_async(5)
        async with limiter.reserve("u", cost=100) as one:
            assert await one.renew_async(30)
        assert left(limiter) == 8900

        async def cancelled() -> None:
            async with limiter.reserve("u", cost=4000):
                await asyncio.sleep(60)

        task = asyncio.create_task(cancelled())
        await asyncio.sleep(0.01)
        assert left(limiter) == 4900
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert left(limiter) == 8900

    asyncio.run(main())


def forked(child: Callable[[], bool]) -> bool:
    """What a child answers that is forked here and leaves this function's callers by their own ends."""
    pid = os.fork()
    if pid == 0:
        answer = 1
        with contextlib.suppress(BaseException):
            answer = 0 if child() else 1
        os._exit(answer)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_only_the_process_that_reserved_settles_however_a_forked_child_leaves(limiter: Limiter) -> None:
    with limiter.reserve("u", cost=4000) as one:

        def leaves(actual: int | None, failing: bool) -> bool:
            """As a child does that runs on where the block ends."""
            if actual is not None and one.settle(actual):
                return False
            if one.renew(5):
                return False
            error = ValueError("in the child") if failing else None
            one.__exit__(ValueError if failing else None, error, None)
            return bool(one)

        async def leaves_a_loop() -> bool:
            try:
                async with limiter.reserve("u", cost=100) as inner:
                    pid = os.fork()
                    if pid == 0:
                        raise KeyboardInterrupt
                    os.waitpid(pid, 0)
                    return left(limiter) == 5900 and inner.settle(50)
            except KeyboardInterrupt:
                os._exit(0)

        for actual in (None, 0, 1000, 9000):
            for failing in (False, True):
                assert forked(lambda actual=actual, failing=failing: leaves(actual, failing))  # type: ignore[misc]
                assert left(limiter) == 6000
        assert asyncio.run(leaves_a_loop())
        assert left(limiter) == 5950
        assert one.settle(1000), "its own process does"
    assert left(limiter) == 8950


def test_a_child_makes_reservations_of_its_own(limiter: Limiter) -> None:
    def reserves() -> bool:
        with limiter.reserve("u", cost=300) as one:
            return one.settle(200)

    with limiter.reserve("u", cost=4000):
        assert forked(reserves)
        assert left(limiter) == 5800


def test_wrong_arguments_are_errors() -> None:
    limiter = Limiter("10/minute", store="memory://")
    for lease in (0.5, 86401, float("nan")):
        with pytest.raises(ValueError, match="lease is in seconds"), limiter.reserve("a", lease=lease):
            pass
    with pytest.raises(TypeError):
        limiter.reserve("a", tokens=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="cost"), limiter.reserve("a", cost="5"):  # type: ignore[arg-type]
        pass
    one = limiter.reserve("a")
    for use in (lambda: bool(one), lambda: one.decision, lambda: one.settle(1), lambda: one.renew(5)):
        with pytest.raises(RuntimeError, match="entering"):
            use()
    with one:
        with pytest.raises(RuntimeError, match="once"):
            one.__enter__()
        with pytest.raises(TypeError):
            one.settle(1.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError):
            one.settle(-1)


def test_a_limiter_that_is_switched_off_reserves_nothing_and_lets_all_through() -> None:
    limiter = Limiter("1/hour", store="memory://", enabled=False)
    for _ in range(3):
        with limiter.reserve("a", cost=5) as one:
            assert one and one.settle(9) and not one.renew(5)


@pytest.mark.parametrize("scheme", ["redis", "tiered"])
def test_reserving_on_redis(redis: Server, scheme: str) -> None:
    uri = redis.patient if scheme == "redis" else f"tiered+{redis.patient}"
    limiter = Limiter("10000/hour token_bucket; 20000/day", name=scheme, store=uri)
    with limiter.reserve("u", cost=4000) as one:
        assert one and limiter.peek("u").remaining <= 6001
        assert one.settle(1000) and one.settle(5)
        assert 9000 <= limiter.peek("u").remaining <= 9001
    with pytest.raises(ZeroDivisionError), limiter.reserve("u", cost=9000):
        assert not limiter.hit("u", cost=5000)
        1 / 0  # noqa: B018
    assert limiter.hit("u", cost=5000), "what was denied a moment ago is not remembered"

    async def main() -> None:
        async with limiter.reserve("u", cost=3000) as one:
            one.settle(100)
            assert (await limiter.peek_async("u")).remaining <= 1010, "done when the block is left"
        assert 3890 <= (await limiter.peek_async("u")).remaining <= 3950
        async with limiter.reserve("u", cost=3000) as one:
            assert await one.settle_async(0) and await one.settle_async(7)
            assert (await limiter.peek_async("u")).remaining >= 3890
        async with limiter.reserve("u", cost=3000) as one:
            assert await one.renew_async(30)

        async def cancelled() -> None:
            async with limiter.reserve("v", cost=4000):
                await asyncio.sleep(60)

        task = asyncio.create_task(cancelled())
        while (await limiter.peek_async("v")).remaining > 6010:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await limiter.peek_async("v")).remaining == 10000

    asyncio.run(main())


def test_who_is_cancelled_again_and_again_while_it_enters_holds_nothing(redis: Server) -> None:
    limiter = Limiter("10000/hour", name="again", store=f"{redis.uri}?timeout_ms=2000", algorithm="token_bucket")

    async def main() -> int:
        await limiter.peek_async("u")
        redis.signal(signal.SIGSTOP)
        entering = asyncio.ensure_future(limiter.reserve("u", cost=4000).__aenter__())
        for _ in range(5):
            await asyncio.sleep(0.01)
            entering.cancel()
        redis.signal(signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await entering
        return (await limiter.peek_async("u")).remaining

    assert asyncio.run(main()) == 10000


@pytest.mark.parametrize("algorithm", ["sliding_log", "fixed_window", "sliding_counter", "token_bucket", "leaky_bucket"])
def test_all_that_was_taken_can_be_given_back_on_a_redis_with_its_own_clock(redis: Server, algorithm: str) -> None:
    limiter = Limiter(f"100/hour {algorithm}", name="all", store=redis.patient)
    decision = limiter.hit("u", cost=3)
    decision.refund()
    assert limiter.peek("u").remaining == 100
    with limiter.reserve("u", cost=5) as one:
        assert one.settle(0)
    assert limiter.peek("u").remaining == 100
    with limiter.reserve("u", cost=5) as one:
        assert one.settle(120)
    assert limiter.peek("u").remaining == 0


EVERY_ALGORITHM = ("sliding_log", "fixed_window", "sliding_counter", "token_bucket", "leaky_bucket")


def test_a_lease_longer_than_its_rules_period_is_renewed_and_ends_on_redis_as_on_a_table(
    redis: Server, tmp_path: Path
) -> None:
    limiters = [
        Limiter(f"10/20ms {algorithm}{more}", store=store, name=f"long-{algorithm}{len(more)}")
        for algorithm in EVERY_ALGORITHM
        for more in ("", "; 100/hour")
        for store in (redis.patient, f"shared://{tmp_path}/table")
    ]
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(limiter.reserve("u", cost=5, lease=2)) for limiter in limiters]
        for _ in range(3):  # past the end of the first lease
            time.sleep(0.8)
            assert [one.renew(2) for one in held] == [True] * 20, "the states have been fresh for long, no lease has ended"
        assert all(limiter.peek("u", cost=10) for limiter in limiters), "what was taken has left as ever"
        for limiter in limiters[:10]:
            limiter.reset("u")
        assert [one.renew(1) for one in held] == [False] * 10 + [True] * 10, "what is forgotten is not renewed"
        time.sleep(1.1)
        assert not any(one.renew(1) for one in held), "the others have ended"
    for limiter in limiters:
        limiter.reset("u")


def test_a_key_that_is_kept_for_a_lease_goes_when_that_is_settled(redis: Server) -> None:
    def kept() -> list[int]:
        """How long its key lasts yet, where it is."""
        return [left for key, left in redis.keys().items() if ":kept:" in key]

    for algorithm in EVERY_ALGORITHM:
        limiter = Limiter(f"10/20ms {algorithm}", store=redis.patient, name="kept")
        with limiter.reserve("u", cost=5, lease=600) as one:
            time.sleep(0.1)
            (lasts,) = kept()
            assert 590_000 < lasts <= 600_001
            assert limiter.hit("u", cost=3)
            (lasts,) = kept()
            assert 590_000 < lasts <= 600_001, "others keep the lease"
            one.settle(2)
        time.sleep(0.1)
        assert not kept(), algorithm


def test_a_lease_on_redis_ends_by_the_servers_clock(redis: Server) -> None:
    limiter = Limiter("5/hour", name="ends", store=redis.patient)
    limiter.reserve("u", cost=5, lease=1).__enter__()
    assert not limiter.hit("u")
    time.sleep(1.05)
    assert limiter.hit("u", cost=5)
    assert all(left > 0 for left in redis.keys().values()), "no key without an expiry"


def test_a_silent_redis_makes_a_reservation_follow_the_failure_policy(caplog: pytest.LogCaptureFixture) -> None:
    with server() as other:
        limiter = Limiter("5/hour", store=other.patient)
        closed = Limiter("5/hour", store=other.patient, on_store_failure="closed")
        held = limiter.reserve("u", cost=2)
        held.__enter__()
    assert not held.settle(1), "it cannot be told"
    held.__exit__(None, None, None)
    with limiter.reserve("u") as one:
        assert one and one.decision.degraded
    with closed.reserve("u") as one:
        assert not one and one.decision.degraded


def test_more_than_512_leases_of_one_client_are_refused_on_redis(redis: Server) -> None:
    # Slow: leases in a bucket that has drained meanwhile hold nothing, and are forgotten with it.
    limiter = Limiter("100000/week token_bucket", name="many", store=redis.patient, on_store_failure="closed")
    kept = [limiter.reserve("u").__enter__() for _ in range(512)]
    assert all(kept)
    with limiter.reserve("u") as one:
        assert not one and one.decision.degraded
    assert limiter.hit("u") and limiter.hit("v"), "a hit does not need one"
    with limiter.reserve("v") as one:
        assert one and not one.decision.degraded
    assert kept[0].settle(0)
    with limiter.reserve("u") as one:
        assert one and not one.decision.degraded


def hold_and_wait(uri: str, ready: "multiprocessing.SimpleQueue[int]") -> None:
    Limiter("5/hour token_bucket", name="places", store=uri).reserve("u", lease=1).__enter__()
    ready.put(os.getpid())
    time.sleep(60)


@pytest.mark.fault("R161")
@pytest.mark.parametrize(("kind", "method"), [("table", "spawn"), ("redis", "fork")])
def test_places_held_by_killed_processes_are_free_when_their_leases_have_ended(
    kind: str, method: str, redis: Server, tmp_path: Path
) -> None:
    uri = redis.patient if kind == "redis" else f"shared://{tmp_path}/table"
    limiter = Limiter("5/hour token_bucket", name="places", store=uri)
    context = multiprocessing.get_context(method)
    ready: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    holders = [context.Process(target=hold_and_wait, args=(uri, ready)) for _ in range(5)]  # type: ignore[attr-defined]
    for holder in holders:
        holder.start()
    pids = [ready.get() for _ in holders]
    if method == "fork":  # five programs take longer to begin than the first one's lease lasts
        assert not limiter.hit("u")
    begun = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for holder in holders:
        holder.join()
    while limiter.peek("u").remaining < 5:
        assert time.monotonic() - begun < 20
        time.sleep(0.01)
    assert limiter.hit("u", cost=5)
    assert all(left > 0 for left in redis.keys().values())


def test_a_table_without_room_for_another_lease_says_so_and_follows_the_failure_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_, closed = (
        Limiter("100000/hour token_bucket", store=f"shared://{tmp_path}/table?size=64KiB", on_store_failure=policy)
        for policy in ("open", "closed")
    )
    kept = []
    for _ in range(5000):
        one = closed.reserve("u", lease=3600).__enter__()
        if not one:
            break
        kept.append(one)
    assert 50 < len(kept) < 5000
    assert one.decision.degraded
    remaining = closed.peek("u").remaining
    with open_.reserve("u") as let_through:
        assert let_through and let_through.decision.degraded
    assert closed.peek("u").remaining == remaining == 100000 - len(kept), "nothing is taken that could not come back"
    assert [record.getMessage() for record in caplog.records if "leases-full" in record.getMessage()]
    assert closed.hit("u"), "a hit does not need one"
    for other in kept:
        other.settle(0)
    with closed.reserve("u") as again:
        assert again and not again.decision.degraded
