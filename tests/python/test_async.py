"""Questions to a remote store from coroutines: the loop goes on, and what is answered is what the call that waits answers.
How each failure is told is held by tests/c; what a server does with it by test_async_uvicorn.py."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import uvloop
from fastapi import Depends, FastAPI

from tidegate import Gate, Limiter, ManualClock, StoreError
from tidegate.asgi import TidegateMiddleware
from tidegate.fastapi import install, rate_limit

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from cluster import cluster
from server import Lateness, MachineLateness, Server, server

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


@pytest.fixture
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    if request.param == "asyncio":
        return asyncio.run
    return uvloop.run


def connections(redis: Server) -> int:
    clients = redis("CLIENT", "LIST", "TYPE", "normal")
    assert isinstance(clients, bytes)
    return clients.count(b"\n") - 1  # ours


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


# ---- a limiter


def test_what_is_awaited_is_what_the_waiting_call_answers(redis: Server, run: Run[None]) -> None:
    one = Limiter("3/minute token_bucket; 100/hour", name="x", store=redis.patient)

    async def main() -> None:
        decisions = [await one.hit_async("a") for _ in range(4)]
        assert [bool(decision) for decision in decisions] == [True, True, True, False]
        assert [decision.remaining for decision in decisions] == [2, 1, 0, 0]
        assert 19 < decisions[3].retry_after <= 20
        assert len(decisions[0].rules) == 2
        await decisions[0].refund_async()
        await decisions[0].refund_async()
        assert await one.hit_async("a") and not await one.hit_async("a")
        await one.reset_async("a")
        assert (await one.peek_async("a")).remaining == 3
        await one.refund_async("a", cost=5)
        assert (await one.hit_async(dims={"ip": "192.0.2.1"}, cost=2)).remaining == 1

    run(main())
    assert one.peek(dims={"ip": "192.0.2.1"}).remaining == 1


def test_wrong_arguments_are_told_by_the_call_and_not_by_the_awaiting(redis: Server) -> None:
    one = Limiter("3/minute", name="x", store=redis.patient)

    async def main() -> None:
        with pytest.raises(TypeError, match="who is asking"):
            one.hit_async()
        with pytest.raises(ValueError, match="cost"):
            one.hit_async("a", cost=-1)

    asyncio.run(main())


def test_a_thousand_tasks_travel_over_one_connection_and_are_counted_exactly(redis: Server, run: Run[None]) -> None:
    one = Limiter("700/hour", name="x", store=redis.patient)

    async def main() -> None:
        decisions = await asyncio.gather(*[one.hit_async("a") for _ in range(1000)])
        assert sum(map(bool, decisions)) == 700
        assert not any(decision.degraded for decision in decisions)
        assert connections(redis) <= 2  # and the one that opening the store has made

    run(main())


def test_tiers_answer_a_known_denial_without_a_turn_of_the_loop(redis: Server, run: Run[None]) -> None:
    one = Limiter("5/hour", name="x", store=f"tiered+{redis.patient}")

    async def main() -> None:
        assert sum(map(bool, await asyncio.gather(*[one.hit_async("a") for _ in range(50)]))) == 5
        redis.signal(signal.SIGSTOP)
        denied = await asyncio.wait_for(one.hit_async("a"), 0.5)
        assert not denied and not denied.degraded
        redis.signal(signal.SIGCONT)

    run(main())


def test_a_cluster_counts_exactly_for_coroutines_too() -> None:
    with cluster() as nodes:
        one = Limiter("10/hour", name="x", store=nodes.patient)

        async def main() -> None:
            for admitted in (400, 0):
                hits = await asyncio.gather(*[one.hit_async(f"client-{k % 40}") for k in range(600)])
                assert not any(hit.degraded for hit in hits)
                assert sum(map(bool, hits)) == admitted

        asyncio.run(main())


def test_a_store_in_memory_is_asked_by_the_call_itself() -> None:
    one = Limiter("3/minute", name="x", store="memory://async-at-once")

    async def main() -> None:
        hit = one.hit_async("a")
        assert one.peek("a").remaining == 2, "the hit was made before anybody awaited it"
        assert (await hit).remaining == 2

    asyncio.run(main())


def test_without_a_running_loop_the_call_waits_itself(redis: Server) -> None:
    one = Limiter("3/minute", name="x", store=redis.patient)
    hit = one.hit_async("a")
    assert one.peek("a").remaining == 2

    async def main() -> None:
        assert (await hit).remaining == 2

    asyncio.run(main())


def test_a_stopped_redis_costs_each_task_its_deadline_and_the_loop_nothing(redis: Server, run: Run[None]) -> None:
    one = Limiter("10/minute", name="x", store=redis.uri)

    async def main() -> None:
        while (await one.hit_async("a")).degraded:
            await asyncio.sleep(0.02)  # a busy machine was late
        gaps = []

        async def tick() -> None:
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.001)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        async def ask() -> float:
            began = time.monotonic()
            assert (await one.hit_async("a")).degraded
            return time.monotonic() - began

        ticking = asyncio.ensure_future(tick())
        redis.signal(signal.SIGSTOP)
        with MachineLateness() as late:
            took = await asyncio.gather(*[ask() for _ in range(100)])
            assert late.allows(max(took), 0.07)
            assert late.allows(max(gaps), 0.01)
            began = time.monotonic()
            for _ in range(100):  # known not to answer: nobody waits any more
                await ask()
            assert late.allows(time.monotonic() - began, 0.1)
        redis.signal(signal.SIGCONT)
        began = time.monotonic()
        while (await one.hit_async("a")).degraded:
            assert time.monotonic() - began < 5
            await asyncio.sleep(0.02)
        ticking.cancel()

    run(main())


def test_administrative_calls_raise_where_redis_is_silent(redis: Server) -> None:
    one = Limiter("10/minute", name="x", store=redis.patient)

    async def main() -> None:
        decision = await one.hit_async("a")
        redis.kill()
        for begin in (lambda: one.reset_async("a"), lambda: one.refund_async("a"), decision.refund_async):
            with pytest.raises(StoreError):
                await begin()
        redis.start()
        await asyncio.sleep(0)
        deadline = time.monotonic() + 5
        while True:
            try:
                await decision.refund_async()  # it may be called again
                break
            except StoreError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)

    asyncio.run(main())


def test_a_loop_that_was_held_up_reads_its_answers_before_it_calls_them_late(redis: Server, run: Run[None]) -> None:
    one = Limiter("10/minute", name="x", store=f"{redis.uri}?timeout_ms=300")

    async def main() -> None:
        while (await one.hit_async("a")).degraded:
            await asyncio.sleep(0.02)
        asked = asyncio.ensure_future(one.hit_async("a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.6)  # longer than the deadline: an application that computes
        assert not (await asked).degraded

    run(main())


# ---- tasks, loops, threads, forks


def test_a_cancelled_task_disturbs_nobody_and_leaves_nothing(redis: Server, run: Run[None]) -> None:
    one = Limiter("1000/hour token_bucket", name="x", store=redis.patient)

    async def main() -> None:
        await one.hit_async("a")
        held = sys.getrefcount(one)
        for turns in range(3):
            tasks = [asyncio.ensure_future(one.hit_async(f"t{i}")) for i in range(60)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(answer, asyncio.CancelledError) or answer.allowed for answer in done)
            assert not any(isinstance(answer, asyncio.CancelledError) for answer in done[1::2])
            del tasks, done, task
        await until(lambda: sys.getrefcount(one) <= held)
        with pytest.raises(asyncio.TimeoutError):
            redis.signal(signal.SIGSTOP)
            await asyncio.wait_for(one.hit_async("b"), 0.02)
        redis.signal(signal.SIGCONT)
        assert not (await one.hit_async("c")).degraded

    run(main())


@pytest.mark.fault("R143")
def test_a_thousand_cancelled_hits_leave_one_connection_and_no_wait(redis: Server, run: Run[None]) -> None:
    one = Limiter("100000/hour token_bucket", name="x", store=redis.patient)

    async def main() -> None:
        await one.hit_async("a")
        before = len(os.listdir("/proc/self/fd"))
        redis.signal(signal.SIGSTOP)
        tasks = [asyncio.ensure_future(one.hit_async("a")) for _ in range(1000)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        redis.signal(signal.SIGCONT)
        await one.hit_async("a")  # behind the others on the wire
        took = []
        for _ in range(10):
            began = time.monotonic()
            assert not (await one.hit_async("a")).degraded
            took.append(time.monotonic() - began)
        assert min(took) < 0.01, "on a busy machine one of them may be late, and not all"
        assert len(os.listdir("/proc/self/fd")) <= before
        assert connections(redis) <= 2

    run(main())


CLOSING = """
import asyncio, os, sys, gc
import uvloop
from tidegate import Limiter

one = Limiter("1000000/hour token_bucket", name="x", store=sys.argv[1])
new = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[sys.argv[2]]

async def hits(): return [await one.hit_async("a") for _ in range(3)]

async def leaves(): return [asyncio.ensure_future(one.hit_async("a")) for _ in range(20)]

def descriptors(): return len(os.listdir("/proc/self/fd"))

before = None
for turn in range(30):
    loop = new()
    loop.run_until_complete(hits())
    if turn % 2:
        loop.run_until_complete(leaves())  # closed with answers under way
        [task.cancel() for task in asyncio.all_tasks(loop)]
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    del loop
    gc.collect()
    before = before or descriptors()
    assert descriptors() <= before, (turn, before, descriptors())
kept = []
for turn in range(10):  # closed loops that somebody keeps
    loop = new()
    loop.run_until_complete(hits())
    loop.close()
    kept.append(loop)
    assert descriptors() <= before, (turn, before, descriptors())
print("whole")
"""


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_closed_loop_takes_its_connection_with_it_without_a_warning(redis: Server, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", CLOSING, redis.patient, kind],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("whole\n", "", 0)


VANISHING = """
import asyncio, sys
from tidegate import Limiter

one = Limiter("1000000/hour token_bucket", name="x", store=sys.argv[1])
loops = []

class Asked(asyncio.SelectorEventLoop):
    def is_closed(self):  # what other threads may do while a loop is asked
        while loops:
            loops.pop().close()
        return super().is_closed()

async def hit(): return await one.hit_async("a")

def ask(loop):
    loop.run_until_complete(hit())
    return loop

for turn in range(20):
    others = [ask(asyncio.new_event_loop()) for _ in range(3)]
    asked = ask(Asked())
    others += [ask(asyncio.new_event_loop()) for _ in range(2)]
    loops[:] = others
    del others
    last = ask(asyncio.new_event_loop())
    assert not loops
    last.close()
    asked.close()
print("whole")
"""


def test_loops_that_close_while_another_is_asked_whether_it_is_closed_do_no_harm(redis: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", VANISHING, redis.patient],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("whole\n", "", 0)


def test_loops_in_several_threads_share_a_limit_each_over_its_own_connection(redis: Server) -> None:
    one = Limiter("1000/hour token_bucket", name="x", store=redis.patient)

    async def ask() -> int:
        return sum(map(bool, await asyncio.gather(*[one.hit_async("a") for _ in range(400)])))

    with ThreadPoolExecutor(4) as pool:
        admitted = list(pool.map(lambda k: (uvloop.run if k % 2 else asyncio.run)(ask()), range(4)))
    assert sum(admitted) == 1000


def test_a_forked_child_asks_on_a_loop_of_its_own(redis: Server) -> None:
    one = Limiter("1000/hour token_bucket", name="x", store=redis.patient)

    async def ask(count: int) -> int:
        return sum(decision.degraded for decision in await asyncio.gather(*[one.hit_async("a") for _ in range(count)]))

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(ask(10)) == 0
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                os._exit(asyncio.run(ask(50)))
            finally:
                os._exit(99)
        children.append(child)
    assert loop.run_until_complete(ask(50)) == 0
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 3
    assert loop.run_until_complete(ask(1)) == 0
    loop.close()
    assert one.peek("a").remaining == 1000 - 10 - 4 * 50 - 1


def test_the_connection_keeps_nothing_of_the_task_that_opened_it(redis: Server, run: Run[None]) -> None:
    one = Limiter("1000/hour", name="x", store=redis.patient)
    of_request: contextvars.ContextVar[object] = contextvars.ContextVar("of_request")

    class Request:
        pass

    async def first() -> weakref.ref[Request]:
        request = Request()
        of_request.set(request)
        await one.hit_async("a")
        return weakref.ref(request)

    async def main() -> None:
        request = await asyncio.ensure_future(first())
        await asyncio.sleep(0.01)
        gc.collect()
        assert connections(redis) == 2
        timers = 2.1  # of the deadline, which a task's own context may wait for
        deadline = time.monotonic() + timers
        while request() is not None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
            gc.collect()

    run(main())


def test_a_call_that_waits_inside_a_loop_warns_with_its_line(redis: Server) -> None:
    one = Limiter("1000/hour", name="x", store=redis.patient)
    local = Limiter("1000/hour", name="x", store="memory://no-warning")

    async def main() -> int:
        local.hit("a")
        for _ in range(3):
            one.hit("a")
        return sys._getframe().f_lineno - 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        one.hit("a")
        threading.Thread(target=one.hit, args=("a",)).start()
        line = asyncio.run(main())
    assert [(warning.category, warning.lineno, warning.filename) for warning in caught] == [(RuntimeWarning, line, __file__)]
    assert "_async" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            asyncio.run(main())


def test_a_loop_begins_and_drops_stores_at_once_while_another_thread_opens_one_that_is_silent(
    redis: Server, run: Run[None]
) -> None:
    one = Limiter("1000/hour", name="x", store=redis.patient)
    one.hit("a")
    dropped = [Limiter("1/s", name="z", store="memory://dropped-while-another-is-opened")]
    opened: list[float] = []
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(redis.folder / "silent"))
        silent.listen()

        def opens() -> None:
            began = time.monotonic()
            Limiter("5/minute", name="y", store=f"redis+unix://{redis.folder}/silent")
            opened.append(time.monotonic() - began)

        async def main() -> None:
            opening = threading.Thread(target=opens)
            with MachineLateness() as late:
                opening.start()
                await asyncio.sleep(0.05)
                assert not opened
                began = time.monotonic()
                first = one.hit_async("a")  # this loop's first: a client of its own is made
                begun = time.monotonic() - began
                assert not (await first).degraded
                assert late.allows(begun, 0.02) and late.allows(time.monotonic() - began, 0.05)
                began = time.monotonic()
                dropped.clear()
                assert late.allows(time.monotonic() - began, 0.02)
                assert not opened, "it was being opened all the while"
            opening.join()

        run(main())
    assert opened and opened[0] > 0.2


# ---- requests


@pytest.mark.fault("R113")
def test_while_redis_is_slow_for_a_second_other_requests_are_answered_at_once(redis: Server, run: Run[None]) -> None:
    app = FastAPI()
    install(app)
    limit = rate_limit("100/hour", by="header:X-Who", name="slow", store=redis.patient)

    @app.get("/limited", dependencies=[Depends(limit)])
    async def limited() -> str:
        return "ok"

    @app.get("/free")
    async def free() -> str:
        return "ok"

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a", headers={"X-Who": "a"}) as client:
            assert (await client.get("/limited")).headers["X-RateLimit-Remaining"] == "99"
            redis.signal(signal.SIGSTOP)
            continues = threading.Timer(1, redis.signal, (signal.SIGCONT,))
            continues.start()
            with Lateness() as late:
                began = last = time.monotonic()
                slow = asyncio.ensure_future(client.get("/limited"))
                gaps, answered = [0.0], [0.0]
                while not slow.done():
                    asked = time.monotonic()
                    assert (await client.get("/free")).status_code == 200
                    answered.append(time.monotonic() - asked)
                    await asyncio.sleep(0.002)
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()
                assert slow.result().headers["X-RateLimit-Remaining"] == "98"
                assert time.monotonic() - began > 0.9 and len(answered) > 20
                assert late.allows(max(answered), 0.1)
                assert late.allows(max(gaps), 0.05)
            continues.join()

    run(main())


POLICIES = """
policies:
  - {name: enforced, also: true, rules: [6/minute token_bucket, 20/hour sliding_log], count: {status: 401}}
  - {name: weighed, also: true, by: "header:X-Key", missing_identity: shared, rules: 30/minute sliding_counter,
     cost: {response_header: X-Cost, reserve: 2, max: 9}}
  - {name: heavy, also: true, match: {path: "/form*"}, by: [ip, "form:account"], rules: 4/minute, missing_identity: shared}
  - {name: proof, also: true, mode: challenge, rules: 4/minute token_bucket}
  - {name: trial, mode: shadow, rules: 3/minute token_bucket}
"""


class World:
    """One application under one rules file, asked directly."""

    def __init__(self, rules: Path, store: str, clock: ManualClock | None = None) -> None:
        self.gate = Gate(str(rules), store=store, clock=clock)
        self.app = TidegateMiddleware(self.answer, gate=self.gate)
        self.status = 200
        self.seen: list[bytes] = []

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            self.seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"x-cost", b"%d" % len(scope["path"]))]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def ask(self, path: str, key: str, form: bytes | None, status: int) -> tuple[int, list[tuple[bytes, bytes]]]:
        self.status = status
        sent: list[Any] = []
        headers = [(b"x-key", key.encode()), (b"content-type", b"application/x-www-form-urlencoded")]
        scope = {"type": "http", "method": "POST" if form else "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": headers, "client": ("192.0.2.1", 1234)}  # fmt: skip

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": form or b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)  # type: ignore[arg-type]
        return sent[0]["status"], sent[0]["headers"] + [(b"", sent[1]["body"])]


@pytest.mark.parametrize("seed", range(3))
def test_a_rules_file_on_redis_judges_as_in_memory(redis: Server, run: Run[None], tmp_path: Path, seed: int) -> None:
    """Second looks at the body, shadows, challenges and what the response says, to the byte."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(POLICIES)
    clock = ManualClock()
    memory, remote = World(rules, "memory://judges", clock), World(rules, redis.patient, clock)
    randomly = random.Random(seed)

    async def main() -> None:
        for _ in range(60):
            form = randomly.choice([None, b"account=bob", b"account=eve"])
            asked = (randomly.choice(["/form", "/longer/path"]) if form else "/", randomly.choice("ab"), form,
                     randomly.choice([200, 401]))  # fmt: skip
            assert await remote.ask(*asked) == await memory.ask(*asked)
            clock.advance(randomly.choice([0, 0.3, 7]))
        assert remote.seen == memory.seen and remote.seen

    run(main())


def test_rules_are_read_again_while_requests_wait(redis: Server, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("policies:\n  - {name: a, rules: 1000/minute}\n")
    world = World(rules, redis.patient)

    async def main() -> None:
        for turn in range(40):
            asked: list[Awaitable[tuple[int, Any]]] = [world.ask("/", "a", None, 200) for _ in range(10)]
            answers = asyncio.gather(*asked)
            await asyncio.sleep(0)
            rules.write_text(f"policies:\n  - {{name: a, rules: {1001 + turn}/minute}}\n")
            world.gate.reload()
            assert [status for status, _ in await answers] == [200] * 10

    asyncio.run(main())
