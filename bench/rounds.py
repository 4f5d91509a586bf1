"""Interleaved timing: every round times each row once, so that rows which are compared met the same machine.

A ratio is the median over the rounds of the ratio within a round. Counted is the processor's time of this process, so
that what else runs does not count. Must not enter: what is measured.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Mapping
from typing import Any


class Rounds:
    """Times of several rows, in nanoseconds a call, by round."""

    def __init__(
        self, statements: Mapping[str, str], names: dict[str, Any], rounds: int, seconds: float = 0.02
    ) -> None:
        timers = {
            row: timeit.Timer(statement, timer=time.process_time, globals=names)
            for row, statement in statements.items()
        }
        calls = {}
        for row, timer in timers.items():
            number, taken = timer.autorange()
            calls[row] = max(1, round(number * seconds / taken))
        self.ns: dict[str, list[float]] = {row: [] for row in timers}
        for _ in range(rounds):
            for row, timer in timers.items():
                self.ns[row].append(timer.timeit(calls[row]) * 1e9 / calls[row])

    def median(self, row: str) -> float:
        return statistics.median(self.ns[row])

    def ratio(self, row: str, base: str) -> float:
        """How many times the base's time the row takes."""
        return statistics.median(a / b for a, b in zip(self.ns[row], self.ns[base], strict=True))
