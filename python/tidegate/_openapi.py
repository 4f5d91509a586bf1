"""What a FastAPI application's schema tells of its limits: a 429 with its body and its fields where a route has one, and a
401 or 400 where a limit refuses who does not say who is asking.

Must not enter: judging; a schema of another framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_WHOLE = {"type": "integer", "minimum": 0}



def _body(title: str, code: str, retry_after: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "title": title,
        "type": "object",
        "required": ["code", "message", "retry_after"],
        "properties": {
            "code": {"type": "string", "const": code},
            "message": {"type": "string"},
            "retry_after": retry_after,
        },
    }
    return {"application/json": {"schema": schema}}


_REFUSED: dict[str, Any] = {
    "description": "Too many requests: a limit is used up",
    "headers": {
        "Retry-After": {"description": "Seconds after which the request passes", "schema": {"type": "integer", "minimum": 1}},
        "X-RateLimit-Limit": {"description": "Units of the limit that refused", "schema": _WHOLE},
        "X-RateLimit-Remaining": {"description": "Units that are left of it", "schema": _WHOLE},
        "X-RateLimit-Reset": {"description": "Seconds until all of it is left", "schema": _WHOLE},
    },
    "content": _body(
        "RateLimited",
        "RATE_LIMITED",
        {"description": "Seconds; null where no wait can help", "anyOf": [{"type": "integer"}, {"type": "null"}]},
    ),
}

_UNIDENTIFIED: dict[str, Any] = {
    "description": "The request does not say who is asking, and a limit counts by that",
    "content": _body("Unidentified", "UNIDENTIFIED", {"type": "null"}),
}
_CHALLENGE = {"WWW-Authenticate": {"description": "How to say it", "schema": {"type": "string"}}}


def responses_of(unidentified: int | None) -> Mapping[str, Any]:
    """What a limit may answer, by status: one that answers who does not say who is asking with `unidentified`, None: never."""
    if unidentified is None:
        return {"429": _REFUSED}
    return {"429": _REFUSED, str(unidentified): {**_UNIDENTIFIED, **({"headers": _CHALLENGE} if unidentified == 401 else {})}}


def describe(app: Any, answers: Callable[[Any, Any], Mapping[str, Any]]) -> None:
    """Has app.openapi() tell what limits among the dependencies of its routes may answer: `answers(dependency, endpoint)`, by
    status. What a route describes itself stays as it is."""
    openapi = getattr(app, "openapi", None)
    if openapi is None or getattr(openapi, "_tidegate", False):
        return

    def described() -> dict[str, Any]:
        schema: dict[str, Any] = openapi()
        paths = schema.get("paths", {})
        for path, methods, dependant in _operations(app):
            told = {
                status: answer
                for call in _calls(dependant)
                for status, answer in answers(call, dependant.call).items()
            }
            for method in methods if told else ():
                operation = paths.get(path, {}).get(method.lower())
                if operation is not None:
                    operation["responses"] = {**told, **operation.get("responses", {})}
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


def _calls(dependant: Any) -> Iterator[Any]:
    yield dependant.call
    for below in dependant.dependencies:
        yield from _calls(below)
