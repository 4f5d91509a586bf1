"""The fuzz targets, for a moment each and always from the same seed: that they still build, and find nothing at once.
`make fuzz` lets them search."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = sorted(path.stem for path in (ROOT / "tests/fuzz").glob("fuzz_*.c"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_fuzz_target_finds_nothing_in_its_first_inputs(
    target: str, tmp_path: Path, build: Path, make: Callable[..., None]
) -> None:
    program = build / "fuzz" / target
    make(str(program))
    kept = ROOT / "tests/fuzz/corpus" / target.removeprefix("fuzz_")
    known = [tmp_path / "new", kept] if kept.exists() else []
    for folder in known[:1]:
        folder.mkdir()
    done = subprocess.run(
        [program, *known, "-seed=1", "-runs=20000", "-max_total_time=20", f"-artifact_prefix={tmp_path}/"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-10000:]
