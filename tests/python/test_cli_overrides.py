"""tidegate set, pause and list, and the same from Python: what is set while everything runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tidegate
from tidegate import Gate, IdentityError, Limiter, ManualClock, RuleError, StoreError

Run = Callable[..., "subprocess.CompletedProcess[str]"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
SITE = """
policies:
  - name: login
    match: {path: /login}
    rules: 3/hour
    by: [user|ip]
  - name: gone
    match: {path: /gone}
    rules: deny
  - name: both
    rules: 10/hour
    by: [ip, "header:X-Key"]
    missing_identity: shared
"""


class Site:
    def __init__(self, program: Path, folder: Path) -> None:
        self.folder = folder
        self.program = program
        self.path = folder / "rules.yaml"
        self.path.write_text(SITE)
        self.store = f"shared://{folder}/table"
        self.gate = Gate(self.path, store=self.store)

    def run(self, command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, command, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env={**CLEAN, "TIDEGATE_CONFIG": str(self.path), "TIDEGATE_STORE": self.store}, timeout=30, check=False,
        )

    def ok(self, command: str, *arguments: object) -> str:
        done = self.run(command, *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def ask(self, path: str = "/login", peer: str = "192.0.2.1", user: str | None = None, key: str = "k") -> str:
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "REMOTE_ADDR": peer, "HTTP_X_KEY": key}
        return self.gate.judge_wsgi(environ, user=user).outcome


@pytest.fixture
def site(make: Callable[[str], None], build: Path, tmp_path: Path) -> Site:
    make("programs")
    return Site(build / "bin" / "tidegate", tmp_path)


def test_one_client_is_tightened_and_others_are_not(site: Site) -> None:
    assert site.ok("set", "login", "1/hour", "--user", "42", "--for", "10m") == "login: set\n"
    assert [site.ask(user="42") for _ in range(2)] == ["allowed", "denied"]
    assert [site.ask(user="43") for _ in range(4)] == ["allowed"] * 3 + ["denied"]
    (told,) = json.loads(site.ok("list", "--json"))
    assert (told["policy"], told["kind"], told["rules"], told["identity"]) == ("login", "rules", "1/hour", "user 42")
    assert 590e6 < told["left_us"] <= 600e6
    assert site.ok("set", "login", "--end", "user=42") == "login: as in the file again\n"
    assert site.ok("list") == "none\n"
    assert [site.ask(user="42") for _ in range(3)] == ["allowed"] * 2 + ["denied"]  # what was used stays used


def test_everybody_is_given_more_and_one_clients_own_goes_before(site: Site) -> None:
    site.ok("set", "login", "5/hour", "--for", "1h")
    site.ok("set", "login", "1/hour", "ip=192.0.2.9", "--for", "1h")
    assert [site.ask() for _ in range(6)] == ["allowed"] * 5 + ["denied"]
    assert [site.ask(peer="192.0.2.9") for _ in range(2)] == ["allowed", "denied"]
    assert len(site.ok("list").splitlines()) == 2
    site.ok("set", "login", "7/hour", "--for", "1h")  # takes the place of the first
    assert [site.ask() for _ in range(3)] == ["allowed"] * 2 + ["denied"]
    assert len(site.ok("list").splitlines()) == 2


def test_other_processes_follow_at_once(site: Site) -> None:
    script = (
        "import sys, tidegate\n"
        f"gate = tidegate.Gate({str(site.path)!r}, store={site.store!r})\n"
        "environ = {'REQUEST_METHOD': 'GET', 'PATH_INFO': '/login', 'REMOTE_ADDR': '192.0.2.1'}\n"
        "for line in sys.stdin: print(gate.judge_wsgi(environ).outcome, flush=True)\n"
    )
    environment = {**CLEAN, "PYTHONPATH": str(Path(tidegate.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as other:
        def there() -> str:
            assert other.stdin and other.stdout
            print("ask", file=other.stdin, flush=True)
            return other.stdout.readline().strip()

        assert there() == "allowed"
        site.ok("set", "login", "deny", "ip=192.0.2.1", "--for", "1m")
        assert there() == "forbidden"
        site.ok("set", "login", "--end", "ip=192.0.2.1")
        assert there() == "allowed"


def test_an_override_is_over_by_itself(site: Site) -> None:
    limiter = Limiter(policy="login", config=str(site.path), store=site.store)
    limiter.override("deny", dims={"ip": "192.0.2.1"}, seconds=0.3)
    assert site.ask() == "forbidden"
    time.sleep(0.35)
    assert site.ask() == "allowed"
    assert site.ok("list") == "none\n"


def test_a_pause_lets_through_and_counts_nothing(site: Site) -> None:
    assert [site.ask() for _ in range(4)][-1] == "denied"
    assert site.ok("pause", "login", "--for", "1h") == "login: paused\n"
    assert {site.ask() for _ in range(20)} == {"allowed"}
    assert {site.ask(peer="192.0.2.7") for _ in range(20)} == {"allowed"}
    assert site.ok("pause", "gone", "--for", "1h") == "gone: paused\n"
    assert site.ask("/gone") == "allowed"
    assert "login: paused for everybody, 3600 s left" in site.ok("list")
    site.ok("pause", "login", "--end")
    site.ok("pause", "gone", "--end")
    assert site.ask() == "denied"
    assert [site.ask(peer="192.0.2.7") for _ in range(4)] == ["allowed"] * 3 + ["denied"]
    assert site.ask("/gone") == "forbidden"


def test_a_dimension_without_a_value_is_left_alone(site: Site) -> None:
    site.ok("set", "both", "1/hour", "header:X-Key=bad", "--for", "1h")
    assert [site.ask("/x", key="bad") for _ in range(2)] == ["allowed", "denied"]
    assert [site.ask("/x", key="good") for _ in range(5)] == ["allowed"] * 5
    assert "hidden" in site.ok("list")
    done = site.run("set", "both", "1/hour", "user=7", "--for", "1h")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_what_is_wrong_is_said_in_one_line(site: Site) -> None:
    for wrong in (["set"], ["set", "login", "5/minute"], ["set", "login", "5/minute", "--for", "soon"], ["list", "x"],
                  ["set", "login", "5/minute", "--for", "0s"], ["set", "login", "5/minute", "user", "--for", "1m"],
                  ["set", "login", "5/minute", "--end"], ["pause", "login"], ["pause", "--for", "1m"],
                  ["set", "login", "5/minute", "--for", "900d"]):
        done = site.run(*wrong)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), wrong
    for wrong in (["set", "login", "5/minuet", "--for", "1m"], ["set", "nobody", "5/minute", "--for", "1m"],
                  ["set", "login", "5/minute; 9/hour", "--for", "1m"], ["pause", "nobody", "--for", "1m"]):
        done = site.run(*wrong)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), wrong
    assert site.ok("list") == "none\n"


def test_nothing_is_set_where_nothing_runs(site: Site) -> None:
    for command in (["set", "login", "1/hour", "--for", "1m"], ["pause", "login", "--for", "1m"],
                    ["reset", "login", "ip=192.0.2.1"]):
        done = site.run(*command, "--store", f"shared://{site.folder}/none")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "no table yet" in done.stderr
    assert not (site.folder / "none").exists()


def test_the_65th_override_is_refused_and_a_place_that_is_over_is_used_again(site: Site) -> None:
    limiter = Limiter(policy="login", config=str(site.path), store=site.store)
    for n in range(64):
        limiter.override("1/hour", dims={"user": f"u{n}"}, seconds=1000)
    with pytest.raises(StoreError, match="64 places"):
        limiter.override("1/hour", dims={"user": "one more"}, seconds=1000)
    limiter.override(None, dims={"user": "u7"})
    limiter.override("1/hour", dims={"user": "one more"}, seconds=1000)
    assert len(site.ok("list").splitlines()) == 64


def test_python_overrides_limiters_without_a_file() -> None:
    clock = ManualClock()
    limiter = Limiter("3/minute fixed_window", store="memory://overridden", clock=clock, name="plain")
    limiter.override("1/minute fixed_window", "eve", seconds=30)
    assert [bool(limiter.hit("eve")) for _ in range(2)] == [True, False]
    assert [bool(limiter.hit("ann")) for _ in range(4)] == [True] * 3 + [False]
    assert limiter.peek("eve").rule == "1/minute fixed_window"
    clock.advance(30)
    assert [bool(limiter.hit("eve")) for _ in range(3)] == [True, True, False]
    limiter.pause(10)
    assert all(limiter.hit("eve") for _ in range(9))
    limiter.pause(None)
    assert not limiter.hit("eve")
    limiter.override("9/minute fixed_window", seconds=10)
    assert limiter.hit("eve").remaining == 5
    clock.advance(10)
    assert not limiter.hit("eve")


def test_python_refuses_what_is_no_override() -> None:
    limiter = Limiter("3/minute", store="memory://overridden", name="wrong")
    for bad in ((), (5,), ("1/minute", "a", "b", "c", "d", "e", "f", "g", "h", "i")):
        with pytest.raises(TypeError):
            limiter.override(*bad, seconds=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        limiter.override("1/minute")
    with pytest.raises(TypeError):
        limiter.override("1/minute", seconds=1, colour="red")  # type: ignore[call-arg]
    for seconds in (0, -1, float("nan"), 1e12):
        with pytest.raises(ValueError, match="seconds"):
            limiter.override("1/minute", "a", seconds=seconds)
        with pytest.raises(ValueError, match="seconds"):
            limiter.pause(seconds)
    with pytest.raises(RuleError):
        limiter.override("1/fortnight", "a", seconds=1)
    with pytest.raises(RuleError):
        limiter.override("1/minute; 2/hour", "a", seconds=1)
    small = Limiter("3/minute", store="memory://small?size=512KiB")
    with pytest.raises(tidegate.Error, match="1 MiB"):
        small.override("1/minute", "a", seconds=1)
    policy = Limiter("3/minute", store="memory://overridden", name="by", by="user")
    with pytest.raises(IdentityError):
        policy.override("1/minute", dims={"ip": "192.0.2.1"}, seconds=1)


def test_a_reload_keeps_an_override_and_what_it_has_counted(site: Site) -> None:
    site.ok("set", "login", "2/hour", "--for", "1h")
    assert site.ask() == "allowed"
    site.path.write_text(SITE.replace("rules: 3/hour", "rules: 9/hour"))
    site.gate.reload()
    assert [site.ask() for _ in range(2)] == ["allowed", "denied"]
    site.ok("set", "login", "--end")
    assert [site.ask() for _ in range(8)] == ["allowed"] * 7 + ["denied"]  # two of nine were used


@pytest.mark.parametrize("rules", ["1/hour", "1/day", "5/minute fixed_window", "deny"])
def test_a_reset_during_an_override_forgets_what_both_have_counted(site: Site, rules: str) -> None:
    assert [site.ask() for _ in range(3)] == ["allowed"] * 3
    site.ok("set", "login", rules, "--for", "1h")
    while site.ask() == "allowed":
        pass
    site.ok("reset", "login", "ip=192.0.2.1")
    if rules != "deny":
        assert site.ask() == "allowed"
        site.ok("reset", "login", "ip=192.0.2.1")
    site.ok("set", "login", "--end")
    assert [site.ask() for _ in range(4)] == ["allowed"] * 3 + ["denied"]


def test_a_reset_during_a_pause_forgets_what_was_counted_before(site: Site) -> None:
    assert [site.ask() for _ in range(4)] == ["allowed"] * 3 + ["denied"]
    site.ok("pause", "login", "--for", "1h")
    assert site.ask() == "allowed"
    site.ok("reset", "login", "ip=192.0.2.1")
    site.ok("pause", "login", "--end")
    assert [site.ask() for _ in range(4)] == ["allowed"] * 3 + ["denied"]
