"""Charging by outcome: what was taken before the answer was known is given back where the answer does not count.

Taken first and given back after, because a limit that charges afterwards lets through whatever asks meanwhile. Must not
enter: frameworks.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from tidegate._core import Decision, StoreError

log = logging.getLogger("tidegate")

Pair = tuple[bytes, bytes] | tuple[str, str]


class Response(Protocol):
    """What a `charge_when=` callable is asked about: Flask gives its own response, other faces an Outcome."""

    @property
    def status_code(self) -> int: ...
    @property
    def headers(self) -> Any: ...


ChargeWhen = Callable[[Any], bool]


class Fields(Mapping[str, str]):
    """Header fields by name in any case; of a repeated one the values joined by ", " (RFC 9110 5.3)."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._values: dict[str, str] = {}
        for name, value in pairs:
            key, text = _text(name).lower(), _text(value)
            self._values[key] = f"{self._values[key]}, {text}" if key in self._values else text

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _text(value: bytes | str) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


class Outcome:
    """An answer as far as it is known when it begins: its status and its header fields."""

    __slots__ = ("status_code", "headers")

    def __init__(self, status_code: int, headers: Iterable[Pair] = ()) -> None:
        self.status_code = status_code
        self.headers = Fields(headers)


def check_charge_when(charge_when: object) -> None:
    """TypeError now rather than with the first answer."""
    if charge_when is None:
        return
    if not callable(charge_when):
        raise TypeError(f"charge_when must be a callable that takes the response, not {type(charge_when).__name__}")
    if inspect.iscoroutinefunction(charge_when):
        raise TypeError("charge_when is asked while the answer is being sent: it cannot be async")


class Pending(NamedTuple):
    """A decision that is still to be told what was answered."""

    decision: Decision
    charge_when: ChargeWhen

    def counts(self, response: Any) -> bool:
        """A predicate that fails must not take the answer with it: what was taken then stays taken."""
        try:
            return bool(self.charge_when(response))
        except Exception:
            log.exception("charge_when=%r failed on a response; the request stays charged", self.charge_when)
            return True


def give_back(pending: Iterable[Pending], response: Any) -> None:
    """Gives back what should not have been taken. Raises nothing: a store's trouble is logged where it began."""
    for one in pending:
        if not one.counts(response):
            with contextlib.suppress(StoreError):
                one.decision.refund()


async def give_back_async(pending: Iterable[Pending], response: Any) -> None:
    """The same without holding an event loop. All are begun at once: a task that is cancelled here has given back all the
    same."""
    for begun in [one.decision.refund_async() for one in pending if not one.counts(response)]:
        with contextlib.suppress(StoreError):
            await begun
