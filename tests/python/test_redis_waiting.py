"""Who waits for Redis keeps the interpreter's lock until the question is on its way: that it is let go wherever a
network is waited for, and that an answer is taken for what it is, however it comes."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidegate import Limiter, ManualClock, _core

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from detour import Detour
from server import MachineLateness, Server, free_port, server
from tls import Certificates, tls_server

TIMEOUT = 0.25
BEGINNING = 0.08  # of the waiting: less than its first system call may take


def limiter(uri: str, more: str = "") -> Limiter:
    return Limiter("1000/minute", name="x", by="ip", store=f"{uri}?timeout_ms={int(TIMEOUT * 1000)}{more}")


def _stopped(folder: Path) -> Iterator[Limiter]:
    with server(port=free_port()) as redis:
        one = limiter(redis.tcp)
        assert not one.hit(dims={"ip": "192.0.2.1"}).degraded
        redis.signal(signal.SIGSTOP)
        yield one


def _stopped_with_the_only_connection_in_use(folder: Path) -> Iterator[Limiter]:
    with server() as redis:
        one = limiter(redis.uri, "&connections=1")
        assert not one.hit(dims={"ip": "192.0.2.1"}).degraded
        redis.signal(signal.SIGSTOP)
        sooner = threading.Thread(target=one.hit, kwargs={"dims": {"ip": "192.0.2.2"}})
        sooner.start()
        time.sleep(0.05)
        yield one
        sooner.join()


def _stopped_behind_tls(folder: Path) -> Iterator[Limiter]:
    certificates = Certificates(folder)
    redis, port = tls_server(certificates)
    with contextlib.closing(redis):
        one = limiter(f"rediss://127.0.0.1:{port}", f"&ca={certificates.path('ca.crt')}")
        assert not one.hit(dims={"ip": "192.0.2.1"}).degraded
        redis.signal(signal.SIGSTOP)
        yield one


def _nobody_accepts(folder: Path) -> Iterator[Limiter]:
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(8):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        yield limiter(f"redis://127.0.0.1:{full.getsockname()[1]}")


def _says_nothing(scheme: str, path: str = "", more: str = "") -> Callable[[Path], Iterator[Limiter]]:
    def way(folder: Path) -> Iterator[Limiter]:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            yield limiter(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}{path}", more)

    return way


WAYS = {
    "a server that has stopped": _stopped,
    "another call's connection": _stopped_with_the_only_connection_in_use,
    "a server that has stopped, behind TLS": _stopped_behind_tls,
    "a connection": _nobody_accepts,
    "a greeting": _says_nothing("redis"),
    "a TLS handshake": _says_nothing("rediss", more="&verify=no"),
    "a sentinel": _says_nothing("redis+sentinel", "/main"),
}


def judged(one: Limiter) -> bool:
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": ("192.0.2.1", 5)}
    return bool(_core.judge_asgi([one], scope))


@pytest.mark.parametrize("ask", [lambda one: one.hit(dims={"ip": "192.0.2.1"}).degraded, judged], ids=["hit", "judge"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_other_threads_run_while_one_waits_for(
    way: Callable[[Path], Iterator[Limiter]], ask: Callable[[Limiter], bool], tmp_path: Path
) -> None:
    with contextlib.contextmanager(way)(tmp_path) as one:
        seen: list[float] = []
        done = threading.Event()

        def tick() -> None:
            while not done.is_set():
                time.sleep(0.001)
                seen.append(time.monotonic())

        ticker = threading.Thread(target=tick)
        ticker.start()
        while not seen:
            time.sleep(0.001)
        with MachineLateness() as late:
            began = time.monotonic()
            answer = ask(one)
            ended = time.monotonic()
        done.set()
        ticker.join()
        assert answer, "not answered by on_store_failure"
        assert ended - began > TIMEOUT / 2, "nothing was waited for"
        ran = sum(began < at < began + BEGINNING for at in seen)
        assert ran > 3 or late.worst > BEGINNING / 2, f"another thread ran {ran} times in the first {BEGINNING} s"


ASKS_NOBODY = """
import contextlib, sys
from tidegate import Limiter

one, never = (Limiter(rules, name="x", store=sys.argv[1]) for rules in ("100/minute", "deny"))
for _ in range(20):
    assert not never.hit("a")
    with contextlib.suppress(ValueError):
        one.hit("a", cost=10**11)
        raise SystemExit("a cost that no rule can hold was asked about")
    one.refund("a")
    one.reset("a")
assert one.hit("a").remaining == 99
"""


def test_a_call_that_asks_nobody_leaves_nothing_behind_for_the_next_one() -> None:
    """The next call lets go of the lock by itself: a second time would end the process."""
    with server() as redis:
        command = [sys.executable, "-c", ASKS_NOBODY, redis.patient]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr


class Told(Detour):
    """A detour that says something else than the server did, in pieces of its own; a number is a pause in seconds."""

    tells: Callable[[bytes], list[bytes | float]] = staticmethod(lambda words: [words])

    def answer(self, near: socket.socket, far: socket.socket, asked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while words := far.recv(65536):
                pieces: list[bytes | float] = [words]
                if asked.is_set():
                    asked.clear()
                    pieces = self.tells(words)
                for piece in pieces:
                    if isinstance(piece, float):
                        time.sleep(piece)
                    else:
                        near.sendall(piece)


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    with server(port=free_port()) as redis, contextlib.closing(Told(redis)) as way:
        yield way


def through(told: Told, rules: str, name: str) -> Limiter:
    told.tells = lambda words: [words]
    return Limiter(rules, name=name, clock=ManualClock(), store=f"{told.uri}?timeout_ms=2000&connections=1")


def test_an_answer_broken_in_two_at_any_byte_is_the_same_answer(told: Told) -> None:
    one = through(told, "5/minute token_bucket; 9/hour token_bucket", "broken")
    lengths: list[int] = []

    def tell(words: bytes) -> list[bytes | float]:
        lengths.append(len(words))
        return [words]

    assert one.peek("a").remaining == 5  # the script is known from now on
    told.tells = tell
    assert one.hit("a").remaining == 4
    at = 0

    def breaks(words: bytes) -> list[bytes | float]:
        return [words[:at], 0.0005, words[at:]]

    told.tells = breaks
    for at in range(1, lengths[0]):
        found = one.peek("a")
        assert (found.degraded, found.remaining) == (False, 4), f"broken at byte {at} of {lengths[0]}"


def test_answers_of_255_bytes_and_of_fewer_and_more_are_read_alike(told: Told) -> None:
    """Up to 255 bytes lie with who asked, more elsewhere."""
    lengths: list[int] = []

    def tell(words: bytes) -> list[bytes | float]:
        lengths.append(int(words[1 : words.index(b"\r\n")]))
        return [words]

    for count in range(1, 17):
        one = through(told, "; ".join(f"{i + 5}/{i + 2}m sliding_log" for i in range(min(count, 8))), f"long{count}")
        dims = {f"user{i}": "a" for i in range(1 + count // 8)}
        assert one.peek(dims=dims).remaining == 5
        told.tells = tell
        assert [one.hit(dims=dims).remaining for _ in range(6)] == [4, 3, 2, 1, 0, 0]
    assert min(lengths) < 100 and max(lengths) > 256 and 255 in lengths, sorted(set(lengths))


@pytest.mark.parametrize("length", [0, 1, 9, 254, 255, 256, 257, 5000])
def test_an_answer_that_no_script_gives_is_none_and_the_next_one_is_right(told: Told, length: int) -> None:
    one = through(told, "100/minute token_bucket", f"none{length}")
    assert one.hit("a").remaining == 99
    byte = b""

    def lies(words: bytes) -> list[bytes | float]:
        return [b"$%d\r\n%s\r\n" % (length, byte * length)]

    for byte in (b"\0", b"\1", b"\xff"):
        told.tells = lies
        assert one.peek("a").degraded
        told.tells = lambda words: [words]
        found = one.peek("a")
        assert (found.degraded, found.remaining) == (False, 99)
