"""Flask: what a limit is told by asking, charging by outcome, limits by endpoint, commands, and views of every kind."""

from __future__ import annotations

import json
import linecache
import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flask
import flask_restx
import pytest
from flask import Blueprint, Flask, Response
from flask.views import MethodView, View
from tidegate import ConfigError, Gate
from tidegate.flask import RateLimit, RateLimited, Tidegate, rate_limit

from setting import FaceSetting as Setting
from test_fastapi_store import standing_still


@pytest.fixture
def limit() -> Setting:
    return Setting(rate_limit, Tidegate)


@pytest.fixture
def app() -> Flask:
    return Flask("shop")


@pytest.fixture(autouse=True)
def environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEGATE_ENABLED", "TIDEGATE_STORE", "TIDEGATE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def get(app: Flask, path: str, count: int = 1, **request: Any) -> list[int]:
    return [app.test_client().get(path, **request).status_code for _ in range(count)]


# ---- asked for each request ----


def tenant() -> str | None:
    return flask.request.headers.get("X-Tenant")


async def tenant_async() -> str | None:
    return tenant()


@pytest.mark.parametrize("by", [tenant, tenant_async, lambda: tenant()])
def test_by_may_be_a_callable_sync_or_async_and_nobody_is_401(app: Flask, limit: Setting, by: Any) -> None:
    app.add_url_rule("/", "root", limit("1/minute", by=by)(lambda: "ok"))
    assert get(app, "/", 2, headers={"X-Tenant": "a"}) == [200, 429]
    assert get(app, "/", headers={"X-Tenant": "b"}) == [200]
    assert get(app, "/") == [401]


def test_costs_and_rules_may_be_callables_and_what_was_used_stays_used(app: Flask, limit: Setting) -> None:
    async def rules() -> str:
        return {"free": "3/minute", "paid": "9/minute"}[flask.request.headers.get("X-Plan", "free")]

    own = limit(rules, cost=lambda: int(flask.request.headers.get("X-Cost", 1)), name="planned")
    app.add_url_rule("/", "root", own(lambda: "ok"))
    assert get(app, "/", 2, headers={"X-Cost": "2"}) == [200, 429]
    paid = app.test_client().get("/", headers={"X-Plan": "paid", "X-Cost": "2"})
    assert [paid.headers[field] for field in ("X-RateLimit-Limit", "X-RateLimit-Remaining")] == ["9", "5"]
    assert own.limiter_for("9/minute").peek(dims={"ip": "127.0.0.1"}).remaining == 5


def test_a_request_whose_cost_is_0_is_left_out_also_where_nothing_is_left(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="2/minute", cost=lambda: 1 if flask.request.method == "POST" else 0)
    app.add_url_rule("/", "root", lambda: "ok", methods=["GET", "POST"])
    client = app.test_client()
    for left in (200, 200, 429):
        assert get(app, "/", 5) == [200] * 5
        assert client.post("/").status_code == left
    assert get(app, "/", 5) == [200] * 5


def test_the_applications_limit_may_be_asked_for_too(app: Flask, limit: Setting) -> None:
    load = [2]
    limit.gate(app, limit=lambda: load[0], window_seconds=60, by=["ip", tenant], missing_identity="shared")
    app.add_url_rule("/", "root", lambda: "ok")
    assert get(app, "/", 3) == [200, 200, 429]
    load[0] = 3
    assert get(app, "/", 2) == [200, 429]


def test_a_callable_that_answers_with_something_else_is_an_error_that_names_it(app: Flask, limit: Setting) -> None:
    app.testing = True
    app.add_url_rule("/by", "by", limit(by=lambda: ["list"])(lambda: "ok"))
    app.add_url_rule("/rules", "rules", limit(lambda: 5)(lambda: "ok"))
    app.add_url_rule("/cost", "cost", limit(cost=lambda: "1")(lambda: "ok"))
    for path, words in (("/by", "must answer with str, int or None, but gave list"), ("/rules", "but gave int"),
                        ("/cost", "cost must be an int, not str")):  # fmt: skip
        with pytest.raises(TypeError, match=words):
            app.test_client().get(path)


def test_a_limit_made_in_a_view_is_warned_of_at_its_line(app: Flask, limit: Setting) -> None:
    app.add_url_rule("/", "root", lambda: str(rate_limit("5/minute", **limit.own)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert get(app, "/") == [200]
    (told,) = [one for one in caught if "while a request is served" in str(one.message)]
    assert 'lambda: str(rate_limit("5/minute"' in linecache.getline(told.filename, told.lineno)


# ---- by outcome ----


def failed(response: Response) -> bool:
    return response.status_code == 401


def login(status: str) -> Any:
    if status == "abort":
        flask.abort(401)
    if status == "crash":
        raise RuntimeError("as asked")
    return Response("answer", int(status), {"X-Kind": "own"})


@pytest.mark.fault("R17")
@pytest.mark.parametrize("where", ["view", "application", "endpoint"])
def test_only_answers_that_count_are_charged_whatever_made_them(app: Flask, limit: Setting, where: str) -> None:
    view: Callable[..., Any] = login
    if where == "view":
        view = limit("3/minute", charge_when=failed, name="login")(login)
    elif where == "application":
        limit.gate(app, default="3/minute", charge_when=failed)
    else:
        limit.gate(app, limits={"/login/<status>": limit("3/minute", charge_when=failed)})
    app.add_url_rule("/login/<status>", "login", view)
    for status in ("200", "500", "crash", "302", "200"):
        assert get(app, f"/login/{status}")[0] in (200, 302, 500)
    for status in ("401", "abort", "401"):
        assert get(app, f"/login/{status}") == [401]
    assert get(app, "/login/200") == [429]


def test_requests_under_way_hold_their_places_until_their_answers_are_known(app: Flask, limit: Setting) -> None:
    inside, go_on = threading.Barrier(4), threading.Event()
    own = limit("3/minute", charge_when=failed, name="held")

    @app.get("/")
    @own
    def root() -> str:
        inside.wait(20)
        go_on.wait(20)
        return "ok"

    told: list[int] = []
    threads = [threading.Thread(target=lambda: told.extend(get(app, "/"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    inside.wait(20)
    assert get(app, "/") == [429]
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert told == [200] * 3
    assert own.limiter.peek(dims={"ip": "127.0.0.1"}).remaining == 3


@pytest.mark.fault("R127")
def test_a_store_that_stops_before_the_answer_is_known_leaves_the_answer_and_one_warning(
    app: Flask, make: Callable[..., None], build: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holder = build / "tests" / "fcgi" / "hold_store"
    make(str(holder))
    rules, store = tmp_path / "rules.yaml", f"shared://{tmp_path}/table?size=128KiB"  # one lock for all of it
    rules.write_text("policies: [{name: stalling, rules: 1000/hour}]\n")
    own = rate_limit("5/minute", charge_when=failed, name="late", store=store, on_store_failure="open")
    stops: list[bool] = []

    @app.get("/")
    @own
    def root() -> str:
        if stops:
            stops.pop().__class__  # noqa: B018
            hold.__enter__()
        return "ok"

    assert get(app, "/") == [200]
    hold = standing_still(holder, rules, store)
    Gate(rules, store=store).judge_wsgi({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.1"})
    stops.append(True)
    with caplog.at_level(logging.WARNING, "tidegate"):
        try:
            assert get(app, "/") == [200]  # stopped while the view ran: nothing could be given back
            assert get(app, "/") == [200]  # and still: the policy is open, before and after
        finally:
            hold.__exit__(None, None, None)
    assert len([record for record in caplog.records if "store-failing" in record.getMessage()]) == 1
    assert get(app, "/") == [200]


# ---- limits of what others have registered ----


@pytest.mark.fault("R128")
def test_an_endpoint_or_a_path_rule_of_an_extension_is_limited_by_its_name(app: Flask, limit: Setting) -> None:
    security = Blueprint("security", "security", url_prefix="/security")
    security.add_url_rule("/login", "login", lambda: "ok", methods=["POST"])
    security.add_url_rule("/logout", "logout", lambda: "ok")
    security.add_url_rule("/users/<int:number>", "user", lambda number: "ok")
    limit.gate(app, limits={"security.login": "6/hour", "/security/users/<int:number>": limit("2/hour")})
    app.register_blueprint(security)  # later: an extension's init_app
    client = app.test_client()
    assert [client.post("/security/login").status_code for _ in range(7)] == [200] * 6 + [429]
    assert get(app, "/security/logout", 9) == [200] * 9
    assert [client.get(f"/security/users/{n}").status_code for n in range(3)] == [200, 200, 429]


def test_a_name_that_is_no_endpoint_is_warned_of_with_what_was_probably_meant(
    app: Flask, limit: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    limit.gate(app, limits={"security.logn": "6/hour", "security.login": "9/hour"})
    app.add_url_rule("/", "security.login".replace(".", "_"), lambda: "ok")
    blueprint = Blueprint("security", "security")
    blueprint.add_url_rule("/login", "login", lambda: "ok")
    app.register_blueprint(blueprint)
    with caplog.at_level(logging.WARNING, "tidegate"):
        get(app, "/login", 3)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "'security.logn'" in told[0] and "did you mean 'security.login'" in told[0]


# ---- views ----


class Things(MethodView):
    async def get(self) -> str:
        return "got"

    def post(self) -> str:
        return "posted"


@pytest.mark.fault("R118")
def test_method_views_views_and_async_methods_take_limits_by_decorators_and_by_endpoint(
    app: Flask, limit: Setting
) -> None:
    class Limited(Things):
        decorators = [limit("3/minute", name="class")]

    class Shown(View):
        methods = ["GET"]
        decorators = [limit("1/minute", name="shown")]

        def dispatch_request(self) -> str:
            return "shown"

    app.add_url_rule("/limited", view_func=Limited.as_view("limited"))
    app.add_url_rule("/free", view_func=Things.as_view("free"))
    app.add_url_rule("/shown", view_func=Shown.as_view("shown"))
    limit.gate(app, limits={"free": "1/minute"})
    client = app.test_client()
    assert [client.get("/limited").text, client.post("/limited").text, client.get("/limited").text] == [
        "got", "posted", "got",
    ]  # fmt: skip
    assert client.post("/limited").status_code == 429
    assert get(app, "/free", 2) + get(app, "/shown", 2) == [200, 429, 200, 429]


@pytest.mark.fault("R118")
def test_resources_of_flask_restx_take_limits_by_method_decorators_and_nothing_grows_with_requests(
    app: Flask, limit: Setting
) -> None:
    gate = limit.gate(app, default="100/minute")
    api = flask_restx.Api(app)
    every, posts = limit("5/minute", name="every"), limit("2/minute", name="posts")

    @api.route("/things/<int:number>")
    class Thing(flask_restx.Resource):  # type: ignore[misc]
        method_decorators = [every]

        def get(self, number: int) -> dict[str, Any]:
            return {"self": type(self).__name__, "number": number}

        @posts
        def post(self, number: int) -> dict[str, int]:
            return {"posted": number}

    @api.route("/free")
    class Free(flask_restx.Resource):  # type: ignore[misc]
        decorators = [gate.exempt]

        def get(self) -> str:
            return "ok"

    client = app.test_client()
    assert client.get("/things/7").get_json() == {"self": "Thing", "number": 7}
    assert [client.post("/things/8").status_code for _ in range(3)] == [200, 200, 429]
    assert get(app, "/things/9", 4) == [200, 200, 429, 429]  # what the refused post took of the class is given back
    assert client.get("/free").headers.get("X-RateLimit-Limit") is None
    # The library decorates at each request.
    noted = [len(value) for value in vars(Thing.get).values() if isinstance(value, tuple)]
    get(app, "/things/9", 5)
    assert [len(value) for value in vars(Thing.get).values() if isinstance(value, tuple)] == noted == [1]


def test_a_blueprints_own_error_handler_answers_its_refusals(app: Flask, limit: Setting) -> None:
    blueprint = Blueprint("api", "api", url_prefix="/api")

    @blueprint.errorhandler(RateLimited)
    def refused(error: RateLimited) -> tuple[dict[str, Any], int]:
        return {"wait": error.decision.retry_after}, 429

    blueprint.add_url_rule("/x", "x", limit("1/minute")(lambda: "ok"))
    app.register_blueprint(blueprint)
    app.add_url_rule("/y", "y", limit("1/minute")(lambda: "ok"))
    get(app, "/api/x")
    get(app, "/y")
    assert app.test_client().get("/api/x").get_json() == {"wait": 60.0}
    assert app.test_client().get("/y").get_json()["code"] == "RATE_LIMITED"


def test_a_view_that_one_application_limits_is_free_in_another_that_registers_it_as_it_is(limit: Setting) -> None:
    def view() -> str:
        return "ok"

    limited, free = Flask("limited"), Flask("free")
    limited.add_url_rule("/", "root", limit("1/minute")(view))
    free.add_url_rule("/", "root", view)
    assert get(limited, "/", 2) == [200, 429]
    assert get(free, "/", 3) == [200] * 3


def test_factories_make_several_applications_that_count_apart_or_together_as_named(limit: Setting) -> None:
    def create(namespace: str) -> Flask:
        app = Flask("made")
        limit.gate(default="1/minute", namespace=namespace).init_app(app)
        app.add_url_rule("/", "root", lambda: "ok")
        return app

    one, two, second_of_two = create("one"), create("two"), create("two")
    assert [get(app, "/")[0] for app in (one, two, second_of_two, one)] == [200, 200, 429, 429]


# ---- commands ----

RULES = """
policies:
  - {name: login, match: {path: /login}, rules: 2/minute}
  - {name: api, match: {path: "/api/*"}, rules: 5/minute, by: user}
"""


@pytest.fixture
def site(app: Flask, tmp_path: Path) -> Flask:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    Tidegate(app, config=str(path), default="3/minute", name="site", store=f"shared://{tmp_path}/table?size=1MiB")
    app.add_url_rule("/login", "login", lambda: "ok")
    return app


def test_flask_tidegate_explains_a_request_and_takes_nothing(site: Flask) -> None:
    run = site.test_cli_runner().invoke
    get(site, "/login")
    for _ in range(5):
        told = run(args=["tidegate", "explain", "GET /login", "--ip", "127.0.0.1"])
        assert told.exit_code == 0, told.output
    assert "login" in told.output and "allowed" in told.output
    data = json.loads(run(args=["tidegate", "explain", "GET /api/x", "--user", "ann", "--json"]).output)
    assert data["decision"]["outcome"] == "allowed"
    assert [policy["name"] for policy in data["policies"] if policy["applies"]] == ["api"]
    wrong = run(args=["tidegate", "explain", "GET /", "--header", "nothing"])
    assert wrong.exit_code == 2 and "'nothing' is no NAME:VALUE" in wrong.output


def test_flask_tidegate_tells_what_was_counted(site: Flask) -> None:
    get(site, "/login", 4)
    run = site.test_cli_runner().invoke
    told = json.loads(run(args=["tidegate", "stats", "--format", "json"]).output)
    assert "login" in json.dumps(told)
    assert "# TYPE" in run(args=["tidegate", "stats", "--format", "prometheus"]).output
    assert "login" in run(args=["tidegate", "stats"]).output


def test_flask_tidegate_forgets_a_client_of_a_limit_or_a_policy(site: Flask) -> None:
    assert get(site, "/login", 4) == [200, 200, 429, 429]
    run = site.test_cli_runner().invoke
    told = run(args=["tidegate", "reset", "login", "ip=127.0.0.1"])
    assert told.exit_code == 0 and told.output == "login: ip=127.0.0.1 is forgotten\n"
    assert get(site, "/login", 2) == [200, 429]  # one is left of the application's three
    assert run(args=["tidegate", "reset", "site", "ip=127.0.0.1"]).exit_code == 0
    assert get(site, "/login", 2) == [200, 429]
    for args, words in (
        (["nobody", "ip=127.0.0.1"], "nobody"), (["login", "127.0.0.1"], "is no KIND=VALUE"), (["login", "ip=x"], "no address"),
    ):  # fmt: skip
        wrong = run(args=["tidegate", "reset", *args])
        assert wrong.exit_code != 0 and words in wrong.output, wrong.output


def test_flask_tidegate_tells_limits_without_a_name_apart_by_the_route(app: Flask, tmp_path: Path) -> None:
    store = f"shared://{tmp_path}/table?size=1MiB"
    Tidegate(app, default="5/minute", store=store)
    for path, rules in (("/a", "2/minute"), ("/b", "2/hour")):
        app.add_url_rule(path, path, rate_limit(rules, store=store)(lambda: "ok"))
    assert get(app, "/a", 3) == [200, 200, 429]
    assert get(app, "/b", 3) == [200, 200, 429]  # four of the application's five
    run = app.test_cli_runner().invoke
    for values in (["method=GET", "route=/a"], ["method=GET", "route=/b"]):
        assert run(args=["tidegate", "reset", "default", "ip=127.0.0.1", *values]).exit_code == 0
    assert get(app, "/b", 2) == [200, 429]  # the application's fifth
    assert run(args=["tidegate", "reset", "default", "ip=127.0.0.1"]).exit_code == 0
    assert get(app, "/b", 2) == [200, 429]  # the view's second
    assert get(app, "/a", 3) == [200, 200, 429]


def test_a_limit_by_route_alone_asks_for_the_route(app: Flask, tmp_path: Path) -> None:
    Tidegate(app)
    app.add_url_rule("/a", "a", rate_limit("2/minute", prefix="p", store=f"shared://{tmp_path}/table")(lambda: "ok"))
    told = app.test_cli_runner().invoke(args=["tidegate", "reset", "p", "ip=127.0.0.1"])
    assert told.exit_code == 1 and "'p' counts by route: add method=" in told.output


def test_without_a_rules_file_the_commands_say_what_is_missing(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="1/minute")
    run = app.test_cli_runner().invoke
    wrong = run(args=["tidegate", "explain", "GET /"])
    assert wrong.exit_code == 1 and "no Tidegate object of this application has a rules file" in wrong.output
    assert run(args=["tidegate", "stats"]).exit_code == 0
    with pytest.raises(ConfigError):
        Tidegate(config="/no-such/rules.yaml")
