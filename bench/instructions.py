"""Counts the instructions of one decision with callgrind: unlike a time, the same on every run.

    python bench/instructions.py build/bench/c_decision [--json]

Each row is run twice, with different numbers of calls; what start and end take falls out of the difference. The
kernel's part is not seen; the clock is read without it (vDSO), which valgrind replaces by a call of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile

ROWS = (
    "clock",
    "one_rule",
    "two_rules",
    "three_rules",
    "denied",
    "peek",
    "fixed_window",
    "sliding_counter",
    "sliding_log",
    "sliding_log_denied",
    "gate",
    "gate_long_way",
)
FEW, MANY = 2000, 22000


def instructions(program: str, row: str, calls: int) -> int:
    with tempfile.NamedTemporaryFile() as out:
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out.name}", program, "--only", row, str(calls)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or not found:
        raise SystemExit(f"{row}: exit {done.returncode}\n{done.stderr}")
    return int(found.group(1))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("program")
    arguments.add_argument("--json", action="store_true")
    asked = arguments.parse_args()
    counted = {
        row: round((instructions(asked.program, row, MANY) - instructions(asked.program, row, FEW)) / (MANY - FEW), 1)
        for row in ROWS
    }
    if asked.json:
        print(json.dumps(counted))
    else:
        for row, count in counted.items():
            print(f"{row:20} {count:8.1f} instructions a call")
    return 0


if __name__ == "__main__":
    sys.exit(main())
