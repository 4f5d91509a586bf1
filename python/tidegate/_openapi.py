"""What a FastAPI application's schema tells of its limits: a 429 with its body and its fields where a route has one.

Must not enter: judging; a schema of another framework.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

_WHOLE = {"type": "integer", "minimum": 0}

REFUSED: dict[str, Any] = {
    "description": "Too many requests: a limit is used up",
    "headers": {
        "Retry-After": {"description": "Seconds after which the request passes", "schema": {"type": "integer", "minimum": 1}},
        "X-RateLimit-Limit": {"description": "Units of the limit that refused", "schema": _WHOLE},
        "X-RateLimit-Remaining": {"description": "Units that are left of it", "schema": _WHOLE},
        "X-RateLimit-Reset": {"description": "Seconds until all of it is left", "schema": _WHOLE},
    },
    "content": {
        "application/json": {
            "schema": {
                "title": "RateLimited",
                "type": "object",
                "required": ["code", "message", "retry_after"],
                "properties": {
                    "code": {"type": "string", "const": "RATE_LIMITED"},
                    "message": {"type": "string"},
                    "retry_after": {
                        "description": "Seconds; null where no wait can help",
                        "anyOf": [{"type": "integer"}, {"type": "null"}],
                    },
                },
            }
        }
    },
}


def describe(app: Any, limits: Callable[[Any, Any], bool]) -> None:
    """Has app.openapi() tell of the limits among the dependencies of its routes: those of which `limits(dependency,
    endpoint)` is true. A 429 that a route describes itself stays as it is."""
    openapi = getattr(app, "openapi", None)
    if openapi is None or getattr(openapi, "_tidegate", False):
        return

    def described() -> dict[str, Any]:
        schema: dict[str, Any] = openapi()
        paths = schema.get("paths", {})
        for path, methods, dependant in _operations(app):
            if _limited(dependant, functools.partial(limits, endpoint=dependant.call)):
                for method in methods:
                    operation = paths.get(path, {}).get(method.lower())
                    if operation is not None:
                        operation.setdefault("responses", {}).setdefault("429", REFUSED)
        return schema

    described._tidegate = True  # type: ignore[attr-defined]
    app.openapi = described


def _operations(app: Any) -> Iterator[tuple[str, list[str], Any]]:
    iter_route_contexts = getattr(sys.modules.get("fastapi.routing"), "iter_route_contexts", None)
    routes = app.routes if iter_route_contexts is None else iter_route_contexts(app.routes)
    for route in routes:
        path, dependant = getattr(route, "path_format", None), getattr(route, "dependant", None)
        if path is not None and dependant is not None:
            yield path, sorted(getattr(route, "methods", None) or ()), dependant


def _limited(dependant: Any, is_limit: Callable[..., bool]) -> bool:
    return is_limit(dependant.call) or any(_limited(below, is_limit) for below in dependant.dependencies)
