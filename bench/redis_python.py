"""A decision through Redis from Python, beside a hiredis loop that sends the same command and beside other clients and
limiters, in one interleaved run; and what each script costs the server beside INCR.

    python bench/redis_python.py FOLDER_OF_PROGRAMS [--rounds N] [--milliseconds M] [--json]

Each round times every row once; a ratio is the median of the ratios within a round. Times are the clock's, since two
processes work on each decision: run it on a machine that does nothing else, with two processors or more. Must not enter:
HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import coredis
import limits
import limits.aio
import redis.asyncio
import throttled
import uvloop
from tidegate import Limiter

KEY = "203.0.113.7"
RULES = "1000000000/second token_bucket"  # never reached, so that every call writes
SCRIPTS = {
    "INCR": None,
    "token_bucket": "1000000000/second token_bucket",
    "fixed_window": "10000000000/day fixed_window",
    "sliding_counter": "10000000000/day sliding_counter",
    "sliding_log": "1000000/second sliding_log resolution 1ms",
    "two rules": "1000000000/second token_bucket; 10000000000/minute token_bucket",
    "four algorithms": "1000000000/second token_bucket; 10000000000/day fixed_window; 10000000000/hour sliding_counter;"
    " 1000000/second sliding_log resolution 1ms",
}
Ask = Callable[[], Awaitable[Any]]


def heard(path: Path, folder: Path, rules: str, name: str) -> bytes:
    """The command of one hit, as it goes over the wire: the last of a few, when the script is known."""
    between = folder / "between"
    between.unlink(missing_ok=True)
    pieces: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(between))
        listener.listen()

        def carry() -> None:
            while True:
                try:
                    near = listener.accept()[0]
                except OSError:
                    return
                far = socket.socket(socket.AF_UNIX)
                far.connect(str(path))
                for source, target, keep in ((near, far, True), (far, near, False)):
                    threading.Thread(target=pipe, args=(source, target, pieces if keep else None), daemon=True).start()

        threading.Thread(target=carry, daemon=True).start()
        limiter = Limiter(rules, name=name, store=f"redis+unix://{between}?timeout_ms=2000")
        for _ in range(3):
            pieces.clear()
            assert not limiter.hit(KEY).degraded
        command = b"".join(pieces)  # before the store is closed, which carries its counts over the same way
        del limiter
        listener.shutdown(socket.SHUT_RDWR)
    return command


def pipe(source: socket.socket, target: socket.socket, kept: list[bytes] | None) -> None:
    with contextlib.suppress(OSError):  # the other one of the two has closed them
        while data := source.recv(65536):
            if kept is not None:
                kept.append(data)
            target.sendall(data)
    target.close()


def words(command: bytes) -> list[bytes]:
    """The words of a RESP command."""
    found, rest = [], command.split(b"\r\n", 1)[1]
    while rest:
        head, rest = rest.split(b"\r\n", 1)
        found.append(rest[: int(head[1:])])
        rest = rest[int(head[1:]) + 2 :]
    return found


class Plain:
    """The hiredis loop with one command."""

    def __init__(self, program: Path, path: Path, folder: Path, name: str, command: bytes) -> None:
        file = folder / name.replace(" ", "-")
        file.write_bytes(command)
        self.process = subprocess.Popen([program, path, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def rate(self, depth: int, milliseconds: int) -> tuple[float, float]:
        """Commands a second, and the server's microseconds for each."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{depth} {milliseconds}\n")
        self.process.stdin.flush()
        rate, cpu = self.process.stdout.readline().split()
        return float(rate), float(cpu)

    def close(self) -> None:
        self.process.communicate()


def called(ask: Callable[[], object], seconds: float) -> float:
    count, began = 0, time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        for _ in range(10):
            ask()
        count += 10
    return count / (now - began)


async def awaited(ask: Ask, tasks: int, seconds: float) -> float:
    """Each task asks again when it has its answer."""
    count, began = 0, time.perf_counter()
    end = began + seconds

    async def task() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await ask()
            await ask()
            count += 2

    await asyncio.gather(*[task() for _ in range(tasks)])
    return count / (time.perf_counter() - began)


def others(path: Path) -> dict[str, Callable[[], object]]:
    """Limiters that wait, in the way their documentation calls them."""
    uri = f"redis+unix://{path}"
    fixed = limits.strategies.FixedWindowRateLimiter(limits.storage.storage_from_string(uri))
    moving = limits.strategies.SlidingWindowCounterRateLimiter(limits.storage.storage_from_string(uri))
    item = limits.RateLimitItemPerDay(1_000_000_000)
    bucket = throttled.Throttled(
        key=KEY, using="token_bucket", quota=throttled.per_sec(1_000_000_000, burst=1_000_000_000),
        store=throttled.RedisStore(server=f"unix://{path}"),
    )  # fmt: skip
    return {
        "limits, fixed window": lambda: fixed.hit(item, KEY),
        "limits, sliding window counter": lambda: moving.hit(item, KEY),
        "throttled-py, token bucket": lambda: bucket.limit(),
    }


def async_others(path: Path, command: list[bytes], tasks: int) -> dict[str, Callable[[float], Coroutine[Any, Any, float]]]:
    """Other clients that send the same command, and limiters that await. Each is opened for its turn, which is not timed."""
    sha, keys, rest = command[1].decode(), int(command[2]), command[3:]

    async def by_redis_py(seconds: float) -> float:
        client = redis.asyncio.Redis(unix_socket_path=str(path), max_connections=tasks)
        try:
            await client.evalsha(sha, keys, *rest)
            return await awaited(lambda: client.evalsha(sha, keys, *rest), tasks, seconds)
        finally:
            await client.aclose()

    async def by_coredis(seconds: float) -> float:
        async with coredis.Redis(unix_socket_path=str(path)) as client:
            await client.evalsha(sha, keys=rest[:keys], args=rest[keys:])
            return await awaited(lambda: client.evalsha(sha, keys=rest[:keys], args=rest[keys:]), tasks, seconds)

    async def by_limits(seconds: float) -> float:
        storage = limits.storage.storage_from_string(
            f"async+redis+unix://{path}", implementation="redispy", max_connections=tasks
        )
        strategy = limits.aio.strategies.FixedWindowRateLimiter(storage)
        item = limits.RateLimitItemPerDay(1_000_000_000)
        await strategy.hit(item, KEY)
        return await awaited(lambda: strategy.hit(item, KEY), tasks, seconds)

    return {"redis-py asyncio": by_redis_py, "coredis": by_coredis, "limits.aio, fixed window": by_limits}


def measure(programs: Path, path: Path, folder: Path, rounds: int, milliseconds: int) -> dict[str, Any]:
    seconds = milliseconds / 1000
    store = f"redis+unix://{path}?timeout_ms=2000"
    limiter = Limiter(RULES, name="bench", store=store)
    command = heard(path, folder, RULES, "bench")
    plain = Plain(programs / "redis_loop", path, folder, "bench", command)
    loops = {"asyncio": asyncio.new_event_loop(), "uvloop": uvloop.new_event_loop()}
    rows: dict[str, Callable[[], float]] = {
        "hiredis loop, one at a time": lambda: plain.rate(1, milliseconds)[0],
        "tidegate, hit()": lambda: called(lambda: limiter.hit(KEY), seconds),
        "hiredis loop, 64 at a time": lambda: plain.rate(64, milliseconds)[0],
    }
    for name, loop in loops.items():
        for tasks in (64, 256):
            rows[f"tidegate, hit_async(), {tasks} tasks, {name}"] = lambda loop=loop, tasks=tasks: loop.run_until_complete(
                awaited(lambda: limiter.hit_async(KEY), tasks, seconds)
            )
    for name, ask in others(path).items():
        rows[name] = lambda ask=ask: called(ask, seconds)
    for tasks in (64, 256):
        for name, main in async_others(path, words(command), tasks).items():
            rows[f"{name}, {tasks} tasks"] = lambda main=main: loops["asyncio"].run_until_complete(main(seconds))
    rates: dict[str, list[float]] = {row: [] for row in rows}
    for number in range(rounds):
        # Back and forth, so that no row is always the one after another.
        for row in list(rows) if number % 2 == 0 else reversed(list(rows)):
            rates[row].append(rows[row]())
    plain.close()
    for loop in loops.values():
        loop.close()
    return {"rates": rates, "cpu": server_costs(programs, path, folder, rounds, milliseconds)}


def server_costs(programs: Path, path: Path, folder: Path, rounds: int, milliseconds: int) -> dict[str, list[float]]:
    """The server's microseconds for each decision, 64 at a time."""
    loops = {}
    for name, rules in SCRIPTS.items():
        command = heard(path, folder, rules, name) if rules else b"*2\r\n$4\r\nINCR\r\n$7\r\nbench:i\r\n"
        loops[name] = Plain(programs / "redis_loop", path, folder, name, command)
    costs: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            costs[name].append(loop.rate(64, milliseconds)[1])
    for loop in loops.values():
        loop.close()
    return costs


def ratio(rates: dict[str, list[float]], row: str, base: str) -> float:
    return statistics.median(a / b for a, b in zip(rates[row], rates[base], strict=True))


def report(told: dict[str, Any]) -> None:
    rates, cpu = told["rates"], told["cpu"]
    one, many, theirs = "hiredis loop, one at a time", "hiredis loop, 64 at a time", "redis-py asyncio, 64 tasks"
    print(f"{'':52}{'a second':>10}  to the loop  to redis-py asyncio")
    for row in rates:
        base = one if row in (one, "tidegate, hit()") or "tasks" not in row and row != many else many
        print(f"{row:52}{statistics.median(rates[row]):10.0f}  {ratio(rates, row, base):11.2f}  {ratio(rates, row, theirs):11.1f}")
    print()
    for name in cpu:
        times = statistics.median(a / b for a, b in zip(cpu[name], cpu["INCR"], strict=True))
        print(f"{'server, ' + name:52}{statistics.median(cpu[name]):7.2f} us  {times:8.1f} x INCR")
    print()
    for what, found, least in [
        ("waiting, to the loop", ratio(rates, "tidegate, hit()", one), 0.9),
        *[(f"{tasks} tasks, to the loop", max(ratio(rates, f"tidegate, hit_async(), {tasks} tasks, {loop}", many)
                                            for loop in ("asyncio", "uvloop")), 0.8) for tasks in (64, 256)],
        ("64 tasks, to redis-py asyncio", ratio(rates, "tidegate, hit_async(), 64 tasks, asyncio", theirs), 6),
    ]:  # fmt: skip
        print(f"{'met   ' if found >= least else 'missed'}  {what}: {found:.2f}, at least {least}")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("programs", type=Path)
    arguments.add_argument("--rounds", type=int, default=11)
    arguments.add_argument("--milliseconds", type=int, default=300)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    os.environ["TIDEGATE_SECRET"] = "bench"
    with tempfile.TemporaryDirectory(prefix="tg-bench-") as folder:
        path = Path(folder) / "s"
        server = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder,
             "--latency-tracking", "no"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            while not path.exists():
                time.sleep(0.01)
            told = measure(given.programs, path, Path(folder), given.rounds, given.milliseconds)
        finally:
            server.terminate()
            server.wait()
    if given.json:
        print(json.dumps(told))
    else:
        report(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
