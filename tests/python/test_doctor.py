"""What a running process notices about its surroundings and logs once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tidegate

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")},
    "PYTHONPATH": str(Path(tidegate.__file__).parents[1]),
}


def notices(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


ASK = """
import logging, sys
from tidegate import Limiter
from tidegate._core import judge_wsgi
logging.basicConfig(stream=sys.stdout, format="%(message)s")
limiter = Limiter("100000/hour", store="memory://seen", by="ip")
def ask(peer, times=1):
    for _ in range(times):
        judge_wsgi([limiter], {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": peer})
"""


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        ("ask('10.0.0.1', 1000)", 1),
        ("ask('127.0.0.1', 5000)", 1),
        ("ask('10.0.0.1', 999)", 0),
        ("ask('198.51.100.7', 5000)", 0),
        ("ask('10.0.0.1', 500); ask('10.0.0.2'); ask('10.0.0.1', 5000)", 0),
    ],
)
def test_all_requests_on_one_private_address_are_told_once(asked: str, lines: int) -> None:
    told = [line for line in notices(ASK + asked) if "one private" in line or "private address" in line]
    assert len(told) == lines
    assert all("trusted_proxies" in line for line in told)


WORKERS = """
import os, subprocess, sys, time
WORKER = '''
import logging, sys, time
from tidegate import Limiter
logging.basicConfig(stream=sys.stdout, format="%(message)s")
limiter = Limiter("5/minute", store=sys.argv[1])
end = time.monotonic() + 2.5
while time.monotonic() < end:
    limiter.hit("x")
    time.sleep(0.05)
'''
workers = [subprocess.Popen([sys.executable, "-c", WORKER, *options]) for options in OPTIONS]
sys.exit(sum(worker.wait() for worker in workers))
"""


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ([["memory://"], ["memory://"], ["memory://"]], 3),
        ([["memory://"], ["memory://other"]], 0),  # another command: no workers of one server
        ([["memory://"]], 0),
    ],
)
def test_a_memory_store_under_several_workers_is_told_once_by_each(options: list[list[str]], lines: int) -> None:
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        pytest.skip("this kernel does not list children")
    told = notices(WORKERS.replace("OPTIONS", repr(options)))
    assert len(told) == lines
    assert all("use shared://default" in line for line in told)


def test_a_memory_store_opened_before_the_fork_is_shared_and_not_told_of() -> None:
    script = """
import logging, os, sys, time
from tidegate import Limiter
logging.basicConfig(stream=sys.stdout, format="%(message)s")
limiter = Limiter("5/minute", store="memory://")
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            limiter.hit("x")
            time.sleep(0.05)
        sys.stdout.flush()
        os._exit(0)
    children.append(pid)
sys.exit(sum(os.waitpid(pid, 0)[1] for pid in children))
"""
    assert notices(script) == []


def test_each_notice_has_its_paragraph_and_each_paragraph_its_notice(root: Path) -> None:
    sources = [path.read_text() for folder in ("csrc", "python") for path in sorted((root / folder).rglob("*.c"))]
    said = {code for text in sources for code in re.findall(r'(?:tg__notice\(|log_warning\(\w+,)\s*"([\w-]+)"', text)}
    page = re.findall(r"^\*\*([\w-]+)\*\* — ", (root / "docs/notices.md").read_text(), re.MULTILINE)
    assert len(page) == len(set(page))
    assert set(page) == said
    # What a site's first hours bring to light: forwarded headers from a stranger, everybody on one key, workers that count
    # apart, a clock that went back, a table that fills up.
    assert {"forwarded-from-untrusted", "one-client", "memory-workers", "clock-back", "table-near-full"} <= said
