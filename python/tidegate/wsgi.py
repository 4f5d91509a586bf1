"""Limits in front of any WSGI application.

    application = TidegateMiddleware(application, config="rules.yaml")
    application = TidegateMiddleware(application, limiter=Limiter("100/minute", by="ip"))

Requests are judged before the application sees them. Only the standard library and the compiled part are used: no
framework is needed. Must not enter: addresses, keys, numbers; those are the compiled part's.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http.client import responses
from typing import Any, TypeAlias

from tidegate._core import Gate, Judgement, Limiter, ManualClock, judge_wsgi, shown
from tidegate._limits import Needs, check_cost, check_judges, open_gate, user_text
from tidegate._outcome import ChargeWhen, Outcome, Pending, check_charge_when, give_back
from tidegate._request_state import BODY_BYTES_MAX, SCOPE_KEY, RequestState, refused, settle

__all__ = ["TidegateMiddleware"]

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Any]
Application: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]
UserOf: TypeAlias = Callable[[Mapping[str, Any]], "str | int | None"]
PlanOf: TypeAlias = Callable[[Mapping[str, Any]], "str | None"]


class TidegateMiddleware:
    """Judges every request by a rules file, or by limiters, or by both.

    config        the rules file; without it, and without gate= and limiter=, TIDEGATE_CONFIG names it. ConfigError here,
                  not on the first request
    gate          a Gate to share instead of opening one
    limiter       a Limiter with `by`, or several: judged together, all or nothing, after the rules file
    cost          units that a request takes of `limiter`
    charge_when   callable(response) -> whether a request that was answered so counts: `response.status_code`,
                  `response.headers`. Every request is judged and charged before it goes on; one that does not count gets
                  it back, so the limit is exact whatever asks meanwhile. Of `limiter` only: a rules file says `count`
    store, clock, timeout  as for Gate
    user          callable(environ) -> the user's id or None; without it REMOTE_USER counts
    plan          callable(environ) -> the name of the client's plan or None, for policies with `plans`

    A refusal is what the rules say, such as 429 with Retry-After (RFC 9110 10.2.3). What the application returns is handed
    to the server as it is, so nothing is buffered and its close() is called by the server.
    """

    def __init__(
        self,
        app: Application,
        config: str | None = None,
        *,
        gate: Gate | None = None,
        limiter: Limiter | Sequence[Limiter] | None = None,
        cost: int = 1,
        charge_when: ChargeWhen | None = None,
        store: str | None = None,
        clock: ManualClock | None = None,
        timeout: float = 0.05,
        user: UserOf | None = None,
        plan: PlanOf | None = None,
    ) -> None:
        if not callable(app):
            raise TypeError(f"app must be a WSGI application, not {type(app).__name__}")
        check_charge_when(charge_when)
        self.app = app
        self.limiters = () if limiter is None else (limiter,) if isinstance(limiter, Limiter) else tuple(limiter)
        self.cost = check_cost(cost)
        for one in self.limiters:
            check_judges(one)
        if charge_when is not None and not self.limiters:
            raise ValueError("charge_when= speaks of limiter=; a policy of a rules file has `count`")
        if gate is None and (config is not None or not self.limiters):
            gate = open_gate(config, store=store, clock=clock, timeout=timeout)
        self.gate = gate
        self.user = user
        self.plan = plan
        self.charge_when = charge_when
        self._needs: Needs | None = None

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        state: RequestState | None = environ.get(SCOPE_KEY)
        outermost = state is None
        if state is None:
            state = environ[SCOPE_KEY] = []
        pending: list[Pending] = []
        refusal = self._judge(environ, state, pending)
        if refusal is not None:
            refused(state, refusal)
            return _refuse(environ, start_response, refusal)
        answer = _Answer(state if outermost else [], pending, start_response)
        try:
            body = self.app(environ, answer.start)
        except BaseException:
            answer.settle(500, ())  # what the server makes of it is outside of us
            raise
        # The application's own iterable, so that servers still see its length or its file.
        return body if answer.is_settled() else _Watched(body, answer)

    def _judge(self, environ: Environ, state: RequestState, pending: list[Pending]) -> Judgement | None:
        """The refusal, or None: then the state holds what let the request through."""
        if self.gate is not None:
            if self._needs is None or self._needs.generation != self.gate.generation:
                self._needs = Needs(self.gate)
            user = user_text(self.user(environ)) if self.user is not None and self._needs.user else None
            plan = None if self.plan is None else self.plan(environ)
            judgement = self.gate.judge_wsgi(environ, user=user, plan=plan, prior=state, reads_body=True)
            if judgement.needs_body:
                state.append(judgement)
                body = read_ahead(environ)
                judgement = self.gate.judge_wsgi(environ, user=user, plan=plan, prior=state, body=body)
            if judgement.status:
                return judgement
            state.append(judgement)
        if self.limiters:
            user = None if self.user is None else user_text(self.user(environ))
            asks: dict[str, Any] = {"user": user, "cost": self.cost, "prior": state}
            judgement = judge_wsgi(self.limiters, environ, reads_body=True, **asks)
            if judgement.needs_body:
                state.append(judgement)
                judgement = judge_wsgi(self.limiters, environ, body=read_ahead(environ), **asks)
            if judgement.status:
                return judgement
            state.append(judgement)
            if self.charge_when is not None:
                pending.append(Pending(judgement.decision, self.charge_when))
        return None


def _refuse(environ: Mapping[str, Any], start_response: StartResponse, judgement: Judgement) -> list[bytes]:
    body = judgement.body
    fields = [*judgement.fields_text, ("Content-Length", str(len(body)))]
    start_response(f"{judgement.status} {responses.get(judgement.status, 'Refused')}", fields)
    return [] if environ.get("REQUEST_METHOD") == "HEAD" else [body]


class _Answer:
    """A start_response that puts the fields on the answer and tells the limits what it is."""

    __slots__ = ("_state", "_pending", "_start_response", "_settled")

    def __init__(self, state: RequestState, pending: list[Pending], start_response: StartResponse) -> None:
        self._state = state  # empty under another middleware of tidegate: that one adds the fields
        self._pending = pending
        self._start_response = start_response
        self._settled = False

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        self.settle(int(status[:3]), headers)
        if self._state:
            fields = [pair for pair in shown(self._state).fields_text if pair[0] != "Content-Type"]
            ours = {name.lower() for name, _ in fields}
            headers = [pair for pair in headers if pair[0].lower() not in ours] + fields
        return self._start_response(status, headers, *(() if exc_info is None else (exc_info,)))

    def settle(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        """Once: an application that starts again has failed on its way, after what it did was done."""
        if self._settled:
            return
        self._settled = True
        settle(self._state, status, headers)
        if self._pending:
            give_back(self._pending, Outcome(status, headers))

    def is_settled(self) -> bool:
        """Whether nothing is left to be told."""
        return self._settled or not (self._pending or any(judgement.settles for judgement in self._state))


class _Watched:
    """An iterable of an application that has not begun its answer yet and may still fail."""

    __slots__ = ("_body", "_iterator", "_answer")

    def __init__(self, body: Iterable[bytes], answer: _Answer) -> None:
        self._body = body
        self._iterator: Iterator[bytes] | None = None
        self._answer = answer

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> bytes:
        try:
            if self._iterator is None:
                self._iterator = iter(self._body)
            return next(self._iterator)
        except StopIteration:
            raise
        except BaseException:
            self._answer.settle(500, ())
            raise

    def close(self) -> None:
        self._answer.settle(500, ())  # it never began one
        close = getattr(self._body, "close", None)
        if close is not None:
            close()


def read_ahead(environ: Environ) -> bytes:
    """The body as far as it is looked at; `wsgi.input` is replaced by one that gives all of it once more."""
    source = environ.get("wsgi.input")
    if source is None:
        return b""
    declared = str(environ.get("CONTENT_LENGTH") or "")
    if declared.isascii() and declared.isdigit():
        wanted = int(declared)
        if wanted >= BODY_BYTES_MAX:
            return b""  # longer than is looked at: what would stand there is missing, and nothing is read
    elif environ.get("wsgi.input_terminated"):
        wanted = BODY_BYTES_MAX
    else:
        return b""  # PEP 3333: without a length there is no body
    pieces, length = [], 0
    while length < wanted:
        piece = source.read(wanted - length)
        if not piece:
            break
        pieces.append(piece)
        length += len(piece)
    body = b"".join(pieces)
    environ["wsgi.input"] = (
        io.BufferedReader(_Replay(body, source)) if length == BODY_BYTES_MAX else io.BytesIO(body)
    )
    return body if length < BODY_BYTES_MAX else b""


class _Replay(io.RawIOBase):
    """What has been read, then the rest of where it came from."""

    def __init__(self, head: bytes, source: Any) -> None:
        self._head = memoryview(head)
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        room = len(buffer)
        piece = self._head[:room] if self._head else self._source.read(room)
        self._head = self._head[len(piece) :] if self._head else self._head
        buffer[: len(piece)] = piece
        return len(piece)
