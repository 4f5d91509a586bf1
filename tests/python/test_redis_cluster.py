"""redis+cluster:// under load: slots that move, primaries that are demoted, killed or stopped, asked by threads that wait and by
tasks that do not. Each reply that only a cluster gives is brought about in tests/c/stores/redis/test_cluster.c."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

from tidegate import Decision, Limiter, ManualClock
from tidegate.fastapi import install, rate_limit

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from cluster import SLOTS, Cluster, cluster
from server import Lateness

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with cluster() as some:
        yield some


@pytest.fixture
def six() -> Iterator[Cluster]:
    with cluster(replicas=True, timeout_ms=1000) as some:
        yield some


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run


def slot_of(name: str) -> int:
    crc = 0
    for byte in name.encode():
        crc ^= byte << 8
        for _ in range(8):
            crc = ((crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc % SLOTS


def names_on(part: int, count: int, stem: str = "n") -> list[str]:
    """Names in the slots that a cluster of three gives to its `part`-th primary."""
    found = (f"{stem}{i}" for i in range(10_000))
    return [name for name in found if slot_of(name) * 3 // SLOTS == part][:count]


# ---- tasks


def test_tasks_are_answered_as_in_memory_over_any_number_of_slots(three: Cluster, run: Run) -> None:
    draw = random.Random("cluster")
    clock = ManualClock(1_700_000_000)
    rules = "7/10s sliding_log; 20/minute token_bucket; 9/30s fixed_window; 30/minute sliding_counter"
    name = f"equal-{run.__module__}"
    here = Limiter(rules, name=name, store="memory://equal", clock=clock)
    there = Limiter(rules, name=name, store=three.patient, clock=clock)

    def told(decision: Decision) -> list[object]:
        one = [decision.remaining, decision.retry_after_us, decision.reset_after_us, bool(decision)]
        return one + [(rule.allowed, rule.remaining, rule.retry_after, rule.reset_after) for rule in decision.rules]
    kinds = ["user", "route", "policy"]

    async def main() -> None:
        for _ in range(600):
            clock.advance(draw.choice([0, 0.001, 0.7, 3]))
            dims = {f"header:{kind}": f"v{draw.randrange(4)}" for kind in draw.sample(kinds, draw.randrange(1, 4))}
            cost = draw.choice([1, 1, 1, 2, 5])
            way = draw.randrange(8)
            if way == 0:
                assert told(await there.peek_async(dims=dims, cost=cost)) == told(here.peek(dims=dims, cost=cost))
            elif way == 1:
                await there.refund_async(dims=dims, cost=cost)
                here.refund(dims=dims, cost=cost)
            else:
                expected, decision = here.hit(dims=dims, cost=cost), await there.hit_async(dims=dims, cost=cost)
                assert not decision.degraded
                assert told(decision) == told(expected)
                if decision and way == 2:
                    await decision.refund_async()
                    expected.refund()

    run(main())


def test_a_thousand_tasks_are_counted_exactly_over_one_connection_to_each_node(three: Cluster, run: Run) -> None:
    one = Limiter("100/hour sliding_log", name=f"tasks-{run.__module__}", store=three.patient)
    names = [names_on(part, 1, "tasks")[0] for part in range(3)]
    before = connections(three)

    async def main() -> None:
        decisions = await asyncio.gather(*[one.hit_async(names[i % 3]) for i in range(1000)])
        assert not any(decision.degraded for decision in decisions)
        assert sum(map(bool, decisions)) == 300
        both = await asyncio.gather(*[one.hit_async(dims={"user": "a", "header:x": f"{i % 7}"}) for i in range(400)])
        assert sum(map(bool, both)) == 100
        assert connections(three) - before <= 3
        assert (await one.peek_async(dims={"user": "a"})).remaining == 0
        used = [100 - (await one.peek_async(dims={"header:x": str(i)})).remaining for i in range(7)]
        assert sum(used) == 100, "what was charged and then refused has been given back"

    run(main())


def connections(some: Cluster) -> int:
    lists = [node("CLIENT", "LIST", "TYPE", "normal") for node in some.running]
    return sum(one.count(b"\n") - 1 for one in lists if isinstance(one, bytes))


def test_a_cancelled_task_and_a_closed_loop_leave_nothing_behind(three: Cluster, run: Run) -> None:
    one = Limiter("100000/hour fixed_window", name="cancelled", store=three.patient)
    before = connections(three)

    async def main() -> None:
        for _ in range(5):
            tasks = [asyncio.ensure_future(one.hit_async(dims={"user": f"{i % 5}", "header:y": f"{i}"})) for i in range(100)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert not any(isinstance(end, Exception) for end in ended[1::2])
        assert not (await one.hit_async("after")).degraded

    run(main())
    assert connections(three) <= before + 1


def test_a_stopped_node_costs_its_tasks_the_deadline_and_the_others_nothing(three: Cluster, run: Run) -> None:
    one = Limiter("100000/hour fixed_window", name="stopped", store=f"{three.uri}?timeout_ms=300")  # time for those that are well
    stopped, well = names_on(2, 20, "stopped"), names_on(0, 20, "well")

    async def main() -> None:
        while (await one.hit_async(stopped[0])).degraded or (await one.hit_async(well[0])).degraded:
            await asyncio.sleep(0.05)
        three.primaries[2].signal(signal.SIGSTOP)
        try:
            longest = 0.0
            for _ in range(10):
                began = time.monotonic()
                answers = await asyncio.gather(*map(one.hit_async, stopped), *map(one.hit_async, well))
                longest = max(longest, time.monotonic() - began)
                assert all(answer.degraded for answer in answers[:20])
            assert late.allows(longest, 0.31)
            assert not any(answer.degraded for answer in answers[20:])
        finally:
            three.primaries[2].signal(signal.SIGCONT)
        began = time.monotonic()
        while (await one.hit_async(stopped[0])).degraded:
            assert late.allows(time.monotonic() - began, 2), "recovery within 2 s"
            await asyncio.sleep(0.01)

    with Lateness() as late:
        run(main())
    three.wait()


def test_a_fastapi_application_is_limited_by_a_cluster(three: Cluster) -> None:
    app = FastAPI()
    install(app)
    limit = rate_limit("2/minute", name="face", store=three.patient, by=["header:X-Who", "header:X-Team"])

    @app.get("/", dependencies=[Depends(limit)])
    def index() -> str:
        return "ok"

    client = TestClient(app, raise_server_exceptions=False)
    asked = [("a", "red"), ("b", "red"), ("c", "red"), ("c", "blue"), ("c", "blue"), ("c", "green")]
    codes = [client.get("/", headers={"X-Who": who, "X-Team": team}).status_code for who, team in asked]
    assert codes == [200, 200, 429, 200, 200, 429]


# ---- what happens to a cluster, under load


class Load:
    """Threads that wait and tasks that do not, until it is over: what each was answered, and how long the slowest took."""

    def __init__(self, store: str, names: list[str], *, tasks: bool) -> None:
        self.one = Limiter("1000000/hour fixed_window", name="load", store=store)
        self.names = names
        self.decided = dict.fromkeys(names, 0)
        self.decided_at: dict[str, list[float]] = {name: [] for name in names}
        self.unknown = 0
        self.slowest = 0.0
        self.errors: list[BaseException] = []
        self.over = threading.Event()
        self.last_failure = 0.0
        target = self.run_tasks if tasks else self.run_thread
        self.threads = [threading.Thread(target=target, args=(i,)) for i in range(1 if tasks else 3)]

    def count(self, name: str, degraded: bool, took: float) -> None:
        self.slowest = max(self.slowest, took)
        if degraded:
            self.unknown += 1
            self.last_failure = time.monotonic()
        else:
            self.decided[name] += 1
            self.decided_at[name].append(time.monotonic())

    def run_thread(self, number: int) -> None:
        draw = random.Random(number)
        mine = self.names[number::3]
        try:
            while not self.over.is_set():
                name = draw.choice(mine)
                began = time.monotonic()
                self.count(name, self.one.hit(name).degraded, time.monotonic() - began)
                time.sleep(0.001)
        except BaseException as error:
            self.errors.append(error)

    def run_tasks(self, number: int) -> None:
        async def hit_on(name: str) -> None:
            while not self.over.is_set():
                began = time.monotonic()
                self.count(name, (await self.one.hit_async(name)).degraded, time.monotonic() - began)
                await asyncio.sleep(0.004)

        async def main() -> None:
            await asyncio.gather(*map(hit_on, self.names))

        try:
            asyncio.run(main())
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self) -> Load:
        for name in self.names:
            while self.one.hit(name).degraded:
                self.unknown += 1
            self.decided[name] += 1
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()
        assert not self.errors

    def recovered(self, late: Lateness, since: float) -> bool:
        """Within 2 s: no call fails after that. On a busy machine one may be late again, but each name was decided by then."""
        if late.allows(self.last_failure - since, 2):
            return True
        first = max(min([at for at in times if at >= since], default=math.inf) for times in self.decided_at.values())
        return late.worst > 0.01 and late.allows(first - since, 2)

    def used(self, store: str) -> dict[str, int]:
        asks = Limiter("1000000/hour fixed_window", name="load", store=store)
        return {name: 1_000_000 - asks.peek(name).remaining for name in self.names}


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_slots_that_move_under_load_lose_and_invent_no_hit(three: Cluster, tasks: bool) -> None:
    names = [name for part in range(3) for name in names_on(part, 5, "tasks" if tasks else "threads")]
    with Load(three.patient, names, tasks=tasks) as load:
        for there_and_back in (1, 0):
            for i, name in enumerate(names):
                three.move_slot(slot_of(name), three.primaries[(i // 5 + there_and_back) % 3])
    assert load.unknown == 0, "followed within the call"
    assert min(load.decided.values()) > 0 and sum(load.decided.values()) > 60  # some of it while slots moved
    assert load.used(three.patient) == load.decided


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_a_planned_and_an_unplanned_failover_pass_under_load(six: Cluster, tasks: bool) -> None:
    names = [name for part in range(3) for name in names_on(part, 4)]
    with Lateness() as late, Load(six.uri, names, tasks=tasks) as load:
        time.sleep(0.3)
        six.replicas[0]("CLUSTER", "FAILOVER")
        wait_until(lambda: six.replicas[0]("ROLE")[0] == b"master")  # type: ignore[index]
        planned = time.monotonic()
        time.sleep(2.2)
        assert load.recovered(late, planned), "recovery within 2 s"
        unknown_before = load.unknown
        six.primaries[1].kill()
        wait_until(lambda: six.replicas[1]("ROLE")[0] == b"master")  # type: ignore[index]
        six.wait()
        promoted = time.monotonic()
        time.sleep(2.2)
        assert load.recovered(late, promoted), "recovery within 2 s"
        assert load.unknown > unknown_before, "until then by policy"
    assert late.allows(load.slowest, 0.06), "no call takes longer than its deadline and 10 ms"
    used = load.used(six.patient)
    for i, name in enumerate(names):
        if i // 4 == 2:  # nothing has happened there
            assert load.decided[name] <= used[name] <= load.decided[name] + load.unknown
        else:  # hits that had not travelled are lost, and one that was late may have been counted
            assert 0 < used[name] <= load.decided[name] + load.unknown
    three_others = [six.replicas[0], six.replicas[1], six.primaries[2]]
    assert all(node("ROLE")[0] == b"master" for node in three_others)  # type: ignore[index]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
