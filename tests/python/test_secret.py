"""The secret under which values in keys are hashed, and kinds that are private: the same meaning from the rules file, the
environment and a file, shown nowhere, and what is said where two machines could differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidegate import ConfigError, Gate, Limiter, StoreError

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from server import Server, server

SECRET = "correct horse battery staple"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
POLICY = "policies: [{name: a, rules: 5/hour, by: [user]}]\n"


@pytest.fixture(scope="module")
def server_of_all() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture
def redis(server_of_all: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.delenv("TIDEGATE_SECRET", raising=False)
    server_of_all("FLUSHALL")
    return server_of_all


def rules(folder: Path, text: str) -> Path:
    path = folder / "rules.yaml"
    path.write_text(text + POLICY)
    return path


def ask(gate: Gate, user: str = "ann") -> str:
    return str(gate.judge_wsgi({"REQUEST_METHOD": "GET", "PATH_INFO": "/"}, user=user).outcome)


def key_of(redis: Server) -> str:
    (key,) = redis.keys()
    redis("FLUSHALL")
    return key


def test_the_secret_means_the_same_from_the_file_the_environment_and_a_file_of_its_own(
    redis: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "secret"
    kept.write_text(SECRET + "\n")
    kept.chmod(0o600)
    keys = []
    for named in [f'secret: "{SECRET}"\n', f"secret: '@{kept}'\n", "secret: ${SITE_SECRET}\n", ""]:
        monkeypatch.setenv("SITE_SECRET", SECRET)
        if not named:
            monkeypatch.setenv("TIDEGATE_SECRET", SECRET)
        gate = Gate(rules(tmp_path, named), store=redis.patient)
        assert ask(gate) == "allowed"
        del gate
        keys.append(key_of(redis))
    monkeypatch.setenv("TIDEGATE_SECRET", f"@{kept}")
    Limiter("5/hour", name="a", store=redis.patient).hit(dims={"user": "ann"})
    keys.append(key_of(redis))
    assert len({key.split("{")[0] for key in keys}) == 1
    monkeypatch.setenv("TIDEGATE_SECRET", "another that is long enough")
    Limiter("5/hour", name="a", store=redis.patient).hit(dims={"user": "ann"})
    assert key_of(redis).split("{")[0] != keys[0].split("{")[0]


def test_a_secrets_file_that_others_can_read_is_refused_and_so_is_none(redis: Server, tmp_path: Path) -> None:
    kept = tmp_path / "secret"
    kept.write_text(SECRET)
    kept.chmod(0o640)
    with pytest.raises(StoreError, match="0640, expected .* 0600") as caught:
        Gate(rules(tmp_path, f"secret: '@{kept}'\n"), store=redis.patient)
    assert SECRET not in str(caught.value)
    kept.chmod(0o600)
    for text in ["", "x" * 128, "a\0b"]:
        kept.write_text(text)
        with pytest.raises(ConfigError, match="one line of 1 to 127 bytes"):
            Gate(rules(tmp_path, f"secret: '@{kept}'\n"), store=redis.patient)
    with pytest.raises(ConfigError, match="secret's file"):
        Gate(rules(tmp_path, f"secret: '@{tmp_path}/none'\n"), store=redis.patient)
    with pytest.raises(ConfigError, match=r"SITE_SECRET_OF_NOBODY.*not set"):
        Gate(rules(tmp_path, "secret: ${SITE_SECRET_OF_NOBODY}\n"), store=redis.patient)
    with pytest.raises(ConfigError, match="at most 127 bytes") as caught_long:
        Gate(rules(tmp_path, f"secret: {'hunter2' * 20}\n"), store=redis.patient)
    assert "hunter2" not in str(caught_long.value)


def test_private_kinds_are_hashed_in_keys_and_hidden_where_identities_are_shown(
    redis: Server, tmp_path: Path, make: Callable[[str], None], build: Path
) -> None:
    make("programs")
    path = rules(tmp_path, f'secret: "{SECRET}"\nprivate: user\n')
    gate = Gate(path, store=redis.patient)
    assert ask(gate, "ann@example.org") == "allowed"
    (key,) = redis.keys()
    assert "ann" not in key and "{user=#" in key
    environment = {**CLEAN, "TIDEGATE_CONFIG": str(path), "TIDEGATE_STORE": redis.patient}

    def told(*words: str) -> str:
        done = subprocess.run([build / "bin" / "tidegate", *words], capture_output=True, text=True, env=environment, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = told("explain", "--request", "GET /", "--user", "ann@example.org")
    said += told("set", "a", "1/hour", "--user", "ann@example.org", "--for", "10m") + told("list") + told("stats")
    assert "hidden, 15 bytes" in said
    assert "example.org" not in said and SECRET not in said
    kept = redis("GET", "tg1:{tidegate}:overrides")
    assert isinstance(kept, bytes) and b"example" not in kept
    with pytest.raises(ConfigError, match="rules.yaml:1:.*expected ip, user"):
        Gate(rules(tmp_path, "private: [ip, header:X-Key]\n"), store=redis.patient)


def test_neither_secret_nor_private_kinds_change_while_running(redis: Server, tmp_path: Path) -> None:
    path = rules(tmp_path, f'secret: "{SECRET}"\n')
    gate = Gate(path, store=redis.patient)
    for text in ['secret: "another that is long enough"\n', f'secret: "{SECRET}"\nprivate: user\n', ""]:
        rules(tmp_path, text)
        with pytest.raises(ConfigError, match="can change while running") as caught:
            gate.reload()
        assert "another that" not in str(caught.value)
    rules(tmp_path, f'secret: "{SECRET}"\n')
    gate.reload()
    assert ask(gate) == "allowed"


def test_one_store_is_not_opened_under_two_secrets_in_one_process(redis: Server, tmp_path: Path) -> None:
    store = f"{redis.patient}&connections=3"  # no other test's
    limiter = Limiter("5/hour", name="a", store=store)
    with pytest.raises(ConfigError, match="open in this process with another secret") as caught:
        Gate(rules(tmp_path, f'secret: "{SECRET}"\n'), store=store)
    assert SECRET not in str(caught.value)
    assert limiter.hit("a")


def test_check_warns_where_two_machines_could_differ_and_of_a_secret_that_is_guessed(
    tmp_path: Path, make: Callable[[str], None], build: Path
) -> None:
    make("programs")

    def codes(text: str, store: str, **environment: str) -> list[str]:
        done = subprocess.run(
            [build / "bin" / "tidegate", "check", rules(tmp_path, text), "--json", "--store", store],
            capture_output=True, text=True, env={**CLEAN, **environment}, timeout=30, check=False,
        )  # fmt: skip
        assert SECRET not in done.stdout + done.stderr
        return [warning["code"] for warning in json.loads(done.stdout)[0]["warnings"]]

    assert codes("", "redis://127.0.0.1:1") == []  # kept in Redis, one for all
    assert codes("", "redis://127.0.0.1:1", TIDEGATE_SECRET=SECRET) == ["secret-apart"]
    assert codes("", "tiered+redis://127.0.0.1:1", TIDEGATE_SECRET=SECRET) == ["secret-apart"]
    assert codes("", "shared://site", TIDEGATE_SECRET=SECRET) == []
    assert codes("secret: ${TIDEGATE_SECRET}\n", "redis://127.0.0.1:1", TIDEGATE_SECRET=SECRET) == []
    assert codes("secret: ${TIDEGATE_SECRET}\n", "redis://127.0.0.1:1", TIDEGATE_SECRET="short") == ["secret-short"]
