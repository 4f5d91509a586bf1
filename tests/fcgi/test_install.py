"""`make install` into a folder, and what can be done with nothing but that."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {name: value for name, value in os.environ.items()
         if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS") and not name.startswith("TIDEGATE_")}


def out(*command: object, **environment: str) -> str:
    done = subprocess.run([str(word) for word in command], env={**CLEAN, **environment}, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(program: Path, build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DESTDIR's /opt/tidegate."""
    folder = tmp_path_factory.mktemp("installed")
    out("make", "-C", ROOT, "-s", "-j2", f"B={build}", "PREFIX=/opt/tidegate", f"DESTDIR={folder}", "install")
    return folder / "opt" / "tidegate"


def pkg_config(installed: Path, *options: str) -> list[str]:
    return out("pkg-config", *options, PKG_CONFIG_PATH=str(installed / "lib/pkgconfig")).split()


def test_everything_is_installed_and_nothing_outside_of_the_prefix(installed: Path) -> None:
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert {
        "bin/tidegate", "bin/tidegate-fcgi", "bin/tidegate-cgi", "include/tidegate.h", "include/tidegate_fcgx.h",
        "lib/libtidegate.a", "lib/libtidegate.so", "lib/libtidegate.so.0", "lib/pkgconfig/tidegate.pc",
        "lib/pkgconfig/tidegate-fcgx.pc", "share/man/man1/tidegate.1", "share/man/man1/tidegate-fcgi.1",
        "share/man/man1/tidegate-cgi.1", "lib/systemd/system/tidegate-fcgi.service",
        "lib/systemd/system/tidegate-fcgi.socket", "lib/tmpfiles.d/tidegate.conf", "share/doc/tidegate/fastcgi.md",
    } <= files
    assert [path.name for path in installed.parents[1].iterdir()] == ["opt"]
    for page in (installed / "share/doc/tidegate").rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
    assert os.access(installed / "share/doc/tidegate/examples/cgi/shop.cgi", os.X_OK)
    assert (installed / "share/doc/tidegate/rules.schema.json").is_file()
    unit = (installed / "lib/systemd/system/tidegate-fcgi.service").read_text()
    assert "ExecStart=/opt/tidegate/bin/tidegate-fcgi " in unit
    assert "Documentation=file:/opt/tidegate/share/doc/tidegate/fastcgi.md" in unit


def test_the_installed_programs_run_from_where_they_lie(installed: Path, tmp_path: Path) -> None:
    for name in ("tidegate", "tidegate-fcgi", "tidegate-cgi"):
        assert out(installed / "bin" / name, "--version").startswith(f"{name} ")
    (tmp_path / "rules.yaml").write_text(f"store: shared://{tmp_path}/t\npolicies: [{{name: a, rules: 1/hour}}]\n")
    out(installed / "bin/tidegate", "compile", tmp_path / "rules.yaml")
    asked = {"REQUEST_METHOD": "GET", "REQUEST_URI": "/", "REMOTE_ADDR": "203.0.113.9",
             "TIDEGATE_CONFIG": str(tmp_path / "rules.yaml")}
    assert '"remaining": 0' in out(installed / "bin/tidegate-cgi", **asked)
    assert out(installed / "bin/tidegate-cgi", **asked).startswith("Status: 429")


@pytest.mark.parametrize("linked", ["shared", "static"])
def test_an_application_is_built_with_what_was_installed_alone(installed: Path, tmp_path: Path, linked: str) -> None:
    flags = pkg_config(installed, "--cflags", "--libs", *(["--static"] if linked == "static" else []), "tidegate-fcgx")
    more = ["-Wl,-Bstatic", *flags, "-Wl,-Bdynamic"] if linked == "static" else [*flags, f"-Wl,-rpath,{installed}/lib"]
    program = tmp_path / "guestbook"
    out("gcc", "-Wall", "-Wextra", "-Werror", ROOT / "examples/fcgx/guestbook.c", *more, "-pthread", "-o", program)
    assert ("libtidegate" in out("ldd", program)) == (linked == "shared")
    (tmp_path / "rules.yaml").write_text("policies: [{name: a, rules: 5/minote}]\n")
    done = subprocess.run([program, tmp_path / "s"], env={**CLEAN, "TIDEGATE_CONFIG": str(tmp_path / "rules.yaml")},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "rules.yaml:1:" in done.stderr  # it reads rules


def test_each_manual_page_is_sound_and_names_every_option(installed: Path) -> None:
    pages = installed / "share/man/man1"
    for name in ("tidegate-fcgi", "tidegate-cgi"):
        page = (pages / f"{name}.1").read_text().replace("\\-", "-")
        shown = out(installed / "bin" / name, "--help")
        options = set(re.findall(r"--[a-z][a-z-]+", shown)) | set(re.findall(r"\bTIDEGATE_[A-Z_]*[A-Z]", shown))
        options |= set(re.findall(r"\b[a-z-]+=", shown.split("Behind commas:")[-1].split("  --mode")[0])) - {"kind="}
        missing = [option for option in options if option not in page]
        assert not missing, f"{name}.1 does not name {missing}"
    for path in pages.iterdir():
        text = path.read_text()
        assert text.startswith(f".TH {path.stem.upper()} 1 ")
        assert [line for line in re.findall(r"^\.SH (.*)", text, re.MULTILINE)][:2] == ["NAME", "SYNOPSIS"]
        assert max(map(len, text.splitlines())) <= 600 and "\t" not in text


def test_a_debian_package_holds_what_is_installed_and_names_what_it_needs(program: Path, build: Path, tmp_path: Path) -> None:
    if not Path("/usr/bin/dpkg-shlibdeps").exists():
        pytest.skip("dpkg-dev is not installed: this is no Debian, or `make setup` has not run")
    made = Path(out("make", "-C", ROOT, "-s", f"B={build}", "deb").strip())
    package = made if made.is_absolute() else ROOT / made
    depends = out("dpkg-deb", "-f", package, "Depends")
    assert {"libsodium23", "libyaml-0-2", "libc6"} <= {word.split()[0] for word in depends.split(", ")}
    out("dpkg-deb", "-R", package, tmp_path)
    assert out("sh", "-n", tmp_path / "DEBIAN/postinst") == ""
    for name in ("tidegate", "tidegate-fcgi", "tidegate-cgi"):
        assert out(tmp_path / "usr/bin" / name, "--version").startswith(f"{name} ")
    assert "ExecStart=/usr/bin/tidegate-fcgi" in (tmp_path / "usr/lib/systemd/system/tidegate-fcgi.service").read_text()
    listed = out("dpkg-deb", "-c", package).splitlines()
    assert all(line.split()[1] == "root/root" for line in listed)
    assert not [line for line in listed if not line.split()[5].startswith("./usr") and line.split()[5] != "./"]
