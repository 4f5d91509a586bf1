"""A tidegate-fcgi for tests: started in a folder of its own, ended by its pid, its log at hand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "redis")]
from server import Lateness, free_port  # noqa: E402

RULES = """\
store: memory://
policies:
  - name: small
    match: {path: /small}
    rules: 2/hour
  - name: closed
    match: {path: /closed}
    rules: deny
  - name: keyed
    match: {path: /keyed}
    rules: 2/hour
    by: header:X-Api-Key
  - name: big
    match: {path: /big}
    rules: 1000000/hour
"""


def wait_for(condition: Callable[[], object], seconds: float = 20.0, what: str = "condition") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.005)


@contextlib.contextmanager
def within(seconds: float, least: float = 0.0) -> Iterator[None]:
    """What is done there takes no longer, but for what the machine was late."""
    with Lateness() as late:
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        assert took > least, f"{took} s, more than {least} expected"
        assert late.allows(took, seconds), f"{took} s, at most {seconds} expected"


class Daemon:
    def __init__(self, program: Path, folder: Path, rules: str = RULES, *options: str, listen: str | None = None,
                 ready: bool = True, **popen: object) -> None:
        self.folder = folder
        self.rules = folder / "rules.yaml"
        self.rules.write_text(rules)
        self.address = listen or f"unix:{folder}/tidegate.sock"
        self.log_path = folder / "log"
        self.log_file = self.log_path.open("ab")
        command = [str(program), "--config", str(self.rules), *options]
        if listen != "":
            command += ["--listen", self.address]
        self.address = self.address.partition(",")[0]
        self.process = subprocess.Popen(
            command, **{"stdin": subprocess.DEVNULL, "stderr": self.log_file, **popen},  # type: ignore[call-overload]
        )
        if ready:
            try:
                wait_for(lambda: "listening" in self.log() or self.process.poll() is not None, what="listening")
            except AssertionError:
                self.process.kill()
                raise
            assert self.process.poll() is None, self.log()
            if self.address.endswith(":0"):
                line = next(line for line in self.log().splitlines() if "listening: tcp:" in line)
                self.address = line.partition("listening: ")[2]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def lines(self, code: str) -> list[str]:
        return [line for line in self.log().splitlines() if f": {code}: " in line]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 20.0) -> int:
        return self.process.wait(seconds)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def reload(self) -> str:
        """SIGHUP; the line it wrote."""
        before = len(self.log().splitlines())
        self.signal(signal.SIGHUP)

        def said() -> list[str]:
            return [line for line in self.log().splitlines()[before:] if ": rules-re" in line]

        wait_for(said, what="reload")
        return said()[0]

    def resident_kb(self) -> int:
        """Of its own: pages of its program and libraries come and go as the machine has room for them."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1])

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))
