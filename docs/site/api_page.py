"""The page of the Python interface: signatures from the stub file and the typed sources, texts from the docstrings.

The compiled part cannot tell its signatures and the stub file holds no texts, so neither Sphinx extension that reads one of
the two would do."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python/tidegate"

# Where each public name is found: the package itself, then its public modules.
MODULES = ("tidegate", *(f"tidegate.{path.stem}" for path in sorted(PACKAGE.glob("[a-z]*.py"))))


def public_names(module: str) -> list[str]:
    """None of a pytest plugin: its names are fixtures, which are asked for by their place in a signature."""
    return [name for name in getattr(importlib.import_module(module), "__all__", ()) if not name.startswith("__")]


def _definitions(tree: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.unparse(node.args)
    for first in ("self, /, ", "self, ", "cls, ", "self", "cls"):
        if arguments.startswith(first):
            arguments = arguments[len(first):]
            break
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({arguments}){returns}"


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)


def _is_overload_or_setter(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(each).endswith(("overload", ".setter")) for each in node.decorator_list)


def _text(thing: object, indent: str) -> list[str]:
    documented = inspect.getdoc(thing) or ""
    return [f"{indent}{line}".rstrip() for line in documented.splitlines()]


def _source_of(module: str, name: str, thing: object) -> pathlib.Path:
    """Where the signature stands: the stub of what is compiled, else the module that defines it."""
    if getattr(importlib.import_module("tidegate._core"), name, None) is thing:
        return PACKAGE / "_core.pyi"
    return pathlib.Path(importlib.import_module(getattr(thing, "__module__", module)).__file__ or "")


def _entry(module: str, name: str) -> list[str]:
    thing = getattr(importlib.import_module(module), name)
    tree = ast.parse(_source_of(module, name, thing).read_text())
    node = next((each for each in _definitions(tree) if each.name == name), None)
    if node is None:
        raise LookupError(f"{module}.{name}: its definition was not found")
    if not isinstance(node, ast.ClassDef):
        return [f"````{{py:function}} {name}{_signature(node)}", "", *_text(thing, ""), "````", ""]
    members = [each for each in _definitions(node) if not each.name.startswith("_") or each.name in ("__new__", "__init__")]
    made = next((each for each in members if each.name in ("__new__", "__init__")), None)
    shown = _signature(made).partition(" -> ")[0] if isinstance(made, ast.FunctionDef) else ""
    kind = "exception" if inspect.isclass(thing) and issubclass(thing, BaseException) else "class"
    lines = [f"`````{{py:{kind}}} {name}{shown}", "", *_text(thing, ""), ""]
    for each in members:
        if isinstance(each, ast.ClassDef) or each.name in ("__new__", "__init__") or _is_overload_or_setter(each):
            continue
        if _is_property(each):
            returns = f"\n:type: {ast.unparse(each.returns)}" if each.returns else ""
            lines += [f"````{{py:property}} {each.name}{returns}"]
        else:
            lines += [f"````{{py:method}} {each.name}{_signature(each)}"]
        lines += ["", *_text(inspect.getattr_static(thing, each.name, None), ""), "````", ""]
    return [*lines, "`````", ""]


def write_page(path: pathlib.Path) -> None:
    lines = ["# Python interface", "",
             "Every public name with its signature. What a number means, to the microsecond: [algorithms](algorithms.md).", ""]
    for module in MODULES:
        names = public_names(module)
        if not names:
            continue
        lines += [f"## {module}", "", f"```{{py:module}} {module}", "```", ""]
        lines += [line for name in names for line in _entry(module, name)]
    text = "\n".join(lines)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
