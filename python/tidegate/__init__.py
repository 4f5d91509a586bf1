"""tidegate: one rate limiter for every part of a site.

    from tidegate import Limiter

    limiter = Limiter("10/second; 1000/hour", name="search")
    if not limiter.hit("203.0.113.7"):
        ...

The faces are tidegate.fastapi, tidegate.asgi, tidegate.flask and tidegate.wsgi; docs/python.md tells what each number means.
"""

from tidegate._core import (
    ConfigError,
    Decision,
    Error,
    Gate,
    IdentityError,
    Judgement,
    Limiter,
    ManualClock,
    RuleError,
    RuleResult,
    StoreError,
    __version__,
    refusal,
)
from tidegate._explain import Explanation, explain
from tidegate._reservation import Reservation

__all__ = [
    "ConfigError",
    "Decision",
    "Error",
    "Explanation",
    "Gate",
    "IdentityError",
    "Judgement",
    "Limiter",
    "ManualClock",
    "Reservation",
    "RuleError",
    "RuleResult",
    "StoreError",
    "__version__",
    "explain",
    "refusal",
]
