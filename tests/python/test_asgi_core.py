"""Answers, asgi_hit and asgi_enter: what the compiled part does for an admitted request, and when it leaves it to
Python."""

import asyncio
import functools
import gc
import sys
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tidegate import Decision, Gate, Judgement, Limiter, ManualClock
from tidegate._core import Answers, Dependency, asgi_enter, asgi_hit, asgi_send
from tidegate._request_state import BareState
from tidegate._routes import RouteTable


def http(**more: Any) -> dict[str, Any]:
    return {"type": "http", "method": "GET", "path": "/x/1", "headers": [], "client": ("192.0.2.1", 5000), **more}


class Router:
    """Anything that can keep what the walk found."""


class Route:
    path_format = "/x/{id}"


def routed(route: object, template: str = "/x/{id}", **more: Any) -> dict[str, Any]:
    router = Router()
    router._tidegate_ready = {id(route): template}  # type: ignore[attr-defined]
    return http(route=route, router=router, tidegate=[], **more)


@pytest.fixture
def limiter() -> Limiter:
    return Limiter("2/minute", by="ip+route", store=f"memory://{uuid.uuid4().hex}", clock=ManualClock())


@pytest.fixture
def gate(tmp_path: Path) -> Callable[[str], Gate]:
    def make(by: str) -> Gate:
        rules = tmp_path / f"{uuid.uuid4().hex}.yaml"
        rules.write_text(f"policies:\n  - {{name: all, rules: 2/minute, by: '{by}'}}\n")
        return Gate(str(rules), store=f"memory://{uuid.uuid4().hex}", clock=ManualClock())

    return make


async def send(message: Any) -> None: ...


# ---- asgi_hit ----


def test_a_hit_gives_decisions_then_the_judgement_of_the_refusal(limiter: Limiter) -> None:
    hit, route = asgi_hit(limiter, 1, True), Route()
    first, second, third = (hit(routed(route)) for _ in range(3))
    assert isinstance(first, Decision) and isinstance(second, Decision)
    assert [first.remaining, second.remaining] == [1, 0]
    assert isinstance(third, Judgement) and third.status == 429


def test_a_hit_is_kept_in_the_requests_state_and_charged_once(limiter: Limiter) -> None:
    hit, scope = asgi_hit(limiter, 1, True), routed(Route())
    for _ in range(5):
        assert isinstance(hit(scope), Decision)
    assert len(scope["tidegate"]) == 5 and limiter.enabled
    assert [judgement.decision.remaining for judgement in scope["tidegate"]] == [1] * 5


def test_the_route_is_the_effective_context_only_where_that_speaks_of_it(limiter: Limiter) -> None:
    class Context:
        def __init__(self, original: object, starlette: object = None) -> None:
            self.original_route, self.starlette_route = original, starlette

    hit, route = asgi_hit(limiter, 2, True), Route()
    mine, wrapped, foreign = Context(route), Context(Route(), route), Context(Route(), Route())

    def status(context: object, *known: object) -> object:
        scope = routed(route, "/of-the-route", fastapi={"effective_route_context": context})
        scope["router"]._tidegate_ready.update({id(one): f"/of-{number}" for number, one in enumerate(known)})
        return type(hit(scope))

    # Each template is a bucket that one hit of cost 2 empties.
    assert status(mine, mine) is Decision
    assert status(wrapped, mine, wrapped) is Decision
    assert status(mine, mine) is Judgement
    assert status(foreign, foreign) is Decision  # counted as the route
    assert status(None) is Judgement
    assert status(object()) is Judgement


@pytest.mark.parametrize(
    "change",
    [
        {"tidegate": None}, {"tidegate": BareState()}, {"tidegate": ()}, {"method": "HEAD"}, {"router": None},
        {"router": object()}, {"route": None}, {"route": Route()},
    ],
)  # fmt: skip
def test_what_is_not_simple_is_left_to_python_and_charges_nothing(limiter: Limiter, change: dict[str, Any]) -> None:
    hit, route = asgi_hit(limiter, 2, True), Route()
    assert hit({**routed(route), **change}) is None
    assert isinstance(hit(routed(route)), Decision)


def test_a_scope_that_is_no_dict_is_left_to_python(limiter: Limiter) -> None:
    assert asgi_hit(limiter, 1, False)(5) is None
    assert asgi_hit(limiter, 1, False)(http()) is None


def test_without_a_need_no_route_is_looked_for() -> None:
    limiter = Limiter("1/minute", by="ip", store=f"memory://{uuid.uuid4().hex}")
    hit = asgi_hit(limiter, 1, False)
    assert isinstance(hit(http(tidegate=[])), Decision)
    assert isinstance(hit(http(tidegate=[])), Judgement)


def test_arguments_of_other_kinds_are_errors(limiter: Limiter, gate: Callable[[str], Gate]) -> None:
    wrong: list[tuple[Any, ...]] = [(), (limiter, 1), (5, 1, True), (limiter, 1, 5)]
    for arguments in wrong:
        with pytest.raises(TypeError, match="asgi_hit"):
            asgi_hit(*arguments)
    with pytest.raises(ValueError, match="cost"):
        asgi_hit(limiter, -1, True)
    wrong = [(), (gate("ip"), 5), (limiter, True)]
    for arguments in wrong:
        with pytest.raises(TypeError, match="asgi_enter"):
            asgi_enter(*arguments)
    with pytest.raises(TypeError, match="a scope and a send"):
        asgi_enter(gate("ip"), True)(http())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="ASGI application"):
        Answers(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        asgi_hit(limiter, 1, False)(http(tidegate=[], headers=5))


# ---- asgi_enter ----


def test_entering_gives_a_send_then_the_judgement_of_the_refusal(gate: Callable[[str], Gate]) -> None:
    enter = asgi_enter(gate("ip"), False)
    scope = http()
    first = enter(scope, send)
    assert callable(first) and first is not send and len(scope["tidegate"]) == 1
    again = http(tidegate=[])
    assert enter(again, send) is send  # somebody around this one adds the fields
    refused = enter(http(), send)
    assert isinstance(refused, Judgement) and refused.status == 429


def test_entering_is_left_to_python_where_a_policy_asks_what_only_python_can_tell(gate: Callable[[str], Gate]) -> None:
    assert asgi_enter(gate("ip+route"), False)(http(), send) is None
    assert asgi_enter(gate("user|ip"), True)(http(), send) is None
    assert callable(asgi_enter(gate("user|ip"), False)(http(), send))
    assert asgi_enter(gate("ip"), True)({"type": "lifespan"}, send) is None
    assert asgi_enter(gate("ip"), True)({}, send) is None
    assert asgi_enter(gate("ip"), True)(http(tidegate=BareState()), send) is None


def test_entering_a_gate_that_is_switched_off_is_left_to_python(
    gate: Callable[[str], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_ENABLED", "0")
    assert asgi_enter(gate("ip"), False)(http(), send) is None


# ---- Answers ----


def test_answers_passes_scopes_on_and_gives_requests_a_state_and_a_send() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    async def receive() -> Any: ...

    around = Answers(app)
    assert around.app is app
    for scope in ({"type": "lifespan"}, {"type": "invented"}, {}, http(tidegate=[])):
        asyncio.run(around(scope, receive, send))  # type: ignore[arg-type]
        assert seen.pop() == (scope, receive, send)
    for kind in ("http", "websocket", "".join(["web", "socket"])):
        scope = http(type=kind)
        asyncio.run(around(scope=scope, receive=receive, send=send))  # type: ignore[arg-type]
        passed, received, sent = seen.pop()
        assert passed is scope and scope["tidegate"] == [] and received is receive and sent is not send
    with pytest.raises(TypeError):
        around(1)  # type: ignore[call-arg]


def test_answers_in_a_cycle_are_collected() -> None:
    class App:
        around: Any

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...

    app = App()
    app.around = Answers(app)
    alive = weakref.ref(app)
    del app
    gc.collect()
    assert alive() is None


def test_a_send_in_a_cycle_through_its_scope_is_collected() -> None:
    class Server:
        async def __call__(self, message: Any) -> None: ...

    kept: list[Any] = []

    def app(scope: Any, receive: Any, send: Any) -> Any:
        scope["send"] = send
        kept.append(send)

    server = Server()
    Answers(app)(http(), send, server)  # type: ignore[arg-type]
    alive = weakref.ref(server)
    del server
    kept.clear()
    gc.collect()
    assert alive() is None


def test_a_hit_in_a_cycle_through_its_route_is_collected(limiter: Limiter) -> None:
    class Dependent(Route):
        hit: Any

    route = Dependent()
    route.hit = asgi_hit(limiter, 1, True)
    assert isinstance(route.hit(routed(route)), Decision)
    alive = weakref.ref(route)
    del route
    gc.collect()
    assert alive() is None


def test_a_remembered_template_holds_until_a_table_of_routes_is_made_anew(limiter: Limiter) -> None:
    hit, route = asgi_hit(limiter, 2, True), Route()
    scope = routed(route, "/before")
    assert isinstance(hit(scope), Decision)

    def again() -> Any:
        scope["tidegate"] = []
        return hit(scope)

    assert isinstance(again(), Judgement)
    scope["router"]._tidegate_ready[id(route)] = "/after"
    RouteTable(None)
    assert isinstance(again(), Decision)  # another template, another count
    assert isinstance(again(), Judgement)


def test_a_limit_before_a_hundred_routes_counts_each_by_its_own_template(limiter: Limiter) -> None:
    hit, routes = asgi_hit(limiter, 1, True), [Route() for _ in range(100)]
    router = Router()
    router._tidegate_ready = {id(one): f"/{number}" for number, one in enumerate(routes)}  # type: ignore[attr-defined]
    for remaining in (1, 0):
        for route in routes:
            assert hit(http(route=route, router=router, tidegate=[])).remaining == remaining
    other = Router()  # the same routes below another router are other routes
    other._tidegate_ready = {id(one): f"/below/{number}" for number, one in enumerate(routes)}  # type: ignore[attr-defined]
    for route in routes:
        assert hit(http(route=route, router=other, tidegate=[])).remaining == 1


def test_what_is_called_without_a_tuple_can_be_called_with_one_and_refuses_other_arguments(limiter: Limiter) -> None:
    hit = asgi_hit(limiter, 1, True)
    sent: list[Any] = []
    out = asgi_send([], sent.append)  # type: ignore[arg-type]
    for function in (hit, out):
        for wrong in ((), (1, 2), (1, 2, 3, 4, 5)):
            with pytest.raises(TypeError):
                function(*wrong)
        with pytest.raises(TypeError):
            function(message=1)  # type: ignore[call-arg]
    assert isinstance(functools.partial(hit)(routed(Route())), Decision)
    assert isinstance(hit(*[routed(Route())]), Decision)
    type(out).__call__(out, 5)
    assert sent == [5]
    for kind in (type(hit), type(out)):
        with pytest.raises(TypeError):
            kind()


def test_a_hundred_thousand_requests_leave_nothing_behind(gate: Callable[[str], Gate]) -> None:
    limiter = Limiter("1000000000/second token_bucket", by="ip+route", store=f"memory://{uuid.uuid4().hex}")
    hit, route = asgi_hit(limiter, 1, True), Route()
    enter = asgi_enter(gate("ip"), False)
    scope = routed(route)

    def app(scope: Any, receive: Any, send: Any) -> Any:
        return None

    around, headers = Answers(app), scope["headers"]

    def once() -> None:
        scope["tidegate"] = []
        hit(scope)
        del scope["tidegate"]
        enter(scope, send)  # refused, mostly: then nothing is left in the scope
        scope.pop("tidegate", None)
        around(scope, send, send)

    def counts() -> tuple[int, ...]:
        return tuple(map(sys.getrefcount, (limiter, route, scope, app, send, headers, None, type(limiter))))

    for _ in range(100):
        once()
    before, blocks = counts(), sys.getallocatedblocks()
    for _ in range(100_000):
        once()
    assert all(abs(now - then) < 50 for now, then in zip(counts(), before, strict=True))
    assert sys.getallocatedblocks() - blocks < 200


# ---- Dependency ----


class Conn:
    def __init__(self, scope: Any) -> None:
        self.scope = scope


class Told(Dependency):
    """As RateLimit is derived; keeps what it was told."""

    async def _called(self, *args: Any, **kwargs: Any) -> Any:
        return ("called", args, kwargs)

    async def _otherwise(self, conn: Any, response: Any, told: dict[str, Any], got: Any) -> Any:
        return ("otherwise", conn, response, told, got)


async def awaited(awaitable: Any) -> Any:
    return await awaitable


def test_what_is_let_through_is_the_decision_at_once(limiter: Limiter) -> None:
    one, scope = Told(), routed(Route())
    one._hit = asgi_hit(limiter, 1, True)
    done = one(conn=Conn(scope), response=None)
    assert len(scope["tidegate"]) == 1, "charged by the call"
    assert asyncio.run(awaited(done)).remaining == 1


def test_whatever_else_a_hit_gives_goes_on_in_python_with_all_that_was_told() -> None:
    one, conn = Told(), Conn({})
    told = {"conn": conn, "response": 1, "user": "u", "cost": 3}
    for got in (None, "a judgement"):
        one._hit = lambda scope, got=got: got
        assert asyncio.run(awaited(one(**told))) == ("otherwise", conn, 1, {"user": "u", "cost": 3}, got)
    assert told == {"conn": conn, "response": 1, "user": "u", "cost": 3}, "the caller's own words stay"


@pytest.mark.parametrize("args, kwargs", [((1, 2), {}), ((1,), {"conn": 1, "response": 2}), ((), {"conn": 1}), ((), {})])
def test_a_call_that_is_not_fastapis_is_left_to_python(args: Any, kwargs: Any) -> None:
    one = Told()
    one._hit = lambda scope: pytest.fail("asked")
    assert asyncio.run(awaited(one(*args, **kwargs))) == ("called", args, kwargs)
    unsaid = Told()
    assert asyncio.run(awaited(unsaid(conn=1, response=2))) == ("called", (), {"conn": 1, "response": 2})


def test_what_a_hit_or_a_connection_raises_is_raised_and_leaves_nothing() -> None:
    def hit(scope: Any) -> Any:
        one._hit = lambda scope: None  # while it is being called
        raise LookupError("hit")

    one = Told()
    one._hit = hit
    with pytest.raises(LookupError, match="hit"):
        one(conn=Conn({}), response=None)
    with pytest.raises(AttributeError, match="scope"):
        one(conn=object(), response=None)
    for wrong in (None, 5):
        with pytest.raises(TypeError, match="_hit must be a callable"):
            one._hit = wrong  # type: ignore[assignment]
    with pytest.raises(TypeError, match="_hit must be a callable"):
        del one._hit


def test_a_dependency_that_leads_back_to_itself_is_collected() -> None:
    one = Told()
    one._hit = functools.partial(lambda self, scope: None, one)
    alive = weakref.ref(one)
    del one
    gc.collect()
    assert alive() is None


def test_calls_let_go_of_all_they_made(limiter: Limiter) -> None:
    free = Limiter("1000000/second", by="ip", store=f"memory://{uuid.uuid4().hex}")
    one, scope = Told(), http(tidegate=[])
    conn, response, hit = Conn(scope), object(), asgi_hit(free, 1, False)
    one._hit = hit

    def ask() -> None:
        for _ in range(2000):
            assert list(one(conn=conn, response=response).__await__()) == [], "awaited, and never waited"
            scope["tidegate"].clear()

    ask()
    before = [sys.getrefcount(each) for each in (conn, response, scope, hit, one)]
    ask()
    assert [sys.getrefcount(each) for each in (conn, response, scope, hit, one)] == before
