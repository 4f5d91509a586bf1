"""tidegate.wsgi in front of Flask, Django, Bottle and bare applications, in process and under gunicorn."""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.util import FileWrapper, setup_testing_defaults
from wsgiref.validate import validator

import pytest
from tidegate import ConfigError, Limiter, RuleError
from tidegate.wsgi import TidegateMiddleware

from setting import MiddlewareSetting as Setting


@pytest.fixture(autouse=True)
def environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEGATE_ENABLED", "TIDEGATE_STORE", "TIDEGATE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


class Answer:
    def __init__(self, status: str, headers: list[tuple[str, str]], body: bytes, returned: Any) -> None:
        self.status, self.headers, self.body, self.returned = int(status[:3]), headers, body, returned

    def all(self, name: str) -> list[str]:
        return [value for given, value in self.headers if given.lower() == name.lower()]

    def __getitem__(self, name: str) -> str:
        (value,) = self.all(name)
        return value


def ask(app: Any, method: str = "GET", path: str = "/", body: bytes | None = None, **environ: Any) -> Answer:
    """As a server that keeps to PEP 3333, which wsgiref's validator holds both sides to."""
    given: dict[str, Any] = {"REQUEST_METHOD": method, "PATH_INFO": path, "REMOTE_ADDR": "192.0.2.1", "SCRIPT_NAME": ""}
    given |= environ
    if body is not None:
        given.setdefault("CONTENT_LENGTH", str(len(body)))
        given["wsgi.input"] = io.BytesIO(body)
    setup_testing_defaults(given)
    given["QUERY_STRING"] = environ.get("QUERY_STRING", "")
    started: list[Any] = []
    returned = app(given, lambda *answer: started.append(answer) or (lambda piece: None))
    try:
        sent = b"".join(returned)
    finally:
        if hasattr(returned, "close"):
            returned.close()
    return Answer(started[-1][0], started[-1][1], sent, returned)


def hello(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


@pytest.mark.parametrize("named", [False, True])
def test_exc_info_may_be_given_by_place_or_by_name(named: bool) -> None:
    def application(environ: Any, start_response: Any) -> list[bytes]:
        try:
            raise RuntimeError("as asked")
        except RuntimeError:
            failed = sys.exc_info()
            start_response("500 No", [], **{"exc_info": failed}) if named else start_response("500 No", [], failed)
        return [b"no"]

    started: list[Any] = []
    app = TidegateMiddleware(application, limiter=Limiter("5/minute", by="ip", name=f"exc {named}", store="memory://wsgi"))
    app({"REQUEST_METHOD": "GET", "REMOTE_ADDR": "192.0.2.1"}, lambda *answer: started.append(answer))
    ((status, fields, (kind, _, _)),) = started
    assert status == "500 No" and kind is RuntimeError and ("X-RateLimit-Remaining", "4") in fields


# ---- the three frameworks, in process ----


def flask_app() -> Any:
    import flask

    app = flask.Flask("shop")

    @app.route("/login", methods=["GET", "POST"])
    def login() -> Any:
        return f"account {flask.request.form.get('account')}", int(flask.request.args.get("status", 200))

    @app.get("/stream")
    def stream() -> Any:
        return flask.Response(iter(["one", "two"]))

    @app.get("/fail")
    def fail() -> str:
        raise RuntimeError("as asked")

    return app


DJANGO = """
from django.conf import settings
if not settings.configured:
    settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="for the test", DEBUG=False,
                       LOGGING_CONFIG=None, USE_TZ=True)
import django
django.setup()
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

@csrf_exempt
def login(request):
    return HttpResponse(f"account {request.POST.get('account')}", status=int(request.GET.get("status", 200)))

def stream(request):
    return StreamingHttpResponse(iter([b"one", b"two"]))

def fail(request):
    raise RuntimeError("as asked")

urlpatterns = [path("login", login), path("stream", stream), path("fail", fail)]
app = get_wsgi_application()
"""


def django_app() -> Any:
    import importlib.util
    import tempfile

    if "tidegate_test_django" not in sys.modules:
        folder = tempfile.mkdtemp()
        file = Path(folder, "tidegate_test_django.py")
        file.write_text(DJANGO)
        spec = importlib.util.spec_from_file_location("tidegate_test_django", file)
        assert spec is not None and spec.loader is not None
        module = sys.modules["tidegate_test_django"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["tidegate_test_django"].app


def bottle_app() -> Any:
    import bottle

    app = bottle.Bottle()

    @app.route("/login", method=["GET", "POST"])
    def login() -> Any:
        bottle.response.status = int(bottle.request.query.get("status", 200))
        return f"account {bottle.request.forms.get('account')}"

    @app.get("/stream")
    def stream() -> Iterator[str]:
        yield "one"
        yield "two"

    @app.get("/fail")
    def fail() -> str:
        raise RuntimeError("as asked")

    return app


APPS: dict[str, Callable[[], Any]] = {"flask": flask_app, "django": django_app, "bottle": bottle_app}


@pytest.fixture(params=list(APPS))
def app(request: pytest.FixtureRequest) -> Any:
    return APPS[request.param]()


FORM = {"CONTENT_TYPE": "application/x-www-form-urlencoded"}


def test_a_framework_behind_a_limiter_refuses_the_third_and_carries_fields_on_every_answer(
    app: Any, setting: Setting
) -> None:
    limited = validator(TidegateMiddleware(app, limiter=setting.limiter()))
    answers = [ask(limited, path="/login") for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert [answer["X-RateLimit-Remaining"] for answer in answers] == ["1", "0", "0"]
    assert answers[0].body == b"account None"
    assert (answers[2]["Retry-After"], answers[2]["Content-Length"]) == ("60", str(len(answers[2].body)))
    assert json.loads(answers[2].body)["code"] == "RATE_LIMITED"
    assert ask(limited, path="/login", REMOTE_ADDR="192.0.2.2").status == 200


@pytest.mark.parametrize(("path", "status"), [("/stream", 200), ("/fail", 500), ("/nowhere", 404)])
def test_streams_errors_and_unknown_urls_carry_the_fields_once(
    app: Any, setting: Setting, path: str, status: int
) -> None:
    answer = ask(TidegateMiddleware(app, limiter=setting.limiter("9/minute")), path=path)
    assert answer.status == status
    assert answer.all("X-RateLimit-Remaining") == ["8"]
    assert status != 200 or answer.body == b"onetwo"


def test_a_form_counts_its_account_and_the_application_reads_the_form_all_the_same(app: Any, setting: Setting) -> None:
    gate = setting.gate("policies: [{name: login, match: {path: /login}, rules: 2/minute, by: [ip, 'form:account']}]\n")
    limited = TidegateMiddleware(app, gate=gate)
    told = [
        ask(limited, "POST", "/login", b"account=ann&x=1", REMOTE_ADDR=f"192.0.2.{n}", **FORM) for n in range(1, 4)
    ]
    assert [answer.status for answer in told] == [200, 200, 429]
    assert told[1].body == b"account ann"
    assert ask(limited, "POST", "/login", b"account=bob", REMOTE_ADDR="192.0.2.9", **FORM).body == b"account bob"


@pytest.mark.fault("R17")
def test_only_failed_logins_count_by_the_rules_file_and_by_charge_when(app: Any, setting: Setting) -> None:
    gate = setting.gate("policies: [{name: login, rules: 3/minute, count: {status: 401}}]\n")
    own = setting.limiter("3/minute", name="own")
    for limited in (
        TidegateMiddleware(app, gate=gate),
        TidegateMiddleware(app, limiter=own, charge_when=lambda response: response.status_code == 401),
    ):
        for _ in range(8):
            assert ask(limited, path="/login", QUERY_STRING="status=200").status == 200
        for _ in range(3):
            assert ask(limited, path="/login", QUERY_STRING="status=401").status == 401
        assert ask(limited, path="/login", QUERY_STRING="status=200").status == 429


# ---- bare applications ----


def test_what_the_application_returns_is_handed_on_as_it_is_and_closed_by_the_server(setting: Setting) -> None:
    closed = []

    class Parts:
        def __iter__(self) -> Iterator[bytes]:
            yield b"part"

        def __len__(self) -> int:
            return 1

        def close(self) -> None:
            closed.append(True)

    parts, file = Parts(), FileWrapper(io.BytesIO(b"file"))

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return file if environ["PATH_INFO"] == "/file" else parts

    limited = TidegateMiddleware(app, limiter=setting.limiter())
    assert ask(limited).returned is parts and closed == [True]
    assert ask(limited, path="/file").returned is file


def test_a_stream_is_sent_piece_by_piece_as_it_is_made(setting: Setting) -> None:
    made = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        for number in range(3):
            made.append(number)
            yield b"%d" % number

    limited = TidegateMiddleware(app, limiter=setting.limiter(), charge_when=lambda response: True)
    environ: dict[str, Any] = {"REMOTE_ADDR": "192.0.2.1"}
    setup_testing_defaults(environ)
    pieces = iter(limited(environ, lambda *answer: lambda piece: None))
    assert made == []
    assert next(pieces) == b"0" and made == [0]
    assert next(pieces) == b"1" and made == [0, 1]


@pytest.mark.parametrize("when", ["at once", "on the way"])
def test_an_application_that_fails_before_it_answers_has_answered_500_and_is_closed(
    setting: Setting, when: str
) -> None:
    seen, closed = [], []

    def on_the_way() -> Iterator[bytes]:
        raise RuntimeError("as asked")
        yield b""

    class Failing:
        def __iter__(self) -> Iterator[bytes]:
            return on_the_way()

        def close(self) -> None:
            closed.append(True)

    def app(environ: Any, start_response: Any) -> Any:
        if when == "at once":
            raise RuntimeError("as asked")
        return Failing()

    def counts(response: Any) -> bool:
        seen.append(response.status_code)
        return False

    limiter = setting.limiter("1/minute")
    limited = TidegateMiddleware(app, limiter=limiter, charge_when=counts)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="as asked"):
            ask(limited)
    assert seen == [500] * 3  # each let through: what the one before took was given back
    assert len(closed) == (3 if when == "on the way" else 0)


def test_requests_under_way_hold_their_places_until_their_answers_are_known(setting: Setting) -> None:
    limiter = setting.limiter("2/minute")
    inside: list[int] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        if 429 not in inside:
            inside.append(ask(limited).status)  # while this one is being served, another asks
        return hello(environ, start_response)

    limited = TidegateMiddleware(app, limiter=limiter, charge_when=lambda response: response.status_code == 401)
    assert ask(limited).status == 200
    assert inside == [429, 200]  # the third at once finds both places taken
    assert limiter.peek(dims={"ip": "192.0.2.1"}).remaining == 2  # and all is given back


def test_a_predicate_sees_fields_in_any_case_and_one_that_fails_leaves_the_answer_and_the_charge(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("X-Failed", environ["PATH_INFO"][1:]), ("x-failed", "again")])
        return [b"answered"]

    def counts(response: Any) -> bool:
        if response.headers["x-FAILED"].startswith("raise"):
            raise KeyError("as asked")
        return bool(response.headers["x-failed"] == "yes, again")

    limiter = setting.limiter("9/minute")
    limited = TidegateMiddleware(app, limiter=limiter, charge_when=counts)
    for path in ("/yes", "/no", "/raise"):
        assert ask(limited, path=path).body == b"answered"
    assert limiter.peek(dims={"ip": "192.0.2.1"}).remaining == 7
    assert [record.message for record in caplog.records if "charge_when" in record.message] != []


def test_preflights_are_free_and_a_head_refusal_has_no_body(setting: Setting) -> None:
    limited = TidegateMiddleware(hello, limiter=setting.limiter("1/minute"))
    preflight = {"HTTP_ORIGIN": "https://shop.test", "HTTP_ACCESS_CONTROL_REQUEST_METHOD": "POST"}
    assert [ask(limited, "OPTIONS", **preflight).status for _ in range(5)] == [200] * 5
    assert ask(limited).status == 200
    refused = ask(limited, "HEAD")
    assert (refused.status, refused.body) == (429, b"") and int(refused["Content-Length"]) > 0


def test_a_body_is_replayed_whole_however_it_comes_and_whatever_reads_it(setting: Setting) -> None:
    gate = setting.gate("policies: [{name: a, rules: 90/minute, by: 'json:who', missing_identity: shared}]\n")
    read: list[Any] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        source = environ["wsgi.input"]
        how = environ["PATH_INFO"]
        read.append(
            source.read() if how == "/all" else b"".join(source) if how == "/lines" else
            b"".join(iter(lambda: source.read(7), b"")) if how == "/pieces" else source.readline() + source.read()
        )  # fmt: skip
        return hello(environ, start_response)

    limited = TidegateMiddleware(app, gate=gate)
    small, large = b'{"who":\n "ann"}', b"x\n" * 100_000
    for how in ("/all", "/lines", "/pieces", "/line"):
        for chunked in (False, True):
            for body in (b"", small, large):
                extra = {"wsgi.input_terminated": True, "CONTENT_LENGTH": ""} if chunked else {}
                ask(limited, "POST", how, body, CONTENT_TYPE="application/json", **extra)
                assert read.pop() == body, (how, chunked, len(body))


def test_a_request_is_refused_before_its_body_is_read(setting: Setting) -> None:
    class Unread:
        def read(self, *_: Any) -> bytes:
            raise AssertionError("read")

    limited = TidegateMiddleware(hello, limiter=setting.limiter("1/minute"))
    assert [ask(limited, "POST", **{"wsgi.input": Unread(), "CONTENT_LENGTH": "9"}).status for _ in range(2)] == [200, 429]


def test_two_middlewares_and_the_flask_face_inside_charge_an_equal_key_once(setting: Setting) -> None:
    import flask
    from tidegate.flask import rate_limit

    app = flask.Flask("shop")
    narrow = rate_limit("3/minute", name="site", store=setting.store, clock=setting.clock)
    app.add_url_rule("/", "root", narrow(lambda: "ok"))
    app.add_url_rule("/free", "free", lambda: "ok")
    site = setting.limiter("9/minute", name="site")
    limited = TidegateMiddleware(TidegateMiddleware(app, limiter=site), limiter=site)
    answers = [ask(limited) for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert [answer.all("X-RateLimit-Remaining") for answer in answers] == [["2"], ["1"], ["0"], ["0"]]
    # What was refused gave back what the middleware had taken.
    assert ask(limited, path="/free")["X-RateLimit-Remaining"] == "5"


def test_the_user_and_the_plan_are_asked_for_only_where_somebody_counts_by_them(setting: Setting) -> None:
    asked: list[str] = []

    def user(environ: Any) -> str | None:
        asked.append("user")
        return str(environ["HTTP_X_NAME"]) if "HTTP_X_NAME" in environ else None

    gate = setting.gate(
        "policies:\n"
        "  - {name: mine, match: {path: /mine}, rules: 1/minute, by: user}\n"
        "  - {name: rest, plans: {default: free, free: 1/minute, paid: 5/minute}}\n"
    )
    limited = TidegateMiddleware(
        hello, gate=gate, user=user, plan=lambda environ: environ.get("HTTP_X_PLAN")
    )
    told = [ask(limited, path="/mine", **extra).status for extra in ({"HTTP_X_NAME": "ann"},) * 2 + ({},)]
    assert told == [200, 429, 401]
    assert [ask(limited, HTTP_X_PLAN="paid").status for _ in range(6)] == [200] * 5 + [429]
    count = len(asked)
    TidegateMiddleware(hello, gate=setting.gate("policies: [{name: a, rules: 9/minute}]\n"), user=user)
    assert len(asked) == count


def test_what_is_wrong_raises_where_the_middleware_is_made(setting: Setting, tmp_path: Path) -> None:
    for nothing in (None, []):
        with pytest.raises(ConfigError, match=r"config= .* TIDEGATE_CONFIG; or limiter=Limiter\(.* or a gate="):
            TidegateMiddleware(hello, limiter=nothing)
    with pytest.raises(ConfigError, match="no-such"):
        TidegateMiddleware(hello, config="/no-such/rules.yaml")
    with pytest.raises(ConfigError, match="by="):
        TidegateMiddleware(hello, limiter=Limiter("5/minute", store=setting.store, clock=setting.clock))
    with pytest.raises(TypeError, match="a Limiter, not by str"):
        TidegateMiddleware(hello, limiter=["5/minute"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="cannot be async"):

        async def late(response: Any) -> bool:
            return True

        TidegateMiddleware(hello, limiter=setting.limiter(), charge_when=late)
    with pytest.raises(ValueError, match="count"):
        TidegateMiddleware(hello, gate=setting.gate("policies: [{name: a, rules: 1/minute}]\n"), charge_when=bool)
    with pytest.raises(RuleError, match="fortnight"):
        setting.limiter("5/fortnight")
    with pytest.raises(TypeError, match="WSGI application"):
        TidegateMiddleware("app", limiter=setting.limiter())  # type: ignore[arg-type]


MADE_LATE = """
import asyncio, json, sys, warnings
from wsgiref.util import setup_testing_defaults
from django.conf import settings

settings.configure(ROOT_URLCONF="late_urls", ALLOWED_HOSTS=["*"], SECRET_KEY="for the test", USE_TZ=True)
import django
django.setup()
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.urls import clear_url_caches

def wsgi(path):
    environ = {"PATH_INFO": path, "REMOTE_ADDR": "192.0.2.1"}
    setup_testing_defaults(environ)
    return b"".join(get_wsgi_application()(environ, lambda *answer: None))

def asgi(path):
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "http_version": "1.1"}
    waiting, sent = [{"type": "http.request", "body": b""}], []

    async def receive():
        return waiting.pop() if waiting else await asyncio.sleep(60)

    async def send(message):
        sent.append(message.get("body", b""))

    asyncio.run(get_asgi_application()(scope, receive, send))
    return b"".join(sent)

told = []
for ask in (wsgi, asgi):
    sys.modules.pop("late_urls", None)  # the views are imported by the first request, as Django does it
    clear_url_caches()
    for path in ("/once", "/each"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            said = ask("/async" + path if ask is asgi else path).decode()
        told.append([said, [one.lineno for one in caught if issubclass(one.category, RuntimeWarning)]])
print(json.dumps(told))
"""
LATE_URLS = """
from django.http import HttpResponse
from django.urls import path
from tidegate import Limiter

limiter = Limiter("5/minute", name="once", store="memory://late")

def once(request):
    return HttpResponse(str(limiter.hit("ann").allowed))

def each(request):
    return HttpResponse(str(Limiter("5/minute", name="each", store="memory://late").hit("ann").allowed))

async def once_async(request):
    return once(request)

async def each_async(request):
    return each(request)

urlpatterns = [path("once", once), path("each", each), path("async/once", once_async), path("async/each", each_async)]
"""


def test_in_django_a_limiter_made_for_each_request_is_warned_of_and_a_modules_own_is_not(tmp_path: Path) -> None:
    (tmp_path / "late_urls.py").write_text(LATE_URLS)
    (tmp_path / "asking.py").write_text(MADE_LATE)
    done = subprocess.run([sys.executable, "asking.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = 1 + LATE_URLS.splitlines().index(next(one for one in LATE_URLS.splitlines() if 'name="each"' in one))
    assert json.loads(done.stdout) == [["True", []], ["True", [line]]] * 2


# ---- under gunicorn ----

SERVED = """
from tidegate import Limiter
from tidegate.wsgi import TidegateMiddleware
{app}
application = TidegateMiddleware(app, limiter=Limiter("7/hour", by="ip", name="served"))
"""

BARE = {
    "flask": """
        import flask
        app = flask.Flask("shop")
        app.add_url_rule("/login", "login", lambda: "account None")
    """,
    "django": DJANGO,
    "bottle": """
        import bottle
        app = bottle.Bottle()
        app.route("/login")(lambda: "account None")
    """,
}


@pytest.mark.parametrize("name", list(BARE))
def test_four_gunicorn_workers_admit_the_limit_exactly(name: str, tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED.format(app=textwrap.dedent(BARE[name])))
    listener = socket.create_server(("127.0.0.1", 0))
    environment = {**os.environ, "TIDEGATE_STORE": f"shared://{tmp_path}/table?size=1MiB"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "--workers", "4", "--chdir", str(tmp_path), "served:application",
             "--bind", f"fd://{listener.fileno()}", "--keep-alive", "0"],
            pass_fds=[listener.fileno()], env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while (tmp_path / "log").read_text().count("Booting worker") < 4:
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        told = []
        for _ in range(20):
            connection = http.client.HTTPConnection("127.0.0.1", listener.getsockname()[1], timeout=20)
            connection.request("GET", "/login")
            answer = connection.getresponse()
            told.append((answer.status, answer.read(), answer.headers.get_all("X-RateLimit-Remaining")))
            connection.close()
        assert Counter(status for status, _, _ in told) == {200: 7, 429: 13}, (tmp_path / "log").read_text()
        assert [body for status, body, _ in told if status == 200] == [b"account None"] * 7
        assert [left for _, _, left in told] == [[str(max(0, 6 - n))] for n in range(20)]
    finally:
        server.terminate()
        server.wait(20)
        listener.close()
