"""Sites as fixtures, and what stands behind them: an application over HTTP, and php-fpm."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fcgi_stack import PhpFpm, php_fpm  # noqa: E402
from server_recipes import Recipe  # noqa: E402
from server_site import Site  # noqa: E402
from server_stack import PHP, Application  # noqa: E402

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
