"""Why a request is answered as it is, in Python. The words are those of `tidegate explain`; docs/cli.md.

Must not enter: a second way to judge.
"""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, final

from tidegate._core import Gate


@final
class Explanation:
    """str() is for a person; `data` holds the same as `tidegate explain --json` prints."""

    def __init__(self, text: str, data: dict[str, Any]) -> None:
        self._text = text
        self.data = data

    @property
    def outcome(self) -> str:
        """ "allowed", "denied", "unmatched", …"""
        return str(self.data["decision"]["outcome"])

    @property
    def policies(self) -> list[str]:
        """The names of those that apply, in the file's order."""
        return [policy["name"] for policy in self.data["policies"] if policy["applies"]]

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Explanation {self.outcome}, policies {self.policies}>"


def explain(
    request: str,
    *,
    config: str | os.PathLike[str] | Gate | None = None,
    store: str | None = None,
    headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    ip: str = "127.0.0.1",
    host: str | None = None,
    user: str | None = None,
    route: str | None = None,
    cost: int = 1,
) -> Explanation:
    """What a request such as "POST /login" would meet and why. Takes nothing; a table that is not there is not made.

    config: the rules file, else TIDEGATE_CONFIG; or a Gate, whose rules and counts are then asked. A memory:// store's
    counts are seen only from the process that has them: give its Gate. Raises ConfigError, StoreError.
    """
    method, _, path = request.rpartition(" ")
    if not path:
        raise ValueError("request must be 'METHOD PATH', such as 'POST /login'")
    gate = config if isinstance(config, Gate) else Gate(config, store=store, look=True)
    sent = tuple(tuple(pair) for pair in (headers.items() if isinstance(headers, Mapping) else headers))
    told = [
        gate.explain_as(
            method or "GET", path, headers=sent, peer=ip, host=host, user=user, route=route, cost=cost, json=form
        )
        for form in (False, True)
    ]
    return Explanation(told[0], json.loads(told[1]))
