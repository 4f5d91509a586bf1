"""The stub: checked against the built module, and by a strict checker on code as a reader would write it."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

import tidegate

HERE = pathlib.Path(__file__).parent
PACKAGE = pathlib.Path(tidegate.__file__).parent

USAGE = """
import asyncio
from collections.abc import Sequence
from typing import assert_type

from tidegate import ConfigError, Decision, Error, Gate, Judgement, Limiter, ManualClock, RuleError, RuleResult, StoreError
from tidegate._core import client_address, judge_asgi, judge_wsgi, take_notices

clock = ManualClock(now_us=1_700_000_000_000_000)
limiter = Limiter("10/second; 1000/hour", name="search", algorithm="token_bucket", store="memory://", clock=clock)
decision = limiter.hit("203.0.113.7", b"user-42", cost=1)
assert_type(decision, Decision)
assert_type(limiter.hit(dims={"ip": "203.0.113.7", "ip+user": ("203.0.113.7", b"u")}), Decision)
assert_type(decision.retry_after, float)
assert_type(decision.retry_after_us, int | None)
assert_type(decision.rules, tuple[RuleResult, ...])
assert_type(decision.refund(), None)
assert_type(limiter.rules, tuple[str, ...])
clock.advance(1.5)
clock.advance_us(1)
clock.now_us = 5


async def main() -> None:
    assert_type(await limiter.hit_async("a"), Decision)
    assert_type(await asyncio.gather(limiter.peek_async("a"), limiter.reset_async("a")), tuple[Decision, None])


def judge(limiters: Sequence[Limiter], scope: dict[str, object], gate: Gate) -> list[tuple[bytes, bytes]]:
    first = judge_asgi(limiters, scope, route="/", user=None, cost=1)
    second = gate.judge_wsgi(scope, prior=[first])
    assert_type(judge_wsgi([limiter], scope), Judgement)
    assert_type(client_address(scope, gate), str)
    assert_type(take_notices(), list[tuple[str, str]])
    return second.fields


try:
    Limiter("5/minute")
except RuleError as error:
    assert_type(error.offset, int)
except (ConfigError, StoreError) as other:
    assert_type(other.code, str)
except Error:
    pass
"""

MISUSE = """
from tidegate import Decision, Limiter

class Mine(Limiter): ...
Limiter("5/minute").hit(5)
Limiter("5/minute").hit("a", cost="1")
Limiter("5/minute").hit("a").allowed = True
Limiter("5/minute", enabled="no")
"""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")


def mypy(module: str, *arguments: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "MYPYPATH": str(PACKAGE.parent), "PYTHONPATH": str(PACKAGE.parent)},
    )


def test_code_as_in_the_documentation_passes_the_strict_checker(tmp_path: pathlib.Path) -> None:
    (tmp_path / "usage.py").write_text(USAGE)
    done = mypy("mypy", "--strict", "usage.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_part_passes_mypy_strictly(tmp_path: pathlib.Path) -> None:
    done = mypy("mypy", "--strict", str(HERE / "typed_usage.py"), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_part_passes_pyright_strictly(tmp_path: pathlib.Path) -> None:
    (tmp_path / "typed_usage.py").write_text((HERE / "typed_usage.py").read_text())
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": [str(PACKAGE.parent)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"include": ["typed_usage.py"], **settings}))
    # basedpyright is pyright with a node of its own; what it checks beyond is not asked for here.
    done = mypy("basedpyright", "-p", str(tmp_path), "--pythonpath", sys.executable, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_strict_checker_refuses_misuse(tmp_path: pathlib.Path) -> None:
    (tmp_path / "misuse.py").write_text(MISUSE)
    done = mypy("mypy", "--strict", "misuse.py", folder=tmp_path)
    lines = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert lines == ["4", "5", "6", "7", "8"], done.stdout + done.stderr


def test_the_stub_says_what_the_built_module_is(tmp_path: pathlib.Path) -> None:
    done = mypy("mypy.stubtest", "tidegate._core", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
