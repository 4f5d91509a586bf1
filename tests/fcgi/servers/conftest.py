"""Sites as fixtures: a real server on one recipe, a limiter that can be stopped and started, an application behind."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fcgi_daemon import Daemon  # noqa: E402
from fcgi_stack import PhpFpm, free_port, php_fpm  # noqa: E402
from server_recipes import Recipe  # noqa: E402
from server_stack import PHP, Application, Place, Running, group_of  # noqa: E402

RULES = """\
store: memory://
policies:
  - name: canary
    match: {path: ["/app/tidegate-canary", "/tidegate-canary.php"]}
    rules: deny
  - name: two
    match: {path: ["/app/two", "/two.php"]}
    rules: 2/hour
    by: ip+header:X-Case
    missing_identity: shared
  - name: posts
    match: {path: ["/app/posts", "/posts.php"], methods: [POST]}
    rules: 1/hour
    by: ip+header:X-Case
    missing_identity: shared
  - {name: rest, rules: 1000000/hour}
"""


class Site:
    def __init__(self, recipe: Recipe, program: Path, folder: Path, php: Path, application: int, quick: bool = False,
                 fail_open: bool = True, changes: tuple[tuple[str, str], ...] = (), rules: str = RULES) -> None:
        self.recipe, self.program, self.folder, self.rules = recipe, program, folder, rules
        self.listen = recipe.listen.format(folder=folder, group=group_of(recipe.kind.group), php=php, port=free_port())
        self.daemons: list[Daemon] = []
        self.start_limiter()
        self.running: Running | None = None
        place = Place(folder, application, php, self.limiter.address,
                      [*(recipe.quick if quick else ()), *changes], fail_open)
        try:
            self.running = recipe.kind.start(recipe.example, place)
        except BaseException:
            self.stop()
            raise

    @property
    def limiter(self) -> Daemon:
        return self.daemons[-1]

    @property
    def server(self) -> Running:
        assert self.running
        return self.running

    def start_limiter(self) -> None:
        own = self.folder / f"d{len(self.daemons)}"
        own.mkdir()
        self.daemons.append(Daemon(self.program, own, self.rules, listen=self.listen))

    def kill_limiter(self) -> None:
        self.limiter.signal(signal.SIGKILL)
        self.limiter.wait()

    def stop(self) -> None:
        if self.running:
            self.running.stop()
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                daemon.signal(signal.SIGCONT)
                daemon.signal(signal.SIGTERM)
                try:
                    daemon.wait()
                except Exception:
                    daemon.process.kill()
                    daemon.wait()
            daemon.log_file.close()


@pytest.fixture(scope="session")
def application() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Application)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def ground() -> Iterator[Path]:
    """A folder that every server's user can read, with pages for each site."""
    path = Path(tempfile.mkdtemp(prefix="tgs-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def php(ground: Path) -> Iterator[Path]:
    if not php_fpm():
        pytest.skip("php-fpm is not installed")
    server = PhpFpm(ground / "php")
    yield server.socket
    server.stop()


@pytest.fixture(scope="module")
def build_site(
    program: Path, ground: Path, application: int, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Site]]:
    """build_site(recipe, fail_open=..., changes=...): a site that ends with the module or when its stop() is called."""
    with ExitStack() as stack:

        def build(recipe: Recipe, prepare: Callable[[Path], None] | None = None, **more: object) -> Site:
            if not recipe.kind.found():
                pytest.skip(f"{recipe.kind.program} is not installed")
            folder = Path(tempfile.mkdtemp(prefix="s", dir=ground))
            folder.chmod(0o755)
            www = folder / "www"
            www.mkdir()
            (folder / "tmp").mkdir()
            os.chmod(folder / "tmp", 0o1777)
            for name in ("index", "page", "two", "posts", "tidegate-canary"):
                (www / f"{name}.php").write_text(PHP)
            if prepare:
                prepare(folder)
            socket = request.getfixturevalue("php") if recipe.php else folder / "none.sock"
            site = Site(recipe, program, folder, socket, application, **more)  # type: ignore[arg-type]
            stack.callback(site.stop)
            return site

        yield build
