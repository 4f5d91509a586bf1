"""tests/conformance/table.yaml, asked of every face: each answers every line alike."""

from __future__ import annotations

import http.client
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI, Response
from fastapi.testclient import TestClient
from flask import Flask
from tidegate import Gate, ManualClock
from tidegate.asgi import TidegateMiddleware as AsgiMiddleware
from tidegate.fastapi import install
from tidegate.flask import Tidegate
from tidegate.wsgi import TidegateMiddleware as WsgiMiddleware
from werkzeug.test import Client

from conformance_cgi import cgi as ask_cgi
from fcgi_daemon import Daemon, free_port, wait_for
from fcgi_nginx import NGINX

TABLE: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).resolve().parents[1] / "conformance" / "table.yaml").read_text()
)
METHODS = ["GET", "HEAD", "POST", "OPTIONS"]
NOW_US = 1_700_000_000_000_000
Told = tuple[int, dict[str, str], bytes]
Ask = Callable[[str, str, dict[str, str]], Told]
numbers = itertools.count()


def gate_of(rules: Path) -> Gate:
    return Gate(rules, store=f"memory://conformance-{os.getpid()}-{next(numbers)}", clock=ManualClock(NOW_US))


def lower(fields: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in fields}


def core(rules: Path) -> Iterator[Ask]:
    """The C core alone: what it says is the answer."""
    gate = gate_of(rules)

    def ask(method: str, target: str, headers: dict[str, str]) -> Told:
        sent = {"HTTP_" + name.upper().replace("-", "_"): value for name, value in headers.items()}
        judged = gate.judge_wsgi({"REQUEST_METHOD": method, "RAW_URI": target, "REMOTE_ADDR": "127.0.0.1", **sent})
        return judged.status or 200, lower(judged.fields_text), judged.body

    yield ask


def fastapi(rules: Path) -> Iterator[Ask]:
    app = FastAPI()
    install(app, gate=gate_of(rules))

    @app.api_route("/{path:path}", methods=METHODS)
    async def anything(path: str) -> Response:
        return Response("done")

    client = TestClient(app, client=("127.0.0.1", 50000))

    def ask(method: str, target: str, headers: dict[str, str]) -> Told:
        # As it stands: a client's own tidying would hide what is asked for.
        got = client.request(method, f"http://testserver{target}", headers=headers)
        return got.status_code, lower(got.headers.items()), got.content

    yield ask


def flask(rules: Path) -> Iterator[Ask]:
    app = Flask(__name__)
    app.url_map.merge_slashes = False
    Tidegate(app, gate=gate_of(rules))

    @app.route("/", defaults={"path": ""}, methods=METHODS)
    @app.route("/<path:path>", methods=METHODS)
    def anything(path: str) -> str:
        return "done"

    client = app.test_client(use_cookies=False)

    def ask(method: str, target: str, headers: dict[str, str]) -> Told:
        # The test client takes "//api" for a host: what a server would say is said for it.
        raw = {"RAW_URI": target, "REQUEST_URI": target, "REMOTE_ADDR": "127.0.0.1"}
        got = client.open("/" + target.lstrip("/"), method=method, headers=headers, environ_overrides=raw)
        return got.status_code, lower(got.headers), got.data

    yield ask


def asgi(rules: Path) -> Iterator[Ask]:
    async def anything(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    client = TestClient(AsgiMiddleware(anything, gate=gate_of(rules)), client=("127.0.0.1", 50000))

    def ask(method: str, target: str, headers: dict[str, str]) -> Told:
        got = client.request(method, f"http://testserver{target}", headers=headers)
        return got.status_code, lower(got.headers.items()), got.content

    yield ask


def wsgi(rules: Path) -> Iterator[Ask]:
    def anything(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"done"]

    client = Client(WsgiMiddleware(anything, gate=gate_of(rules)), use_cookies=False)

    def ask(method: str, target: str, headers: dict[str, str]) -> Told:
        raw = {"RAW_URI": target, "REQUEST_URI": target, "REMOTE_ADDR": "127.0.0.1"}
        got = client.open("/" + target.lstrip("/"), method=method, headers=headers, environ_overrides=raw)
        return got.status_code, lower(got.headers), got.data

    yield ask


def cgi(rules: Path) -> Iterator[Ask]:
    yield ask_cgi(rules, NOW_US)


# Each face is a function of the rules file's path; that of nginx, which needs a server, is below.
FACES = [core, fastapi, asgi, flask, wsgi, cgi]


CONF = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/errors; {user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
    uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            fastcgi_pass {socket};
            include /etc/nginx/fastcgi_params;
            fastcgi_param TIDEGATE_NOW_US {now};
        }}
    }}
}}
"""


@pytest.fixture(params=[*FACES, "nginx"], ids=[*(face.__name__ for face in FACES), "nginx"])
def face(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[str], Ask]]:
    """A face under rules yet to be given."""
    if request.param != "nginx":

        if request.param is cgi:
            request.getfixturevalue("program")  # built

        def opened(rules: str) -> Ask:
            path = folder / "rules.yaml"
            path.write_text(rules)
            asks: Ask = next(request.param(path))
            return asks

        yield opened
        return
    start: Callable[..., Daemon] = request.getfixturevalue("start")
    started: list[subprocess.Popen[bytes]] = []

    def behind_nginx(rules: str) -> Ask:
        daemon = start(rules + "store: memory://\n", "--manual-clock")
        port = free_port()
        conf = folder / "nginx.conf"
        conf.write_text(CONF.format(folder=folder, port=port, socket=daemon.address, now=NOW_US,
                                    user="user root;" if os.geteuid() == 0 else ""))  # fmt: skip
        started.append(subprocess.Popen([NGINX, "-e", folder / "errors", "-c", conf], stdin=subprocess.DEVNULL))

        def listening() -> bool:
            with socket.socket() as peer:
                return peer.connect_ex(("127.0.0.1", port)) == 0

        wait_for(listening, what="nginx")

        def ask(method: str, target: str, headers: dict[str, str]) -> Told:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request(method, target, headers=headers)
            got = connection.getresponse()
            return got.status, lower(got.getheaders()), got.read()

        return ask

    yield behind_nginx
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.wait(5)


@pytest.mark.parametrize("case", TABLE, ids=[case["name"] for case in TABLE])
def test_every_face_answers_alike(face: Callable[[str], Ask], case: dict[str, Any]) -> None:
    ask = face(case["rules"])
    for line in case["ask"]:
        method, target = line["ask"].split(" ", 1)
        status, fields, body = ask(method, target, line.get("headers", {}))
        assert status == line["told"], (line, fields, body)
        for name, value in line.get("fields", {}).items():
            assert fields.get(name) == value, (line, fields)
        assert not [name for name in line.get("no", []) if name in fields], (line, fields)
        if "body" in line:
            assert body.decode() == line["body"], line
