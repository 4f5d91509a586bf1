"""Daemons as fixtures. Each lives in a private folder and ends with its test."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # client.py and fcgi_daemon.py

from fcgi_daemon import RULES, Daemon  # noqa: E402


@pytest.fixture(scope="session")
def program(make: Callable[[str], None], build: Path) -> Path:
    """build/bin/tidegate-fcgi, up to date."""
    make("programs")
    return build / "bin" / "tidegate-fcgi"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a short name: a socket's path has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="tgf-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start(program: Path, folder: Path) -> Iterator[Callable[..., Daemon]]:
    """start(rules, *options, listen=None): a daemon that ends with the test, and must not have died before."""
    daemons: list[Daemon] = []

    def run(rules: str = RULES, *options: str, **more: object) -> Daemon:
        own = folder / f"d{len(daemons)}"
        own.mkdir()
        daemon = Daemon(program, own, rules, *options, **more)  # type: ignore[arg-type]
        daemons.append(daemon)
        return daemon

    yield run
    for daemon in daemons:
        if daemon.process.poll() is None:
            daemon.signal(signal.SIGTERM)
            try:
                assert daemon.wait() == 0, daemon.log()
            finally:
                if daemon.process.poll() is None:
                    daemon.process.kill()
                    daemon.wait()
        daemon.log_file.close()


@pytest.fixture
def daemon(start: Callable[..., Daemon]) -> Daemon:
    """One with the rules above."""
    return start()
