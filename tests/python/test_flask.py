"""Tidegate(app), @rate_limit and exempt: what a client of a Flask application sees."""

import json
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flask
import pytest
from flask import Blueprint, Flask, Response, abort, jsonify, redirect, stream_with_context
from flask.testing import FlaskClient
from flask.views import MethodView, View
from tidegate import ConfigError, RuleError
from tidegate.flask import RateLimit, RateLimited, Tidegate, rate_limit
from werkzeug.exceptions import HTTPException, TooManyRequests
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from setting import FaceSetting as Setting

FIELDS = ("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset")


@pytest.fixture
def limit() -> Setting:
    return Setting(rate_limit, Tidegate)


@pytest.fixture
def app() -> Flask:
    return Flask("shop")


@pytest.fixture(autouse=True)
def environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TIDEGATE_ENABLED", "TIDEGATE_STORE", "TIDEGATE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    yield


def statuses(client: FlaskClient, path: str, count: int, **request: Any) -> list[int]:
    return [client.get(path, **request).status_code for _ in range(count)]


def of(address: str) -> dict[str, Any]:
    return {"environ_base": {"REMOTE_ADDR": address}}


# ---- the application's limit ----


def test_the_default_limit_counts_each_client_over_all_routes(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="3/minute")
    app.add_url_rule("/a", "a", lambda: "a")
    app.add_url_rule("/b", "b", lambda: "b")
    client = app.test_client()
    assert [client.get(path).status_code for path in ("/a", "/b", "/a", "/b")] == [200, 200, 200, 429]
    assert statuses(client, "/a", 1, **of("192.0.2.9")) == [200]


def test_a_default_by_ip_and_route_counts_each_route_by_itself(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="1/minute", by="ip+route")
    app.add_url_rule("/users/<int:number>", "user", lambda number: "user")
    app.add_url_rule("/b", "b", lambda: "b")
    client = app.test_client()
    assert [client.get(path).status_code for path in ("/users/1", "/b", "/users/2", "/b")] == [200, 200, 429, 429]


def test_init_app_guards_several_applications_and_twice_is_once(limit: Setting) -> None:
    gate = limit.gate(default="2/minute")
    for name in ("one", "two"):
        app = Flask(name)
        gate.init_app(app)
        gate.init_app(app)
        app.add_url_rule("/", "root", lambda: "ok")
        # One object, one count: the limit is the client's over both.
        assert statuses(app.test_client(), "/", 2) == ([200, 200] if name == "one" else [429, 429])


def test_two_applications_with_limits_of_different_names_do_not_meet(limit: Setting) -> None:
    one, two = Flask("one"), Flask("two")
    limit.gate(one, default="1/minute", name="one")
    limit.gate(two, default="1/minute", name="two")
    for app in (one, two):
        app.add_url_rule("/", "root", lambda: "ok")
    client = Client(DispatcherMiddleware(one, {"/two": two}))
    answers = [client.get(path, **of("192.0.2.1")).status_code for path in ("/", "/two/", "/", "/two/")]
    assert answers == [200, 200, 429, 429]


@pytest.mark.fault("R14")
def test_the_applications_limit_is_charged_once_beside_a_routes_own(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="600/minute")
    narrow = limit("300/minute")

    @app.get("/")
    @narrow
    def root() -> str:
        return "ok"

    app.add_url_rule("/other", "other", lambda: "ok")
    client = app.test_client()
    for _ in range(100):
        answer = client.get("/")
    assert [answer.headers[field] for field in FIELDS[:2]] == ["300", "200"]
    assert client.get("/other").headers["X-RateLimit-Remaining"] == "499"


def test_when_a_view_refuses_what_the_default_limit_took_is_given_back(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="10/minute")
    app.add_url_rule("/narrow", "narrow", limit("1/minute")(lambda: "ok"))
    app.add_url_rule("/left", "left", lambda: "ok")
    client = app.test_client()
    assert statuses(client, "/narrow", 6) == [200] + [429] * 5
    assert client.get("/left").headers["X-RateLimit-Remaining"] == "8"


@pytest.mark.fault("R124")
def test_several_tidegate_objects_on_one_application_are_all_asked(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="10/minute")
    limit.gate(app, default="15/minute", by="host", name="everybody")
    app.add_url_rule("/", "root", lambda: "ok")
    client = app.test_client()
    admitted = [client.get("/", **of(f"192.0.2.{1 + n % 2}")).status_code for n in range(20)].count(200)
    assert admitted == 15


@pytest.mark.fault("R121")
def test_unknown_urls_count_so_that_scanners_are_not_free(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="5/minute")
    client = app.test_client()
    assert [client.get(f"/{uuid.uuid4().hex}").status_code for _ in range(10)] == [404] * 5 + [429] * 5


def test_unknown_urls_share_one_bucket_where_routes_have_their_own(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="2/minute", by="ip+route")
    client = app.test_client()
    assert [client.get(f"/{uuid.uuid4().hex}").status_code for _ in range(3)] == [404, 404, 429]


@pytest.mark.fault("R125")
def test_a_request_context_held_open_around_others_makes_none_of_them_unlimited(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="2/day")
    app.add_url_rule("/", "root", limit("2/day", name="own")(lambda: "ok"))
    client = app.test_client()
    with app.test_request_context("/"):
        assert statuses(client, "/", 3) == [200, 200, 429]


@pytest.mark.fault("R116")
def test_preflights_are_free_and_never_refused(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="5/minute")
    app.add_url_rule("/", "root", lambda: "ok", methods=["POST"])
    client = app.test_client()
    preflight = {"Origin": "https://shop.test", "Access-Control-Request-Method": "POST"}
    assert [client.options("/", headers=preflight).status_code for _ in range(10)] == [200] * 10
    assert [client.post("/").status_code for _ in range(6)] == [200] * 5 + [429]


# ---- exemptions and blueprints ----


def test_an_exempt_view_is_left_out_and_its_own_limit_still_holds(app: Flask, limit: Setting) -> None:
    gate = limit.gate(app, default="1/minute")

    @app.get("/health")
    @gate.exempt
    def health() -> str:
        return "ok"

    @gate.exempt
    @app.get("/above")
    @limit("3/minute")
    def above() -> str:
        return "ok"

    @gate.exempt
    class Status(View):
        def dispatch_request(self) -> str:
            return "ok"

    app.add_url_rule("/class", view_func=Status.as_view("status"))
    client = app.test_client()
    assert statuses(client, "/health", 4) == [200] * 4
    assert statuses(client, "/above", 4) == [200] * 3 + [429]
    assert statuses(client, "/class", 4) == [200] * 4


@pytest.mark.fault("R122")
def test_limits_and_exemptions_of_a_blueprint_reach_those_nested_in_it(app: Flask, limit: Setting) -> None:
    gate = limit.gate(app, default="1/minute")
    limited, free = Blueprint("limited", "limited"), Blueprint("free", "free")
    middle, child = Blueprint("middle", "middle"), Blueprint("child", "child")
    child.add_url_rule("/x", "x", lambda: "ok")
    middle.register_blueprint(child, url_prefix="/child")
    limited.register_blueprint(middle, url_prefix="/middle")
    free.register_blueprint(middle, url_prefix="/middle")
    limit("5/minute", name="limited")(limited)
    gate.exempt(free)
    free.before_request(lambda: None)
    app.register_blueprint(limited, url_prefix="/limited")
    app.register_blueprint(free, url_prefix="/free")
    client = app.test_client()
    assert statuses(client, "/free/middle/child/x", 8) == [200] * 8
    gate.enabled = False
    assert statuses(client, "/limited/middle/child/x", 8) == [200] * 5 + [429] * 3


@pytest.mark.fault("R122")
def test_what_a_blueprint_has_a_nested_one_or_a_view_can_be_left_out_of_and_have_its_own(
    app: Flask, limit: Setting
) -> None:
    of_parent, of_child = limit("5/minute", name="parent"), limit("2/minute", name="child")
    parent, child, grandchild = Blueprint("parent", "p"), Blueprint("child", "c"), Blueprint("grandchild", "g")

    @of_parent.exempt
    @parent.get("/free")
    def free() -> str:
        return "ok"

    parent.add_url_rule("/x", "x", lambda: "ok")
    child.add_url_rule("/x", "x", lambda: "ok")
    grandchild.add_url_rule("/x", "x", lambda: "ok")
    assert of_parent(parent) is parent and of_child(child) is child
    of_parent.exempt(child)
    child.register_blueprint(grandchild, url_prefix="/grandchild")
    parent.register_blueprint(child, url_prefix="/child")
    app.register_blueprint(parent, url_prefix="/parent")
    client = app.test_client()
    assert statuses(client, "/parent/free", 9) == [200] * 9
    assert statuses(client, "/parent/child/x", 1) + statuses(client, "/parent/child/grandchild/x", 2) == [200, 200, 429]
    assert statuses(client, "/parent/x", 6) == [200] * 5 + [429], "of which the others took nothing"


def test_one_view_name_in_two_blueprints_has_two_buckets(app: Flask, limit: Setting) -> None:
    own = limit("1/minute")
    for name in ("a", "b"):
        blueprint = Blueprint(name, name, url_prefix=f"/{name}")
        blueprint.add_url_rule("/items", "items", own(lambda: "ok"))
        app.register_blueprint(blueprint)
    client = app.test_client()
    assert [client.get(path).status_code for path in ("/a/items", "/b/items", "/a/items", "/b/items")] == [
        200, 200, 429, 429,
    ]  # fmt: skip


# ---- the decorator ----


@pytest.mark.fault("R98")
@pytest.mark.fault("R88")
def test_views_are_limited_whatever_their_parameters_by_template_and_not_by_path(app: Flask, limit: Setting) -> None:
    @app.get("/plain")
    @limit()
    def plain() -> str:
        return "ok"

    @app.get("/users/<name>")
    @limit()
    def user(name: str) -> str:
        return name

    client = app.test_client()
    assert statuses(client, "/plain", 3) == [200, 200, 429]
    assert [client.get(f"/users/{n}").status_code for n in range(3)] == [200, 200, 429]
    assert client.get("/users/9").status_code == 429


def test_an_async_view_is_limited_and_awaited(app: Flask, limit: Setting) -> None:
    @app.get("/")
    @limit()
    async def root() -> str:
        return "awaited"

    client = app.test_client()
    assert client.get("/").text == "awaited"
    assert statuses(client, "/", 2) == [200, 429]


@pytest.mark.fault("R104")
def test_a_limit_written_above_the_route_holds_as_well(app: Flask, limit: Setting) -> None:
    @limit("2/minute")
    @app.get("/above")
    def above() -> str:
        return "ok"

    blueprint = Blueprint("b", "b")

    @limit("2/minute")
    @blueprint.get("/in-blueprint")
    def in_blueprint() -> str:
        return "ok"

    @app.get("/below")
    @limit("2/minute")
    def below() -> str:
        return "ok"

    app.register_blueprint(blueprint)
    client = app.test_client()
    for path in ("/above", "/in-blueprint", "/below"):
        assert statuses(client, path, 3) == [200, 200, 429], path


def test_a_function_that_is_also_registered_without_its_limit_stays_free_there(app: Flask, limit: Setting) -> None:
    def view() -> str:
        return "ok"

    app.add_url_rule("/free", "free", view)
    app.add_url_rule("/limited", "limited", limit("1/minute")(view))
    client = app.test_client()
    assert statuses(client, "/limited", 2) == [200, 429]
    assert statuses(client, "/free", 3) == [200] * 3


@pytest.mark.fault("R118")
def test_class_based_views_take_a_limit_for_the_class_and_one_for_a_method(app: Flask, limit: Setting) -> None:
    class Things(MethodView):
        decorators = [limit("5/minute")]

        def __init__(self) -> None:
            self.word = "self"

        @limit("2/minute")
        def get(self) -> str:
            return self.word

        def post(self) -> str:
            return self.word

    app.add_url_rule("/things", view_func=Things.as_view("things"))
    client = app.test_client()
    assert client.get("/things").text == "self"
    assert statuses(client, "/things", 2) == [200, 429]
    assert [client.post("/things").status_code for _ in range(6)] == [200] * 5 + [429]


@pytest.mark.fault("R119")
def test_a_helper_called_twice_in_a_request_is_charged_once(app: Flask, limit: Setting) -> None:
    calls = []

    @limit("2/minute")
    def helper() -> None:
        calls.append(1)

    @app.get("/")
    def root() -> str:
        helper()
        helper()
        return "ok"

    client = app.test_client()
    assert statuses(client, "/", 3) == [200, 200, 429]
    assert len(calls) == 4


def test_head_counts_with_get_because_one_view_answers_both(app: Flask, limit: Setting) -> None:
    app.add_url_rule("/", "root", limit("1/minute")(lambda: "ok"))
    client = app.test_client()
    assert [client.get("/").status_code, client.head("/").status_code] == [200, 429]


def test_a_view_can_read_its_decision(app: Flask, limit: Setting) -> None:
    own = limit("3/minute")

    @app.get("/")
    @own
    def root() -> str:
        assert own.decision is not None
        return str(own.decision.remaining)

    assert app.test_client().get("/").text == "2"


def test_outside_a_request_a_limited_function_says_so(limit: Setting) -> None:
    with pytest.raises(RuntimeError, match="request context"):
        limit()(lambda: None)()


def test_what_is_wrong_raises_where_the_limit_is_written(limit: Setting) -> None:
    with pytest.raises(RuleError, match="fortnight"):
        limit("5/fortnight")
    with pytest.raises(RuleError, match="fortnight"):
        limit.gate(default="5/fortnight")
    with pytest.raises(ConfigError, match="colour"):
        limit("5/minute", by="colour")
    with pytest.raises(ConfigError, match="no-such"):
        Tidegate(config="/no-such/rules.yaml")
    with pytest.raises(TypeError, match="decorates a function"):
        limit("5/minute")("not a function")  # type: ignore[type-var]


@pytest.mark.fault("R110")
def test_a_limit_can_be_switched_off_without_asking_the_store(app: Flask) -> None:
    with socket.socket() as bound:  # and not listening: whoever asks is refused
        bound.bind(("127.0.0.1", 0))
        nobody: Any = {"store": f"redis://127.0.0.1:{bound.getsockname()[1]}", "on_store_failure": "closed"}
        own, gate = rate_limit("1/minute", **nobody), Tidegate(app, default="1/minute", **nobody)
        app.add_url_rule("/", "root", own(lambda: "ok"))
        client = app.test_client()
        assert statuses(client, "/", 1) == [503]
        gate.enabled = False
        assert statuses(client, "/", 1) == [503]
        own.enabled = False
        assert statuses(client, "/", 100) == [200] * 100


# ---- the answer ----


@pytest.mark.fault("R172")
def test_a_refusal_is_429_with_the_fields_and_body_of_every_face(app: Flask, limit: Setting) -> None:
    app.add_url_rule("/", "root", limit("1/minute")(lambda: "ok"))
    client = app.test_client()
    client.get("/")
    refused = client.get("/")
    assert refused.status_code == 429
    assert refused.headers.getlist("Retry-After") == ["60"]
    assert [refused.headers.getlist(field) for field in FIELDS[:2]] == [["1"], ["0"]]
    assert refused.headers.getlist("Content-Type") == ["application/json"]
    told = json.loads(refused.data)
    assert (told["code"], told["retry_after"]) == ("RATE_LIMITED", 60)


@pytest.mark.fault("R100")
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/dict", 200), ("/str", 200), ("/own", 200), ("/redirect", 302), ("/stream", 200), ("/file", 200),
        ("/abort", 409), ("/error", 500), ("/nowhere", 404),
    ],
)  # fmt: skip
def test_every_answer_carries_the_fields_once(
    app: Flask, limit: Setting, tmp_path: Path, path: str, status: int
) -> None:
    limit.gate(app, default="10/minute")
    file = tmp_path / "file.txt"
    file.write_text("content")
    app.add_url_rule("/dict", "dict", lambda: {"a": 1})
    app.add_url_rule("/str", "str", lambda: "text")
    app.add_url_rule("/own", "own", lambda: Response("own"))
    app.add_url_rule("/redirect", "redirect", lambda: redirect("/own"))
    app.add_url_rule("/stream", "stream", lambda: Response(stream_with_context(iter(["one", "two"]))))
    app.add_url_rule("/file", "file", lambda: flask.send_file(file))
    app.add_url_rule("/abort", "abort", lambda: abort(409))
    app.add_url_rule("/error", "error", lambda: str(1 // 0))
    answer = app.test_client().get(path)
    assert answer.status_code == status
    values = [answer.headers.getlist(field) for field in FIELDS]
    assert values[:2] == [["10"], ["9"]]
    assert len(values[2]) == 1 and 0 < int(values[2][0]) <= 60


@pytest.mark.parametrize("handled", [429, TooManyRequests, RateLimited, HTTPException])
def test_an_error_handler_gets_the_decision_and_the_fields_still_reach_the_client(
    app: Flask, limit: Setting, handled: Any
) -> None:
    app.add_url_rule("/", "root", limit("1/minute")(lambda: "ok"))

    @app.errorhandler(handled)
    def handler(error: RateLimited) -> tuple[Response, int]:
        return jsonify(wait=error.decision.retry_after, code=error.code), 429

    client = app.test_client()
    client.get("/")
    refused = client.get("/")
    assert refused.get_json() == {"wait": 60.0, "code": 429}
    assert refused.headers.getlist("Retry-After") == ["60"]


def test_other_refusals_are_the_exception_of_their_status(app: Flask, limit: Setting) -> None:
    app.errorhandler(401)(lambda error: ("sign in", 401))
    app.errorhandler(RateLimited)(lambda error: (f"refused {error.code}", error.code))
    app.add_url_rule("/user", "user", limit("1/minute", by="user")(lambda: "ok"))
    app.add_url_rule(
        "/key", "key", limit("1/minute", by="header:X-Api-Key", missing_identity="reject 400")(lambda: "ok")
    )
    app.add_url_rule("/never", "never", limit("deny")(lambda: "ok"))
    client = app.test_client()
    assert [client.get(path).status_code for path in ("/user", "/key", "/never")] == [401, 400, 403]
    assert [client.get(path).text for path in ("/user", "/key", "/never")] == ["sign in", "refused 400", "refused 403"]


def test_the_tightest_of_several_limits_is_shown(app: Flask, limit: Setting) -> None:
    limit.gate(app, default="4/minute")
    app.add_url_rule("/loose", "loose", limit("9/minute")(lambda: "ok"))
    app.add_url_rule("/tight", "tight", limit("2/minute")(lambda: "ok"))
    client = app.test_client()
    assert client.get("/loose").headers["X-RateLimit-Limit"] == "4"
    assert client.get("/tight").headers["X-RateLimit-Limit"] == "2"


# ---- who asks ----


class LoadedUser:
    def __init__(self, name: str, signed_in: bool = True) -> None:
        self.name, self.is_authenticated = name, signed_in

    def get_id(self) -> str:
        return self.name


@pytest.mark.parametrize("kind", ["callable", "async callable", "g.user text", "g.user object", "REMOTE_USER"])
def test_the_user_is_found_where_applications_keep_it(app: Flask, limit: Setting, kind: str) -> None:
    def name() -> str | None:
        return flask.request.headers.get("X-Name")

    async def name_async() -> str | None:
        return name()

    @app.before_request
    def sign_in() -> None:
        if kind == "g.user text":
            flask.g.user = name()
        if kind == "g.user object":
            flask.g.user = LoadedUser(name() or "", name() is not None)

    user = {"callable": name, "async callable": name_async}.get(kind)
    app.add_url_rule("/", "root", limit("1/minute", by="user", user=user)(lambda: "ok"))
    client = app.test_client()

    def ask(who: str | None) -> int:
        if kind == "REMOTE_USER":
            return client.get("/", environ_overrides={"REMOTE_USER": who} if who else {}).status_code
        return client.get("/", headers={"X-Name": who} if who else {}).status_code

    assert [ask("ann"), ask("ann"), ask("bob"), ask(None)] == [200, 429, 200, 401]


# ---- the rules file ----

RULES = """
store: {store}
policies:
  - name: login
    match: {{path: /login, methods: [POST]}}
    rules: 2/minute
  - name: api
    match: {{path: "/api/*"}}
    rules: 3/minute
    by: ip+route
"""


def test_the_rules_file_is_judged_before_the_views(app: Flask, limit: Setting, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES.format(store=limit.store))
    limit.gate(app, config=str(rules))
    app.add_url_rule("/login", "login", lambda: "ok", methods=["GET", "POST"])
    app.add_url_rule("/api/<int:number>", "api", lambda number: "ok")
    client = app.test_client()
    assert [client.post("/login").status_code for _ in range(3)] == [200, 200, 429]
    assert statuses(client, "/login", 3) == [200] * 3
    assert [client.get(f"/api/{n}").status_code for n in range(4)] == [200, 200, 200, 429]


def test_a_view_can_use_a_policy_of_the_rules_file_and_is_charged_once_beside_it(
    app: Flask, limit: Setting, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES.format(store=limit.store))
    gate = limit.gate(app, config=str(rules))
    own = rate_limit(policy="login", config=str(rules), store=limit.store, clock=limit.clock)
    app.add_url_rule("/login", "login", own(lambda: "ok"), methods=["GET", "POST"])
    client = app.test_client()
    assert [client.post("/login").status_code for _ in range(3)] == [200, 200, 429]
    # The view holds every method to the policy; the file itself only POST. One count.
    assert client.get("/login").status_code == 429
    assert gate.gate is not None and gate.gate.generation == 1
