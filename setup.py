"""Builds tidegate._core from python/ext and the C core. Everything else about the package stands in pyproject.toml."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LIBRARIES = {"libsodium": "libsodium-dev", "yaml-0.1": "libyaml-dev", "hiredis": "libhiredis-dev"}
HEADER = pathlib.Path("csrc/include/tidegate.h")
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # has no stable ABI


def version() -> str:
    return re.search(r'^#define TG_VERSION "([^"]+)"', HEADER.read_text(), re.MULTILINE)[1]


def pkg_config() -> tuple[list[str], list[str]]:
    """Flags for the compiler and for the linker, or an end that says what to install."""
    program = os.environ.get("PKG_CONFIG") or "pkg-config"
    if not shutil.which(program):
        sys.exit(
            f"tidegate: cannot build, {program} was not found.\n"
            "  Debian, Ubuntu: apt-get install gcc pkg-config python3-dev " + " ".join(LIBRARIES.values())
        )
    missing = [name for name in LIBRARIES if subprocess.run([program, "--exists", name]).returncode]
    if missing:
        sys.exit(
            f"tidegate: cannot build, {program} does not know {' and '.join(missing)}.\n"
            "  Debian, Ubuntu: apt-get install " + " ".join(LIBRARIES[name] for name in missing)
        )

    # TLS to Redis where there is OpenSSL, as in the Makefile; TLS=no leaves it out.
    tls = [] if os.environ.get("TLS") == "no" or subprocess.run([program, "--exists", "openssl"]).returncode else ["openssl"]

    def ask(what: str) -> list[str]:
        return shlex.split(subprocess.check_output([program, what, *LIBRARIES, *tls], text=True))

    return ask("--cflags") + (["-DTG_WITH_TLS"] if tls else []), ask("--libs")


class BuildCore(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if sys.platform == "win32":
            sys.exit("tidegate: Windows is not supported; its stores need POSIX shared memory. WSL works.")
        compile_flags, link_flags = pkg_config()
        ext.extra_compile_args += compile_flags
        ext.extra_link_args += link_flags
        super().build_extension(ext)


def sources() -> list[str]:
    core = [path for path in pathlib.Path("csrc").rglob("*.c") if path.parts[1] != "cli"]
    return sorted(str(path) for path in [*core, *pathlib.Path("python/ext").glob("*.c")])


core = Extension(
    "tidegate._core",
    sources=sources(),
    depends=sorted(str(path) for root in ("csrc", "python/ext") for kind in ("*.h", "*.lua")
                   for path in pathlib.Path(root).rglob(kind)),
    include_dirs=["csrc", "csrc/include"],
    define_macros=[("_GNU_SOURCE", None)] + ([] if FREE_THREADED else [("Py_LIMITED_API", "0x030b0000")]),
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Wshadow"]
    + ["-fno-tree-slp-vectorize"],  # as in the Makefile, which says why
    extra_link_args=["-pthread"] + (["-Wl,-Bsymbolic-functions"] if sys.platform == "linux" else []),
    py_limited_api=not FREE_THREADED,
)

setup(
    version=version(),
    ext_modules=[core],
    cmdclass={"build_ext": BuildCore},
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
