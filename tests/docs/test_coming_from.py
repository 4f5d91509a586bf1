"""The pages for who comes from another limiter: both programs of a page run, and limit the same requests alike."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[2] / "docs/coming-from"
BLOCK = re.compile(r"<!-- (before|after)(?:: (\S+))? -->\n+```\w+\n(.*?)```", re.DOTALL)
SEVEN_SEARCHES = [("GET", "/search")] * 7
WSGI = """
def ask(method, path):
    from werkzeug.test import Client
    return Client(application).open(path, method=method, environ_base={"REMOTE_ADDR": "203.0.113.9"}).status_code
"""
# How a program of each page is asked: what makes its module able to answer, then one request.
ASKING = {
    "flask-limiter": "application = app\n" + WSGI,
    "slowapi": """
def ask(method, path):
    from starlette.testclient import TestClient
    return TestClient(app).request(method, path).status_code
""",
    "django-ratelimit": WSGI,
}
ASKING["fastapi-limiter"] = ASKING["slowapi"]
DJANGO = """
import django.conf
django.conf.settings.configure(
    ROOT_URLCONF="urls", ALLOWED_HOSTS=["*"], SECRET_KEY="of a test",
    CACHES={"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}, SILENCED_SYSTEM_CHECKS=["*"],
    RATELIMIT_ENABLE=True,
)
import django
django.setup()
"""
FIVE_OF_SEVEN = [200] * 5 + [429] * 2
# The requests, and what both programs answer.
CLAIMS = {
    "flask-limiter": [
        (SEVEN_SEARCHES, FIVE_OF_SEVEN),
        ([("GET", "/export")] * 3, [200, 200, 429]),
        ([("GET", "/admin/users")] * 3, [200, 200, 429]),
        ([("GET", "/health")] * 9, [200] * 9),
    ],
    "slowapi": [
        (SEVEN_SEARCHES, FIVE_OF_SEVEN),
        ([("GET", "/export")] * 3, [200, 200, 429]),
        ([("GET", "/health")] * 9, [200] * 9),
    ],
    "django-ratelimit": [
        (SEVEN_SEARCHES, FIVE_OF_SEVEN),
        ([("POST", "/login")] * 3, [200, 200, 429]),
        ([("GET", "/login")] * 5, [200] * 5),
        ([("GET", "/health")] * 9, [200] * 9),
    ],
}
CLAIMS["fastapi-limiter"] = CLAIMS["slowapi"]


def programs(page: str, which: str) -> dict[str, str]:
    found = {name or "": text for kind, name, text in BLOCK.findall((PAGES / f"{page}.md").read_text()) if kind == which}
    assert "" in found, f"{page}.md has no program marked {which}"
    return found


def script(page: str, which: str, folder: Path) -> str:
    files = programs(page, which)
    for name, text in files.items():
        if name.endswith(".yaml"):
            (folder / name).write_text(text)
    if page != "django-ratelimit":
        return files[""] + ASKING[page]
    (folder / "urls.py").write_text(files[""])
    wsgi = files.get("wsgi.py", "from django.core.wsgi import get_wsgi_application\napplication = get_wsgi_application()\n")
    return DJANGO + wsgi + ASKING[page]


@pytest.mark.parametrize("which", ["before", "after"])
@pytest.mark.parametrize("page", sorted(CLAIMS))
def test_both_programs_of_a_page_limit_the_same_requests_alike(page: str, which: str, tmp_path: Path) -> None:
    asked = [requests for requests, _ in CLAIMS[page]]
    (tmp_path / "program.py").write_text(
        script(page, which, tmp_path)
        + f"\nimport json\nprint(json.dumps([[ask(*each) for each in requests] for requests in {asked!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "TIDEGATE_STORE": "memory://"},
    )
    assert done.returncode == 0, done.stderr
    expected = [statuses for _, statuses in CLAIMS[page]]
    if page == "django-ratelimit" and which == "before":  # the page says that it answers 403
        expected = [[403 if status == 429 else status for status in statuses] for statuses in expected]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_every_page_for_who_comes_from_elsewhere_is_held_here() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == set(CLAIMS)
