"""tidegate for Flask: limits for an application, a view, or any function that runs in a request.

    gate = Tidegate(app, default="100/minute")

    @app.post("/login")
    @rate_limit("5/minute")
    def login() -> str: ...

See docs/flask.md. Must not enter: addresses, keys, numbers; those are the compiled part's.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from flask import (
    Blueprint,
    Flask,
    Request,
    Response,
    after_this_request,
    current_app,
    g,
    has_request_context,
    request,
    request_started,
)
from werkzeug.exceptions import HTTPException, default_exceptions
from werkzeug.wrappers import Response as WerkzeugResponse

from tidegate._core import Decision, Gate, Judgement, Limiter, ManualClock, judge_wsgi, shown
from tidegate._flask_commands import commands
from tidegate._limits import UNROUTED, Kind, Limit, Needs, check_cost, key_text, user_text
from tidegate._outcome import ChargeWhen, Pending, give_back
from tidegate._request_state import BODY_BYTES_MAX, SCOPE_KEY, RequestState, message_of, refusal_of, refused, settle

__all__ = ["RateLimit", "RateLimited", "Tidegate", "rate_limit"]

User = str | int | None
Function = TypeVar("Function", bound=Callable[..., Any] | Blueprint)
Exempted = TypeVar("Exempted", Callable[..., Any], Blueprint)

log = logging.getLogger("tidegate")

_STATE = "_tidegate"
_PENDING = "_tidegate_pending"  # on a request: what is still to be told how it was answered
_ENFORCES = "__tidegate_enforces__"  # on a wrapper: the limits it checks
_WANTED = "__tidegate_wanted__"  # on a function as written: the limits somebody decorated it with
_EXEMPT = "__tidegate_exempt__"  # on a view: the Tidegate objects that leave it alone


class RateLimited(HTTPException):
    """A limit has refused the request. It is also the werkzeug exception of its status (TooManyRequests for 429), so
    `errorhandler(429)` and `errorhandler(RateLimited)` both meet it. `decision` holds the numbers.

    A view that asks a limiter itself raises it with the Decision that refuses, of hit(), wait() or reserve():

        with limiter.reserve(user, cost=4000) as reservation:
            if not reservation:
                raise RateLimited(reservation.decision)
    """

    def __new__(cls, refused: Judgement | Decision) -> Self:
        # Flask looks for a handler by the class's code.
        return super().__new__(_class_of(refusal_of(refused).status) if cls is RateLimited else cls)

    def __init__(self, refused: Judgement | Decision) -> None:
        judgement = refusal_of(refused)
        if has_request_context():
            state = _state_of(request._get_current_object())  # type: ignore[attr-defined]
            if judgement not in state:
                # What limits have taken for the request stays taken: it has come as far as its view.
                state.append(judgement)
        self.judgement = judgement
        self.decision: Decision = judgement.decision
        self.body: bytes = judgement.body
        super().__init__(message_of(self.body))
        self.code = judgement.status

    def get_body(self, environ: Any = None, scope: Any = None) -> str:
        return self.body.decode()

    def get_headers(self, environ: Any = None, scope: Any = None) -> list[tuple[str, str]]:
        return list(self.judgement.fields_text)


@functools.cache
def _class_of(status: int) -> type[RateLimited]:
    """Flask looks for a handler by the exception's classes and by the code of its class."""
    general = default_exceptions.get(status)
    bases = (RateLimited,) if general is None else (RateLimited, general)
    return type("RateLimited", bases, {"code": status, "__doc__": RateLimited.__doc__, "__module__": __name__})


def _state_of(actual: Request) -> RequestState:
    """The state of one actual request. It lives on the request object: `g` outlives a request where a test keeps one
    context open around several."""
    state: RequestState | None = actual.__dict__.get(_STATE)
    if state is None:
        state = actual.environ.get(SCOPE_KEY)
        if state is None:
            state = []
            after_this_request(functools.partial(_add_fields, state))
        # else tidegate.wsgi is around the application: it has judged this request, and adds the fields.
        actual.__dict__[_STATE] = state
    return state


def _add_fields(state: RequestState, response: Response) -> Response:
    if state:
        settle(state, response.status_code, list(response.headers))
        for name, value in shown(state).fields_text:
            # The body may be an error handler's own by now, and its type with it.
            if name != "Content-Type":
                response.headers[name] = value
    return response


def _signed_in() -> str | None:
    """Flask-Login's user, else `g.user`; REMOTE_USER is looked at by the compiled part."""
    flask_login = sys.modules.get("flask_login")
    if flask_login is not None and hasattr(current_app, "login_manager"):
        current = flask_login.current_user
        if current.is_authenticated:
            return user_text(current.get_id())
    user = g.get("user")
    if user is None or isinstance(user, (str, int)):
        return user_text(user)
    if not getattr(user, "is_authenticated", True):
        return None
    get_id = getattr(user, "get_id", None)
    return user_text(get_id() if callable(get_id) else getattr(user, "id", None))


def _ask(function: Callable[[], Any]) -> Any:
    answer = function()
    if inspect.isawaitable(answer):
        answer = current_app.async_to_sync(_awaited)(answer)
    return answer


def _user_of(user: Callable[[], Any] | None) -> str | None:
    return _signed_in() if user is None else user_text(_ask(user))


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _template(actual: Request) -> str:
    return UNROUTED if actual.url_rule is None else actual.url_rule.rule


def _judge(limit: Limit, user: Callable[[], Any] | None, actual: Request, state: RequestState) -> Judgement:
    environ: Mapping[str, Any] = actual.environ
    if environ.get("REQUEST_METHOD") == "HEAD":
        # Flask answers HEAD with the view of GET: the same work, so the same count.
        environ = {**environ, "REQUEST_METHOD": "GET"}
    judged = functools.partial(
        judge_wsgi,
        limit.limiters if limit.rules_of is None else limit.limiters_for(_ask(limit.rules_of)),
        environ,
        route=_template(actual) if limit.needs_route else None,
        user=_user_of(user) if limit.needs_user else None,
        cost=limit.cost if limit.cost_of is None else check_cost(_ask(limit.cost_of)),
        keys={name: key_text(name, _ask(function)) for name, function in limit.keys.items()} or None,
        prior=state,
    )
    return _with_body(judged, actual, state)


def _charge(limit: Limit, user: Callable[[], Any] | None, actual: Request) -> None:
    state = _state_of(actual)
    judgement = _judge(limit, user, actual, state)
    _settle(judgement, state)
    if limit.charge_when is not None:
        pending: list[Pending] | None = actual.__dict__.get(_PENDING)
        if pending is None:
            pending = actual.__dict__[_PENDING] = []
            after_this_request(functools.partial(_give_back, pending))
        pending.append(Pending(judgement.decision, limit.charge_when))


def _give_back(pending: list[Pending], response: Response) -> Response:
    give_back(pending, response)
    return response


def _with_body(judged: Callable[..., Judgement], actual: Request, state: RequestState) -> Judgement:
    """Judges, and once more with the body where `form:` or `json:` asks for it."""
    judgement = judged(reads_body=True)
    if not judgement.needs_body:
        return judgement
    state.append(judgement)
    length = actual.content_length
    # Read at once and kept by werkzeug: the view finds it as if nobody had looked.
    known = length is not None and length < BODY_BYTES_MAX
    return judged(body=actual.get_data(cache=True, parse_form_data=False) if known else b"")


def _settle(judgement: Judgement, state: RequestState) -> None:
    if judgement.status:
        refused(state, judgement)
        raise RateLimited(judgement)
    state.append(judgement)


class _Exempting:
    """What can leave single views and blueprints out."""

    def __init__(self) -> None:
        self._exempts = False
        self._exempt_blueprints: list[Blueprint] = []

    def exempt(self, view_or_blueprint: Exempted) -> Exempted:
        """Leaves a view, or a blueprint with those registered on it, out of this. Others still hold."""
        self._exempts = True
        if isinstance(view_or_blueprint, Blueprint):
            self._exempt_blueprints.append(view_or_blueprint)
        else:
            _note(_written(view_or_blueprint), _EXEMPT, self)
        return view_or_blueprint

    def _is_exempt(self, actual: Request) -> bool:
        if self._exempt_blueprints and any(
            current_app.blueprints.get(name) in self._exempt_blueprints for name in actual.blueprints
        ):
            return True
        view = current_app.view_functions.get(actual.endpoint or "")
        if view is None:
            return False
        of_class = getattr(view, "view_class", None)
        return self in getattr(_written(view), _EXEMPT, ()) or self in getattr(of_class, _EXEMPT, ())


class RateLimit(_Exempting):
    """What rate_limit(...) makes: a decorator for views, methods, helpers and blueprints, and `check()` for a hook of your
    own.

    enabled   set it to False and it lets everything through without asking the store
    exempt    leaves a view or a blueprint out, where a blueprint or a hook has this limit for all of its views
    """

    def __init__(self, limit: Limit, user: Callable[[], User | Awaitable[User]] | None) -> None:
        super().__init__()
        self.enabled = True
        self.limit = limit
        self._user = user
        self._placed: WeakSet[Any] = WeakSet()  # functions as written that a view has under this limit

    @property
    def limiter(self) -> Limiter:
        """For a look at the count, or to reset it. Where the rules are a callable's, limiter_for() has theirs."""
        return self.limit.limiter

    def limiter_for(self, rules: str) -> Limiter:
        """The limiter of one of the rules that a callable answers with."""
        return self.limit.limiters_for(rules)[0]

    def __repr__(self) -> str:
        return f"<rate_limit {'; '.join(self.limiter.rules)!r} name={self.limiter.name!r} by={self.limit.by!r}>"

    def check(self) -> None:
        """Charges the current request, once however often it is called; raises RateLimited over the limit."""
        if not self.enabled:
            return
        actual = request._get_current_object()  # type: ignore[attr-defined]
        if not self._exempts or not self._is_exempt(actual):
            _charge(self.limit, self._user, actual)

    @property
    def decision(self) -> Decision | None:
        """What was last decided for the current request by any limit of tidegate; None before."""
        state = _state_of(request._get_current_object())  # type: ignore[attr-defined]
        return shown(state).decision if state else None

    def __call__(self, function: Function) -> Function:
        if isinstance(function, Blueprint):
            function.before_request(self.check)
            return function
        if not callable(function):
            raise TypeError(f"rate_limit(...) decorates a function or a Blueprint, not {type(function).__name__}")
        _note(_written(function), _WANTED, self)
        return _enforcing(self, function)


def _enforcing(limit: RateLimit, function: Function) -> Function:
    limited: Any
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def limited(*args: Any, **kwargs: Any) -> Any:
            limit.check()
            return await function(*args, **kwargs)

    else:

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            limit.check()
            return function(*args, **kwargs)

    limited.__dict__.pop(_WANTED, None)
    limited.__dict__[_ENFORCES] = (limit, *getattr(function, _ENFORCES, ()))
    return limited  # type: ignore[no-any-return]


def _written(function: Any) -> Any:
    """The function as it stands in the source, under its decorators."""
    function = getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _note(written: Any, attribute: str, value: object) -> None:
    noted = getattr(written, attribute, ())
    if value not in noted:  # Flask-RESTX and Flask-RESTful decorate a method anew for each request
        setattr(written, attribute, (*noted, value))


# How many views of an application have been looked through.
_looked: WeakKeyDictionary[Flask, int] = WeakKeyDictionary()


def _enforce_misplaced(app: Flask, **_: Any) -> None:
    """A limit written above `@app.get(...)` decorates a function that is registered already, and would limit nothing.
    Whatever was meant for a view and is on none is put where it was meant."""
    views = app.view_functions
    if _looked.get(app) == len(views):
        return
    # Of all applications: one may register as it is what another has under a limit.
    for view in views.values():
        for limit in getattr(view, _ENFORCES, ()):
            limit._placed.add(_written(view))
    for endpoint, view in list(views.items()):
        written = _written(view)
        for limit in getattr(written, _WANTED, ()):
            if written not in limit._placed:
                views[endpoint] = _enforcing(limit, views[endpoint])
    _looked[app] = len(views)


request_started.connect(_enforce_misplaced)


def rate_limit(
    rules: str | Callable[[], str | Awaitable[str]] | None = None,
    *,
    limit: int | Callable[[], int | Awaitable[int]] | None = None,
    window_seconds: float | None = None,
    by: Kind | Sequence[Kind] | None = None,
    name: str | None = None,
    prefix: str | None = None,
    policy: str | None = None,
    algorithm: str | None = None,
    cost: int | Callable[[], int | Awaitable[int]] = 1,
    charge_when: ChargeWhen | None = None,
    user: Callable[[], User | Awaitable[User]] | None = None,
    store: str | None = None,
    clock: ManualClock | None = None,
    namespace: str | None = None,
    trusted_proxies: Sequence[str] | None = None,
    client_header: str | None = None,
    user_header: str | None = None,
    on_store_failure: str | None = None,
    on_full: str | None = None,
    missing_identity: str | None = None,
    timeout: float = 0.05,
    config: str | None = None,
    enabled: bool | None = None,
) -> RateLimit:
    """A decorator that limits a view, a method of a view class, or any function that runs in a request.

    rules    "10/second; 1000/hour"; or limit= units per window_seconds=
    by       who is counted: "ip" (default), "user", "header:X-Api-Key", "ip+user", "user|ip", a callable, or a list of
             dimensions
    name     all uses of that name share one count. Without it each route (method and template) has its own;
    prefix   the same, under this name
    policy   a policy of the rules file (config=, else TIDEGATE_CONFIG), which then says everything else
    cost     units that one request takes
    charge_when   callable(response) -> whether a request that was answered so counts. It is judged and charged before it
             goes on, and gets back what it took, so the limit is exact whatever asks meanwhile
    user     callable() -> the user's id or None; without it Flask-Login's user, else g.user

    rules, limit, by, cost and user may be callables without arguments, sync or async; they are asked for each request.
    The other arguments are those of tidegate.Limiter. What is wrong raises here: RuleError, ConfigError, StoreError,
    TypeError, ValueError. A request over the limit raises RateLimited, which is answered with 429 and Retry-After in
    whole seconds, rounded up (RFC 9110 10.2.3).
    """
    made = Limit(
        rules, limit=limit, window_seconds=window_seconds, by=by, name=name, prefix=prefix, policy=policy,
        algorithm=algorithm, cost=cost, charge_when=charge_when, store=store, clock=clock, namespace=namespace,
        trusted_proxies=trusted_proxies, client_header=client_header, user_header=user_header,
        on_store_failure=on_store_failure, on_full=on_full, missing_identity=missing_identity, timeout=timeout,
        config=config, enabled=enabled,
    )  # fmt: skip
    return RateLimit(made, user)


class Tidegate(_Exempting):
    """Limits for a whole application, before its views: a default limit, the rules file, or both.

    app       may come later: init_app, for application factories and for several applications
    default   rule text for every request, unknown URLs too; one count for each client over all routes, unless by= says
              otherwise ("ip+route": each route by itself)
    by, name, cost, user, store, clock, ...   as for rate_limit; store and clock hold for the rules file too
    limits    {"security.login": "6/hour", "/search": rate_limit(...)}: limits of single endpoints or path rules, also of
              those that an extension has registered
    charge_when   callable(response) -> whether a request that was answered so counts, for the default limit
    config, gate   the rules file, or a Gate to share: its policies are judged for every request
    plan      callable() -> the name of the client's plan or None, for policies with `plans`

    Several objects may guard one application: every one of them is asked. `exempt` leaves a view or a blueprint out of the
    default limit and the rules file; a rate_limit of its own still holds.
    """

    def __init__(
        self,
        app: Flask | None = None,
        default: str | Callable[[], str | Awaitable[str]] | None = None,
        *,
        limit: int | Callable[[], int | Awaitable[int]] | None = None,
        window_seconds: float | None = None,
        limits: Mapping[str, str | RateLimit] | None = None,
        by: Kind | Sequence[Kind] = "ip",
        name: str | None = None,
        algorithm: str | None = None,
        cost: int | Callable[[], int | Awaitable[int]] = 1,
        charge_when: ChargeWhen | None = None,
        user: Callable[[], User | Awaitable[User]] | None = None,
        plan: Callable[[], str | None | Awaitable[str | None]] | None = None,
        config: str | None = None,
        gate: Gate | None = None,
        store: str | None = None,
        clock: ManualClock | None = None,
        namespace: str | None = None,
        trusted_proxies: Sequence[str] | None = None,
        client_header: str | None = None,
        user_header: str | None = None,
        on_store_failure: str | None = None,
        on_full: str | None = None,
        missing_identity: str | None = None,
        timeout: float = 0.05,
        enabled: bool | None = None,
    ) -> None:
        super().__init__()
        self.enabled = True
        self.gate = (
            Gate(config, store=store, clock=clock, timeout=timeout) if gate is None and config is not None else gate
        )
        # How to open one of its policies by itself, for the commands; of a shared Gate that is not known.
        self._policy = (
            None if config is None else functools.partial(Limiter, config=config, store=store, clock=clock, timeout=timeout)
        )
        self._needs: Needs | None = None
        self.limits = {
            name: rate_limit(given, store=store, clock=clock, namespace=namespace, trusted_proxies=trusted_proxies,
                             client_header=client_header, user_header=user_header, user=user, enabled=enabled)
            if isinstance(given, str) else given
            for name, given in (limits or {}).items()
        }  # fmt: skip
        self._checked: WeakSet[Flask] = WeakSet()
        self.limit: Limit | None = None
        if default is not None or limit is not None or window_seconds is not None:
            self.limit = Limit(
                default, limit=limit, window_seconds=window_seconds, by=by, name=name, algorithm=algorithm, cost=cost,
                charge_when=charge_when, store=store, clock=clock, namespace=namespace, trusted_proxies=trusted_proxies,
                client_header=client_header, user_header=user_header, on_store_failure=on_store_failure,
                on_full=on_full, missing_identity=missing_identity, timeout=timeout, enabled=enabled, scoped=False,
            )  # fmt: skip
        self._user = user
        self._plan = plan
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Guards the application from its next request on."""
        guards: list[Tidegate] = app.extensions.setdefault("tidegate", [])
        if self not in guards:
            if not guards:
                app.cli.add_command(commands())
            guards.append(self)
            app.before_request(self._before_request)

    def _before_request(self) -> WerkzeugResponse | None:
        if not self.enabled:
            return None
        actual = request._get_current_object()  # type: ignore[attr-defined]
        if self._exempts and self._is_exempt(actual):
            return None
        state = _state_of(actual)
        if self.gate is not None:
            if self._needs is None or self._needs.generation != self.gate.generation:
                self._needs = Needs(self.gate)
            # Who is signed in may take a look into a database: only where a policy asks.
            user = _user_of(self._user) if self._needs.user else None
            plan = None if self._plan is None else _user_of(self._plan)
            judged = functools.partial(
                self.gate.judge_wsgi, actual.environ, route=_template(actual), user=user, plan=plan, prior=state
            )
            _settle(_with_body(judged, actual, state), state)
        if self.limit is not None:
            _charge(self.limit, self._user, actual)
        for limit in self._limits_of(actual):
            limit.check()
        return None

    def _limits_of(self, actual: Request) -> list[RateLimit]:
        """Those that limits= has for the endpoint or the path of this request."""
        if not self.limits or actual.url_rule is None:
            return []
        app = current_app._get_current_object()  # type: ignore[attr-defined]
        if app not in self._checked:
            self._checked.add(app)
            self._check_names(app)
        found = (self.limits.get(name) for name in (actual.endpoint, actual.url_rule.rule) if name is not None)
        return [limit for limit in found if limit is not None]

    def _check_names(self, app: Flask) -> None:
        """A misspelt name would limit nothing. Looked at with the first request: extensions register late."""
        known = [*app.view_functions, *(rule.rule for rule in app.url_map.iter_rules())]
        for name in self.limits:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                guess = f": did you mean {near[0]!r}?" if near else ""
                log.warning("limits= names %r, which is no endpoint or path of %r%s", name, app.name, guess)
