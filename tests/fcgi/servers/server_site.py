"""A site: one real server on one recipe, and a limiter that can be stopped and started under it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from fcgi_daemon import Daemon
from fcgi_stack import free_port
from server_recipes import Recipe
from server_stack import Place, Running, group_of

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
                except subprocess.TimeoutExpired:
                    daemon.process.kill()
                    daemon.wait()
            daemon.log_file.close()
