"""What one decision costs from Python, beside an empty C method and beside limits, throttled-py and slowapi in memory.

    python bench/python_decision.py FOLDER_OF_EMPTY_METHOD [--rounds N] [--store URI] [--json]

Each limiter decides about one hot key with a limit that is never reached ("denied" rows: one that is always), in the
way its own documentation calls it. Must not enter: HTTP.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import Any

from rounds import Rounds

KEY = "203.0.113.7"


def tidegate_rows(names: dict[str, Any], store: str) -> dict[str, str]:
    from tidegate import Limiter

    for row, rules in {
        "token_bucket": "1000000000/second token_bucket",
        "fixed_window": "10000000000/day fixed_window",
        "sliding_counter": "10000000000/day sliding_counter",
        "two_rules": "1000000000/second token_bucket; 10000000000/minute token_bucket",
        "denied": "1/year token_bucket",
    }.items():
        names[f"tidegate_{row}"] = Limiter(rules, name=f"bench-{row}", store=store)
    names["tidegate_denied"].hit(KEY)
    rows = {
        f"tidegate {row}": f"tidegate_{row}.hit({KEY!r})"
        for row in ("token_bucket", "fixed_window", "sliding_counter")
    }
    rows["tidegate two rules"] = f"tidegate_two_rules.hit({KEY!r})"
    rows["tidegate denied"] = f"tidegate_denied.hit({KEY!r})"
    rows["tidegate token_bucket, fields read"] = (
        f"d = tidegate_token_bucket.hit({KEY!r}); d.allowed; d.remaining; d.retry_after"
    )
    return rows


def limits_rows(names: dict[str, Any]) -> dict[str, str]:
    import limits
    from limits import storage, strategies

    memory = storage.MemoryStorage()
    names["limits_item"] = limits.RateLimitItemPerDay(1_000_000_000)
    # The moving window keeps every hit of its period in a list: a second's worth of them, not a day's.
    names["limits_moving_item"] = limits.RateLimitItemPerSecond(1_000_000_000)
    names["limits_denied_item"] = limits.RateLimitItemPerYear(1)
    names["limits_fixed"] = strategies.FixedWindowRateLimiter(memory)
    names["limits_moving"] = strategies.MovingWindowRateLimiter(memory)
    names["limits_counter"] = strategies.SlidingWindowCounterRateLimiter(memory)
    names["limits_fixed"].hit(names["limits_denied_item"], KEY)
    return {
        "limits fixed window": f"limits_fixed.hit(limits_item, {KEY!r})",
        "limits moving window": f"limits_moving.hit(limits_moving_item, {KEY!r})",
        "limits sliding window counter": f"limits_counter.hit(limits_item, {KEY!r})",
        "limits fixed window, denied": f"limits_fixed.hit(limits_denied_item, {KEY!r})",
    }


def throttled_rows(names: dict[str, Any]) -> dict[str, str]:
    import throttled

    memory = throttled.store.MemoryStore()
    quota = throttled.rate_limiter.per_day(1_000_000_000, burst=1_000_000_000)
    rows = {}
    for algorithm in ("fixed_window", "sliding_window", "leaking_bucket", "token_bucket", "gcra"):
        names[f"throttled_{algorithm}"] = throttled.Throttled(using=algorithm, quota=quota, store=memory)
        rows[f"throttled-py {algorithm}"] = f"throttled_{algorithm}.limit({f'{KEY} {algorithm}'!r})"
    return rows


def slowapi_rows(names: dict[str, Any]) -> dict[str, str]:
    from slowapi import Limiter
    from slowapi.util import get_remote_address
    from starlette.requests import Request

    limiter = Limiter(key_func=get_remote_address)

    @limiter.limit("1000000000/day")
    def view(request: Request) -> None:
        return None

    names["slowapi_view"] = view

    class App:
        class state:
            pass

    App.state.limiter = limiter  # type: ignore[attr-defined]
    names["slowapi_request"] = lambda: Request(
        {
            "type": "http",
            "method": "GET",
            "path": "/x",
            "headers": [],
            "client": (KEY, 1),
            "app": App,
            "query_string": b"",
        }
    )
    return {
        "slowapi decorator, with its request": "slowapi_view(slowapi_request())",
        "a request alone": "slowapi_request()",
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", help="where empty_method.so is")
    arguments.add_argument("--rounds", type=int, default=21)
    arguments.add_argument("--store", default="memory://bench")
    arguments.add_argument("--json", action="store_true")
    asked = arguments.parse_args()
    logging.disable(logging.CRITICAL)  # a limiter that logs each refusal would measure the logging
    sys.path.insert(0, asked.folder)
    import empty_method  # type: ignore[import-not-found]

    names: dict[str, Any] = {"empty": empty_method.Empty()}
    rows = {"an empty C method": f"empty.hit({KEY!r})"}
    rows |= tidegate_rows(names, asked.store)
    rows |= limits_rows(names) | throttled_rows(names) | slowapi_rows(names)
    rounds = Rounds(rows, names, asked.rounds)
    ours = "tidegate token_bucket"
    table = {
        row: {
            "ns": rounds.median(row),
            "to_empty": rounds.ratio(row, "an empty C method"),
            "to_tidegate": rounds.ratio(row, ours),
        }
        for row in rows
    }
    if asked.json:
        print(json.dumps(table))
    else:
        for row, numbers in table.items():
            ratios = f"{numbers['to_empty']:8.1f} x empty {numbers['to_tidegate']:8.2f} x tidegate"
            print(f"{row:38} {numbers['ns']:10.0f} ns {ratios}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
