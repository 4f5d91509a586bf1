"""The documentation site: `make docs` builds it into build/docs. The pages are the Markdown files beside this one."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = (ROOT / "csrc/include/tidegate.h").read_text()
sys.path.insert(0, str(ROOT / "docs/site"))

import api_page  # noqa: E402

project = "tidegate"
release = version = re.search(r'^#define TG_VERSION "([^"]+)"', HEADER, re.MULTILINE)[1]  # type: ignore[index]
extensions = ["myst_parser"]
html_theme = "furo"
html_title = f"tidegate {version}"
exclude_patterns = ["README.md", "site"]
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4


def name_folders(_app: object, _page: str, source: list[str]) -> None:
    """What lies outside of `docs/` is no part of the site: a link to a folder of examples becomes the folder's name."""
    source[0] = re.sub(r"\[[^]\n]*\]\(\.\./(examples/[\w./-]*)\)", r"`\1`", source[0])


def link_pages(_app: object, page: str, source: list[str]) -> None:
    """Pages name each other in passing, as `redis.md`: who reads them as files opens that, who reads the site needs a link."""
    up = "../" * page.count("/")
    source[0] = re.sub(
        r"(?<!\[)`([a-z][a-z-]*)\.md`",
        lambda named: f"[{named[1]}]({up}{named[1]}.md)" if (ROOT / "docs" / f"{named[1]}.md").exists() else named[0],
        source[0],
    )


def setup(app):  # type: ignore[no-untyped-def]
    app.connect("source-read", name_folders)
    app.connect("source-read", link_pages)


api_page.write_page(ROOT / "docs/api.md")
