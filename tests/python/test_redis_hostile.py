"""What answers on Redis' port is no Redis, and means no good: nobody who asks is held, and memory stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidegate import Limiter

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from server import Lateness, MachineLateness, server

TIMEOUT = 0.1


def _an_array_that_promises_a_hundred_million(peer: socket.socket) -> None:
    peer.sendall(b"*100000000\r\n" + b":1\r\n" * 1000)
    time.sleep(2)


def _an_array_that_goes_on(peer: socket.socket) -> None:
    peer.sendall(b"*100000\r\n")
    while True:
        peer.sendall(b"*100000\r\n" + b":1\r\n" * 16384)


def _a_text_without_end(peer: socket.socket) -> None:
    peer.sendall(b"$9000000000\r\n")
    while True:
        peer.sendall(b"x" * 65536)


def _a_line_without_end(peer: socket.socket) -> None:
    while True:
        peer.sendall(b"+" + b"x" * 65536)


def _a_byte_now_and_then(peer: socket.socket) -> None:
    peer.sendall(b"+")
    while True:
        peer.sendall(b"x")
        time.sleep(0.005)


def _answers_nobody_asked_for(peer: socket.socket) -> None:
    while True:
        peer.sendall(b"+OK\r\n" * 1000)


Speech = Callable[[socket.socket], None]
SPEECHES = [
    _an_array_that_promises_a_hundred_million, _an_array_that_goes_on, _a_text_without_end, _a_line_without_end,
    _a_byte_now_and_then, _answers_nobody_asked_for,
]  # fmt: skip


def _serve(listener: socket.socket, speech: Speech) -> None:
    def serve(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            if peer.recv(64):
                speech(peer)

    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


@contextlib.contextmanager
def impostor(speech: Speech) -> Iterator[int]:
    """Its port. A process of its own: its threads must not take turns with those that are judged."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        child = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, speech), daemon=True)
        child.start()
        try:
            yield listener.getsockname()[1]
        finally:
            child.kill()
            child.join()


def _greetings_of_tls_without_end(peer: socket.socket) -> None:
    """Each asks to begin anew, which means nothing before there was a beginning: OpenSSL reads on by itself."""
    while True:
        peer.sendall(b"\x16\x03\x03\x00\x04\x00\x00\x00\x00" * 50)


def _half_a_greeting_of_tls(peer: socket.socket) -> None:
    peer.sendall(b"\x16\x03\x03")
    time.sleep(2)


SECURED = [_greetings_of_tls_without_end, _half_a_greeting_of_tls]


def _uri(speech: Speech, port: int) -> str:
    return f"{'rediss' if speech in SECURED else 'redis'}://127.0.0.1:{port}?timeout_ms={TIMEOUT * 1000:.0f}"


def _name(speech: Speech) -> str:
    return speech.__name__.strip("_")


@pytest.mark.parametrize("speech", SPEECHES + SECURED, ids=_name)
def test_whatever_answers_on_its_port_a_hit_ends_by_its_deadline_in_bounded_memory(speech: Speech) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with impostor(speech) as port:
        one = Limiter("5/minute", name="x", store=_uri(speech, port))
        for _ in range(3):
            with Lateness() as late:
                began = time.monotonic()
                assert one.hit("a").degraded
                assert late.allows(time.monotonic() - began, TIMEOUT + 0.05)
            time.sleep(0.15)  # it is asked again
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200 * 1024


@pytest.mark.parametrize("speech", SPEECHES + SECURED, ids=_name)
def test_whatever_answers_on_its_port_no_event_loop_is_held(speech: Speech) -> None:
    async def ask(port: int) -> None:
        one = Limiter("5/minute", name="x", store=_uri(speech, port))
        held: list[float] = []
        spent: list[float] = []

        async def tick() -> None:
            while True:
                began, spent_before = time.monotonic(), time.thread_time()
                await asyncio.sleep(0.001)
                held.append(time.monotonic() - began - 0.001)
                spent.append(time.thread_time() - spent_before)

        with MachineLateness() as late:
            ticking = asyncio.ensure_future(tick())
            for _ in range(3):
                began = time.monotonic()
                assert (await one.hit_async("a")).degraded
                assert late.allows(time.monotonic() - began, TIMEOUT + 0.05)
                await asyncio.sleep(0.15)
            ticking.cancel()
            assert len(held) > 100
            # Giving 16 MiB of a reply back, and what OpenSSL reads in one go, take 15 ms; the others below 2.
            assert max(spent) < 0.04, "of the processor, in one turn, whatever comes"
            assert late.allows(max(held), TIMEOUT / 2), "and it waits for nobody"

    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with impostor(speech) as port:
        asyncio.run(ask(port))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200 * 1024


@contextlib.contextmanager
def doubling(path: Path, doubles: threading.Event) -> Iterator[int]:
    """The port of a relay that says the next answer twice where it is told to."""

    def ask(peer: socket.socket, redis: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while asked := peer.recv(65536):
                redis.sendall(asked)
            redis.shutdown(socket.SHUT_RDWR)

    def serve(peer: socket.socket) -> None:
        with peer, socket.socket(socket.AF_UNIX) as redis, contextlib.suppress(OSError):
            redis.connect(str(path))
            threading.Thread(target=ask, args=(peer, redis), daemon=True).start()
            while answer := redis.recv(65536):
                twice = doubles.is_set()
                doubles.clear()
                peer.sendall(answer * 2 if twice else answer)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]


def test_an_answer_that_came_twice_is_never_the_next_hits() -> None:
    doubles = threading.Event()
    with server() as redis, doubling(redis.path, doubles) as port:
        one = Limiter("1000/hour fixed_window", name="x", store=f"redis://127.0.0.1:{port}?timeout_ms=1000")
        left = one.hit("a").remaining
        for _ in range(20):
            doubles.set()
            told = [one.hit("a").remaining for _ in range(4)]
            assert told == [left - 1, left - 2, left - 3, left - 4]
            left = told[-1]
