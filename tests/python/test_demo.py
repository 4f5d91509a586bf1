"""The demo: its sums, its users, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ["/usr/bin/python3", str(ROOT / "examples/demo/demo.py")]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives each server a user of its own: needs root")


@pytest.fixture(autouse=True)
def built(make: Callable[..., None], build: Path) -> None:
    if build != ROOT / "build":
        pytest.skip("the demo runs what is in build/")
    make("programs")


def processes_of(users: list[int]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.stat().st_uid in users and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def folders() -> set[Path]:
    return set(Path("/tmp").glob("tidegate-demo-*"))


def test_every_client_is_admitted_exactly_the_limit_over_three_faces() -> None:
    before = folders()
    done = subprocess.run([*DEMO, "--once", "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["exact"] is True and said["off"] == []
    assert all(client["admitted"] == client["limit"] for client in said["clients"].values())
    assert all(face["admitted"] > 0 and face["refused"] > 0 for face in said["faces"].values())
    assert len(set(said["users"].values())) == 4 and 0 not in said["users"].values()
    assert processes_of(list(said["users"].values())) == []
    assert folders() <= before


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_stays_up_until_it_is_ended_and_leaves_no_process(end: signal.Signals) -> None:
    before = folders()
    process = subprocess.Popen([*DEMO, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "}\n":
            break
    said = json.loads("".join(lines))
    users = list(said["users"].values())
    assert {os.stat(f"/proc/{pid}").st_uid for pid in processes_of(users)} == set(users), "each server under its own"
    for address in said["addresses"].values():
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert answer.status == 200
    for _ in range(3):  # people are impatient
        process.send_signal(end)
        time.sleep(0.1)
    process.communicate(timeout=20)
    assert process.returncode == (-end if end == signal.SIGKILL else 0)
    deadline = time.monotonic() + 10
    while processes_of(users) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(users) == []
    left = folders() - before
    if end == signal.SIGKILL:  # nobody is there any more to remove it
        subprocess.run(["rm", "-rf", *left], check=True)
    else:
        assert left == set()
