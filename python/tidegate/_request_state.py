"""What has been judged for one request, and how it shows in the answer.

Every face keeps one RequestState per actual request, so that middlewares, dependencies and hooks that meet the same
request charge an equal key once, and give back what they took when a later one refuses. Must not enter: frameworks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, ClassVar

from tidegate._core import Judgement, StoreError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SCOPE_KEY = "tidegate"


class RequestState(list[Judgement]):
    """The judgements of one request in the order they were made; after a refusal only that.

    A list and nothing else, because one is made for each request: without a frame of __init__ it costs a third.
    """

    __slots__ = ()
    adds_fields: ClassVar[bool] = True  # a send wrapper puts the fields on the answer, whatever builds it

    def refused(self, judgement: Judgement) -> None:
        """Keeps a refusal and gives back what earlier limits took for this request."""
        for earlier in self:
            try:
                earlier.decision.refund()
            except StoreError:
                # The store has gone since it charged. The refusal stands; the trouble is logged where it began.
                pass
        self[:] = [judgement]


class BareState(RequestState):
    """Where no send wrapper is: each limit has to put its fields where it can."""

    __slots__ = ()
    adds_fields = False
