"""A site on Redis under a real uvicorn, and what its visitors see while Redis stands still, dies and comes back empty."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REDIS = str(Path(__file__).resolve().parents[1] / "redis")
sys.path[:0] = [REDIS]
from server import Lateness, Server, free_port, server

DEADLINE = 0.05  # seconds that a call waits for Redis, as it is where nothing is said

APP = """
import asyncio, contextlib, gc, os, sys, time
from fastapi import Depends, FastAPI
from tidegate.fastapi import install, rate_limit

sys.path[:0] = [os.environ["REDIS_HELPERS"]]
from server import MachineLateness

gaps, held, late = [], [], None

stat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

def waited():  # seconds that this thread was ready and had no processor, so far: the loop is held by others then
    return int(os.pread(stat, 80, 0).split()[1]) / 1e9

async def tick():
    while True:
        before, last, spent = waited(), time.monotonic(), time.thread_time()
        await asyncio.sleep(0.001)
        gaps.append(time.monotonic() - last - 0.001 - (waited() - before))
        held.append(time.thread_time() - spent - 0.001)

@contextlib.asynccontextmanager
async def lifespan(app):
    global late
    gc.collect()
    gc.freeze()  # a full collection over all that has been imported is long, and not ours
    ticking = asyncio.ensure_future(tick())
    late = MachineLateness().__enter__()
    yield
    ticking.cancel()

app = FastAPI(lifespan=lifespan)
install(app)

@app.get("/", dependencies=[Depends(rate_limit("1000000/day fixed_window", by="header:X-Who"))])
async def root() -> str:
    return "ok"

@app.get("/gaps")
async def told() -> dict[str, object]:
    told = {"gaps": sorted(gaps)[-5:], "held": max(held, default=0.0), "ticks": len(gaps), "late": late.worst,
            "loop": type(asyncio.get_running_loop()).__module__}
    gaps.clear()
    late.__enter__()
    return told
"""


class Site:
    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self.log = log

    def ask(self, path: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", path, headers={"X-Who": "a"})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, answer.headers, body

    def remaining(self) -> int | None:
        """None: Redis was not asked."""
        told = self.ask("/")[1].get("X-RateLimit-Remaining")
        return None if told is None else int(told)

    def decided(self) -> int:
        """By Redis: on a busy machine one answer may be late."""
        end = time.monotonic() + 10
        while (remaining := self.remaining()) is None:
            assert time.monotonic() < end
            time.sleep(0.02)
        return remaining

    def load(self, requests: int, clients: int) -> tuple[set[int], list[float]]:
        """So many requests over so many kept connections: the statuses, and how long each took, sorted."""
        statuses: set[int] = set()
        took: list[float] = []

        def client() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
            for _ in range(requests // clients):
                began = time.monotonic()
                connection.request("GET", "/", headers={"X-Who": "a"})
                answer = connection.getresponse()
                answer.read()
                took.append(time.monotonic() - began)
                statuses.add(answer.status)
            connection.close()

        threads = [threading.Thread(target=client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(took) == requests
        return statuses, sorted(took)


@contextmanager
def site(folder: Path, store: str, loop: str) -> Iterator[Site]:
    (folder / "served.py").write_text(APP)
    log = folder / "log"
    port = free_port()
    with log.open("w") as output:
        environment = {**os.environ, "TIDEGATE_STORE": store, "REDIS_HELPERS": REDIS}
        environment.pop("TIDEGATE_ENABLED", None)
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "--app-dir", str(folder), "--port", str(port), "--loop", loop,
             "--no-access-log", "served:app"],
            env=environment, stdout=output, stderr=output,
        )  # fmt: skip
        try:
            end = time.monotonic() + 60
            while "Uvicorn running on" not in log.read_text():
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            yield Site(port, log)
        finally:
            process.terminate()
            process.wait(20)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_visitors_notice_nothing_of_a_redis_that_stands_still_dies_or_comes_back_empty(tmp_path: Path, loop: str) -> None:
    with server(port=free_port()) as redis, site(tmp_path, redis.tcp, loop) as served:
        assert loop in json.loads(served.ask("/gaps")[2])["loop"]
        assert served.load(200, 4)[0] == {200}
        before = served.decided()
        assert 999_700 < before < 1_000_000

        def under(requests: int) -> None:
            served.ask("/gaps")
            with Lateness() as late:
                statuses, took = served.load(requests, 4)
                assert statuses == {200}
                assert late.allows(took[int(len(took) * 0.99)], DEADLINE + 0.02), took[-40:]
            told = json.loads(served.ask("/gaps")[2])
            assert told["ticks"] > 50
            assert told["gaps"][-1] <= 0.005 + 3 * told["late"], told
            # In CPU time of the loop's thread; it goes on while a virtual machine is not run.
            assert told["held"] <= 0.005 + told["late"], told

        redis.signal(signal.SIGSTOP)
        under(3000)
        redis.signal(signal.SIGCONT)
        back(served)
        redis.kill()
        under(1000)
        redis.start()
        took = back(served)
        assert served.decided() > before, "its counts were gone with it"
        lines = [line for line in served.log.read_text().splitlines() if "store-failing" in line]
        assert 1 <= len(lines) <= 2, "one line when trouble begins, not one a request"
        assert took < 2 + 1
        assert "Error" not in served.log.read_text() and "Warning" not in served.log.read_text()


def back(served: Site) -> float:
    """Seconds until Redis decides again."""
    with Lateness() as late:
        began = time.monotonic()
        while served.remaining() is None:
            assert late.allows(time.monotonic() - began, 2), "not back within 2 s"
            time.sleep(0.02)
        return time.monotonic() - began


PROCESSES = """
import asyncio, os, sys
from fastapi import Depends, FastAPI
from tidegate.fastapi import install, rate_limit

app = FastAPI()
install(app)

@app.get("/", dependencies=[Depends(rate_limit("3000/hour", name="shared", by="header:X-Who", store=sys.argv[1]))])
async def root() -> str:
    return "ok"

async def one() -> int:
    sent = []
    async def receive(): return {"type": "http.request", "body": b"", "more_body": False}
    async def send(message): sent.append(message)
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": "/", "raw_path": b"/",
             "query_string": b"", "headers": [(b"x-who", b"a")], "client": ("192.0.2.1", 1), "server": ("a", 80), "scheme": "http",
             "root_path": ""}
    await app(scope, receive, send)
    assert any(name == b"x-ratelimit-limit" for name, _ in sent[0]["headers"]), "Redis was not asked"
    return sent[0]["status"] == 200

async def task() -> int:
    return sum([await one() for _ in range(25)])

async def main() -> int:
    return sum(await asyncio.gather(*[task() for _ in range(20)]))

pipes = []
for number in range(8):
    reading, writing = os.pipe()
    if os.fork() == 0:
        if number % 2:
            import uvloop
            admitted = uvloop.run(main())
        else:
            admitted = asyncio.run(main())
        os.write(writing, b"%d" % admitted)
        os._exit(0)
    os.close(writing)
    pipes.append(reading)
print([int(os.read(pipe, 16) or -1) for pipe in pipes])
"""


def test_eight_processes_of_twenty_tasks_admit_exactly_the_limit(tmp_path: Path) -> None:
    with server(port=free_port()) as redis:
        told = subprocess.run([sys.executable, "-c", PROCESSES, f"{redis.tcp}?timeout_ms=2000"], check=True, timeout=120,
                              capture_output=True, text=True)  # fmt: skip
        admitted = json.loads(told.stdout)
        assert len(admitted) == 8 and min(admitted) >= 0, told.stderr
        assert sum(admitted) == 3000
