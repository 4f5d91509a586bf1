"""The rules read again and again while requests come: none is lost, none counts twice, and each is judged by one file.

`TIDEGATE_LONG=1`: a thousand times.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from client import Answer, Connection, Request, ask
from fcgi_daemon import Daemon

TIMES = 1000 if os.environ.get("TIDEGATE_LONG") == "1" else 50

# A day's log: nothing of it leaves while a test runs. With a resolution it has room for millions.
DAY = "/day sliding_log resolution 60s"
# Upward, downward, to another place in the file, beside another policy, into a file of its own, beside another rule.
FILES = [
    f"policies:\n  - {{name: big, rules: 1000000{DAY}}}\n",
    f"policies:\n  - {{name: big, rules: 2000000{DAY}}}\n",
    f"policies:\n  - {{name: small, match: {{path: /small}}, rules: 5/hour}}\n  - {{name: big, rules: 1500000{DAY}}}\n",
    f"policies:\n  - {{name: all, rules: 9000000/hour, also: true, by: host}}\n  - {{name: big, rules: 1200000{DAY}}}\n",
    "include: base.yaml\npolicies: []\n",
    f"policies:\n  - {{name: big, rules: [1300000{DAY}, 10000000/hour]}}\n",
]
LIMITS = {"1000000", "2000000", "1500000", "1200000", "1700000", "1300000"}


class Crowd:
    """Requests over kept connections, each thread counting for itself."""

    def __init__(self, address: str, threads: int = 3) -> None:
        self.address = address
        self.over = threading.Event()
        self.answers: list[list[Answer]] = [[] for _ in range(threads)]
        self.trouble: list[str] = []
        self.threads = [threading.Thread(target=self.run, args=(own,)) for own in self.answers]
        for thread in self.threads:
            thread.start()

    def run(self, own: list[Answer]) -> None:
        try:
            with Connection(self.address) as connection:
                while not self.over.is_set():
                    own.append(connection.ask(Request(uri="/big", keep=True)))
        except Exception as trouble:  # shown by end()
            self.trouble.append(repr(trouble))

    def end(self) -> list[Answer]:
        self.over.set()
        for thread in self.threads:
            thread.join(20)
        assert self.trouble == []
        return [answer for own in self.answers for answer in own]


def head(store: str) -> str:
    return f"store: {store}\n"


@pytest.mark.parametrize("threads", ["1", "2"])
def test_reloads_under_load_lose_no_count_and_judge_each_request_by_one_file(
    start: Callable[..., Daemon], folder: Path, threads: str
) -> None:
    store = f"shared://{folder}/table"
    daemon = start(head(store) + FILES[0], "--threads", threads)
    (daemon.folder / "base.yaml").write_text(f"policies:\n  - {{name: big, rules: 1700000{DAY}}}\n")
    crowd = Crowd(daemon.address)
    try:
        for number in range(TIMES):
            written = daemon.folder / "new"
            written.write_text(head(store) + FILES[number % len(FILES)])
            written.rename(daemon.rules)
            assert "rules-reloaded" in daemon.reload()
            if number % 10 == 5:  # a bad one in between changes nothing
                written.write_text(head(store) + "policies: [{name: big, rules: 7/minuet}]\n")
                written.rename(daemon.rules)
                assert "rules-refused" in daemon.reload()
    finally:
        answers = crowd.end()
    assert len(answers) > TIMES
    assert {answer.status for answer in answers} == {200}
    seen = {answer["X-RateLimit-Limit"] for answer in answers}
    assert seen <= LIMITS
    assert len(seen) > 1

    # What was used is exactly what was let through, whatever the limit was meanwhile.
    daemon.rules.write_text(head(store) + f"policies:\n  - {{name: big, rules: 3000000{DAY}}}\n")
    assert "rules-reloaded" in daemon.reload()
    assert int(ask(daemon.address, uri="/big")["X-RateLimit-Remaining"] or 0) == 3_000_000 - len(answers) - 1


def test_a_limit_moved_down_and_up_under_load_keeps_what_was_used_to_the_last_unit(
    start: Callable[..., Daemon], folder: Path
) -> None:
    def rules(limit: int) -> str:
        return (head(f"shared://{folder}/table?size=16MiB")
                + f"policies:\n  - {{name: big, rules: {limit}{DAY}}}\n")  # fmt: skip

    daemon = start(rules(5_000))
    crowd = Crowd(daemon.address)
    try:
        for number in range(TIMES):
            daemon.rules.write_text(rules(5_000 if number % 2 else 3))
            assert "rules-reloaded" in daemon.reload()
    finally:
        answers = crowd.end()
    passed = sum(answer.status == 200 for answer in answers)
    assert {answer.status for answer in answers} == {200, 429}
    daemon.rules.write_text(rules(max(passed, 1)))
    daemon.reload()
    assert ask(daemon.address, uri="/big").status == 429
    daemon.rules.write_text(rules(passed + 3))
    daemon.reload()
    assert [ask(daemon.address, uri="/big").status for _ in range(4)] == [200, 200, 200, 429]


def test_an_override_stands_while_the_rules_are_read_again(
    start: Callable[..., Daemon], folder: Path, program: Path
) -> None:
    store = f"shared://{folder}/table?size=1MiB"
    daemon = start(head(store) + "policies:\n  - {name: big, rules: 100/hour}\n")
    operator = [program.parent / "tidegate", "set", "big", "2/hour", "--for", "10m", "--config", daemon.rules]
    subprocess.run(operator, check=True, capture_output=True, timeout=20)
    statuses = []
    for limit in (100, 50, 200):
        daemon.rules.write_text(head(store) + f"policies:\n  - {{name: big, rules: {limit}/hour}}\n")
        assert "rules-reloaded" in daemon.reload()
        statuses.append(ask(daemon.address, uri="/big").status)
    assert statuses == [200, 200, 429]
    subprocess.run([*operator[:3], "--end", "--config", daemon.rules], check=True, capture_output=True, timeout=20)
    assert ask(daemon.address, uri="/big")["X-RateLimit-Remaining"] == "197"
