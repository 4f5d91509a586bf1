"""What has been judged for one request, and how it shows in the answer.

Every face keeps one RequestState per actual request, so that middlewares, dependencies and hooks that meet the same
request charge an equal key once, and give back what they took when a later one refuses. Must not enter: frameworks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from tidegate._core import Decision, Judgement, StoreError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SCOPE_KEY = "tidegate"

# The messages that open an answer; an accepted WebSocket tells its client the numbers too.
_OPENING = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
_LIMIT_FIELDS = frozenset({b"x-ratelimit-limit", b"x-ratelimit-remaining", b"x-ratelimit-reset"})


class RequestState:
    """The judgements of one request, in the order they were made, and the one whose fields the client sees."""

    __slots__ = ("judgements", "shown", "_send")

    def __init__(self, send: Send | None = None) -> None:
        self.judgements: list[Judgement] = []
        self.shown: Judgement | None = None
        self._send = send

    @property
    def adds_fields(self) -> bool:
        """Whether a send wrapper puts the fields on the answer, whatever builds it."""
        return self._send is not None

    def passed(self, judgement: Judgement) -> None:
        """Keeps an allowed judgement; shown is the tightest: the smallest remaining, then the longest reset."""
        shown = self.shown
        if shown is None:
            self.shown = judgement
        elif judgement.fields:
            if not shown.fields or _tightness(judgement.decision) < _tightness(shown.decision):
                self.shown = judgement
        self.judgements.append(judgement)

    def refused(self, judgement: Judgement) -> None:
        """Shows a refusal and gives back what earlier limits took for this request."""
        self.shown = judgement
        for earlier in self.judgements:
            try:
                earlier.decision.refund()
            except StoreError:
                # The store has gone since it charged. The refusal stands; the trouble is logged where it began.
                pass
        self.judgements.clear()

    def send(self, message: Message) -> Awaitable[None]:
        """An ASGI `send` that puts the fields on whatever opens the answer: own responses, streams, errors."""
        shown = self.shown
        if shown is not None and message["type"] in _OPENING:
            # A copy: applications may send one constant message, and a response object may be sent twice.
            message = {**message, "headers": merge_fields(message.get("headers", ()), shown)}
        assert self._send is not None
        return self._send(message)


def _tightness(decision: Decision) -> tuple[int, int]:
    return decision.remaining, -decision.reset_after_us


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
