"""The site: it builds, and no public name is without a text."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs/site"))

import api_page  # noqa: E402


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", tmp_path / "trees", ROOT / "docs",
         tmp_path / "html"],
        capture_output=True, text=True, check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for page in ("index", "api", "fastapi", "flask", "coming-from/slowapi"):
        assert (tmp_path / "html" / f"{page}.html").is_file()
    assert "hit_async" in (tmp_path / "html/api.html").read_text()


def test_every_page_can_be_reached_from_the_first_one() -> None:
    listed = {line.strip() for line in (ROOT / "docs/index.md").read_text().splitlines()}
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - listed - {"index", "README", "site/README"} == set()


@pytest.mark.parametrize("module", api_page.MODULES)
def test_every_public_name_has_a_text(module: str) -> None:
    bare = []
    for name in api_page.public_names(module):
        thing = getattr(importlib.import_module(module), name)
        if not inspect.getdoc(thing):
            bare.append(name)
        if inspect.isclass(thing):
            bare += [f"{name}.{member}" for member, value in vars(thing).items()
                     if not member.startswith("_") and not inspect.ismemberdescriptor(value) and not inspect.getdoc(value)]
    assert bare == []
