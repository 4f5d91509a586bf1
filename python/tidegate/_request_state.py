"""What has been judged for one request, and how it shows in the answer.

Every face keeps one RequestState per actual request, so that middlewares, dependencies and hooks that meet the same
request charge an equal key once, and give back what they took when a later one refuses. Must not enter: frameworks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

from tidegate._core import Decision, Judgement, StoreError, refusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SCOPE_KEY = "tidegate"
SETTLE_KEY = "tidegate_settle"  # in a scope: what is told the answer before it is sent


# The judgements of one request in the order they were made; after a refusal only that. A plain list, because one is
# made for each request, and because the compiled part then knows that a send wrapper puts the fields on the answer.
RequestState = list[Judgement]


class BareState(list[Judgement]):
    """A RequestState where no send wrapper is: each limit has to put its fields where it can."""

    __slots__ = ()


def refused(state: RequestState, judgement: Judgement) -> None:
    """Keeps a refusal and gives back what earlier limits took for this request."""
    for earlier in state:
        try:
            earlier.decision.refund()
        except StoreError:
            # The store has gone since it charged. The refusal stands; the trouble is logged where it began.
            pass
    state[:] = [judgement]


async def refused_async(state: RequestState, judgement: Judgement) -> None:
    """refused() on an event loop. All refunds are begun at once: a task that is cancelled here has given back all the same."""
    begun = [earlier.decision.refund_async() for earlier in state]
    state[:] = [judgement]
    for refund in begun:
        with contextlib.suppress(StoreError):
            await refund


BODY_BYTES_MAX = 65536  # of a body: as much as is looked at for `form:` and `json:`; a longer one has no values


def settle(state: RequestState, status: int, headers: Iterable[tuple[bytes, bytes] | tuple[str, str]]) -> None:
    """Tells the judgements what was answered, for limits that count some answers only."""
    for judgement in state:
        if judgement.settles:
            try:
                judgement.settle(status, headers)
            except StoreError:
                pass  # What was taken stays taken; the trouble is logged where it began.


async def settle_async(state: RequestState, status: int, headers: Sequence[tuple[bytes, bytes] | tuple[str, str]]) -> None:
    """settle() on an event loop, begun at once as in refused_async()."""
    for begun in [judgement.settle_async(status, headers) for judgement in state if judgement.settles]:
        with contextlib.suppress(StoreError):
            await begun


def refusal_of(refused: Judgement | Decision) -> Judgement:
    """What a face's RateLimited is made of."""
    judgement = refusal(refused) if isinstance(refused, Decision) else refused
    if not judgement.status:
        raise ValueError("RateLimited says that a request is refused, and this judgement lets it through")
    return judgement


def message_of(body: bytes) -> str:
    """What a refusal's body says to people: `message`, in application/problem+json `detail`."""
    said = json.loads(body)
    return str(said.get("message", said.get("detail")))
