"""What tests of a limited application need of pytest: time that only they move, counts that begin anew, and a switch.

    def test_the_third_login_is_refused(client, tidegate_clock):
        ...
        tidegate_clock.advance(60)

Comes with the package (entry point pytest11). docs/testing.md tells what it does to limits made at import. Must not enter:
anything at import that a run without limits would pay for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tidegate import ManualClock

# Longer than any period: then every state is as if it had never been (csrc/include/tidegate.h, TG_PERIOD_US_MAX).
_BEYOND_ALL_US = 10 * 365 * 86400 * 1_000_000 + 1_000_000
_CLOCK = pytest.StashKey["ManualClock"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "tidegate_clock",
        "manual: limits count by a clock that only tests move, also those made at import, each process in a memory:// "
        "store of its own unless TIDEGATE_STORE says another; real (default): only limits made in a test that asks for "
        "tidegate_clock",
        default="real",
    )
    parser.addini("tidegate_reset", "whether every test begins with fresh counts; needs tidegate_clock = manual", "bool", False)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before conftest files are imported, and the application with them."""
    kind = config.getini("tidegate_clock")
    if kind not in ("manual", "real"):
        raise pytest.UsageError(f"tidegate_clock is {kind!r}, expected 'manual' or 'real'")
    if kind == "real":
        if config.getini("tidegate_reset"):
            raise pytest.UsageError("tidegate_reset = true needs tidegate_clock = manual: real time cannot be moved on")
        return
    from tidegate._core import ManualClock, use_clock

    clock = ManualClock()
    before = use_clock(clock)
    config.stash[_CLOCK] = clock
    named = "TIDEGATE_STORE" in os.environ
    if not named:
        os.environ["TIDEGATE_STORE"] = "memory://pytest"  # of this process: parallel runs do not meet

    def restore() -> None:
        use_clock(before)
        if not named:
            os.environ.pop("TIDEGATE_STORE", None)

    config.add_cleanup(restore)


@pytest.fixture
def tidegate_clock(request: pytest.FixtureRequest) -> Iterator[ManualClock]:
    """A ManualClock that every limit counts by which is made without a clock of its own: `advance(seconds)`.

    With tidegate_clock = manual in pytest's settings it is that of the whole run, so limits made at import count by it
    too; else that of this test, for applications made by a factory in it.
    """
    kept = request.config.stash.get(_CLOCK, None)
    if kept is not None:
        yield kept
        return
    from tidegate._core import ManualClock, use_clock

    clock = ManualClock()
    before = use_clock(clock)
    try:
        yield clock
    finally:
        use_clock(before)


@pytest.fixture
def tidegate_reset(tidegate_clock: ManualClock) -> Callable[[], None]:
    """Every count begins anew, for this test and whenever it is called: the clock goes on by more than any period."""

    def reset() -> None:
        tidegate_clock.advance_us(_BEYOND_ALL_US)

    reset()
    return reset


@pytest.fixture(autouse=True)
def _tidegate_fresh(request: pytest.FixtureRequest) -> None:
    if request.config.getini("tidegate_reset"):
        request.config.stash[_CLOCK].advance_us(_BEYOND_ALL_US)


@pytest.fixture
def tidegate_off() -> Iterator[None]:
    """Lets everything through and asks no store, whatever has been made and wherever, for the length of this test."""
    from tidegate._core import switch_off

    before = switch_off(True)
    try:
        yield
    finally:
        switch_off(before)
