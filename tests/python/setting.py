"""A store and a clock of a test's own, and what a test makes with them.

Must not enter: frameworks, of which a test may have one only; what is expected.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidegate import Gate, Limiter, ManualClock


class Setting:
    def __init__(self) -> None:
        self.store = f"memory://{uuid.uuid4().hex}"
        self.clock = ManualClock()

    @property
    def own(self) -> dict[str, Any]:
        """As arguments of whatever opens a store."""
        return {"store": self.store, "clock": self.clock}


class MiddlewareSetting(Setting):
    """What middlewares judge by."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def limiter(self, rules: str = "2/minute", **settings: Any) -> Limiter:
        return Limiter(rules, by=settings.pop("by", "ip"), **self.own, **settings)

    def gate(self, rules: str) -> Gate:
        path = self.folder / "rules.yaml"
        path.write_text(rules)
        return Gate(path, **self.own)


class FaceSetting(Setting):
    """What a face's rate_limit() makes, and its object for a whole application where it has one."""

    def __init__(self, rate_limit: Callable[..., Any], whole: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._rate_limit = rate_limit
        self._whole = whole

    def __call__(self, rules: Any = "2/minute", **settings: Any) -> Any:
        return self._rate_limit(rules, **self.own, **settings)

    def gate(self, *arguments: Any, **settings: Any) -> Any:
        assert self._whole is not None
        return self._whole(*arguments, **self.own, **settings)
