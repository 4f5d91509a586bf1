"""`make setup`: what it does on a machine that has everything, and on one that has nothing."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "dirname", "cat", "tr", "readlink", "env")


@pytest.fixture
def bare() -> Iterator[Path]:
    """A copy of the script, readable by anyone, beside a bin/ where no package is installed and there is no sudo."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-setup-"))
    folder.chmod(0o755)
    shutil.copytree(ROOT / ".ci", folder / "tree/.ci")
    (folder / "tree").chmod(0o555)  # no .venv can be made in it
    (folder / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool, path="/usr/bin:/bin")
        assert found
        (folder / "bin" / tool).symlink_to(found)
    stub(folder, "dpkg-query", "printf 'gcc\\trc \\n'")  # removed, its settings left: not installed
    yield folder
    (folder / "tree").chmod(0o755)
    shutil.rmtree(folder)


def stub(bare: Path, name: str, script: str) -> None:
    path = bare / "bin" / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def setup(bare: Path, purpose: str) -> subprocess.CompletedProcess[str]:
    nobody = ["/usr/bin/setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    setpriv = nobody if os.geteuid() == 0 else []
    return subprocess.run(
        [*setpriv, "/bin/bash", str(bare / "tree/.ci/setup"), purpose],
        env={"PATH": str(bare / "bin")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_setup_takes_less_than_a_second_and_says_nothing_when_everything_is_there() -> None:
    started = time.monotonic()
    done = subprocess.run([ROOT / ".ci/setup", "test"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - started < 1


def test_without_root_and_sudo_setup_prints_one_apt_line_and_stops(bare: Path) -> None:
    done = setup(bare, "demo")
    assert done.returncode != 0
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith("apt-get install ")
    assert {"gcc", "libsodium-dev", "nginx-light"} <= set(done.stdout.split())
    assert not {"valgrind", "libcmocka-dev"} & set(done.stdout.split()), "the demo needs no test tools"


def test_packages_are_installed_without_their_services_being_started(bare: Path) -> None:
    stub(bare, "sudo", f'cat > /dev/null; echo "$*" >> {bare}/said/sudo')
    (bare / "said").mkdir(mode=0o777)
    (bare / "said").chmod(0o777)
    setup(bare, "demo")  # stops after the packages: there is no room for a .venv
    said = (bare / "said/sudo").read_text().splitlines()
    install = next(i for i, line in enumerate(said) if "apt-get install" in line)
    assert "DEBIAN_FRONTEND=noninteractive" in said[install]
    assert "tee /usr/sbin/policy-rc.d" in said[:install]
    assert "rm -f /usr/sbin/policy-rc.d" in said[install:]


PIP = """\
[[ $1 == -c ]] && exit
[[ $2 == pip ]] || exit 9
[[ $* == *-qq* ]] || printf '%s\\n' 'Collecting one>=1 (from -r list)' \\
    '  Downloading https://a.test/b/one-1-py3-none-any.whl (5 kB)' 'Installing collected packages: one'
echo "said: $*" >> "${0%/*}/said"
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_on_a_terminal_setup_shows_in_one_line_what_pip_does_and_elsewhere_it_is_quiet(
    bare: Path, terminal: bool
) -> None:
    (bare / "tree").chmod(0o755)
    all_there = "while read -r name _; do printf '%s\\tii \\n' \"$name\"; done < "
    stub(bare, "dpkg-query", f"{all_there}{bare}/tree/.ci/packages.txt")
    (bare / "tree/.venv/bin").mkdir(parents=True)
    (bare / "bin/python").symlink_to(bare / "tree/.venv/bin/python")
    stub(bare, "python", PIP)
    ours, theirs = pty.openpty()
    done = subprocess.run(
        ["/bin/bash", bare / "tree/.ci/setup", "demo"], env={"PATH": str(bare / "bin")}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=theirs if terminal else subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(theirs)
    said = os.read(ours, 65536).decode().replace("\r\n", "\n") if terminal else done.stderr
    os.close(ours)
    assert done.returncode == 0 and done.stdout == ""
    first, _, rest = said.partition("\n")
    assert first == "setup: installing .ci/requirements.txt into .venv, which takes a minute or two"
    steps = ["looking for one>=1", "downloading one-1-py3-none-any.whl (5 kB)", "putting it all into .venv"]
    assert rest == ("".join(f"\r\033[Ksetup:   {step}" for step in steps) + "\r\033[K" if terminal else "")
    assert "--requirement .ci/requirements.txt" in (bare / "tree/.venv/bin/said").read_text()


def test_make_reads_its_file_without_any_tool_that_setup_installs(tmp_path: Path) -> None:
    for tool in ("bash", "sh", "find", "grep", "sed", "expand"):
        found = shutil.which(tool, path="/usr/bin:/bin")
        assert found
        (tmp_path / tool).symlink_to(found)
    make = shutil.which("make")
    assert make
    for arguments in (["help"], ["--dry-run", "setup"]):
        done = subprocess.run(
            [make, "-C", ROOT, *arguments], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
