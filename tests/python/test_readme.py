"""Every example of the README is taken out of it and run as printed, on the real servers that it names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- (example|run): (\w+) ?(\S*) -->\n```\w+\n(.*?)```", re.DOTALL)
Answers = list[tuple[int, dict[str, str], str]]


def blocks(example: str) -> tuple[dict[str, str], list[str]]:
    """The files of one example by name, and its commands."""
    files, commands = {}, []
    for kind, name, file, text in BLOCK.findall((ROOT / "README.md").read_text()):
        if name == example and kind == "example":
            files[file] = text
        elif name == example:
            commands += text.splitlines()
    assert files and commands, f"the README has no whole example marked {example}"
    return files, commands


def run(
    folder: Path,
    build: Path,
    example: str,
    port: int,
    requests: list[tuple[str, str]],
    more_commands: tuple[str, ...] = (),
    more_files: Mapping[str, str] = MappingProxyType({}),
) -> Answers:
    files, commands = blocks(example)
    for name, text in files.items():
        (folder / name).write_text(text)
    asked = {
        "folder": str(folder),
        "path": f"{build}/bin:{ROOT}/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "commands": [*commands, *more_commands],
        "port": port,
        "requests": requests,
        "files": dict(more_files),
    }
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:
        namespaces.append("--map-root-user")
    if subprocess.run([*namespaces, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system gives no namespaces to run the README in")
    done = subprocess.run(
        [*namespaces, str(ROOT / ".venv/bin/python"), str(ROOT / "tests/python/own_world.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    log = folder / "log"
    assert done.returncode == 0, f"{done.stderr}\n{log.read_text() if log.exists() else ''}"
    return [tuple(answer) for answer in json.loads(done.stdout)]


def assert_limited_to_five(answers: Answers) -> None:
    assert [status for status, _, _ in answers] == [200] * 5 + [429] * 2
    assert [fields["x-ratelimit-remaining"] for _, fields, _ in answers[:5]] == ["4", "3", "2", "1", "0"]
    for _, fields, body in answers[5:]:
        assert re.fullmatch(r"[1-9][0-9]?", fields["retry-after"]) and int(fields["retry-after"]) <= 60
        assert json.loads(body)["code"] == "RATE_LIMITED"
        assert json.loads(body)["retry_after"] == int(fields["retry-after"])


def test_the_fastapi_example_of_the_readme_limits_as_it_says(tmp_path: Path, build: Path) -> None:
    answers = run(tmp_path, build, "fastapi", 8000, [("GET", f"/search?q={n}") for n in range(7)])
    assert_limited_to_five(answers)
    assert json.loads(answers[2][2]) == {"q": "2"}


def test_the_flask_example_of_the_readme_limits_as_it_says(tmp_path: Path, build: Path) -> None:
    answers = run(tmp_path, build, "flask", 8000, [("POST", "/login")] * 7)
    assert_limited_to_five(answers)
    assert json.loads(answers[0][2]) == {"welcome": True}


def test_the_nginx_example_of_the_readme_limits_as_it_says(
    tmp_path: Path, build: Path, make: Callable[..., None]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("nginx gives its workers a user of their own: needs root")
    make("programs")
    shutil.copy("/etc/nginx/fastcgi_params", tmp_path)
    (tmp_path / "nginx.conf").write_text(
        f"user www-data; pid /run/nginx.pid; error_log {tmp_path}/error.log;\n"
        "events { worker_connections 64; }\n"
        f"http {{ access_log off; include /etc/nginx/mime.types; include {tmp_path}/tidegate.conf; }}\n"
    )
    wait = "until [ -S /run/tidegate.sock ]; do sleep 0.05; done"
    answers = run(
        tmp_path,
        build,
        "nginx",
        8080,
        [("GET", "/downloads/tide.txt")] * 2 + [("GET", "/downloads/")] * 3 + [("GET", "/downloads/tide.html")] * 2,
        more_commands=(f"{wait}; exec nginx -c {tmp_path}/nginx.conf -g 'daemon off;'",),
        more_files={"/srv/www/downloads/tide.txt": "high water\n", "/srv/www/downloads/index.html": "tides\n"},
    )
    assert_limited_to_five(answers)
    assert [body for _, _, body in answers[:5]] == ["high water\n"] * 2 + ["tides\n"] * 3
    assert all(fields["content-type"] == "application/json" for _, fields, _ in answers[5:])
    assert "unexpected status" not in (tmp_path / "error.log").read_text()


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    pages = [ROOT / name for name in listed.splitlines()] or [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    broken = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_page_that_the_documentation_names_in_passing_exists() -> None:
    """Pages are named as `docs/x.md` far more often than linked."""
    broken = []
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/**/README.md")]:
        if "site-packages" in page.parts or ".venv" in page.parts:
            continue
        for target in re.findall(r"`((?:docs|csrc|tests|examples|fcgi|python|bench)/[\w./-]+\.\w+)`", page.read_text()):
            if not (ROOT / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    for page in (ROOT / "docs").rglob("*.md"):  # by its name alone, of which docs/conf.py makes a link
        for target in re.findall(r"`([a-z][a-z-]*\.md)`", page.read_text()):
            if not (ROOT / "docs" / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
