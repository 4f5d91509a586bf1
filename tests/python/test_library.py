"""The C library as others meet it: what it exports, its pkg-config file, both compilers, and C++."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "csrc/include/tidegate.h"
PROGRAM = """
#include <stdio.h>
#include <string.h>
#include <tidegate.h>
int main(void)
{
    tg_store *store;
    tg_limiter *limiter;
    tg_error error;
    const tg_limiter_options options = { .rules = tg_text_of("2/hour") };
    if (tg_store_open(tg_text_of("memory://x"), NULL, &store, &error) != TG_OK
        || tg_limiter_open(store, NULL, &options, &limiter, &error) != TG_OK)
        return 1;
    const tg_part part = { .value = tg_text_of("somebody") };
    const tg_dimension who = { &part, 1 };
    for (int i = 0; i < 3; i++) {
        tg_decision decision;
        if (tg_limiter_hit(limiter, &who, 1, 1, &decision, &error) != TG_OK)
            return 1;
        puts(decision.allowed ? "allowed" : "denied");
    }
    tg_limiter_close(limiter);
    tg_store_close(store);
    return strcmp(TG_VERSION, VERSION);
}
"""


def out(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_the_shared_library_exports_what_the_header_declares_and_nothing_else(
    build: Path, make: Callable[..., None]
) -> None:
    make("lib")
    exported = set(
        re.findall(r"^\S+ [A-TV-Z] (\w+)", out("nm", "-D", "--defined-only", build / "lib/libtidegate.so"), re.M)
    )
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    declared = set(re.findall(r"\bTG_API\b[^;(]*?\b(tg_\w+)\s*\(", text))
    assert exported == declared


def test_a_program_built_with_pkg_config_decides(tmp_path: Path, build: Path, make: Callable[..., None]) -> None:
    make("lib")
    where = {"PKG_CONFIG_PATH": str(build / "lib/pkgconfig")}
    version = out("pkg-config", "--modversion", "tidegate", **where).strip()
    flags = out("pkg-config", "--cflags", "--libs", "tidegate", **where).split()
    (tmp_path / "program.c").write_text(PROGRAM)
    out(
        "gcc",
        "-Wall",
        "-Werror",
        f'-DVERSION="{version}"',
        tmp_path / "program.c",
        *flags,
        "-o",
        tmp_path / "program",
    )
    said = out(tmp_path / "program", LD_LIBRARY_PATH=str(build / "lib"))
    assert said.split() == ["allowed", "allowed", "denied"]


def test_make_install_lays_out_a_library_that_pkg_config_finds(tmp_path: Path, build: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    subprocess.run(
        ["make", "-s", "-j2", f"B={build}", "PREFIX=/usr", f"DESTDIR={tmp_path}", "install"],
        cwd=ROOT,
        env=environment,
        check=True,
    )
    flags = out("pkg-config", "--libs", "tidegate", PKG_CONFIG_PATH=str(tmp_path / "usr/lib/pkgconfig"))
    assert f"-L{tmp_path}/usr/lib" in os.path.normpath(flags.split()[0])
    assert (tmp_path / "usr/include/tidegate.h").read_bytes() == HEADER.read_bytes()
    assert os.access(tmp_path / "usr/bin/tidegate-fcgi", os.X_OK)


def test_clang_finds_nothing_to_warn_of(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    done = subprocess.run(
        ["make", "-s", "-j2", f"B={tmp_path}", "CC=clang", "CFLAGS=-O0", "lib", "programs"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("standard", ["c11", "c17", "c++11", "c++20"])
def test_the_header_stands_alone_in_c_and_in_cpp(tmp_path: Path, standard: str) -> None:
    language = "c++" if "+" in standard else "c"
    source = tmp_path / "alone.c"
    source.write_text("#include <tidegate.h>\n")
    out(
        "clang",
        "-x",
        language,
        f"-std={standard}",
        "-pedantic-errors",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsyntax-only",
        f"-I{HEADER.parent}",
        source,
    )
