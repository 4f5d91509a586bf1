"""The budgets of the project, measured: `make bench`.

    python bench/table.py [BUILD_FOLDER] [--quick] [--json]

Every number comes from a program of this folder and is a median over interleaved rounds. Nothing fails here: a budget
is printed as met or missed. Must not enter: measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

HERE = Path(__file__).resolve().parent


@dataclass
class Budget:
    what: str
    measured: float
    at_most: float | None = None
    at_least: float | None = None
    aim: float | None = None
    unit: str = "x"

    @property
    def met(self) -> bool:
        return (self.at_most is None or self.measured <= self.at_most) and (
            self.at_least is None or self.measured >= self.at_least
        )

    def cells(self) -> list[str]:
        sign, bound = ("≤", self.at_most) if self.at_most is not None else ("≥", self.at_least)
        aim = "" if self.aim is None else f"{self.aim:.3g}"
        return [
            self.what,
            f"{self.measured:.3g} {self.unit}",
            f"{sign} {bound:.3g}",
            aim,
            "met" if self.met else "MISSED",
        ]


def run(*command: object) -> str:
    print(f"  {' '.join(Path(str(word)).name for word in command[:2])} …", file=sys.stderr, flush=True)
    done = subprocess.run(
        [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{command[0]}: exit {done.returncode}")
    return done.stdout


def c_rows(build: Path, rounds: int) -> dict[str, dict[str, float]]:
    table = {}
    for line in run(build / "bench/c_decision", "--rounds", rounds).splitlines():
        name, ns, ratio = line.split()
        table[name] = {"ns": float(ns), "ratio": float(ratio)}
    return table


def python_rows(build: Path, rounds: int) -> dict[str, dict[str, float]]:
    return rows_of("python_decision.py", build / "bench", "--rounds", rounds)


def faces_rows(quick: bool) -> dict[str, dict[str, float]]:
    return rows_of("python_faces.py", *(["--quick"] if quick else []))


def fcgi_rows(build: Path, rounds: int) -> dict[str, dict[str, float]]:
    return rows_of("fcgi_nginx.py", build, "--rounds", rounds)


def cgi_rows(build: Path, rounds: int) -> float:
    """What tidegate-cgi takes to what a program takes that prints a constant; both as a server starts them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rules = Path(folder) / "rules.yaml"
        rules.write_text(f"store: shared://{folder}/t\npolicies: [{{name: bench, rules: 10000000000/day token_bucket}}]\n")
        run(build / "bin" / "tidegate", "compile", rules)
        asked = {"REQUEST_METHOD": "GET", "REQUEST_URI": "/", "REMOTE_ADDR": "127.0.0.1", "TIDEGATE_CONFIG": str(rules)}
        done = subprocess.run(
            [build / "bench" / "cgi_spawn", str(rounds), build / "bench" / "cgi_constant", build / "bin" / "tidegate-cgi"],
            env=asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
        )
    return float(done.stdout.splitlines()[1].split()[2])


def rows_of(script: str, *arguments: object) -> dict[str, dict[str, float]]:
    return cast(dict[str, dict[str, float]], json.loads(run(sys.executable, HERE / script, *arguments, "--json")))


def others(python: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """What admits, of the two libraries that the budget names."""
    return {
        row: numbers
        for row, numbers in python.items()
        if row.startswith(("limits ", "throttled-py ")) and "denied" not in row
    }


def budgets(
    c: dict[str, Any], python: dict[str, Any], faces: dict[str, Any], fcgi: dict[str, Any], cgi: float
) -> list[Budget]:
    ours = python["tidegate token_bucket"]
    fastest = min(others(python), key=lambda row: python[row]["ns"])
    hit, twin = c["one_rule"]["ratio"], c["three_rules"]["ratio"] / c["two_rules"]["ratio"]
    empty, theirs = ours["to_empty"], python[fastest]["to_tidegate"]
    dependency, middleware = faces["dependency"]["ratio"], faces["middleware"]["ratio"]
    return [
        Budget("C: a decision, one token-bucket rule, to one reading of the clock", hit, at_most=5, aim=3.5),
        Budget("C: a second rule, to one", c["two_rules"]["ratio"], at_most=1.5),
        Budget("C: a third rule, to two", twin, at_most=1.5),
        Budget("C: a denial, to an allowed hit", c["denied"]["ratio"], at_most=1.1),
        Budget("C: memory of a logged hit", c["logged_hit_bytes"]["ns"], at_most=16, unit="bytes"),
        Budget("Python: a hit with its Decision, to an empty C method", empty, at_most=250 / 31, aim=180 / 31),
        Budget(f"Python: how many hits in the time of one of {fastest}", theirs, at_least=35, aim=50),
        Budget(
            "FastAPI: a dependency and header fields, to an empty async dependency",
            dependency,
            at_most=1.06,
            aim=1.02,
        ),
        Budget("FastAPI: the middleware, to a pass-through one", middleware, at_most=1.05, aim=1.02),
        Budget("FastCGI behind nginx, answers a second, to a constant answer", fcgi["answer"]["ratio"], at_least=0.9),
        Budget(
            "FastCGI for auth_request, answers a second, to a constant answer", fcgi["auth"]["ratio"], at_least=0.9
        ),
        Budget("CGI: starting tidegate-cgi for a decision, to a C program that prints a constant", cgi, at_most=1.3),
    ]


def table(titles: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    for row in [titles, ["─" * width for width in widths], *rows]:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "   ".join(cells).rstrip())


def machine() -> str:
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    model = models[0] if models else "unknown processor"
    return f"{len(os.sched_getaffinity(0))} cores, {model}, Python {sys.version.split()[0]}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("build", nargs="?", type=Path, default=HERE.parent / "build")
    arguments.add_argument("--quick", action="store_true", help="fewer rounds: seconds instead of minutes")
    arguments.add_argument("--json", action="store_true")
    asked = arguments.parse_args()
    c = c_rows(asked.build, 11 if asked.quick else 101)
    python = python_rows(asked.build, 5 if asked.quick else 31)
    faces = faces_rows(asked.quick)
    fcgi = fcgi_rows(asked.build, 3 if asked.quick else 9)
    cgi = cgi_rows(asked.build, 200 if asked.quick else 1000)
    rows = budgets(c, python, faces, fcgi, cgi)
    if asked.json:
        found = [{**asdict(row), "met": row.met} for row in rows]
        print(
            json.dumps(
                {"machine": machine(), "budgets": found, "c": c, "python": python, "faces": faces, "fcgi": fcgi,
                 "cgi": cgi},
                indent=2,
            )
        )
        return 0
    print(f"\nBudgets ({machine()}); medians, ratios within a round\n")
    table(["what", "measured", "budget", "aim", ""], [row.cells() for row in rows])
    print("\nA decision in C, one hot key\n")
    table(["row", "ns"], [[row, f"{numbers['ns']:.1f}"] for row, numbers in c.items() if row != "logged_hit_bytes"])
    print("\nA decision from Python, in memory, one hot key\n")
    table(
        ["row", "ns", "to tidegate"],
        [
            [row, f"{numbers['ns']:.0f}", f"{numbers['to_tidegate']:.2f}"]
            for row, numbers in sorted(python.items(), key=lambda item: item[1]["ns"])
        ],
    )
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
