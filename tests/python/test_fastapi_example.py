"""examples/fastapi under a real uvicorn with four workers: one count for both."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fastapi"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    environment = {**os.environ, "TIDEGATE_STORE": f"shared://{tmp_path}/table?size=1MiB"}
    environment.pop("TIDEGATE_ENABLED", None)
    command = [sys.executable, "-m", "uvicorn", "--workers", "4", "--app-dir", str(EXAMPLE), "app:app"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--fd", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        number = listener.getsockname()[1]
        wait_for_workers(number, server, tmp_path / "log")
        yield number
    finally:
        server.terminate()
        server.wait(20)
        listener.close()


def wait_for_workers(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until all are up and two have answered: what the count is worth is seen only where several take part."""
    workers: set[int] = set()
    deadline = time.monotonic() + 60
    while len(workers) < 2:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        if log.read_text().count("Application startup complete") == 4:
            workers.add(json.loads(ask(port, "GET", "/search?q=word")[2])["worker"])
        else:
            time.sleep(0.05)


def ask(port: int, method: str, path: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    """On a connection of its own, so that any worker may take it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


@pytest.mark.fault("R154")
def test_four_uvicorn_workers_admit_the_limit_exactly_and_count_remaining_down(port: int) -> None:
    answers = [ask(port, "POST", "/password/reset") for _ in range(20)]
    assert Counter(status for status, _, _ in answers) == {200: 5, 429: 15}
    assert [headers["X-RateLimit-Remaining"] for _, headers, _ in answers] == ["4", "3", "2", "1", "0"] + ["0"] * 15
    refused = answers[-1]
    assert 0 < int(refused[1]["Retry-After"]) <= 3600
    assert json.loads(refused[2])["code"] == "RATE_LIMITED"


def test_the_examples_own_tests_pass_where_it_lies() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEGATE_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=EXAMPLE, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr
