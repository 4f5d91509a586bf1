"""Forks while a cluster is looked for, and maps that are none: what only the parent, or nobody, could end is not inherited, nor
kept."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate import Limiter

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from cluster import SLOTS, Cluster, cluster


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with cluster() as some:
        yield some


def test_a_child_forked_while_a_cluster_that_was_never_reached_is_looked_for_finds_it_later(three: Cluster) -> None:
    """No node is known then, and the thread that asks for the map is the parent's alone."""
    for one in three.nodes:
        one.signal(signal.SIGSTOP)
    children: list[int] = []
    stop = threading.Event()
    try:
        limiter = Limiter("1000/hour", name="forked", store=f"{three.uri}?timeout_ms=200")

        def ask() -> None:
            while not stop.is_set():
                limiter.hit("a")

        asking = threading.Thread(target=ask)
        asking.start()
        for _ in range(12):
            time.sleep(0.013)
            child = os.fork()
            if child == 0:
                end = time.monotonic() + 8
                while limiter.hit("b").degraded and time.monotonic() < end:
                    time.sleep(0.02)
                os._exit(int(time.monotonic() >= end))
            children.append(child)
        stop.set()
        asking.join()
    finally:
        stop.set()
        for one in three.nodes:
            one.signal(signal.SIGCONT)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ended == [0] * 12


def test_a_map_of_more_nodes_than_there_is_room_for_takes_no_room_from_the_next_one(three: Cluster) -> None:
    ranges = [(i * SLOTS // 300, (i + 1) * SLOTS // 300 - 1) for i in range(300)]
    words = [
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (first, last, 1 + i) for i, (first, last) in enumerate(ranges)
    ]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        answered = 0

        def answer() -> None:
            nonlocal answered
            while True:
                try:
                    peer = listener.accept()[0]
                except OSError:
                    return
                with peer:
                    if peer.recv(4096):
                        peer.sendall(b"*300\r\n" + b"".join(words))
                        answered += 1

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            port = listener.getsockname()[1]
            store = three.patient.replace("redis+cluster://", f"redis+cluster://127.0.0.1:{port},")
            limiter = Limiter("1000/hour", name="full", store=store)
            assert not any(limiter.hit(f"k{i}").degraded for i in range(30))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            answering.join()
    assert answered > 0
