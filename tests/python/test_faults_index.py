"""docs/faults.md names a test for each fault; each exists, and in a run of all tests each has run and passed.

Runs last (conftest sees to it). In a run of some tests, those that were chosen must not have failed.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/faults.md"
ROW = re.compile(r"^\| ([RF]\d+) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w./-]+::\w+)`")
# Rows that are held so far. What needs charging by outcome, header settings, concurrency limits or the command
# line joins when that is there.
WANTED = """
R02 R04 R05 R07 R08
R10 R11 R13 R16 R17 R19
R22 R25 R26 R28 R29 R31 R32 R34
R37 R38 R40 R41 R43 R44 R46 R47 R49 R50 R52
R53 R55 R56 R58 R59 R61 R62 R64 R65 R67 R68 R70
R01 R35 R130 R131 R133 R134 R136 R137 R139 R140 R142 R143 R145 R146 R148 R149 R151 R152
R71 R73 R74 R76 R77 R79 R80 R82
R83 R85 R86 R88 R89 R91
R92 R94 R95 R97
R98 R100 R101 R103 R104 R106 R107 R109 R110 R112 R115 R116
R118 R119 R121 R122 R124 R125 R127 R128
R166 R167 R169 R170 R172 R173
R154 R155 R157 R158 R160 R161 R163
""".split()


def rows() -> dict[str, list[str]]:
    """The tests that each row names."""
    found: dict[str, list[str]] = {}
    for fault, _, _, held in ROW.findall(PAGE.read_text()):
        assert fault not in found, f"{fault} has two rows"
        found[fault] = NAMED.findall(held)
    return found


def python_tests() -> dict[str, set[str]]:
    """Every test function by its name, with the rows that its markers claim."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name.startswith("test_"):
                claimed = re.findall(r"\bfault\(([^)]*)\)", " ".join(map(ast.unparse, function.decorator_list)))
                found[f"{path.relative_to(ROOT).as_posix()}::{function.name}"] = set(
                    re.findall(r"[RF]\d+", " ".join(claimed))
                )
    return found


def c_tests() -> set[str]:
    """What a cmocka program defines, as "stores/table/test_table::name"; whether it runs shows in the outcomes."""
    test = re.compile(r"^(\w+)\(void \*\*\w+\)$", re.MULTILINE)
    found = set()
    for path in (ROOT / "tests").rglob("test_*.c"):
        program = path.relative_to(ROOT / "tests").with_suffix("").as_posix().removeprefix("c/")
        found |= {f"{program}::{name}" for name in test.findall(path.read_text())}
    return found


def without_class(nodeid: str) -> str:
    """pytest's own name of a method has its class in the middle; the page leaves it out."""
    parts = nodeid.split("::")
    return f"{parts[0]}::{parts[-1]}"


def test_every_row_that_is_due_is_there_and_names_a_test() -> None:
    found = rows()
    assert set(WANTED) <= set(found)
    assert [fault for fault, tests in found.items() if not tests] == []
    for section in PAGE.read_text().split("\n## ")[1:]:
        order = [int(fault[1:]) for fault, *_ in ROW.findall(section)]
        assert order == sorted(order), section.splitlines()[0]


def test_every_test_that_the_page_names_exists() -> None:
    known = set(python_tests()) | c_tests()
    named = {test for tests in rows().values() for test in tests}
    assert sorted(named - known) == []


def test_every_test_that_claims_a_row_is_named_there() -> None:
    found = rows()
    missing = [
        f"{fault}: {test}"
        for test, claims in python_tests().items()
        for fault in claims
        if fault in found and test not in found[fault]
    ]
    assert missing == []


@pytest.mark.parametrize("fault", [*rows()] if PAGE.exists() else [])
def test_the_tests_of_a_row_ran_and_passed(fault: str, outcomes: object) -> None:
    seen: dict[str, set[str]] = {}
    for name, results in outcomes.by_name.items():  # type: ignore[attr-defined]
        seen.setdefault(without_class(name), set()).update(results)
    for test in rows()[fault]:
        ran = seen.get(test, set())
        assert "failed" not in ran, f"{test} failed"
        if outcomes.whole and os.geteuid() == 0:  # type: ignore[attr-defined]
            assert "passed" in ran, f"{test} {'was skipped' if ran else 'did not run'}"
