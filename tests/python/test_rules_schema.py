"""docs/rules.schema.json, which editors complete by, says what the parser takes: the same keys, words and bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tidegate import ConfigError, Gate

ROOT = Path(__file__).resolve().parents[2]
SCHEMA: dict[str, Any] = json.loads((ROOT / "docs/rules.schema.json").read_text())
TOP = SCHEMA["properties"]
POLICY = TOP["policies"]["items"]["properties"]
DEFAULTS = TOP["defaults"]["properties"]


def parsed(folder: Path, rules: dict[str, Any]) -> None:
    """JSON is YAML."""
    path = folder / "rules.yaml"
    path.write_text(json.dumps(rules))
    Gate(path, store="memory://schema")


def policy(**keys: Any) -> dict[str, Any]:
    whole = {"name": "a", "rules": "5/minute", **keys}
    if "plans" in keys:
        del whole["rules"]
    return {"policies": [whole]}


def words(schema: dict[str, Any]) -> list[Any]:
    found = list(schema.get("enum", []))
    for one in schema.get("anyOf", []):
        found += words(one)
    return found


def accepted() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every example and every word of the schema, each in a file of its own."""
    for key, schema in TOP.items():
        for example in schema.get("examples", []):
            yield f"{key}: {example}", {"policies": [], key: example}
    for key, schema in POLICY.items():
        for example in [*schema.get("examples", []), *words(schema)]:
            yield f"policy {key}: {example}", policy(**{key: example})
    for key, schema in DEFAULTS.items():
        for example in [*schema.get("examples", []), *words(schema)]:
            yield f"defaults {key}: {example}", {"policies": [], "defaults": {key: example}}
    for key, schema in POLICY["match"]["properties"].items():
        for example in schema["examples"]:
            yield f"match {key}: {example}", policy(match={key: example})
    for word in words(POLICY["count"]["properties"]["status"]):
        yield f"count {word}", policy(count={"status": word})


@pytest.mark.parametrize(("what", "rules"), accepted())
def test_what_the_schema_shows_the_parser_takes(tmp_path: Path, what: str, rules: dict[str, Any]) -> None:
    parsed(tmp_path, rules)


def places() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each mapping with fixed keys: what the schema says of it, and a file with an unknown key in it."""
    wrong = {"qqqqqqqqqq": 1}
    yield "file", TOP, {"policies": [], **wrong}
    yield "defaults", DEFAULTS, {"policies": [], "defaults": wrong}
    yield "policy", POLICY, policy(**wrong)
    yield "match", POLICY["match"]["properties"], policy(match=wrong)
    yield "count", POLICY["count"]["properties"], policy(count=wrong)
    yield "cost", POLICY["cost"]["anyOf"][1]["properties"], policy(cost=wrong)
    yield "texts", DEFAULTS["texts"]["properties"], policy(texts=wrong)
    yield "statuses", DEFAULTS["statuses"]["properties"], policy(statuses=wrong)
    yield "log_decisions", DEFAULTS["log_decisions"]["anyOf"][1]["properties"], policy(log_decisions=wrong)


@pytest.mark.parametrize(("place", "properties", "rules"), places())
def test_the_schema_knows_every_key_that_the_parser_knows_and_no_other(
    tmp_path: Path, place: str, properties: dict[str, Any], rules: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as wrong:
        parsed(tmp_path, rules)
    listed = re.search(r"expected (.*)", str(wrong.value))
    assert listed, wrong.value
    assert set(re.split(r", | or ", listed[1])) == set(properties)


@pytest.mark.parametrize("key", [key for key, schema in POLICY.items() if words(schema)])
def test_the_parser_takes_no_word_that_the_schema_does_not_have(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        parsed(tmp_path, policy(**{key: "qqqqqqqqqq"}))
    listed = re.search(r"expected (.*)", str(wrong.value))
    assert listed
    scalars = POLICY[key].get("enum") or POLICY[key]["anyOf"][0]["enum"]
    assert set(re.split(r", | or ", listed[1])) | {"none"} == set(scalars) | {"none"}


@pytest.mark.parametrize(
    "rules",
    [
        policy(statuses={"denied": 399}), policy(statuses={"denied": 600}), policy(count={"status": 99}),
        policy(count={"status": 600}), policy(cost=10**10 + 1), policy(cost=-1), policy(match={}), policy(also="yes"),
        policy(name="a b"), policy(name="a" * 65), policy(texts={"denied": "x" * 201}), policy(headers=[]),
        policy(log_decisions={"what": "all", "sample": 0}), policy(cost={"header": "X"}), {"defaults": {}}, {},
        {"policies": [{"rules": "1/s"}]}, {"policies": [{"name": "a"}]},
        {"policies": [], "unmatched": {"rules": "1/s", "match": {"path": "/"}}},
    ],
)  # fmt: skip
def test_the_schemas_bounds_are_the_parsers(tmp_path: Path, rules: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parsed(tmp_path, rules)


def test_the_parser_takes_what_lies_just_within_the_bounds(tmp_path: Path) -> None:
    parsed(tmp_path, policy(statuses={"denied": 400, "forbidden": 599}, cost=10**10, name="a" * 64))
    parsed(tmp_path, policy(texts={"denied": "x" * 200}, count={"status": [100, 599]}))
