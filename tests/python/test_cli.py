"""The program tidegate: check, explain, init; and the same from Python and from the daemon."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tidegate import ConfigError, Gate, Limiter, ManualClock, StoreError

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from server import Server, server  # noqa: E402

Run = Callable[..., "subprocess.CompletedProcess[str]"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}


@pytest.fixture(scope="session")
def program(make: Callable[[str], None], build: Path) -> Path:
    make("programs")
    return build / "bin" / "tidegate"


@pytest.fixture
def run(program: Path, tmp_path: Path) -> Run:
    def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *map(str, arguments)], cwd=tmp_path, env={**CLEAN, **environment}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=30, check=False,
        )

    return call


def rules(folder: Path, text: str) -> Path:
    path = folder / "rules.yaml"
    path.write_text(text)
    return path


def policies(folder: Path, *lines: str) -> Path:
    return rules(folder, "policies:\n" + "".join(f"  - {line}\n" for line in lines))


# ---- the program


def test_help_names_every_command_and_wrong_usage_is_one_line_and_exit_2(run: Run) -> None:
    told = run("--help")
    assert (told.returncode, told.stderr) == (0, "")
    for command in re.findall(r"^  (\w+)  ", told.stdout, re.MULTILINE):
        own = run(command, "--help")
        assert (own.returncode, own.stderr) == (0, "")
        assert own.stdout.startswith(f"usage: tidegate {command}")
    for wrong in (["nonsense"], ["check", "--nonsense"], ["check", "--face"], ["check", "--face", "cgi9", "x"],
                  ["explain"], ["explain", "--request", ""],
                  ["explain", "--request", "GET login"], ["explain", "--request", "GET"],
                  ["explain", "--request", "/", "--cost", "-1"],
                  ["explain", "--request", "/", "--header", "none"], ["init", "a", "b"], ["check", "--json=1"]):
        done = run(*wrong)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), wrong
        assert "--help" in done.stderr
    assert run().returncode == 2


def test_the_manual_page_names_every_command_and_option(run: Run, root: Path) -> None:
    page = (root / "docs/man/tidegate.1").read_text().replace("\\-", "-")
    for command in re.findall(r"^  (\w+)  ", run("--help").stdout, re.MULTILINE):
        entry = re.search(rf"^\.BR {command} .*?(?=^\.TP|^\.SH)", page, re.MULTILINE | re.DOTALL)
        assert entry, command
        for option in set(re.findall(r"--[a-z]+", run(command, "--help").stdout)):
            assert option in entry.group(), f"{command} {option}"


def test_an_answer_that_cannot_be_written_is_a_failure(program: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([program, "init", "-"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space" in done.stderr


# ---- init


def test_a_first_file_passes_check_without_a_warning_on_every_face(run: Run, tmp_path: Path) -> None:
    assert run("init").returncode == 0
    for face in ("asgi", "flask", "wsgi", "fcgi", "fcgi-auth", "cgi"):
        done = run("check", "rules.yaml", "--face", face, "--strict")
        assert (done.returncode, done.stdout, done.stderr) == (0, "rules.yaml: ok\n", "")
    assert run("init", "-").stdout == (tmp_path / "rules.yaml").read_text()


def test_init_leaves_a_file_that_is_there_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("mine")
    done = run("init")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert (tmp_path / "rules.yaml").read_text() == "mine"


# ---- check: errors


def test_an_error_has_file_line_column_and_what_was_expected(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, "policies:\n  - name: a\n    rules: 5/minuet\n")
    done = run("check", path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"tidegate: error: {path}:3:14: ")
    assert "minute" in done.stderr
    told = json.loads(run("check", path, "--json").stdout)
    assert [(one["ok"], one["error"]["line"], one["error"]["column"]) for one in told] == [(False, 3, 14)]


def test_several_files_are_told_apart_and_one_bad_is_bad(run: Run, tmp_path: Path) -> None:
    good = rules(tmp_path, "policies: []\n")
    done = run("check", good, tmp_path / "none.yaml")
    assert (done.returncode, done.stdout) == (1, f"{good}: ok\n")
    assert "none.yaml" in done.stderr


def test_the_file_may_come_from_the_environment(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, "policies: []\n")
    assert run("check", TIDEGATE_CONFIG=str(path)).returncode == 0
    assert run("check").returncode == 2


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ("shared//x", "expected memory://NAME, shared://NAME or redis://HOST"),
        ("sharde://x", "unknown kind"),
        ("shared://a/b", "a path begins with '/'"),
        ("shared://x?sise=1MiB", "knows no option 'sise'"),
        ("shared://x?size=many", "many"),
        ("shared://x?mode=0666", "0666"),
        ("memory://x?mode=0600", "knows no option"),
        ("redis://h:99999", "99999"),
    ],
)
def test_a_stores_address_is_looked_at_and_never_opened(run: Run, tmp_path: Path, store: str, told: str) -> None:
    for text, options, place in (
        (f"policies: []\nstore: '{store}'\n", [], f"{tmp_path}/rules.yaml:2:1: "),
        ("policies: []\n", ["--store", store], ""),
    ):
        done = run("check", rules(tmp_path, text), *options)
        assert (done.returncode, done.stdout) == (1, ""), store
        assert done.stderr.startswith(f"tidegate: error: {place}")
        assert told in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["rules.yaml"]


def test_users_and_groups_of_another_host_are_no_fault_of_the_file(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, "policies: []\nstore: shared://x?group=nobodys-group&owner=nobodys-name&mode=0660\n")
    assert run("check", path).returncode == 0


def test_a_rule_that_its_table_could_not_hold_is_marked_where_it_stands(run: Run, tmp_path: Path) -> None:
    path = policies(tmp_path, "{name: a, rules: '5/minute; 100000/day sliding_log'}")
    for store, column in (("shared://x", 33), ("shared://x?size=1GiB", None), ("redis://127.0.0.1:1", None)):
        done = run("check", path, "--store", store)
        assert done.returncode == (1 if column else 0), done.stderr
        if column:
            assert done.stderr.startswith(f"tidegate: error: {path}:2:{column}: ")


# ---- check: warnings


def codes(run: Run, path: Path, *options: str) -> list[str]:
    done = run("check", path, "--json", *options)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)
    return [warning["code"] for warning in told["warnings"]]


LOGIN = "{name: login, match: {path: /login}, rules: 5/minute}"
WARNED: list[tuple[str, list[str], list[str]]] = [
    ("never-bites", ["{name: a, rules: 5/minute; 1000/hour}"], []),
    ("never-bites", ["{name: a, rules: [10/second burst 20, 8/2seconds burst 10]}"], []),
    ("never-bites", ["{name: a, rules: 9/s, plans: {pro: 5/minute; 1000/hour}}"], []),
    ("forgets-before", ["{name: a, rules: 9/s, plans: {pro: 5/month}}"], []),
    ("shadowed", ["{name: a, rules: 1/s}", LOGIN], []),
    ("shadowed", ["{name: a, match: {path: '/api/*'}, rules: 1/s}",
                  "{name: b, match: {path: [/api/x, '/api/v1/*']}, rules: 1/s}"], []),
    ("shadowed", ["{name: a, match: {methods: GET}, rules: 1/s}", "{name: b, match: {methods: POST}, rules: 1/s}",
                  "{name: c, match: {path: /x, methods: [HEAD, POST]}, rules: 1/s}"], []),
    ("shadowed", ["{name: a, match: {host: '*.x.example'}, rules: 1/s}",
                  "{name: b, match: {host: a.x.example}, rules: 1/s}"], []),
    ("by-forwarding-header", ["{name: a, rules: 1/s, by: [ip, 'header:X_Forwarded-FOR']}"], []),
    ("by-invented", ["{name: a, rules: 1/s, by: 'header:X-Api-Key'}"], []),
    ("by-invented", ["{name: a, rules: 1/s, by: 'header:X-Api-Key|ip'}"], []),
    ("by-invented", ["{name: a, rules: 1/s, by: 'ip+header:X-Api-Key'}"], []),
    ("one-bucket", ["{name: a, rules: 1/s, by: method}"], []),
    ("one-bucket", ["{name: a, rules: 1/s, by: [host, path]}"], []),
    ("pause-unseen", ["{name: a, rules: 5/s, pause_when: error_rate > 50%}"], ["--face", "fcgi-auth"]),
    ("forgets-before", ["{name: a, rules: 5/month}"], []),
    ("forgets-before", ["{name: a, rules: 5/2days}"], ["--store", "memory://"]),
]
SILENT: list[tuple[list[str], list[str]]] = [
    (["{name: a, rules: 5/minute; 50/day}"], []),
    (["{name: a, rules: 5/minute fixed_window; 300/hour}"], ["--face", "asgi"]),
    (["{name: a, rules: [5/second burst 10, 20/2seconds burst 5]}"], []),
    ([LOGIN, "{name: a, rules: 1/s}"], []),
    (["{name: a, rules: 1/s, also: true}", LOGIN], []),
    (["{name: a, rules: 1/s}", "{name: b, match: {path: /x}, rules: 1/s, also: true}"], []),
    (["{name: a, match: {path: /api}, rules: 1/s}", "{name: b, match: {path: '/api/*'}, rules: 1/s}"], []),
    (["{name: a, match: {path: '/api/x*'}, rules: 1/s}", "{name: b, match: {path: '/api/*'}, rules: 1/s}"], []),
    (["{name: a, match: {path: '/*/x'}, rules: 1/s}", "{name: b, match: {path: '/*'}, rules: 1/s}"], []),
    (["{name: a, match: {methods: GET}, rules: 1/s}", "{name: b, match: {path: /x}, rules: 1/s}"], []),
    (["{name: a, match: {path: /x, methods: GET}, rules: 1/s}", "{name: b, match: {path: /x}, rules: 1/s}"], []),
    (["{name: a, rules: 1/s, by: [ip, 'header:X-Api-Key']}"], []),
    (["{name: a, rules: 1/s, by: user|ip}"], ["--face", "fcgi"]),
    (["{name: a, rules: deny, by: host}"], []),
    (["{name: a, rules: 5/day}"], ["--store", "memory://"]),
    (["{name: a, plans: {default: free, free: 5/minute; 50/day, pro: 9/minute}}"], []),
    (["{name: a, rules: 5/s, pause_when: error_rate > 50%}"], ["--face", "asgi"]),
    (["{name: a, rules: 5/s, pause_when: error_rate > 50%}"], []),
    (["{name: a, rules: 1/s, by: ip+route}"], ["--face", "flask"]),
]


@pytest.mark.parametrize(("code", "lines", "options"), WARNED)
def test_what_is_hardly_meant_is_warned_of(
    run: Run, tmp_path: Path, code: str, lines: list[str], options: list[str]
) -> None:
    path = policies(tmp_path, *lines)
    assert code in codes(run, path, *options)
    done = run("check", path, "--strict", *options)
    assert done.returncode == 1
    assert re.search(rf"^{re.escape(str(path))}:\d+:\d+: warning: .*\[{code}\]$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(("lines", "options"), SILENT)
def test_what_may_well_be_meant_is_not_warned_of(
    run: Run, tmp_path: Path, lines: list[str], options: list[str]
) -> None:
    assert codes(run, policies(tmp_path, *lines), *options) == []


@pytest.mark.parametrize(
    ("network", "wide"),
    [("0.0.0.0/0", True), ('"::/0"', True), ("2000::/3", True), ("8.0.0.0/7", True), ("fc00::/7", True),
     ("10.0.0.0/8", False), ("fd00::/16", False), ('"unix:"', False), ("127.0.0.1", False)],
)
def test_a_trusted_list_as_wide_as_the_internet_is_warned_of(
    run: Run, tmp_path: Path, network: str, wide: bool
) -> None:
    path = rules(tmp_path, f"trusted_proxies: [192.0.2.7, {network}]\npolicies: []\n")
    assert codes(run, path) == (["trusts-everybody"] if wide else [])
    if wide:
        assert f"{path}:1:30: " in run("check", path).stdout


def test_each_warning_has_its_paragraph(root: Path) -> None:
    source = (root / "csrc/core/check.c").read_text()
    manual = (root / "docs/cli.md").read_text()
    found = set(re.findall(r'warn\(c, "([\w-]+)"', source))
    assert found == {code for code, _, _ in WARNED} | {"trusts-everybody", "secret-apart", "secret-short"}  # test_secret.py
    assert found == set(re.findall(r"^\*\*([\w-]+)\*\* — ", manual, re.MULTILINE))


def some_rule(random_: random.Random) -> str:
    kind = random_.choice(["fixed_window", "sliding_log", "sliding_counter", "token_bucket", "leaky_bucket"])
    burst = f" burst {random_.randint(1, 9)}" if "bucket" in kind else ""
    return f"{random_.randint(1, 8)}/{random_.randint(1, 6)}s{burst} {kind}"


def test_a_rule_told_never_to_bite_never_refuses_alone(run: Run, tmp_path: Path) -> None:
    random_ = random.Random(5)
    pairs = [(some_rule(random_), some_rule(random_)) for _ in range(400)]
    pairs = [(one, other) for one, other in pairs if one.split()[0].split("/")[1] != other.split()[0].split("/")[1]]
    path = policies(tmp_path, *(f"{{name: p{n}, rules: {one}; {other}}}" for n, (one, other) in enumerate(pairs)))
    (told,) = json.loads(run("check", path, "--json").stdout)
    claims = [warning["message"] for warning in told["warnings"] if warning["code"] == "never-bites"]
    assert len(claims) > 40
    for claim in claims:
        number, idle = re.match(r'policy "p(\d+)": "([^"]+)"', claim).groups()  # type: ignore[union-attr]
        clock = ManualClock(now_us=1_700_000_000_000_000 + random_.randrange(10**7))
        limiter = Limiter("; ".join(pairs[int(number)]), store="memory://never-bites", clock=clock, name=f"p{number}")
        for _ in range(150):
            decision = limiter.hit("x", cost=random_.choice([1, 1, 1, 2]))
            verdicts = {result.rule: result.allowed for result in decision.rules}
            assert idle in verdicts
            assert verdicts[idle] or not all(ok for rule, ok in verdicts.items() if rule != idle), claim
            clock.advance_us(random_.choice([0, 1000, 100_000, 500_000, 999_999, 1_000_000, 2_500_000]))


def test_a_policy_told_to_be_shadowed_never_judges(run: Run, tmp_path: Path) -> None:
    random_ = random.Random(7)
    paths = ["/", "/a", "/a/*", "/a/b", "/*", "/a*", "*.php", "/a/*/c", "/a/b/c", "/{x}",
             "/a/{x}", "/a/{x}/{y}", "/a/{x}/*"]
    asked = ["/", "/a", "/a/b", "/a/b/c", "/a/x.php", "/ab", "/x.php", "/a/b/b/c", "/zz/y"]
    claimed = 0
    for _ in range(50):
        lines = []
        for n in range(6):
            match: dict[str, list[str] | str] = {}
            if random_.random() < 0.9:
                match["path"] = random_.sample(paths, random_.randint(1, 2))
            if random_.random() < 0.4:
                match["methods"] = random_.sample(["GET", "POST", "HEAD"], random_.randint(1, 2))
            if random_.random() < 0.3:
                match["host"] = random_.choice(["*.x", "a.x", "*"])
            lines.append(json.dumps({"name": f"p{n}", "rules": "1/s", **({"match": match} if match else {})}))
        path = policies(tmp_path, *lines)
        (told,) = json.loads(run("check", path, "--json").stdout)
        shadowed = {warning["message"].split('"')[1] for warning in told["warnings"] if warning["code"] == "shadowed"}
        claimed += len(shadowed)
        gate = Gate(path, store="memory://shadowed")
        for target in asked:
            for method in ("GET", "POST", "HEAD", "PUT"):
                for host in ("a.x", "b.x", "y", ""):
                    met = tidegate.explain(f"{method} {target}", config=gate, host=host).policies
                    assert not shadowed & set(met), (lines, method, target, host)
    assert claimed > 40


def test_the_daemon_checks_alike(run: Run, program: Path, tmp_path: Path) -> None:
    path = policies(tmp_path, "{name: a, rules: 5/minute; 1000/hour, by: [ip, route|ip]}", LOGIN)
    for mode, face in (("answer", "fcgi"), ("auth", "fcgi-auth")):
        mine = run("check", path, "--face", face).stdout.splitlines()
        daemon = subprocess.run(
            [program.with_name("tidegate-fcgi"), "--config", path, "--check", "--mode", mode], env=CLEAN,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False,
        )
        assert daemon.returncode == 0
        assert daemon.stdout.splitlines()[:-1] == mine[:-1]
        assert len(mine) == 3
    path = policies(tmp_path, "{name: a, rules: 5/minute, by: [ip, route]}")
    for face in ("fcgi", "fcgi-auth", "cgi", "wsgi"):
        done = run("check", path, "--face", face)
        assert done.returncode == 1
        assert f"{path}:2:" in done.stderr
    assert run("check", path, "--face", "asgi").returncode == 0


# ---- check: the store itself


@pytest.fixture
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


def live(run: Run, path: Path, store: str, **environment: str) -> list[tuple[str, str]]:
    done = run("check", path, "--json", "--live", "--store", store, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = json.loads(done.stdout)
    return [(warning["code"], warning["message"]) for warning in told["warnings"]]


def test_a_redis_that_evicts_is_warned_of_when_it_is_asked(run: Run, tmp_path: Path, redis: Server) -> None:
    path = policies(tmp_path, "{name: a, rules: 5/minute}")
    assert live(run, path, redis.patient) == []
    redis("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    ((code, message),) = live(run, path, redis.patient)
    assert code == "store-evicts"
    assert "allkeys-lru" in message
    assert codes(run, path, "--store", redis.patient) == []  # nobody is asked unless told to
    assert run("check", path, "--live", "--strict", "--store", redis.patient).returncode == 1


def test_machines_with_different_secrets_are_warned_of_when_redis_is_asked(
    run: Run, tmp_path: Path, redis: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = policies(tmp_path, "{name: a, rules: 5/hour}")
    path.write_text("secret: ${TIDEGATE_SECRET}\n" + path.read_text())
    monkeypatch.setenv("TIDEGATE_SECRET", "one secret of ten machines")
    Limiter("5/hour", name="a", store=redis.patient).hit("x")
    assert live(run, path, redis.patient, TIDEGATE_SECRET="one secret of ten machines") == []
    ((code, message),) = live(run, path, redis.patient, TIDEGATE_SECRET="another on the eleventh")
    assert code == "store-two-secrets"
    assert "1 keys made under another secret" in message
    assert "secret of ten" not in message


def test_a_store_that_is_away_or_not_there_yet_is_no_error_of_the_file(run: Run, tmp_path: Path) -> None:
    path = policies(tmp_path, "{name: a, rules: 5/minute}")
    assert live(run, path, f"shared://{tmp_path}/none") == []
    assert not (tmp_path / "none").exists()
    ((code, message),) = live(run, path, f"redis+unix://{tmp_path}/none")
    assert code == "store-failing"
    assert "does not answer" in message


def test_a_table_that_is_there_and_too_small_is_found_when_it_is_asked(run: Run, tmp_path: Path) -> None:
    path = policies(tmp_path, "{name: a, rules: 900/day sliding_log}")
    store = f"shared://{tmp_path}/small"
    Limiter("5/hour", name="b", store=f"{store}?size=64KiB").hit("x")
    assert run("check", path, "--store", store).returncode == 0
    done = run("check", path, "--store", store, "--live")
    assert done.returncode == 1
    assert done.stderr.startswith(f"tidegate: error: {path}:2:22: ")


# ---- explain

SITE = """
trusted_proxies: [10.0.0.0/8]
policies:
  - name: everybody
    rules: 100/hour
    also: true
  - name: login
    match: {path: /login, methods: [POST]}
    rules: 3/minute
    by: [ip, "header:X-Api-Key"]
    missing_identity: shared
  - name: late
    match: {path: "/log*"}
    rules: 1/s
  - name: gone
    match: {path: "/v1/*", host: "*.example"}
    rules: deny
  - name: me
    match: {path: /me}
    rules: 1/minute
    by: user
"""


def explained(run: Run, *options: object) -> dict[str, Any]:
    done = run("explain", "--json", *options)
    assert (done.returncode, done.stderr) == (0, "")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_explain_tells_which_policies_match_and_why_the_others_do_not(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, SITE)
    told = explained(run, "--config", path, "--store", f"shared://{tmp_path}/t", "--request", "POST //login/?x=1")
    why = {policy["name"]: (policy["applies"], policy["why"]) for policy in told["policies"]}
    assert why["everybody"] == (True, "also: beside whatever else matches")
    assert why["login"][0] is True
    assert why["late"] == (False, 'would match, but "login" in line 7 comes first; also: true would add it')
    assert why["gone"][0] is False
    assert 'none of "/v1/*"' in why["gone"][1]
    assert "no host is known" in why["gone"][1]
    told = explained(run, "--config", path, "--store", f"shared://{tmp_path}/t", "--request", "/login")
    why = {policy["name"]: (policy["applies"], policy["why"]) for policy in told["policies"]}
    assert why["login"] == (False, 'method "GET" is none of "POST"')
    assert why["late"][0] is True


@pytest.mark.fault("R164")
def test_explain_shows_the_live_counts_and_takes_nothing(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, SITE)
    store = f"shared://{tmp_path}/table"
    gate = Gate(path, store=store)
    scope = {"type": "http", "method": "POST", "path": "/login", "client": ("192.0.2.1", 1), "headers": []}
    for used in range(4):
        for _ in range(2):
            told = explained(run, "--config", path, "--store", store, "--request", "POST /login", "--ip", "192.0.2.1")
            left = [(rule["policy"], rule["remaining"]) for rule in told["rules"]]
            assert left == [("everybody", 100 - used), ("login", 3 - used), ("login", 3 - used)]
            assert told["decision"]["outcome"] == ("allowed" if used < 3 else "denied")
            assert told["answer"]["status"] == (0 if used < 3 else 429)
        judgement = gate.judge_asgi(scope)
        if used == 3:
            assert dict(judgement.fields_text)["Retry-After"] == dict(told["answer"]["fields"])["Retry-After"]
            assert re.sub(r"\d+", "N", judgement.body.decode()) == re.sub(r"\d+", "N", told["answer"]["body"])


def test_what_explain_says_the_request_would_leave_is_what_it_leaves(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, """\
policies:
  - {name: window, also: true, rules: 9/hour fixed_window; 20/day sliding_counter}
  - {name: bucket, also: true, rules: 9/hour burst 7}
  - {name: leaky, also: true, rules: 5/hour leaky_bucket, cost: 2}
  - {name: log, rules: 6/hour}
""")
    store = f"shared://{tmp_path}/table"
    gate = Gate(path, store=store)
    options = ("--config", path, "--store", store, "--request", "/", "--ip", "192.0.2.1")
    scope = {"type": "http", "method": "GET", "path": "/", "client": ("192.0.2.1", 1), "headers": []}
    told = explained(run, *options)
    for _ in range(3):
        outcome, after = told["decision"]["outcome"], [rule["remaining_after"] for rule in told["rules"]]
        assert gate.judge_asgi(scope).outcome == outcome
        told = explained(run, *options)
        assert [rule["remaining"] for rule in told["rules"]] == after
    assert told["decision"]["outcome"] == "denied", "the leaky bucket, of which a request takes two places of five"
    assert [rule["remaining_after"] for rule in told["rules"]] == after, "a request that is refused takes nothing"
    assert "\n    4 of 6 left, as new in " in run("explain", *options).stdout
    said = run("explain", *options[:-1], "192.0.2.2").stdout
    assert "\n    9 of 9 left before this request, 8 after it" in said
    assert "\n    5 of 5 left before this request, 3 after it" in said
    assert "\nanswer    the application's own, with (as before this request)\n  X-RateLimit-Limit: 5\n" in said


def test_explain_makes_no_table_and_says_that_there_is_none(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, SITE)
    done = run("explain", "--config", path, "--store", f"shared://{tmp_path}/none", "--request", "/")
    assert done.returncode == 0
    assert f"no table there yet for user {os.geteuid()}" in done.stdout
    assert [one.name for one in tmp_path.iterdir()] == ["rules.yaml"]


def test_without_a_rules_file_explain_says_how_to_name_one_and_how_limits_in_code_are_asked_about(run: Run) -> None:
    done = run("explain", "--request", "/")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert all(word in done.stderr for word in ("--config", "TIDEGATE_CONFIG", "limiter.peek()"))


def test_explain_hides_what_may_be_a_secret_and_still_tells_two_apart(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, SITE)
    shown = []
    for key in ("hunter2hunter2", "hunter2hunter2", "another", "x" * 65):
        done = run("explain", "--config", path, "--store", f"shared://{tmp_path}/t", "--request", "POST /login",
                   "--header", f"X-Api-Key: {key}", "--user", "u", "--json")
        assert key not in done.stdout
        shown.append(json.loads(done.stdout)["identities"][1])
    assert shown[0] == shown[1] != shown[2] != shown[3]
    assert shown[0].startswith("header:x-api-key (hidden, 14 bytes, #")
    none = explained(run, "--config", path, "--store", f"shared://{tmp_path}/t", "--request", "POST /login")
    assert none["identities"][1] == "everybody without header:x-api-key"


def test_explain_tells_where_the_address_came_from(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, SITE)
    forged = ("--header", "X-Forwarded-For: 203.0.113.9", "--request", "/", "--config", path, "--store", "memory://")
    told = explained(run, "--ip", "10.1.1.1", *forged)
    assert (told["client"], told["client_why"]) == ("203.0.113.9", "from x-forwarded-for: the peer, 10.1.1.1, is trusted")
    told = explained(run, "--ip", "192.0.2.1", *forged)
    assert told["client"] == "192.0.2.1"
    assert "is ignored, since 192.0.2.1 is not among trusted_proxies" in told["client_why"]
    told = explained(run, "--ip", "unix:", *forged)
    assert told["client"] == ""


def test_explain_tells_refusals_that_are_no_limit(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, SITE)
    common = ("--config", path, "--store", "memory://")
    told = explained(run, *common, "--request", "/v1/x", "--host", "a.example")
    assert (told["decision"]["outcome"], told["answer"]["status"]) == ("forbidden", 403)
    told = explained(run, *common, "--request", "/me")
    assert (told["decision"]["outcome"], told["decision"]["missing"]) == ("unidentified", "user")
    told = explained(run, *common, "--request", "OPTIONS /login", "--header", "Origin: https://a.example",
                     "--header", "Access-Control-Request-Method: POST")
    assert told["decision"]["outcome"] == "free"
    told = explained(run, *common, "--request", "/", "--cost", "101")
    assert (told["decision"]["outcome"], told["decision"]["retry_after_us"]) == ("denied", None)
    text = run("explain", *common, "--request", "/", "--cost", "101").stdout
    assert "this cost never passes" in text
    assert "decision  denied by" in text


def test_explain_knows_headers_routes_lists_and_costs(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, """
policies:
  - name: beta
    match: {header: {X-Beta: ["yes*", "on"]}, route: "/users/{id}"}
    rules: 5/minute
    exempt: [192.0.2.0/24]
  - name: users
    match: {path: "/users/{id}"}
    rules: 10/minute
    cost: 3
    deny: ["user:mallory"]
""")
    store = f"shared://{tmp_path}/t"
    common = ("--config", path, "--store", store, "--request", "/users/7")
    why = {one["name"]: (one["applies"], one["why"]) for one in explained(run, *common)["policies"]}
    assert why["beta"][0] is False
    assert 'no route is known, wanted is "/users/{id}"' in why["beta"][1]
    assert 'header x-beta is none of "yes*", "on"' in why["beta"][1]
    assert why["users"] == (True, 'path "/users/7" is one of "/users/{}"')
    told = explained(run, *common, "--header", "X-Beta: yes, secret", "--route", "/users/{id}", "--ip", "192.0.2.5")
    assert told["decision"]["outcome"] == "exempt"
    assert "in its exempt list" in told["policies"][0]["why"]
    assert "secret" not in json.dumps(told)
    told = explained(run, *common, "--user", "mallory")
    assert (told["decision"]["outcome"], told["answer"]["status"]) == ("forbidden", 403)
    gate = Gate(path, store=store)
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/users/7", "REMOTE_ADDR": "192.0.2.5", "HTTP_X_BETA": "on"}
    assert [gate.judge_wsgi(environ, route="/users/{id}").outcome for _ in range(2)] == ["exempt"] * 2
    assert gate.judge_wsgi(environ, user="mallory").outcome == "forbidden"
    assert [gate.judge_wsgi(environ).outcome for _ in range(4)] == ["allowed"] * 3 + ["denied"]
    assert explained(run, *common, "--ip", "192.0.2.5")["rules"][0]["remaining"] == 1
    assert counted(run, store) == {"beta": {"exempt": 2}, "users": {"forbidden": 1, "allowed": 3, "denied": 1}}


def test_a_request_as_a_log_has_it_is_understood(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, SITE)
    told = explained(run, "--config", path, "--store", "memory://", "--request", "POST /login HTTP/1.1")
    assert [policy["name"] for policy in told["policies"] if policy["applies"]] == ["everybody", "login"]


def test_explain_of_a_wrong_file_or_store_fails_in_one_line(run: Run, tmp_path: Path) -> None:
    bad = rules(tmp_path, "policies: 5\n")
    good = tmp_path / "good.yaml"
    good.write_text(SITE)
    for options in (["--config", bad], ["--config", tmp_path / "none"], [], ["--config", good, "--store", "nowhere://x"]):
        done = run("explain", "--request", "/", *options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


# ---- the same in Python


def test_python_explains_in_the_same_words(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, SITE)
    store = f"shared://{tmp_path}/table"
    Gate(path, store=store).judge_wsgi({"REQUEST_METHOD": "POST", "PATH_INFO": "/login", "REMOTE_ADDR": "192.0.2.1"})
    mine = tidegate.explain(
        "POST /login", config=path, store=store, ip="192.0.2.1", headers={"X-Api-Key": "k", "Host": "h"}, cost=2
    )
    options = ("--config", path, "--store", store, "--request", "POST /login", "--ip", "192.0.2.1",
               "--header", "X-Api-Key: k", "--header", "Host: h", "--cost", "2")
    other = explained(run, *options)
    moving = re.compile(r'("reset_after_us": |as new in )[\d.]+')
    assert moving.sub("", json.dumps(mine.data)) == moving.sub("", json.dumps(other))
    assert moving.sub("", f"request   POST /login\n{mine}") == moving.sub("", run("explain", *options).stdout)
    assert mine.outcome == "allowed"
    assert mine.policies == ["everybody", "login"]
    assert repr(mine) == "<Explanation allowed, policies ['everybody', 'login']>"


def test_python_explains_from_a_gate_that_counts_in_memory(tmp_path: Path) -> None:
    gate = Gate(rules(tmp_path, SITE), store="memory://explained")
    gate.judge_asgi({"type": "http", "method": "GET", "path": "/", "client": ("192.0.2.1", 1), "headers": []})
    for _ in range(3):
        assert tidegate.explain("/", config=gate, ip="192.0.2.1").data["rules"][0]["remaining"] == 99
    assert tidegate.explain("/", config=gate, ip="192.0.2.2").data["rules"][0]["remaining"] == 100


def test_python_refuses_what_cannot_be_explained(tmp_path: Path) -> None:
    path = rules(tmp_path, SITE)
    with pytest.raises(ValueError, match="METHOD PATH"):
        tidegate.explain("GET ", config=path, store="memory://")
    with pytest.raises(TypeError, match="pairs"):
        tidegate.explain("/", config=path, store="memory://", headers=[("a", "b", "c")])  # type: ignore[list-item]
    with pytest.raises(ConfigError):
        tidegate.explain("/", config=tmp_path / "none")
    with pytest.raises((StoreError, ConfigError)):
        tidegate.explain("/", config=path, store="nowhere://x")
    assert [one.name for one in tmp_path.iterdir()] == ["rules.yaml"]


# ---- stats, top, reset


def counted(run: Run, store: str) -> dict[str, dict[str, int]]:
    done = run("stats", "--store", store, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    found = {
        policy["policy"]: {name: value for name, value in policy.items() if value and isinstance(value, int)}
        for policy in told["policies"]
    }
    return {policy: counts for policy, counts in found.items() if counts}


@pytest.mark.fault("R20")
def test_metrics_are_the_decisions_and_the_units_of_the_store(run: Run, tmp_path: Path) -> None:
    random_ = random.Random(3)
    store = f"shared://{tmp_path}/table"
    gate = Gate(rules(tmp_path, SITE), store=store)
    seen: dict[str, dict[str, int]] = {}

    def count(policy: str, outcome: str) -> None:
        of = seen.setdefault(policy, {})
        of[outcome] = of.get(outcome, 0) + 1

    admitted: dict[str, int] = {}
    for _ in range(1000):
        path = random_.choice(["/", "/login", "/v1/x", "/me"])
        peer = f"192.0.2.{random_.randrange(4)}"
        judgement = gate.judge_wsgi({"REQUEST_METHOD": "POST", "PATH_INFO": path, "REMOTE_ADDR": peer,
                                     "HTTP_HOST": "a.example"})
        own = {"/": [], "/login": ["login"], "/v1/x": ["gone"], "/me": ["me"]}[path]
        if judgement.outcome == "allowed":
            for policy in ["everybody", *own]:
                count(policy, "allowed")
            admitted[peer] = admitted.get(peer, 0) + 1
        else:
            count(judgement.policy, judgement.outcome)
    assert counted(run, store) == seen
    assert sum(sum(of.values()) for of in seen.values()) - seen["login"]["allowed"] == 1000
    used = sum(100 - tidegate.explain("/", config=gate, ip=peer).data["rules"][0]["remaining"] for peer in admitted)
    assert used == seen["everybody"]["allowed"] == sum(admitted.values())
    assert counted(run, store) == seen  # neither explaining nor looking is counted


def test_metrics_of_processes_and_threads_add_up(run: Run, tmp_path: Path) -> None:
    store = f"shared://{tmp_path}/table"
    script = f"""
import threading
from tidegate import Limiter
limiter = Limiter("10/hour", name="shared", store={store!r})
threads = [threading.Thread(target=lambda: [limiter.hit("x") for _ in range(500)]) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    environment = {**CLEAN, "PYTHONPATH": str(Path(tidegate.__file__).parents[1])}
    running = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(3)]
    assert [one.wait(60) for one in running] == [0, 0, 0]
    assert counted(run, store) == {"shared": {"allowed": 10, "denied": 4490}}


def test_stats_are_told_to_people_and_to_prometheus(run: Run, tmp_path: Path) -> None:
    store = f"shared://{tmp_path}/table"
    limiter = Limiter("100/hour", name="search", namespace="shop", store=store)
    for _ in range(200):
        limiter.hit("203.0.113.77")
    text = run("stats", "--store", store).stdout
    assert re.search(r"^shop/search +100 +100 +0", text, re.MULTILINE)
    assert re.search(r"^decided within .* of \d+ measured$", text, re.MULTILINE)
    assert re.search(r"^1 key, [1-9]\d* KiB$", text, re.MULTILINE)
    told = run("stats", "--store", store, "--prometheus").stdout
    assert 'tidegate_decisions_total{namespace="shop",policy="search",outcome="denied"} 100\n' in told
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", told, re.MULTILINE))
    samples = re.findall(r"^([a-z_]+)(?:\{([^}]*)\})? ([\d.e+-]+)$", told, re.MULTILINE)
    assert len(samples) + 2 * len(types) == told.count("\n")
    for name, labels, _ in samples:
        assert re.sub("_(bucket|sum|count)$", "", name) in types or name in types
        assert all(re.fullmatch(r'\w+="[^"\\]*"', one) for one in labels.split(",") if one)
    buckets = [int(value) for name, _, value in samples if name == "tidegate_store_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == int(dict((name, value) for name, _, value in samples)["tidegate_store_seconds_count"]) > 0
    for output in (text, told, run("stats", "--store", store, "--json").stdout):
        assert "203.0.113" not in output  # no identity is a label


def test_more_policies_than_there_are_places_count_together(run: Run, tmp_path: Path) -> None:
    store = f"shared://{tmp_path}/table"
    for n in range(200):
        Limiter("1/hour", name=f"p{n}", store=store).hit("x")
    found = counted(run, store)
    assert len(found) == 128
    assert found["(others)"] == {"allowed": 73}
    assert sum(sum(of.values()) for of in found.values()) == 200


def test_a_small_table_keeps_no_counts_and_says_so(run: Run, tmp_path: Path) -> None:
    store = f"shared://{tmp_path}/table"
    limiter = Limiter("1/hour", store=f"{store}?size=512KiB")
    assert limiter.hit("x")
    assert not limiter.hit("x")
    assert "keeps no counts by policy" in run("stats", "--store", store).stdout
    assert json.loads(run("stats", "--store", store, "--json").stdout)["counted"] is False
    assert run("top", "--store", store, "--times", "1").returncode == 1


@pytest.mark.fault("R164")
def test_looking_at_a_store_that_is_not_there_fails_in_one_line_and_makes_none(run: Run, tmp_path: Path) -> None:
    for command in (["stats"], ["top", "--times", "1"]):
        done = run(*command, "--store", f"shared://{tmp_path}/none")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "no table yet" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["stats"], ["top", "--times", "1", "--every", "0.05"], ["list"]])
def test_the_store_that_is_looked_at_is_the_one_of_the_rules_file(run: Run, tmp_path: Path, command: list[str]) -> None:
    def file_of(name: str) -> str:
        (tmp_path / f"{name}.yaml").write_text(
            f"store: shared://{tmp_path}/{name}\npolicies:\n  - {{name: {name}, rules: 5/hour}}\n"
        )
        return str(tmp_path / f"{name}.yaml")

    for name in ("north", "south"):
        limiter = Limiter(policy=name, config=file_of(name))
        limiter.hit(dims={"ip": "192.0.2.1"})
        limiter.override("9/hour", seconds=60)
    found = {name: run(*command, "--config", file_of(name)).stdout for name in ("north", "south")}
    assert ("north" in found["north"], "south" in found["north"]) == (True, False)
    assert ("north" in found["south"], "south" in found["south"]) == (False, True)
    assert "south" in run(*command, TIDEGATE_CONFIG=file_of("south")).stdout
    # What names a store goes before the file, which is not even read then.
    (tmp_path / "south.yaml").write_text("policies: wrong\n")
    assert run(*command, TIDEGATE_CONFIG=str(tmp_path / "south.yaml")).returncode == 1
    for told in (
        run(*command, "--store", f"shared://{tmp_path}/north", TIDEGATE_CONFIG=str(tmp_path / "south.yaml")),
        run(*command, TIDEGATE_CONFIG=str(tmp_path / "south.yaml"), TIDEGATE_STORE=f"shared://{tmp_path}/north"),
    ):
        assert (told.returncode, "north" in told.stdout) == (0, True)
    done = run(*command, "--config", file_of("nowhere"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "nowhere.yaml has no table yet" in done.stderr
    assert not (tmp_path / "nowhere").exists()


def test_names_from_a_damaged_table_reach_no_terminal(run: Run, tmp_path: Path) -> None:
    store = f"shared://{tmp_path}/table"
    Limiter("1/hour", name="findme", store=store).hit("x")
    data = bytearray((tmp_path / "table").read_bytes())
    at = data.index(b"findme")
    data[at:at + 64] = b'\x1b[31m"\n\xff' + b"A" * 56  # no NUL within its 64 bytes
    with open(tmp_path / "table", "r+b") as table:
        table.write(data)
    for options in ([], ["--json"], ["--prometheus"]):
        told = run("stats", "--store", store, *options).stdout
        assert "AAAA" in told
        assert "\x1b" not in told
    assert "\x1b" not in run("top", "--store", store, "--times", "1", "--every", "0.05").stdout


def test_top_shows_the_busiest_policy_first(program: Path, tmp_path: Path) -> None:
    store = f"shared://{tmp_path}/table"
    calm, busy = (Limiter("5/hour", name=name, store=store) for name in ("calm", "busy"))
    calm.hit("x")
    with subprocess.Popen([program, "top", "--store", store, "--every", "0.3", "--times", "1"], env=CLEAN,
                          stdout=subprocess.PIPE, text=True) as looking:
        deadline = time.monotonic() + 5
        while looking.poll() is None and time.monotonic() < deadline:
            for _ in range(20):
                busy.hit("x")
            calm.hit("y")
            time.sleep(0.01)
        lines = looking.stdout.read().splitlines()  # type: ignore[union-attr]
    assert lines[0].split() == ["allowed/s", "refused/s", "other/s", "policy"]
    assert [line.split()[-1] for line in lines[1:]] == ["busy", "calm"]
    assert float(lines[1].split()[1]) > float(lines[2].split()[1])


@pytest.mark.parametrize("command", ["stats", "top"])
def test_a_store_without_a_table_is_not_shown_as_an_empty_one(run: Run, command: str) -> None:
    done = run(command, "--store", "redis://127.0.0.1:1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "127.0.0.1:1" in done.stderr and "refused" in done.stderr


def test_a_reset_lets_one_client_in_again_and_no_other(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, SITE)
    store = f"shared://{tmp_path}/table"
    gate = Gate(path, store=store)

    def login(peer: str, key: str) -> str:
        return gate.judge_asgi({"type": "http", "method": "POST", "path": "/login", "client": (peer, 1),
                                "headers": [(b"x-api-key", key.encode())]}).outcome

    assert [login("192.0.2.1", "a") for _ in range(4)][-1] == "denied"
    assert [login("192.0.2.2", "b") for _ in range(4)][-1] == "denied"
    done = run("reset", "login", "ip=192.0.2.1", "header:X-Api-Key=a", "--config", path, "--store", store)
    assert (done.returncode, done.stdout, done.stderr) == (0, "login: forgotten\n", "")
    assert login("192.0.2.1", "a") == "allowed"
    assert login("192.0.2.2", "b") == "denied"


def test_a_wrong_reset_says_what_is_wrong(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, SITE)
    common = ("--config", path, "--store", f"shared://{tmp_path}/t")
    done = run("reset", "login", "ip=192.0.2.1", "header:X-Api-Key=a", *common)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"no table yet for user {os.geteuid()}" in done.stderr and not (tmp_path / "t").exists()
    Gate(path, store=common[-1])
    for wrong in (["reset"], ["reset", "login"], ["reset", "login", "203.0.113.9"]):
        assert run(*wrong, *common).returncode == 2
    done = run("reset", "logn", "ip=192.0.2.1", *common)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "login" in done.stderr
    done = run("reset", "late", "ip=nobody", *common)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_shadow_and_challenge_are_counted_apart(run: Run, tmp_path: Path) -> None:
    path = rules(tmp_path, """
policies:
  - {name: tried, rules: 2/hour, mode: shadow, also: true}
  - {name: asked, match: {path: /a}, rules: 1/hour, mode: challenge}
  - {name: kept, rules: 4/hour}
""")
    store = f"shared://{tmp_path}/t"
    gate = Gate(path, store=store)
    for _ in range(6):
        gate.judge_wsgi({"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "192.0.2.5"})
    for _ in range(3):
        gate.judge_wsgi({"REQUEST_METHOD": "GET", "PATH_INFO": "/a", "REMOTE_ADDR": "192.0.2.6"})
    assert counted(run, store) == {
        "tried": {"allowed": 4, "shadow_denied": 3},  # not asked when another refuses
        "asked": {"allowed": 1, "challenged": 2},
        "kept": {"allowed": 4, "denied": 2},
    }


# ---- compile


def test_compiled_rules_are_explained_as_their_source_is(run: Run, tmp_path: Path) -> None:
    assert run("init").returncode == 0
    done = run("compile", "rules.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (0, "rules.yaml.compiled: written\n", "")
    said = [
        run("explain", "--config", name, "--request", "POST /login", "--ip", "203.0.113.9", "--store", "memory://").stdout
        for name in ("rules.yaml", "rules.yaml.compiled")
    ]
    assert said[0] == said[1]
    assert "login" in said[0]


def test_compile_check_tells_a_stale_file_from_a_touched_one(run: Run, tmp_path: Path) -> None:
    assert run("init").returncode == 0
    assert run("compile", "rules.yaml", "-o", "there").returncode == 0
    os.utime(tmp_path / "rules.yaml", (1, 1))
    assert run("compile", "rules.yaml", "-o", "there", "--check").returncode == 0
    (tmp_path / "rules.yaml").write_text("policies: []\n")
    done = run("compile", "rules.yaml", "-o", "there", "--check")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"there was compiled before {tmp_path}/rules.yaml changed" in done.stderr


def test_compile_leaves_what_is_there_when_the_rules_are_wrong(run: Run, tmp_path: Path) -> None:
    assert run("init").returncode == 0
    assert run("compile", "rules.yaml").returncode == 0
    before = (tmp_path / "rules.yaml.compiled").read_bytes()
    (tmp_path / "rules.yaml").write_text("policies: [{name: a, rules: 5/minote}]\n")
    done = run("compile", "rules.yaml")
    assert done.returncode == 1
    assert "rules.yaml:1:" in done.stderr
    assert (tmp_path / "rules.yaml.compiled").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rules.yaml", "rules.yaml.compiled"]


def test_compile_says_where_it_could_not_write(run: Run, tmp_path: Path) -> None:
    assert run("init").returncode == 0
    done = run("compile", "rules.yaml", "-o", "not/there")
    assert done.returncode == 1
    assert "not/there" in done.stderr and "No such file" in done.stderr
    assert run("compile").returncode == 2
