"""Runs the cmocka programs: as they are, under address and undefined-behaviour sanitizers, and, where they have
threads, under the thread sanitizer. One item a program and build; the tests inside are recorded by name for
docs/faults.md.

A program that a build cannot run says so in a comment: `test-builds: plain asan`, with the reason beside it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 300
RESULT = re.compile(r"^\[\s*(OK|FAILED|SKIPPED)\s*\] (\w+)", re.MULTILINE)
OUTCOME = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}
SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def builds_of(source: Path) -> list[str]:
    text = source.read_text(errors="replace")
    said = re.search(r"test-builds:((?: (?:plain|asan|tsan)\b)+)", text)
    if said:
        return said.group(1).split()
    return ["plain", "asan"] + (["tsan"] if "pthread_create" in text else [])


def programs() -> list[ParameterSet]:
    found = []
    for source in sorted((ROOT / "tests").rglob("test_*.c")):
        name = source.relative_to(ROOT / "tests").with_suffix("").as_posix().removeprefix("c/")
        found += [pytest.param(name, build, id=f"{name}-{build}") for build in builds_of(source)]
    return found


@pytest.mark.parametrize(("name", "variant"), programs())
def test_c_program_passes(name: str, variant: str, build: Path, make: Callable[..., None], outcomes: object) -> None:
    program = (build if variant == "plain" else build / variant) / "tests" / name
    make(str(program), variant)
    process = subprocess.Popen(
        [program],
        cwd=ROOT,
        env={**os.environ, **SANITIZERS, "TIDEGATE_BUILD": str(build)},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not done after {SECONDS_MAX} s:\n{output[-20000:]}", pytrace=False)
    # A forked child may print its copy of what was buffered again: names, not lines, are counted.
    results = {test: OUTCOME[word] for word, test in RESULT.findall(output)}
    for test, outcome in results.items():
        outcomes.add(f"{name}::{test}", outcome)  # type: ignore[attr-defined]
    if process.returncode != 0 or "failed" in results.values():
        pytest.fail(f"exit {process.returncode}:\n{output[-20000:]}", pytrace=False)
    assert results, f"no test ran:\n{output}"
    if set(results.values()) == {"skipped"}:
        pytest.skip(f"all of it: {output[-500:]}")
