"""Applications of libfcgi that limit themselves: examples/fcgx/ behind real nginx."""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tidegate import Gate

from fcgi_daemon import wait_for
from fcgi_stack import EXAMPLES, Nginx

HERE = EXAMPLES / "fcgx"
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wshadow"]
COMPILERS = {
    "guestbook.c": [["gcc", "-std=c11", "-Wstrict-prototypes"], ["clang", "-std=c11"], ["gcc", "-std=c99", "-fsyntax-only"]],
    "guestbook.cpp": [["g++", "-std=c++17"], ["clang++", "-std=c++20"]],
}


def flags(build: Path, *options: str) -> list[str]:
    done = subprocess.run(["pkg-config", *options, "tidegate-fcgx"], capture_output=True, text=True, check=True,
                          env={**os.environ, "PKG_CONFIG_PATH": str(build / "lib" / "pkgconfig")})
    return done.stdout.split()


@pytest.fixture(scope="session")
def applications(make: Callable[[str], None], build: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    make("lib")
    folder = tmp_path_factory.mktemp("fcgx")
    built = {}
    for source, compilers in COMPILERS.items():
        built[source] = folder / source.replace(".", "_")
        subprocess.run([*compilers[0], *WARNINGS, "-O1", "-g", HERE / source,
                        *flags(build, "--cflags", "--libs"), "-pthread",
                        f"-Wl,-rpath,{build}/lib", "-o", built[source]], check=True)
    return built


class Application:
    """One of the examples, with threads, behind nginx."""

    def __init__(self, program: Path, folder: Path, threads: int) -> None:
        self.folder = folder
        self.socket = folder / "app.sock"
        self.rules = folder / "rules.yaml"
        self.rules.write_text((HERE / "rules.yaml").read_text().replace("shared://guestbook", f"shared://{folder}/table"))
        self.log = (folder / "app.log").open("wb")
        self.process = subprocess.Popen([program, self.socket, str(threads)], stdin=subprocess.DEVNULL, stderr=self.log,
                                        env={**os.environ, "TIDEGATE_CONFIG": str(self.rules)})
        wait_for(self.socket.exists, what="the application's socket")
        self.nginx = Nginx(HERE / "nginx.conf", folder / "nginx", [("/run/guestbook.sock", str(self.socket))])

    def stop(self) -> None:
        self.nginx.stop()
        self.process.kill()  # libfcgi does not leave on SIGTERM while it waits
        self.process.wait()
        self.log.close()


@pytest.fixture(params=sorted(COMPILERS))
def application(request: pytest.FixtureRequest, applications: dict[str, Path], folder: Path) -> Iterator[Application]:
    running = Application(applications[request.param], folder, 4)
    yield running
    running.stop()


@pytest.mark.parametrize(("source", "compiler"), [(source, each) for source, all in COMPILERS.items() for each in all],
                         ids=lambda value: " ".join(value) if isinstance(value, list) else value)
def test_the_header_compiles_without_a_warning_in_c_and_cpp(
    applications: dict[str, Path], build: Path, tmp_path: Path, source: str, compiler: list[str]
) -> None:
    subprocess.run([*compiler, *WARNINGS, "-c", HERE / source, *flags(build, "--cflags"), "-o", tmp_path / "x.o"],
                   check=True)


def test_a_libfcgi_application_answers_until_the_limit_and_then_the_429_is_ours(application: Application) -> None:
    told = [application.nginx.ask("/guestbook", "POST", b"four") for _ in range(3)]
    assert [response.status for response, _ in told] == [200, 200, 429]
    assert re.fullmatch(rb"C(\+\+)? POST 4 (of 4|by write)\n", told[0][1])
    assert [response.headers["X-RateLimit-Remaining"] for response, _ in told] == ["1", "0", "0"]
    refused, body = told[2]
    assert refused.headers["Content-Type"] == "application/json" and int(refused.headers["Retry-After"]) <= 60
    wanted = Gate(application.rules).judge_wsgi(
        {"REQUEST_METHOD": "POST", "RAW_URI": "/guestbook", "REMOTE_ADDR": "127.0.0.1"})
    assert wanted.status == 429  # the same count
    strip = re.compile(rb"\d+")
    assert strip.sub(b"N", body) == strip.sub(b"N", wanted.body)
    assert application.nginx.ask("/other")[0].headers.get("X-RateLimit-Limit") is None


def test_threads_let_through_exactly_the_limit_between_them(application: Application) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: application.nginx.ask("/guestbook")[0].status, range(80)))
    assert sorted(set(statuses)) == [200, 429]
    assert statuses.count(200) == 20


def test_a_refused_upload_is_answered_and_the_next_request_too(application: Application) -> None:
    for _ in range(2):
        assert application.nginx.ask("/guestbook", "POST", b"x" * 3_000_000)[0].status == 200
    for _ in range(5):
        assert application.nginx.ask("/guestbook", "POST", b"x" * 3_000_000)[0].status == 429
    response, body = application.nginx.ask("/guestbook", "HEAD")
    assert (response.status, body) == (200, b"")


def test_head_of_a_refusal_has_no_body_and_too_many_fields_are_431(application: Application) -> None:
    for _ in range(20):
        application.nginx.ask("/guestbook")
    response, body = application.nginx.ask("/guestbook", "HEAD")
    assert (response.status, body) == (429, b"")
    assert int(response.headers["Content-Length"]) > 20
    response, body = application.nginx.ask("/guestbook", **{f"X_{i}": "1" for i in range(600)})
    assert response.status == 431 and b"TOO_LARGE" in body


def test_what_the_library_has_to_say_is_in_the_web_servers_log(application: Application) -> None:
    application.nginx.ask("/guestbook", X_Forwarded_For="198.51.100.1")
    wait_for(lambda: "forwarded-from-untrusted" in application.nginx.log(), what="the line in nginx's log")


def test_a_store_that_is_gone_is_on_store_failure_and_never_an_exception(
    applications: dict[str, Path], folder: Path
) -> None:
    """Opening is told in words; while running, the policy decides."""
    rules = folder / "rules.yaml"
    rules.write_text("store: shared:///not/there/table\npolicies: [{name: a, rules: 1/minute}]\n")
    done = subprocess.run([applications["guestbook.c"], folder / "s"], capture_output=True, text=True, check=False,
                          env={**os.environ, "TIDEGATE_CONFIG": str(rules)}, timeout=10)
    assert done.returncode == 1
    assert done.stderr.startswith("guestbook: ") and "/not/there" in done.stderr
