"""What has been judged for one request, and how it shows in the answer.

Every face keeps one RequestState per actual request, so that middlewares, dependencies and hooks that meet the same
request charge an equal key once, and give back what they took when a later one refuses. Must not enter: frameworks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, ClassVar

from tidegate._core import Judgement, StoreError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SCOPE_KEY = "tidegate"

# The messages that open an answer; an accepted WebSocket tells its client the numbers too.
_OPENING = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
_LIMIT_FIELDS = frozenset({b"x-ratelimit-limit", b"x-ratelimit-remaining", b"x-ratelimit-reset"})


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

    def shown(self) -> Judgement:
        """Whose fields the client sees: the tightest's, by the smallest remaining, then the longest reset."""
        if len(self) == 1:
            return self[0]
        return min((judgement for judgement in self if judgement.fields), key=_tightness, default=self[0])


class BareState(RequestState):
    """Where no send wrapper is: each limit has to put its fields where it can."""

    __slots__ = ()
    adds_fields = False


def _tightness(judgement: Judgement) -> tuple[int, int]:
    decision = judgement.decision
    return decision.remaining, -decision.reset_after_us


def send_with_fields(state: RequestState, send: Send, message: Message) -> Awaitable[None]:
    """An ASGI `send`, with its first two arguments bound: puts the fields on whatever opens the answer."""
    if state and message["type"] in _OPENING:
        # A copy: applications may send one constant message, and a response object may be sent twice.
        message = {**message, "headers": merge_fields(message.get("headers", ()), state.shown())}
    return send(message)


def merge_fields(headers: Iterable[tuple[bytes, bytes]], judgement: Judgement) -> list[tuple[bytes, bytes]]:
    """The headers with the judgement's fields in place of any of the same name."""
    fields = judgement.fields
    if not judgement.status:
        # Retry-After of an application's own 503 stays: an allowed judgement has none of its own.
        merged = [header for header in headers if header[0] not in _LIMIT_FIELDS]
        merged += fields
        return merged
    # The body may be the application's own by now (an error handler's), so Content-Type stays whatever it is.
    added = [field for field in fields if field[0] != b"content-type"]
    replaced = {name for name, _ in added}
    merged = [(name, value) for name, value in headers if name.lower() not in replaced]
    merged += added
    return merged
