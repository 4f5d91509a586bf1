"""tidegate-cgi as a web server runs it: an environment, a standard input, and what comes out."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tidegate import Gate

RULES = """\
store: shared://{folder}/table
policies:
  - {{name: small, match: {{path: /small}}, rules: 2/hour}}
  - {{name: five, match: {{path: /five}}, rules: 5/hour}}
  - {{name: closed, match: {{path: /closed}}, rules: 5/hour, on_store_failure: closed}}
  - {{name: never, match: {{path: /never}}, rules: deny}}
  - {{name: named, match: {{path: /named}}, rules: 1/hour, by: "form:account", missing_identity: reject 400}}
  - {{name: keyed, match: {{path: /keyed}}, rules: 3/hour, by: "header:X-Api-Key"}}
  - {{name: spaced, match: {{path: "/a%20b/*"}}, rules: 1/hour}}
  - {{name: turns, match: {{path: /turns}}, rules: "60/minute burst 3 leaky_bucket"}}
  - {{name: big, match: {{path: /big}}, rules: 1000000/hour}}
"""
SHOW = """\
#!/bin/sh
printf 'Content-Type: text/plain\\n\\n'
echo "folder $(pwd)"
echo "arguments $*"
env | sort
echo body
cat
"""


class Answer:
    def __init__(self, done: subprocess.CompletedProcess[bytes]) -> None:
        assert done.returncode == 0, done
        self.raw = done.stdout
        self.log = done.stderr.decode()
        head, _, self.body = done.stdout.replace(b"\r\n", b"\n").partition(b"\n\n")
        head = re.sub(rb"^HTTP/1.1 ", b"Status: ", head)  # of an nph- program
        self.fields = {
            name.lower(): value for name, value in (line.split(": ", 1) for line in head.decode().split("\n") if line)
        }
        self.status = int(self.fields.get("status", "200").split()[0])


class Site:
    """Compiled rules, a table, a program behind the gate."""

    def __init__(self, program: Path, tidegate: Path, folder: Path) -> None:
        self.program, self.tidegate, self.folder = program, tidegate, folder
        self.rules = folder / "rules.yaml"
        self.rules.write_text(RULES.format(folder=folder))
        self.show = folder / "inner" / "show.cgi"
        self.show.parent.mkdir()
        self.show.write_text(SHOW)
        self.show.chmod(0o755)
        self.compile()

    def compile(self) -> None:
        subprocess.run([self.tidegate, "compile", self.rules], check=True, capture_output=True)

    def environment(self, path: str, **more: str) -> dict[str, str]:
        return {"GATEWAY_INTERFACE": "CGI/1.1", "PATH": os.environ["PATH"], "REQUEST_METHOD": "GET", "REQUEST_URI": path,
                "SERVER_PROTOCOL": "HTTP/1.1", "REMOTE_ADDR": "203.0.113.9", "TIDEGATE_CONFIG": str(self.rules), **more}

    def ask(self, path: str, *arguments: str, command: Path | None = None, body: bytes = b"", **more: str) -> Answer:
        environment = {name: value for name, value in self.environment(path, **more).items() if value != "-"}
        return Answer(subprocess.run([command or self.program, *arguments], env=environment, input=body,
                                     capture_output=True, timeout=10, check=False))

    def script(self, *lines: str, name: str = "gate.cgi") -> Path:
        path = self.folder / name
        path.write_text("\n".join([f"#!{self.program}{lines[0]}", *lines[1:], ""]))
        path.chmod(0o755)
        return path


@pytest.fixture(scope="session")
def cgi(program: Path, build: Path) -> Path:
    return build / "bin" / "tidegate-cgi"


@pytest.fixture
def site(cgi: Path, build: Path, folder: Path) -> Site:
    return Site(cgi, build / "bin" / "tidegate", folder)


# ---- the decision itself


@pytest.mark.fault("R172")
def test_cgi_counts_down_and_refuses_with_429(site: Site) -> None:
    left = [site.ask("/small") for _ in range(3)]
    assert [answer.status for answer in left] == [200, 200, 429]
    assert [answer.fields["x-ratelimit-remaining"] for answer in left] == ["1", "0", "0"]
    assert left[0].body.startswith(b'{"allowed": true, "policy": "small", "limit": 2,')
    assert left[2].fields["status"] == "429 Too Many Requests"
    assert left[2].fields["retry-after"] == "3600"
    assert re.fullmatch(rb'\{"code": "RATE_LIMITED", "message": ".*", "retry_after": 3600\}', left[2].body)
    assert site.ask("/never").status == 403
    assert site.ask("/nothing").body == b'{"allowed": true, "policy": null}'


def test_cgi_and_python_share_one_count(site: Site) -> None:
    gate = Gate(site.rules)
    environ = {"REQUEST_METHOD": "GET", "RAW_URI": "/small", "REMOTE_ADDR": "203.0.113.9"}
    assert site.ask("/small").status == 200
    assert not gate.judge_wsgi(environ).status
    assert site.ask("/small").status == 429
    assert gate.judge_wsgi(environ).status == 429


def test_of_40_processes_at_once_exactly_five_are_let_through(site: Site) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: site.ask("/five").status, range(40)))
    assert sorted(set(statuses)) == [200, 429]
    assert statuses.count(200) == 5


@pytest.mark.fault("R178")
@pytest.mark.parametrize("length", [None, "0", "10", "abc", "1000000000000"])
@pytest.mark.parametrize("gated", [False, True])
def test_cgi_never_waits_for_a_body(site: Site, length: str | None, gated: bool) -> None:
    """Standard input stays open and empty. Behind the gate it is the program's to read, which is not started here."""
    path = "/never" if gated else "/big"
    environment = site.environment(path, REQUEST_METHOD="POST", **({} if length is None else {"CONTENT_LENGTH": length}))
    if gated:
        environment["TIDEGATE_PROGRAM"] = str(site.show)
    best = 10.0
    for _ in range(5):  # of five, because other tests may have the processor
        began = time.monotonic()
        process = subprocess.Popen([site.program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout
        answer = process.stdout.read()
        best = min(best, time.monotonic() - began)
        assert process.wait(2) == 0  # a body that was announced may still come, for half a second
        assert process.stdin and process.stdout.close() is None
        process.stdin.close()
        assert answer.startswith(b"Status: 403" if gated else b"X-RateLimit-Limit: 1000000\r\n")
    assert best <= 0.1


def test_a_refused_body_is_taken_and_one_that_dawdles_is_not_waited_for(site: Site) -> None:
    """A program that left it unread would be a broken one to fcgiwrap and to Apache."""
    environment = site.environment("/never", REQUEST_METHOD="POST", CONTENT_LENGTH="5000000")
    whole = subprocess.run([site.program], env=environment, input=b"x" * 5_000_000, capture_output=True, check=True)
    assert whole.stdout.startswith(b"Status: 403")  # and no BrokenPipeError
    process = subprocess.Popen([site.program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    began = time.monotonic()
    while process.poll() is None:
        try:
            process.stdin.write(b"x")
            process.stdin.flush()
        except BrokenPipeError:
            break
        time.sleep(0.1)
    assert process.wait(5) == 0
    assert 4 < time.monotonic() - began < 8
    process.stdin.close()
    process.stdout.close()


def test_head_is_answered_without_a_body_and_a_preflight_is_free(site: Site) -> None:
    for _ in range(2):
        site.ask("/small")
    refused = site.ask("/small", REQUEST_METHOD="HEAD")
    assert (refused.status, refused.body) == (429, b"")
    free = site.ask("/never", REQUEST_METHOD="OPTIONS", HTTP_ORIGIN="https://a.example",
                    HTTP_ACCESS_CONTROL_REQUEST_METHOD="GET")
    assert free.status == 200


def test_a_path_is_composed_where_the_server_sends_no_request_uri(site: Site) -> None:
    parts = {"REQUEST_URI": "-", "SCRIPT_NAME": "/a b", "PATH_INFO": "/100%?", "QUERY_STRING": "x=1"}
    assert site.ask("", **parts).status == 200
    assert site.ask("", **parts).status == 429


def test_a_policy_a_key_and_a_cost_may_be_named_by_the_server(site: Site) -> None:
    named = {"TIDEGATE_POLICY": "keyed", "TIDEGATE_KEY": "header:X-Api-Key=42", "TIDEGATE_COST": "2"}
    assert site.ask("/", **named).fields.get("status") is None
    assert site.ask("/", **named).status == 429
    peeked = site.ask("/", **{**named, "TIDEGATE_COST": "1", "TIDEGATE_PEEK": "1"})
    assert b'"remaining": 1' in peeked.body


def test_what_asks_for_a_body_finds_nobody_to_count(site: Site) -> None:
    answer = site.ask("/named", REQUEST_METHOD="POST", body=b"account=7", CONTENT_LENGTH="9",
                      CONTENT_TYPE="application/x-www-form-urlencoded")
    assert answer.status == 400
    told = subprocess.run([site.tidegate, "check", site.rules, "--face", "cgi"], capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert 'policy "named" asks for "form:account"' in told.stderr


def test_more_header_fields_than_are_read_are_refused(site: Site) -> None:
    assert site.ask("/small", HTTP_COOKIE="c" * 120000, HTTP_X_MORE="x" * 20000).status == 431


# ---- a gate before another program


def test_a_program_goes_on_with_its_body_its_folder_and_the_fields_before_its_own(site: Site) -> None:
    body = os.urandom(3_000_000)
    answer = site.ask("/small?x=1", body=body, TIDEGATE_PROGRAM=str(site.show), REQUEST_METHOD="POST",
                      CONTENT_LENGTH=str(len(body)))
    assert answer.raw.startswith(b"X-RateLimit-Limit: 2\r\nX-RateLimit-Remaining: 1\r\n")
    assert answer.fields["content-type"] == "text/plain"
    shown, _, passed = answer.raw.partition(b"body\n")
    assert hashlib.sha256(passed).digest() == hashlib.sha256(body).digest()
    told = shown.decode().splitlines()
    assert f"folder {site.show.parent}" in told and "arguments " in told
    ours = dict(line.split("=", 1) for line in told if line.startswith("TIDEGATE_"))
    assert ours.pop("TIDEGATE_RESET") == "3600"
    assert ours == {"TIDEGATE_CONFIG": str(site.rules), "TIDEGATE_DECIDED_BY": "small", "TIDEGATE_LIMIT": "2",
                    "TIDEGATE_REMAINING": "1"}


def test_an_allowed_request_waits_for_its_turn_where_that_is_asked_for(site: Site) -> None:
    told = {"TIDEGATE_PROGRAM": str(site.show)}
    began = time.monotonic()
    assert site.ask("/turns", **told).status == 200
    assert site.ask("/turns", **told).status == 200  # its turn is in a second, and nobody holds it
    assert time.monotonic() - began < 0.8
    assert site.ask("/turns", TIDEGATE_HOLD="10", **told).status == 200
    assert 1.8 < time.monotonic() - began < 4
    assert site.ask("/turns", TIDEGATE_HOLD="soon", **told).status == 503


def test_a_refused_request_never_starts_the_program(site: Site) -> None:
    marker = site.folder / "started"
    site.show.write_text(f"#!/bin/sh\ntouch {marker}\n")
    answer = site.ask("/never", TIDEGATE_PROGRAM=str(site.show), body=b"x" * 100)
    assert (answer.status, marker.exists()) == (403, False)


def test_a_script_names_the_program_and_the_rules(site: Site) -> None:
    script = site.script(f" {site.show}", "# the shop's gate", "", f"TIDEGATE_CONFIG={site.rules}")
    told = [site.ask("/small", command=script, TIDEGATE_CONFIG="-") for _ in range(3)]
    assert [answer.status for answer in told] == [200, 200, 429]
    assert f"folder {site.show.parent}".encode() in told[0].body


@pytest.mark.parametrize("line", ["TIDEGATE_NOTHING=1", "PATH=/tmp", "TIDEGATE_CONFIG", "x" * 5000])
def test_a_script_with_a_line_that_is_no_setting_refuses(site: Site, line: str) -> None:
    answer = site.ask("/small", command=site.script(f" {site.show}", line))
    assert answer.status == 503
    assert "set-wrongly: the script" in answer.log
    assert ("_ON_ERROR, _ENABLED: found" in answer.log) == line.startswith("TIDEGATE_NOTHING")


def test_nothing_a_client_sends_names_a_program_a_rule_or_a_key(site: Site) -> None:
    """A query without "=" becomes arguments (RFC 3875 4.4), a field HTTP_...; neither is a setting."""
    evil = site.folder / "evil.cgi"
    evil.write_text("#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\nevil'\n")
    evil.chmod(0o755)
    fields = {"HTTP_TIDEGATE_PROGRAM": str(evil), "HTTP_TIDEGATE_POLICY": "big", "HTTP_TIDEGATE_CONFIG": "/dev/null",
              "HTTP_TIDEGATE_KEY": "ip=1.2.3.4", "HTTP_TIDEGATE_ENABLED": "0"}
    words = [str(evil), str(site.program)]
    told = [site.ask("/small", *words, QUERY_STRING="+".join(words), **fields) for _ in range(3)]
    assert [answer.status for answer in told] == [200, 200, 429]
    script = site.script("", f"TIDEGATE_CONFIG={site.rules}")
    for arguments in ([str(evil), str(script)], [str(script), str(evil)], ["--help"], ["--version"]):
        answer = site.ask("/five", *arguments, command=script, **fields)
        assert b'"policy": "five"' in answer.body and b"evil" not in answer.raw, arguments


def test_an_nph_program_speaks_for_itself_and_a_refusal_is_a_whole_answer(site: Site) -> None:
    named = {"SCRIPT_FILENAME": "/srv/cgi-bin/nph-shop.cgi", "TIDEGATE_PROGRAM": str(site.show)}
    assert site.ask("/small", **named).raw.startswith(b"Content-Type: text/plain\n")
    refused = subprocess.run([site.program], env=site.environment("/never", **named), capture_output=True, check=True)
    assert refused.stdout.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    own = subprocess.run([site.program], env=site.environment("/big", SCRIPT_NAME="/nph-x"), capture_output=True, check=True)
    assert own.stdout.startswith(b"HTTP/1.1 200 OK\r\nX-RateLimit-Limit")


def test_the_program_may_be_what_the_server_found(site: Site) -> None:
    answer = site.ask("/small", TIDEGATE_PROGRAM="SCRIPT_FILENAME", SCRIPT_FILENAME=str(site.show))
    assert f"SCRIPT_FILENAME={site.show}".encode() in answer.body
    answer = site.ask("/small", TIDEGATE_PROGRAM=str(site.show), SCRIPT_FILENAME=str(site.program))
    assert f"SCRIPT_FILENAME={site.show}".encode() in answer.body


@pytest.mark.parametrize(("named", "status", "words"), [
    ("relative.cgi", 503, "expects an absolute path"),
    ("/not/there.cgi", 502, "/not/there.cgi: No such file"),
    ("/etc/passwd", 502, "Permission denied"),
    ("/etc", 502, "/etc: Is a directory"),
])
def test_a_program_that_cannot_be_started_is_told_and_charges_nobody(
    site: Site, named: str, status: int, words: str
) -> None:
    answer = site.ask("/small", TIDEGATE_PROGRAM=named)
    assert answer.status == status and words in answer.log
    assert site.ask("/small").fields["x-ratelimit-remaining"] == "1"


def test_it_never_runs_itself_for_ever(site: Site) -> None:
    answer = site.ask("/small", TIDEGATE_PROGRAM=str(site.program))
    assert answer.status == 503 and "another program than tidegate-cgi" in answer.log


# ---- when something is wrong


def test_of_a_store_that_cannot_be_opened_on_store_failure_decides(site: Site) -> None:
    silent = {"TIDEGATE_STORE": f"shared://{site.folder}/not/there"}
    allowed = site.ask("/small", TIDEGATE_PROGRAM=str(site.show), **silent)
    assert allowed.status == 200 and "x-ratelimit-limit" not in allowed.fields
    assert "store-failing" in allowed.log and "not/there" in allowed.log
    assert b'"degraded": true' in site.ask("/small", **silent).body
    refused = site.ask("/closed", **silent)
    assert (refused.status, refused.fields["retry-after"]) == (503, "1")


def test_a_table_of_somebody_else_is_a_store_that_does_not_answer(site: Site) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a file of somebody else's")
    site.ask("/small")
    os.chown(site.folder / "table", 12345, 12345)
    answer = site.ask("/small")
    assert b'"degraded": true' in answer.body and "12345" in answer.log


@pytest.mark.parametrize(("break_it", "words"), [
    (lambda site: (site.folder / "rules.yaml.compiled").unlink(), "expected compiled ones: run tidegate compile"),
    (lambda site: (site.folder / "rules.yaml.compiled").write_bytes(b"TGRULES\0\1"), "damaged (cut off in its head)"),
    (lambda site: site.rules.rename(site.folder / "away") and (site.folder / "rules.yaml.compiled").unlink(),
     "cannot be opened"),
])
def test_rules_that_cannot_be_read_refuse_unless_the_server_says_open(
    site: Site, break_it: Callable[[Site], object], words: str
) -> None:
    break_it(site)
    answer = site.ask("/small", TIDEGATE_PROGRAM=str(site.show))
    assert (answer.status, answer.fields["retry-after"]) == (503, "1")
    assert words in answer.log and answer.log.count("\n") == 1
    through = site.ask("/small", TIDEGATE_PROGRAM=str(site.show), TIDEGATE_ON_ERROR="open")
    assert through.status == 200 and words in through.log


def test_redis_is_refused_in_words(site: Site) -> None:
    answer = site.ask("/small", TIDEGATE_STORE="redis://127.0.0.1")
    assert answer.status == 503 and "tidegate-cgi counts in a table alone" in answer.log


def test_changed_rules_stay_as_compiled_and_are_told_once_a_minute(site: Site) -> None:
    site.rules.write_text(RULES.format(folder=site.folder).replace("2/hour", "1/hour"))
    told = [site.ask("/small") for _ in range(3)]
    assert [answer.status for answer in told] == [200, 200, 429]
    assert [answer.log.count("rules-stale") for answer in told] == [1, 0, 0]
    site.compile()
    assert site.ask("/small").log == ""


def test_a_client_cannot_fill_the_servers_log(site: Site) -> None:
    """A forwarding header from a peer that is not trusted is told once in a process, and each request is one."""
    told = [site.ask("/big", HTTP_X_FORWARDED_FOR="198.51.100.1").log for _ in range(4)]
    assert [log.count("forwarded-from-untrusted") for log in told] == [1, 0, 0, 0]


def test_switched_off_it_reads_nothing_and_lets_through(site: Site) -> None:
    off = {"TIDEGATE_ENABLED": "0", "TIDEGATE_CONFIG": "/not/there"}
    assert site.ask("/never", **off).body == b'{"allowed": true, "policy": null}'
    assert b"folder" in site.ask("/never", TIDEGATE_PROGRAM=str(site.show), **off).body


@pytest.fixture(scope="session")
def checked(make: Callable[..., None], build: Path) -> Path:
    """The same under the address sanitizer."""
    make(str(build / "asan" / "bin" / "tidegate-cgi"), "asan")
    return build / "asan" / "bin" / "tidegate-cgi"


def test_no_request_of_any_shape_upsets_it(checked: Path, build: Path, folder: Path) -> None:
    """Under sanitizers: long, empty, odd and damaged values, with and without a program; each is answered whole."""
    site = Site(checked, build / "bin" / "tidegate", folder)
    long, odd = "x" * 100_000, "".join(map(chr, [*range(1, 32), 127, 233, 0xFFFD]))
    shapes: list[dict[str, str]] = [
        {}, {"REQUEST_METHOD": ""}, {"REQUEST_METHOD": long}, {"REQUEST_URI": ""}, {"REQUEST_URI": long},
        {"REQUEST_URI": "-", "SCRIPT_NAME": odd * 100, "PATH_INFO": long, "QUERY_STRING": long}, {"REQUEST_URI": "-"},
        {"REMOTE_ADDR": ""}, {"REMOTE_ADDR": odd}, {"HTTP_X": long, "HTTP_Y": long}, {"HTTP_": odd, "HTTP_HOST": odd},
        {f"HTTP_X{i}": "1" for i in range(600)}, {"TIDEGATE_POLICY": long}, {"TIDEGATE_KEY": odd}, {"TIDEGATE_COST": "-1"},
        {"TIDEGATE_BATCH": "\n".join(["policy=keyed&key=ip%3D1"] * 40)}, {"TIDEGATE_BATCH": "policy=keyed&key=" + long},
        {"TIDEGATE_BATCH": "policy=keyed&key=header%3AX-Api-Key%3D7\n" * 32}, {"TIDEGATE_ODD": odd},
        {"TIDEGATE_PROGRAM": long}, {"TIDEGATE_PROGRAM": "/"}, {"TIDEGATE_ENABLED": odd}, {"TIDEGATE_ON_ERROR": long},
        {"TIDEGATE_CONFIG": long}, {"TIDEGATE_CONFIG": ""}, {"TIDEGATE_CONFIG": "/"}, {"TIDEGATE_STORE": odd},
        {"TIDEGATE_NOW_US": odd}, {"TIDEGATE_HOLD": odd}, {"TIDEGATE_HOLD": "nan"}, {"TIDEGATE_HOLD": "1e999"}, {"SERVER_PROTOCOL": long, "SCRIPT_FILENAME": "nph-"}, {"SCRIPT_FILENAME": "/nph-" + odd},
        {"CONTENT_LENGTH": "-1"}, {"CONTENT_TYPE": long}, {"GATEWAY_INTERFACE": odd},
    ]
    for shape in shapes:
        for program in ({}, {"TIDEGATE_PROGRAM": str(site.show)}):
            answer = site.ask("/keyed", **{**program, **shape})
            assert "ERROR: AddressSanitizer" not in answer.log and "runtime error" not in answer.log, (shape, answer.log)
            assert answer.fields and answer.status in (200, 400, 401, 429, 431, 500, 502, 503), (shape, answer.raw[:200])


# ---- what it is made of, what it costs


def test_it_is_one_file_without_yaml_and_redis(cgi: Path) -> None:
    assert "not a dynamic executable" in subprocess.run(["ldd", cgi], capture_output=True, text=True, check=False).stderr
    names = subprocess.run(["nm", cgi], capture_output=True, text=True, check=True).stdout
    assert not re.search(r" [Tt] (yaml_parser|redis[A-Z]|SSL_)", names)


def test_a_decision_costs_no_more_than_a_third_above_a_constant(site: Site, build: Path, make: Callable[[str], None]) -> None:
    make(str(build / "bench" / "cgi_constant"))
    make(str(build / "bench" / "cgi_spawn"))
    environment = {**site.environment("/big"), "TIDEGATE_CONFIG": str(site.folder / "rules.yaml.compiled")}
    ratios = []
    for _ in range(3):
        done = subprocess.run([build / "bench" / "cgi_spawn", "150", build / "bench" / "cgi_constant", site.program],
                              env=environment, capture_output=True, text=True, check=True)
        constant, ours = (float(line.split()[0]) for line in done.stdout.splitlines())
        ratios.append(ours / constant)
    assert statistics.median(ratios) <= 1.3, ratios
