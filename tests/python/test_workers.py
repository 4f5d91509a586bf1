"""Exact totals over four workers of each server that people use, loaded before they fork and after."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from servers import Server

ASGI = """
from fastapi import Depends, FastAPI
from tidegate.fastapi import install, rate_limit

asgi = FastAPI()
install(asgi)

@asgi.get("/", dependencies=[Depends(rate_limit("9/hour"))])
async def root():
    return "ok"
"""

WSGI = """
from flask import Flask
from tidegate.flask import rate_limit

wsgi = Flask("shop")

@wsgi.get("/")
@rate_limit("9/hour")
def view():
    return "ok"
"""

FOUR = ("--workers", "4")
SERVERS = {
    "uvicorn": ("uvicorn", *FOUR, "site_app:asgi"),
    "hypercorn": ("hypercorn", *FOUR, "site_app:asgi"),
    "gunicorn sync": ("gunicorn", *FOUR, "site_app:wsgi"),
    "gunicorn sync preload": ("gunicorn", *FOUR, "--preload", "site_app:wsgi"),
    "gunicorn gthread": ("gunicorn", *FOUR, "--worker-class", "gthread", "--threads", "3", "site_app:wsgi"),
    "gunicorn gthread preload": (
        "gunicorn", *FOUR, "--worker-class", "gthread", "--threads", "3", "--preload", "site_app:wsgi",
    ),
    "gunicorn uvicorn": ("gunicorn", *FOUR, "--worker-class", "uvicorn_worker.UvicornWorker", "site_app:asgi"),
    "gunicorn uvicorn preload": (
        "gunicorn", *FOUR, "--worker-class", "uvicorn_worker.UvicornWorker", "--preload", "site_app:asgi",
    ),
}  # fmt: skip


@pytest.mark.fault("R154")
@pytest.mark.parametrize("server", list(SERVERS))
def test_four_workers_admit_the_limit_and_not_one_more_or_less(tmp_path: Path, server: str) -> None:
    (tmp_path / "site_app.py").write_text(ASGI if SERVERS[server][-1].endswith("asgi") else WSGI)
    workers = 4 if server != "hypercorn" else 1  # it tells of itself once
    with Server(tmp_path, *SERVERS[server], workers=workers) as running:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: running.ask("GET", "/"), range(40)))
    assert Counter(status for status, _, _ in answers) == {200: 9, 429: 31}, running.log.read_text()
    left = sorted(int(headers["X-RateLimit-Remaining"]) for status, headers, _ in answers if status == 200)
    assert left == list(range(9))
