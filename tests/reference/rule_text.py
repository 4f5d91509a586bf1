"""Rule text read a second time, from the grammar alone, so that a trace's rules do not pass through the parser they test."""

from __future__ import annotations

import re

from model import DAY, SECOND, Rule

UNITS = {
    "ms": 1000, "s": SECOND, "sec": SECOND, "second": SECOND, "seconds": SECOND,
    "m": 60 * SECOND, "min": 60 * SECOND, "minute": 60 * SECOND, "minutes": 60 * SECOND,
    "h": 3600 * SECOND, "hour": 3600 * SECOND, "hours": 3600 * SECOND,
    "d": DAY, "day": DAY, "days": DAY, "w": 7 * DAY, "week": 7 * DAY, "weeks": 7 * DAY,
    "month": 30 * DAY, "year": 365 * DAY,
}  # fmt: skip
ALGORITHMS = {name: name for name in ("fixed_window", "sliding_log", "sliding_counter", "token_bucket", "leaky_bucket")}
ALGORITHMS["gcra"] = "token_bucket"
AMOUNT = re.compile(r"(\d+)\s*(?:/|per)\s*(\d*)\s*([a-z]+)")
BURST = re.compile(r"\bburst\s*(\d+)")
RESOLUTION = re.compile(r"\bresolution\s*(\d*)\s*([a-z]+)")


def rule(text: str) -> Rule:
    text = text.strip().lower()
    if text == "deny":
        return Rule(0, 0, "deny")
    amount = AMOUNT.match(text)
    assert amount, text
    rest = text[amount.end() :]
    burst, resolution = BURST.search(rest), RESOLUTION.search(rest)
    named = [ALGORITHMS[word] for word in rest.split() if word in ALGORITHMS]
    limit = int(amount[1])
    aligned = "aligned" in rest.split()
    algorithm = (
        named[0] if named
        else "token_bucket" if burst
        else "fixed_window" if aligned
        else "sliding_log" if resolution or limit <= 1000
        else "sliding_counter"
    )  # fmt: skip
    return Rule(
        limit,
        int(amount[2] or 1) * UNITS[amount[3]],
        algorithm,
        int(burst[1]) if burst else None,
        aligned,
        int(resolution[1] or 1) * UNITS[resolution[2]] if resolution else 0,
    )


def rules(text: str) -> list[Rule]:
    return [rule(part) for part in re.split("[;,]", text)]
