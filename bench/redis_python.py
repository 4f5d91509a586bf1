"""A decision through Redis from Python, beside a hiredis loop that sends the same command and beside other clients and
limiters, in one interleaved run; and what each script costs the server beside INCR.

    python bench/redis_python.py FOLDER_OF_PROGRAMS [--rounds N] [--milliseconds M] [--json]

Each round times every row once; a ratio is the median of the ratios within a round. Times are the clock's, since two
processes work on each decision: run it on a machine that does nothing else, with two processors or more. The server has one
of them to itself and all who ask have the others: where the scheduler is left to choose, one and the same row is now a third
faster, now slower, by which row was before it. Who waits for each answer does so in a process of its own, as the loop does,
and takes the time of a round in pieces, since a machine that others share is slow for a while and then is not. Must not
enter: HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
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
PIECES = 10  # of a round's time, for rows of 40 microseconds that are compared by hundredths
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


class Asker:
    """A process that asks, for so long as each line says."""

    def __init__(self, *command: str | Path) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def rate(self, *numbers: int) -> list[float]:
        """Decisions a second, and what else the process tells."""
        assert self.process.stdin and self.process.stdout
        print(*numbers, file=self.process.stdin, flush=True)
        told = [float(number) for number in self.process.stdout.readline().split()]
        if not told:
            raise SystemExit(f"{self.process.args!r} has ended")
        return told

    def close(self) -> None:
        self.process.communicate()


def plain(program: Path, path: Path, folder: Path, name: str, command: bytes) -> Asker:
    """The hiredis loop with one command: so many at a time for so many milliseconds. Tells the server's microseconds too."""
    file = folder / name.replace(" ", "-")
    file.write_bytes(command)
    return Asker(program, path, file)


def called(ask: Callable[[int], None], seconds: float) -> float:
    count, began = 0, time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        ask(10)
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


def ours(path: str) -> Callable[[int], None]:
    hit = Limiter(RULES, name="bench", store=f"redis+unix://{path}?timeout_ms=2000").hit

    def ask(times: int) -> None:
        for _ in range(times):
            hit(KEY)

    return ask


def by_limits(strategy: type[limits.strategies.RateLimiter], path: str) -> Callable[[int], None]:
    hit = strategy(limits.storage.storage_from_string(f"redis+unix://{path}")).hit
    item = limits.RateLimitItemPerDay(1_000_000_000)

    def ask(times: int) -> None:
        for _ in range(times):
            hit(item, KEY)

    return ask


def by_throttled(path: str) -> Callable[[int], None]:
    quota = throttled.per_sec(1_000_000_000, burst=1_000_000_000)
    store = throttled.RedisStore(server=f"unix://{path}")
    limit = throttled.Throttled(key=KEY, using="token_bucket", quota=quota, store=store).limit

    def ask(times: int) -> None:
        for _ in range(times):
            limit()

    return ask


# Who waits for each answer: makes what asks so many times, in the way the documentation of each calls it.
WAITING: dict[str, Callable[[str], Callable[[int], None]]] = {
    "tidegate, hit()": ours,
    "limits, fixed window": functools.partial(by_limits, limits.strategies.FixedWindowRateLimiter),
    "limits, sliding window counter": functools.partial(by_limits, limits.strategies.SlidingWindowCounterRateLimiter),
    "throttled-py, token bucket": by_throttled,
}


def wait_for_answers(name: str, path: str) -> None:
    """What the process of a row of WAITING does: for each line of milliseconds it asks, and prints the decisions a second."""
    ask = WAITING[name](path)
    for line in sys.stdin:
        print(called(ask, int(line) / 1000), flush=True)


def async_others(path: Path, command: list[bytes], tasks: int) -> dict[str, Callable[[float], Coroutine[Any, Any, float]]]:
    """Other clients that send the same command, and limiters that await. Each is opened for its turn, which is not timed."""
    sha, keys, rest = command[1].decode(), int(command[2]), command[3:]

    async def by_redis_py(seconds: float) -> float:
        client = redis.asyncio.Redis(unix_socket_path=str(path), max_connections=tasks)
        try:
            await client.evalsha(sha, keys, *rest)
            return await awaited(functools.partial(client.evalsha, sha, keys, *rest), tasks, seconds)
        finally:
            await client.aclose()

    async def by_coredis(seconds: float) -> float:
        async with coredis.Redis(unix_socket_path=str(path)) as client:
            await client.evalsha(sha, keys=rest[:keys], args=rest[keys:])
            return await awaited(functools.partial(client.evalsha, sha, keys=rest[:keys], args=rest[keys:]), tasks, seconds)

    async def by_limits(seconds: float) -> float:
        storage = limits.storage.storage_from_string(
            f"async+redis+unix://{path}", implementation="redispy", max_connections=tasks
        )
        strategy = limits.aio.strategies.FixedWindowRateLimiter(storage)
        item = limits.RateLimitItemPerDay(1_000_000_000)
        await strategy.hit(item, KEY)
        return await awaited(functools.partial(strategy.hit, item, KEY), tasks, seconds)

    return {"redis-py asyncio": by_redis_py, "coredis": by_coredis, "limits.aio, fixed window": by_limits}


def measure(programs: Path, path: Path, folder: Path, rounds: int, milliseconds: int) -> dict[str, Any]:
    seconds = milliseconds / 1000
    store = f"redis+unix://{path}?timeout_ms=2000"
    limiter = Limiter(RULES, name="bench", store=store)
    command = heard(path, folder, RULES, "bench")
    loop = plain(programs / "redis_loop", path, folder, "bench", command)
    waiting = {name: Asker(sys.executable, __file__, "--wait", name, path) for name in WAITING}
    loops = {"asyncio": asyncio.new_event_loop(), "uvloop": uvloop.new_event_loop()}

    def told_by(asker: Asker, *numbers: int) -> Callable[[], float]:
        return lambda: asker.rate(*numbers)[0]

    def run_by(events: asyncio.AbstractEventLoop, main: Callable[[float], Coroutine[Any, Any, float]]) -> Callable[[], float]:
        return lambda: events.run_until_complete(main(seconds))

    piece = max(1, milliseconds // PIECES)
    one_by_one = {
        "hiredis loop, one at a time": told_by(loop, 1, piece),
        **{name: told_by(asker, piece) for name, asker in waiting.items()},
    }
    rows = {"hiredis loop, 64 at a time": told_by(loop, 64, milliseconds)}
    hit = functools.partial(limiter.hit_async, KEY)
    for name, events in loops.items():
        for tasks in (64, 256):
            rows[f"tidegate, hit_async(), {tasks} tasks, {name}"] = run_by(events, functools.partial(awaited, hit, tasks))
    for tasks in (64, 256):
        for name, main in async_others(path, words(command), tasks).items():
            rows[f"{name}, {tasks} tasks"] = run_by(loops["asyncio"], main)
    rates = interleaved(one_by_one, rounds * PIECES) | interleaved(rows, rounds)
    for asker in (loop, *waiting.values()):
        asker.close()
    for events in loops.values():
        events.close()
    return {"rates": rates, "cpu": server_costs(programs, path, folder, rounds, milliseconds)}


def interleaved(rows: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Back and forth, so that no row is always the one after another."""
    rates: dict[str, list[float]] = {row: [] for row in rows}
    for number in range(rounds):
        for row in list(rows) if number % 2 == 0 else reversed(list(rows)):
            rates[row].append(rows[row]())
    return rates


def server_costs(programs: Path, path: Path, folder: Path, rounds: int, milliseconds: int) -> dict[str, list[float]]:
    """The server's microseconds for each decision, 64 at a time."""
    loops = {}
    for name, rules in SCRIPTS.items():
        command = heard(path, folder, rules, name) if rules else b"*2\r\n$4\r\nINCR\r\n$7\r\nbench:i\r\n"
        loops[name] = plain(programs / "redis_loop", path, folder, name, command)
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
        waits = row in (one, *WAITING)
        beside = "" if waits else f"  {ratio(rates, row, theirs):11.1f}"
        print(f"{row:52}{statistics.median(rates[row]):10.0f}  {ratio(rates, row, one if waits else many):11.2f}{beside}")
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


def divide_processors(server: int) -> None:
    """One for the server, the others for whoever asks: this process and those it starts from here on."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        print("one processor alone: what is measured is how it is shared", file=sys.stderr)
        return
    os.sched_setaffinity(server, processors[:1])
    os.sched_setaffinity(0, processors[1:])


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("programs", type=Path)
    arguments.add_argument("--rounds", type=int, default=11)
    arguments.add_argument("--milliseconds", type=int, default=300)
    arguments.add_argument("--json", action="store_true")
    os.environ["TIDEGATE_SECRET"] = "bench"
    if sys.argv[1:2] == ["--wait"]:
        wait_for_answers(*sys.argv[2:])
        return 0
    given = arguments.parse_args()
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
            divide_processors(server.pid)
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
