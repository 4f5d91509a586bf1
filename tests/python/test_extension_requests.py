"""From a scope or an environ to a judgement: what is read, what is refused, what a face gets back."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections import UserDict, UserList
from typing import Any

import pytest

from tidegate import Gate, IdentityError, Judgement, Limiter, ManualClock
from tidegate._core import client_address, judge_asgi, judge_wsgi


def limiter(rules: str = "1/minute", by: str | list[str] = "ip", **options: object) -> Limiter:
    options.setdefault("clock", ManualClock())
    return Limiter(rules, store="memory://requests", by=by, **options)  # type: ignore[arg-type]


def scope(**changes: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "raw_path": b"/",
        "client": ("192.0.2.1", 50000),
        "headers": [],
    }
    whole.update(changes)
    return whole


def environ(**changes: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "REQUEST_METHOD": "GET",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/",
        "REMOTE_ADDR": "192.0.2.1",
        "wsgi.version": (1, 0),
        "wsgi.input": object(),
    }
    whole.update(changes)
    return whole


def same_asgi(by: str, left: dict[str, Any], right: dict[str, Any], **options: Any) -> bool:
    """Whether two requests meet in one count."""
    one = limiter(by=by, **options)
    assert judge_asgi([one], left).outcome == "allowed"
    return judge_asgi([one], right).outcome == "denied"


def same_wsgi(by: str, left: dict[str, Any], right: dict[str, Any], **options: Any) -> bool:
    one = limiter(by=by, **options)
    assert judge_wsgi([one], left).outcome == "allowed"
    return judge_wsgi([one], right).outcome == "denied"


# ---- the judgement


def test_an_allowed_request_gets_fields_and_no_body() -> None:
    judgement = judge_asgi([limiter("5/minute")], scope())
    assert isinstance(judgement, Judgement) and judgement
    assert (judgement.outcome, judgement.status, judgement.policy, judgement.missing) == ("allowed", 0, "default", "")
    assert judgement.fields == [
        (b"x-ratelimit-limit", b"5"),
        (b"x-ratelimit-remaining", b"4"),
        (b"x-ratelimit-reset", b"60"),
    ]
    assert judgement.fields_text == [
        ("X-RateLimit-Limit", "5"),
        ("X-RateLimit-Remaining", "4"),
        ("X-RateLimit-Reset", "60"),
    ]
    assert judgement.body == b""
    assert judgement.decision.remaining == 4
    assert repr(judgement) == "<Judgement allowed, status 0, policy 'default'>"


def test_a_refused_request_gets_429_retry_after_and_a_json_body() -> None:
    one = limiter("1/minute", name="login")
    judge_asgi([one], scope())
    judgement = judge_asgi([one], scope())
    assert not judgement
    assert (judgement.outcome, judgement.status, judgement.policy) == ("denied", 429, "login")
    fields = dict(judgement.fields)
    assert fields[b"retry-after"] == b"60" and fields[b"content-type"] == b"application/json"
    body = json.loads(judgement.body)
    assert body["code"] == "RATE_LIMITED" and body["retry_after"] == 60


def test_fields_are_a_new_list_each_time() -> None:
    judgement = judge_asgi([limiter()], scope())
    judgement.fields.append((b"x", b"y"))
    assert (b"x", b"y") not in judgement.fields
    assert judgement.fields is not judgement.fields


def test_both_faces_give_the_same_answer_to_the_same_request() -> None:
    one = limiter("2/minute", by="ip+path+method+host")
    first = judge_asgi([one], scope(headers=[(b"host", b"Example.com:8000")], raw_path=b"/a%20b?q", method="POST"))
    second = judge_wsgi([one], environ(HTTP_HOST="example.com", PATH_INFO="/a b", REQUEST_METHOD="POST"))
    assert [first.decision.remaining, second.decision.remaining] == [1, 0]
    assert [name for name, _ in first.fields] == [name.lower().encode() for name, _ in second.fields_text]


def test_cost_is_taken_as_given() -> None:
    assert judge_asgi([limiter("5/minute")], scope(), cost=3).decision.remaining == 2
    assert judge_wsgi([limiter("5/minute")], environ(), cost=3).decision.remaining == 2


def test_several_limiters_are_judged_all_or_nothing() -> None:
    clock = ManualClock()
    wide, narrow = limiter("5/minute", name="wide", clock=clock), limiter("1/minute", name="narrow", clock=clock)
    assert judge_asgi([wide, narrow], scope()).policy == "narrow"
    assert judge_asgi((wide, narrow), scope()).status == 429
    assert wide.peek(dims={"ip": "192.0.2.9"}).remaining == 5
    assert judge_asgi(UserList([wide]), scope()).decision.remaining == 3


def test_what_was_charged_before_in_this_request_is_not_charged_again() -> None:
    one = limiter("5/minute")
    first = judge_asgi([one], scope())
    again = judge_asgi([one], scope(), prior=[first])
    assert again.outcome == "allowed"
    assert judge_asgi([one], scope()).decision.remaining == 3


def test_a_prior_judgement_of_another_store_does_not_count_here() -> None:
    one, other = limiter("5/minute"), limiter("5/minute")  # of two clocks: two tables
    first = judge_asgi([other], scope())
    assert judge_asgi([one], scope(), prior=(first,)).decision.remaining == 4
    assert judge_asgi([one], scope()).decision.remaining == 3


def test_a_prior_judgement_that_was_given_back_does_not_count_as_paid() -> None:
    one = limiter("5/minute")
    first = judge_asgi([one], scope())
    first.decision.refund()
    judge_asgi([one], scope(), prior=[first])
    assert judge_asgi([one], scope()).decision.remaining == 3


def test_a_judgements_decision_gives_back_what_all_limiters_took() -> None:
    clock = ManualClock()
    both = [limiter("5/minute", name="a", clock=clock), limiter("7/hour", name="b", clock=clock)]
    judge_asgi(both, scope()).decision.refund()
    assert [item.remaining for item in judge_asgi(both, scope(), cost=0).decision.rules] == [5, 7]


def test_deny_is_403_and_a_missing_user_401_or_400() -> None:
    assert judge_asgi([limiter("deny")], scope()).status == 403
    unknown = judge_asgi([limiter(by="user")], scope())
    assert (unknown.outcome, unknown.status, unknown.missing) == ("unidentified", 401, "user")
    assert not unknown and not unknown.decision
    assert judge_asgi([limiter(by="user", missing_identity="reject 400")], scope()).status == 400
    assert same_asgi("user", scope(), scope(client=("192.0.2.9", 1)), missing_identity="shared")


def test_a_preflight_is_free() -> None:
    headers = [(b"origin", b"https://a.example"), (b"access-control-request-method", b"POST")]
    one = limiter()
    for _ in range(3):
        judgement = judge_asgi([one], scope(method="OPTIONS", headers=headers))
        assert (judgement.outcome, judgement.status, judgement.fields) == ("unmatched", 0, [])
        assert judgement.decision and judgement.decision.remaining == 10**10
    judgement.decision.refund()


@pytest.mark.parametrize("kind", ["lifespan", "http.future"])
def test_a_scope_that_is_no_request_is_unmatched(kind: str) -> None:
    assert judge_asgi([limiter()], {"type": kind}).outcome == "unmatched"


def test_a_websocket_is_judged_as_the_get_that_opens_it() -> None:
    websocket = scope(type="websocket")
    del websocket["method"]
    assert same_asgi("ip+method", scope(), websocket)


def test_limiters_that_are_switched_off_are_passed_over() -> None:
    off = Limiter("1/minute", by="ip", enabled=False)
    one = limiter("5/minute")
    assert judge_asgi([off, one], scope()).decision.remaining == 4
    judgement = judge_asgi([off], scope())
    assert (judgement.outcome, judgement.fields) == ("unmatched", [])


# ---- ASGI: what is read


def test_the_raw_path_is_taken_where_there_is_one() -> None:
    assert same_asgi("path", scope(raw_path=b"/a%2Fb", path="/a/b"), scope(raw_path=b"/a%2fb?x=1", path="/other"))
    assert not same_asgi("path", scope(raw_path=b"/a%252Fb"), scope(raw_path=b"/a%2Fb"))


@pytest.mark.parametrize("path", ["/a%41", "/a?b", "/ü", "/a b", "/%", "/\ud800"])
def test_a_decoded_path_is_not_decoded_twice(path: str) -> None:
    encoded = "".join(f"%{byte:02X}" if byte != 0x2F else "/" for byte in path.encode("utf-8", "surrogatepass"))
    assert same_asgi("path", scope(raw_path=None, path=path), scope(raw_path=encoded.encode()))
    assert not same_asgi("path", scope(raw_path=None, path="/a%41"), scope(raw_path=b"/aA"))


def test_route_and_user_are_taken_as_given() -> None:
    one = limiter(by="route+user")
    assert judge_asgi([one], scope(), route="/items/{id}", user="é").outcome == "allowed"
    assert judge_asgi([one], scope(raw_path=b"/items/7"), route="/items/{id}", user="é").outcome == "denied"
    assert judge_asgi([one], scope(), route="/items/{id}", user="e").outcome == "allowed"
    assert judge_asgi([one], scope(), user="e", route=None).missing == "route"


class User:
    def __init__(self, authenticated: bool = True, **fields: object) -> None:
        self.is_authenticated = authenticated
        self.__dict__.update(fields)


class Unfinished(User):
    @property
    def identity(self) -> str:
        raise NotImplementedError


def test_an_authenticated_scope_user_is_the_user() -> None:
    assert same_asgi("user", scope(user=User(identity="a")), scope(user=User(display_name="a")))
    assert same_asgi("user", scope(user=User(identity=7)), scope(user=User(identity="7")))
    assert same_asgi("user", scope(user=User(identity="a")), scope(user=Unfinished(display_name="a")))
    assert not same_asgi("user", scope(user=User(identity="a")), scope(user=User(identity="b")))


@pytest.mark.parametrize("user", [User(False, identity="a"), "a", {"name": "a"}, User(), User(identity=""), None, object()])
def test_anything_else_under_user_is_nobody(user: object) -> None:
    assert judge_asgi([limiter(by="user")], scope(user=user)).missing == "user"


def test_a_user_given_by_the_face_wins() -> None:
    one = limiter(by="user")
    assert judge_asgi([one], scope(user=User(identity="a")), user="b").outcome == "allowed"
    assert judge_asgi([one], scope(user=User(identity="b"))).outcome == "denied"


def test_a_user_that_raises_raises() -> None:
    class Broken:
        @property
        def is_authenticated(self) -> bool:
            raise RuntimeError("database gone")

    with pytest.raises(RuntimeError, match="database gone"):
        judge_asgi([limiter(by="ip")], scope(user=Broken()))


def test_a_user_that_empties_the_request_does_no_harm() -> None:
    """Python code runs while the user is read; what is borrowed is borrowed after it."""
    limiters: list[Limiter] = []
    request = scope()

    class Vandal:
        @property
        def is_authenticated(self) -> bool:
            request.clear()
            limiters.clear()
            return True

        identity = "v"

    limiters.append(limiter(by="user"))
    request["user"] = Vandal()
    with pytest.raises(ValueError, match="1 to 8 limiters"):
        judge_asgi(limiters, request)


def test_headers_may_be_lists_or_tuples_of_lists_or_tuples() -> None:
    one = limiter(by="header:X-Key")
    for headers in ([(b"x-key", b"1")], ((b"x-key", b"2"),), [[b"x-key", b"3"]], UserList([(b"x-key", b"4")])):
        assert judge_asgi([one], scope(headers=headers)).outcome == "allowed"
    assert judge_asgi([one], scope(headers=[(b"X-KEY", b"1")])).outcome == "denied"
    missing = scope()
    del missing["headers"]
    assert judge_asgi([one], missing).missing == "header:X-Key"


def test_a_thousand_headers_are_read() -> None:
    many = [(b"x-%d" % i, b"v") for i in range(1000)]
    assert same_asgi("header:X-Key", scope(headers=[*many, (b"x-key", b"1")]), scope(headers=[(b"x-key", b"1"), *many]))


@pytest.mark.parametrize(
    "headers",
    [
        5,
        "host",
        b"host",
        {b"host": b"a"},
        iter([(b"host", b"a")]),
        [("host", "a")],
        [(b"host", "a")],
        [(b"host",)],
        [b"ab"],
        [None],
        [(bytearray(b"host"), b"a")],
    ],
)
def test_headers_of_another_shape_are_a_type_error_that_says_so(headers: object) -> None:
    with pytest.raises(TypeError, match="headers"):
        judge_asgi([limiter()], scope(headers=headers))


@pytest.mark.parametrize(
    ("key", "value"),
    [("method", b"GET"), ("raw_path", "/"), ("client", "192.0.2.1"), ("client", (5, 5)), ("client", ())],
)
def test_a_scope_of_another_shape_is_a_type_error_that_names_the_key(key: str, value: object) -> None:
    with pytest.raises(TypeError, match=key):
        judge_asgi([limiter()], scope(**{key: value}))


@pytest.mark.parametrize("whole", [None, 5, "scope", [("type", "http")], object()])
def test_what_is_no_mapping_is_a_type_error(whole: object) -> None:
    with pytest.raises(TypeError, match="must be a mapping"):
        judge_asgi([limiter()], whole)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a mapping"):
        judge_wsgi([limiter()], whole)  # type: ignore[arg-type]


def test_any_mapping_is_read() -> None:
    assert judge_asgi([limiter()], UserDict(scope())).outcome == "allowed"
    assert judge_wsgi([limiter()], UserDict(environ())).outcome == "allowed"


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        ((), {}),
        ((None,), {}),
        ((5, scope()), {}),
        ((["limiter"], scope()), {}),
        (("limiter", scope()), {}),
        (([limiter()], scope(), 1), {}),
        (([limiter()], scope()), {"rout": "/"}),
        (([limiter()], scope()), {"route": b"/"}),
        (([limiter()], scope()), {"user": 5}),
        (([limiter()], scope()), {"cost": 1.5}),
        (([limiter()], scope()), {"prior": 5}),
        (([limiter()], scope()), {"prior": ["judgement"]}),
    ],
)
def test_wrong_arguments_are_type_errors(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        judge_asgi(*arguments, **keywords)


def test_no_limiters_too_many_or_one_without_by_are_value_errors() -> None:
    for limiters in ([], [limiter()] * 9, [Limiter("1/s", store="memory://no-by")]):
        with pytest.raises(ValueError):
            judge_asgi(limiters, scope())


# ---- who the client is


@pytest.mark.parametrize("client", [None, ("", 0), ("/run/app.sock", 0), ("unix:", None), (None, None), ("@abstract", 1)])
def test_a_local_socket_is_no_address(client: object) -> None:
    assert judge_asgi([limiter()], scope(client=client)).outcome == "unidentified"
    with pytest.raises(IdentityError):
        client_address(scope(client=client), limiter())


def test_a_trusted_local_socket_is_walked_through() -> None:
    one = limiter(trusted_proxies=["unix:"])
    request = scope(client=None, headers=[(b"x-forwarded-for", b"192.0.2.77")])
    assert client_address(request, one) == "192.0.2.77"


def test_the_client_address_is_normalised() -> None:
    one = limiter(trusted_proxies=["10.0.0.0/8"])
    assert client_address(scope(client=("::ffff:192.0.2.5", 1)), one) == "192.0.2.5"
    assert client_address(scope(client=["2001:db8:1:2::9", 1]), one) == "2001:db8:1:2::/64"
    forwarded = [(b"x-forwarded-for", b"203.0.113.9, 192.0.2.8")]
    assert client_address(scope(client=("10.1.1.1", 1), headers=forwarded), one) == "192.0.2.8"
    assert client_address(environ(REMOTE_ADDR="10.1.1.1", HTTP_X_FORWARDED_FOR="192.0.2.8"), one) == "192.0.2.8"
    with pytest.raises(IdentityError, match="testclient"):
        client_address(scope(client=("testclient", 50000)), one)
    with pytest.raises(TypeError, match="Limiter or a Gate"):
        client_address(scope(), "limiter")  # type: ignore[arg-type]


def test_a_client_that_the_server_resolved_is_not_walked_again() -> None:
    """uvicorn has put 10.9.9.9 of the header in the peer's place, and says so by port 0."""
    one = limiter(trusted_proxies=["10.0.0.0/8"])
    headers = [(b"x-forwarded-for", b"203.0.113.1, 10.9.9.9")]
    assert client_address(scope(client=("10.9.9.9", 0), headers=headers), one) == "10.9.9.9"
    assert client_address(scope(client=("10.9.9.9", 4711), headers=headers), one) == "203.0.113.1"


def test_a_client_that_proxy_fix_resolved_is_not_walked_again() -> None:
    one = limiter(trusted_proxies=["10.0.0.0/8"])
    fixed = environ(
        REMOTE_ADDR="10.9.9.9",
        HTTP_X_FORWARDED_FOR="203.0.113.1, 10.9.9.9",
        **{"werkzeug.proxy_fix.orig": {"REMOTE_ADDR": "10.1.1.1"}},
    )
    assert client_address(fixed, one) == "10.9.9.9"
    fixed["werkzeug.proxy_fix.orig"] = {"REMOTE_ADDR": "10.9.9.9"}  # it replaced nothing
    assert client_address(fixed, one) == "203.0.113.1"


def test_a_resolved_client_is_said_once() -> None:
    program = """
import logging, tidegate
from tidegate import _core
logging.basicConfig(format="%(message)s")
one = tidegate.Limiter("5/minute", store="memory://x", by="ip", clock=tidegate.ManualClock())
for _ in range(3):
    _core.judge_asgi([one], {"type": "http", "client": ("192.0.2.1", 0), "headers": []})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.count("client-resolved") == 1


# ---- WSGI: what is read


def test_environ_headers_are_read_by_name() -> None:
    assert same_wsgi("header:X-Api-Key", environ(HTTP_X_API_KEY="k"), environ(HTTP_X_API_KEY="k", REMOTE_ADDR="192.0.2.2"))
    assert same_wsgi("header:Content-Type", environ(CONTENT_TYPE="a/b"), environ(CONTENT_TYPE="a/b"))
    assert judge_wsgi([limiter(by="header:X-Api-Key")], environ(X_API_KEY="k")).missing == "header:X-Api-Key"


def test_environ_text_is_bytes_one_a_character() -> None:
    key = "é".encode()
    assert same_wsgi("header:X-Key", environ(HTTP_X_KEY=key.decode("latin-1")), environ(HTTP_X_KEY=key.decode("latin-1")))
    one = limiter(by="header:X-Key")
    assert judge_wsgi([one], environ(HTTP_X_KEY=key.decode("latin-1"))).outcome == "allowed"
    assert judge_asgi([one], scope(headers=[(b"x-key", key)])).outcome == "denied"
    assert judge_wsgi([one], environ(HTTP_X_KEY="𝕏\ud800")).outcome == "allowed"


@pytest.mark.parametrize("key", ["RAW_URI", "REQUEST_URI"])
def test_the_raw_uri_is_taken_where_there_is_one(key: str) -> None:
    assert same_wsgi("path", environ(**{key: "/a%2Fb?x"}), environ(**{key: "http://host:80/a%2Fb"}))
    assert not same_wsgi("path", environ(**{key: "/a%252Fb"}, PATH_INFO="/a/b"), environ(PATH_INFO="/a/b"))
    assert same_wsgi("path", environ(**{key: "http://host"}), environ(**{key: "/"}))
    assert same_wsgi("path", environ(**{key: ""}, PATH_INFO="/x"), environ(PATH_INFO="/x"))


@pytest.mark.parametrize("sent", ["ftp://host/x", "a+b-c.9://host/x", "HTTPS:///x", "x:/x", "\x01/x", "/\tx", "x", "? /x"])
def test_what_was_served_is_what_is_judged_however_its_target_was_written(sent: str) -> None:
    assert same_wsgi("path", environ(PATH_INFO="/x", RAW_URI="/x"), environ(PATH_INFO="/x", RAW_URI=sent))


def test_the_path_is_the_mount_and_the_rest() -> None:
    assert same_wsgi("path", environ(SCRIPT_NAME="/app", PATH_INFO="/x%y"), environ(RAW_URI="/app/x%25y"))
    assert same_wsgi("path", environ(PATH_INFO="/\xc3\xa9"), environ(RAW_URI="/%C3%A9"))


def test_remote_user_is_the_user() -> None:
    one = limiter(by="user")
    assert judge_wsgi([one], environ(REMOTE_USER="a")).outcome == "allowed"
    assert judge_wsgi([one], environ(), user="a").outcome == "denied"
    assert judge_wsgi([one], environ(REMOTE_USER="a"), user="b").outcome == "allowed"
    assert judge_wsgi([one], environ(HTTP_REMOTE_USER="a")).missing == "user"


@pytest.mark.parametrize("address", ["", None])
def test_a_wsgi_peer_without_address_is_a_local_socket(address: object) -> None:
    assert judge_wsgi([limiter()], environ(REMOTE_ADDR=address)).outcome == "unidentified"


@pytest.mark.parametrize("key", ["REQUEST_METHOD", "REMOTE_ADDR", "HTTP_HOST", "PATH_INFO", "RAW_URI", "REMOTE_USER"])
def test_an_environ_of_another_shape_is_a_type_error(key: str) -> None:
    with pytest.raises(TypeError, match="must be str, not"):
        judge_wsgi([limiter()], environ(**{key: b"x"}))


def test_foreign_keys_in_an_environ_do_no_harm() -> None:
    odd: dict[Any, Any] = environ(HTTP_X_LIST=["a"])
    odd[5] = "five"
    odd["HTTP_\ud800"] = "x"
    odd["HTTP_"] = "x"
    assert judge_wsgi([limiter()], odd).outcome == "allowed"


# ---- Gate


@pytest.fixture
def rules_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "rules.yaml"
    path.write_text(
        "store: memory://gate\n"
        "trusted_proxies: [10.0.0.0/8]\n"
        "policies:\n"
        "  - name: login\n"
        "    match: {path: /login, methods: [POST]}\n"
        "    rules: 1/minute\n"
        "    by: ip\n"
    )
    return path


def test_a_gate_judges_by_the_policies_that_match(rules_file: pathlib.Path) -> None:
    gate = Gate(rules_file, clock=ManualClock())
    post = scope(method="POST", raw_path=b"/login")
    assert gate.judge_asgi(scope()).outcome == "unmatched"
    assert gate.judge_asgi(post).policy == "login"
    assert gate.judge_wsgi(environ(REQUEST_METHOD="POST", PATH_INFO="/login")).status == 429
    assert client_address(scope(client=("10.0.0.1", 1), headers=[(b"x-forwarded-for", b"192.0.2.4")]), gate) == "192.0.2.4"


def test_a_gate_and_a_limiter_of_its_policy_share_a_count(rules_file: pathlib.Path) -> None:
    clock = ManualClock()
    gate, login = Gate(str(rules_file), clock=clock), Limiter(policy="login", config=rules_file, clock=clock)
    judgement = gate.judge_asgi(scope(method="POST", raw_path=b"/login"))
    assert judgement
    assert not login.hit(dims={"ip": "192.0.2.1"})
    assert not judge_asgi([login], scope())
    judgement.decision.refund()
    assert login.hit(dims={"ip": "192.0.2.1"})


def test_a_gates_decision_keeps_its_store(rules_file: pathlib.Path) -> None:
    clock = ManualClock()
    gate = Gate(rules_file, clock=clock)
    post = scope(method="POST", raw_path=b"/login")
    judgement = gate.judge_asgi(post)
    assert gate.judge_asgi(post, prior=[judgement]).outcome == "allowed"
    del gate
    judgement.decision.refund()


def test_a_reload_takes_a_good_file_and_refuses_a_bad_one(rules_file: pathlib.Path) -> None:
    from tidegate import ConfigError

    gate = Gate(rules_file, clock=ManualClock())
    post = scope(method="POST", raw_path=b"/login")
    assert gate.generation == 1 and gate.enabled
    text = rules_file.read_text()
    rules_file.write_text(text.replace("1/minute", "3/minute"))
    gate.judge_asgi(post)
    gate.reload()
    assert gate.generation == 2
    assert gate.judge_asgi(post).decision.remaining == 1  # what was used stays used
    rules_file.write_text(text.replace("1/minute", "3/fortnight"))
    with pytest.raises(ConfigError, match="fortnight") as caught:
        gate.reload()
    assert caught.value.line == 6
    assert gate.generation == 2
    assert gate.judge_asgi(post).decision.remaining == 0


def test_a_gate_that_is_switched_off_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_ENABLED", "0")
    gate = Gate("/nonexistent")
    assert not gate.enabled and gate.generation == 0
    gate.reload()
    assert gate.judge_asgi(scope()).outcome == "unmatched"
    assert gate.judge_wsgi(environ()).fields_text == []
    with pytest.raises(IdentityError, match="switched off"):
        client_address(scope(), gate)


@pytest.mark.parametrize("options", [{"clock": 5}, {"timeout": 0}, {"timeout": "1"}, {"store": 5}, {"config": 5}])
def test_wrong_options_of_a_gate_are_refused(rules_file: pathlib.Path, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Gate(**{"config": rules_file, **options})
