"""What every test sees: where the build is, and who passed.

The index of faults names tests and has to know that they ran, so this keeps each outcome of the session: pytest's own
by function, and those inside the cmocka programs by program and test name. Must not enter: fixtures of one room only.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INDEX = "test_faults_index.py"


class Outcomes:
    """What became of each test: "passed", "skipped", "failed", or several where it ran more than once."""

    def __init__(self) -> None:
        self.by_name: dict[str, set[str]] = {}
        self.whole = False  # every test file of the tree was collected and nothing deselected

    def add(self, name: str, outcome: str) -> None:
        self.by_name.setdefault(name, set()).add(outcome)


OUTCOMES = pytest.StashKey[Outcomes]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(id): holds this row of docs/faults.md")
    config.stash[OUTCOMES] = Outcomes()
    config.pluginmanager.register(_Recorder(config.stash[OUTCOMES]), "tidegate-outcomes")


class _Recorder:
    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        self.deselected = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.add(report.nodeid.split("[")[0], report.outcome)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected = self.deselected or bool(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        collected = {Path(item.path) for item in session.items}
        everything = {path for path in (ROOT / "tests").rglob("test_*.py")}
        self.outcomes.whole = not self.deselected and everything <= collected


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The index speaks of the others' outcomes: it runs last."""
    items.sort(key=lambda item: item.path.name == INDEX)


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    return request.config.stash[OUTCOMES]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def build() -> Path:
    """The build folder, absolute: TIDEGATE_BUILD, else build/."""
    return ROOT / os.environ.get("TIDEGATE_BUILD", "build")


@pytest.fixture(scope="session")
def make(build: Path) -> Iterator[object]:
    """make(target, variant="plain"): brings one thing up to date and fails with the compiler's words if it cannot."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }

    def run(target: str, variant: str = "plain") -> None:
        done = subprocess.run(
            ["make", "--no-print-directory", "-s", "-j2", f"B={build}", f"VARIANT={variant}", target],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"make {target} ({variant}):\n{done.stdout}{done.stderr}", pytrace=False)

    yield run
