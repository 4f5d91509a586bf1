"""Pools by fork and by spawn, forks of a process with a memory store, and a hundred threads count in one table.

Real time, kept short; TIDEGATE_LONG=1 takes the spans of the reported faults. Must not enter: what one process can show.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from tidegate import Limiter

LONG = os.environ.get("TIDEGATE_LONG") == "1"


def boot_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def hit_for(store: str, rules: str, seconds: float) -> int:
    limiter = Limiter(rules, name="pool", store=store)
    admitted = 0
    end = boot_seconds() + seconds  # its own: on a busy machine a spawned Python is seconds late
    while boot_seconds() < end:
        for _ in range(50):
            admitted += limiter.hit("one").allowed
        time.sleep(0.001)
    return admitted


@pytest.mark.fault("R155")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_pool_of_forty_admits_what_one_process_would(method: str, tmp_path: Path) -> None:
    seconds = 10 if LONG else 3
    workers = 40 if method == "fork" or LONG else 12  # each spawned one is a Python of its own
    store = f"shared://{tmp_path}/table?size=1MiB"
    begun = boot_seconds()
    with multiprocessing.get_context(method).Pool(workers) as pool:
        admitted = sum(pool.starmap(hit_for, [(store, "7/second", seconds)] * workers, chunksize=1))
    took = boot_seconds() - begun
    assert 7 <= admitted <= 7 * (took + 1)


def test_a_fork_shares_memory_of_its_parent() -> None:
    limiter = Limiter("9/hour", name="forked", store="memory://forked")
    assert limiter.hit("a")
    readers = []
    for _ in range(4):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, bytes([sum(limiter.hit("a").allowed for _ in range(3))]))
            os._exit(0)
        os.close(writing)
        readers.append((pid, reading))
    admitted = 1
    for pid, reading in readers:
        admitted += os.read(reading, 1)[0]
        os.close(reading)
        assert os.waitpid(pid, 0)[1] == 0
    assert admitted == 9
    assert not limiter.hit("a")


@pytest.mark.fault("R157")
def test_a_hundred_threads_start_no_thread_of_ours_and_meet_no_error(tmp_path: Path) -> None:
    limiter = Limiter("1000/hour", name="threads", store=f"shared://{tmp_path}/table?size=1MiB")
    limiter.hit("warm")
    native = len(os.listdir("/proc/self/task"))
    admitted: list[int] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            admitted.append(sum(limiter.hit("one").allowed for _ in range(100)))
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sum(admitted) == 1000
    deadline = time.monotonic() + 5  # join() returns a moment before the kernel lets go of a thread
    while len(os.listdir("/proc/self/task")) > native and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(os.listdir("/proc/self/task")) == native
