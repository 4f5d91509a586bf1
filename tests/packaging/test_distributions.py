"""A source distribution from this tree, a wheel from that alone, and both used in an environment that has nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.search(r'#define TG_VERSION "([^"]+)"', (ROOT / "csrc/include/tidegate.h").read_text())[1]  # type: ignore[index]
USED = """
import tidegate
limiter = tidegate.Limiter("2/minute", store="memory://")
assert [bool(limiter.hit("a")) for _ in range(3)] == [True, True, False]
assert tidegate.__version__ == {version!r}, tidegate.__version__
print(tidegate.__file__)
"""


def run(*command: str | os.PathLike[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False,
                          env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"})
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    clone = folder / "clone"  # setuptools leaves its notes beside the sources
    run("git", "clone", "-q", ROOT, clone)
    changed = run("git", "ls-files", "--modified", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in changed:
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('../dist')", cwd=clone)
    (made,) = (folder / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, sdist)
    (made,) = folder.iterdir()
    return made


def test_the_source_distribution_holds_what_a_build_needs_and_no_more(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sdist.name == f"tidegate-{VERSION}.tar.gz"
    needed = {"setup.py", "pyproject.toml", "README.md", "CHANGELOG.md", "csrc/include/tidegate.h",
              "python/tidegate/py.typed", "python/tidegate/_core.pyi"}
    needed |= {str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/stores/redis/*.lua")}
    needed |= {str(path.relative_to(ROOT)) for path in ROOT.glob("python/ext/*.[ch]")}
    assert needed - names == set()
    assert {name for name in names if name.startswith(("tests/", "docs/", "bench/", "examples/", "fcgi/"))} == set()


def test_the_wheel_serves_every_python_from_3_11_and_holds_the_types(wheel: Path) -> None:
    assert re.fullmatch(rf"tidegate-{re.escape(VERSION)}-cp311-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        compiled = archive.read("tidegate/_core.abi3.so")
    assert {"tidegate/py.typed", "tidegate/_core.pyi", "tidegate/fastapi.py", "tidegate/flask.py"} <= set(names)
    assert all(name.startswith(("tidegate/", "tidegate-")) for name in names)
    assert b"_PyObject_GetDictPtr" not in compiled  # a name outside of the stable interface


def test_an_empty_environment_installs_the_wheel_and_counts(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True, symlinks=True)
    python = tmp_path / "env/bin/python"
    run(python, "-m", "pip", "install", "-q", "--no-index", wheel)
    used = run(python, "-c", USED.format(version=VERSION), cwd=tmp_path)
    assert used.startswith(str(tmp_path / "env"))
    listed = run(python, "-m", "pip", "show", "tidegate")
    assert "Requires: \n" in listed  # nothing at run time


def later_pythons() -> list[str]:
    """One CPython of each later minor version that is here: on the PATH, or among those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found: dict[str, str] = {}
    for minor in range(sys.version_info.minor + 1, 20):
        name = f"python3.{minor}"
        candidates = [shutil.which(name), *map(str, sorted(pyenv.glob(f"versions/3.{minor}.*/bin/{name}")))]
        says = "import sys, ensurepip; print(sys.implementation.name, getattr(sys, '_is_gil_enabled', lambda: True)())"
        for candidate in filter(None, candidates):
            done = subprocess.run([candidate, "-c", says], capture_output=True, text=True, check=False)
            if done.stdout.split() == ["cpython", "True"]:
                found.setdefault(name, candidate)
    return list(found.values())


NONE_LATER = pytest.param("", marks=pytest.mark.skip(f"no CPython after 3.{sys.version_info.minor} on the PATH or of pyenv"))
# What they need is pytest, which is Python alone and serves any version.
ON_ANY_PYTHON = ("decision", "extension", "extension_requests", "limiter", "limiter_faults")


@pytest.mark.parametrize("later", later_pythons() or [NONE_LATER], ids=lambda path: Path(path).name)
def test_the_same_wheel_passes_its_tests_under_every_later_python_that_is_here(
    later: str, wheel: Path, tmp_path: Path
) -> None:
    run(later, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    run(python, "-m", "pip", "install", "-q", "--no-index", wheel)
    assert run(python, "-c", USED.format(version=VERSION), cwd=tmp_path).startswith(str(tmp_path / "env"))
    lent = tmp_path / "lent"
    lent.mkdir()
    for package in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for top in {file.parts[0] for file in importlib.metadata.files(package) or ()}:
            if not top.endswith(".dist-info") and top not in ("..", "__pycache__"):
                (lent / top).symlink_to(Path(str(importlib.metadata.distribution(package).locate_file(top))))
    tests = [ROOT / f"tests/python/test_{name}.py" for name in ON_ANY_PYTHON]
    lending = {"PYTHONPATH": str(lent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], cwd=tmp_path,
                          env={**os.environ, **lending}, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 400, done.stdout


def test_what_the_package_says_of_itself_is_one_thing() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+)", changes, re.MULTILINE)
    assert newest and newest[1] == VERSION
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert project["requires-python"] == ">=3.11"
    assert {"fastapi", "flask", "limits"} <= set(project["optional-dependencies"])
    assert "dependencies" not in project
