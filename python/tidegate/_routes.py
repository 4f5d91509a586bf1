"""The template of the route that a request has met: "/v1/users/{id}", with every prefix and mount in front.

A concrete path is never used: each value of a path parameter would get a budget of its own. FastAPI's and Starlette's
routers are walked once, and again only when a route turns up that was not there. Must not enter: limits.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tidegate._core import routes_changed

# Kept on the outermost router, so they go when the application goes.
_TABLE = "_tidegate_routes"
_READY = "_tidegate_ready"  # the table's `ready`, where the compiled part looks
_MOUNT_TAIL = "/{path}"
_UNWRAP_MAX = 32


class _Place(NamedTuple):
    """One way to reach a route."""

    root: re.Pattern[str]  # what stands in front, as a concrete root_path
    template: str


class _Entry(NamedTuple):
    route: Any  # held, so that its id stays its own
    places: list[_Place]


class RouteTable:
    """Every route below one router."""

    def __init__(self, router: Any, kept: Mapping[int, _Entry] | None = None) -> None:
        # Routes of which only their own template is known; found again they would be looked for in vain each time.
        self.kept = dict(kept or {})
        self._entries: dict[int, _Entry] = {}
        self.ordered: list[tuple[re.Pattern[str], frozenset[str] | None, str]] = []
        self._walk(getattr(router, "routes", ()), "", "", [])
        self._entries = {**self.kept, **self._entries}
        # What needs no look at the request: most routes are reached in one way.
        self.ready = {name: entry.places[0].template for name, entry in self._entries.items() if len(entry.places) == 1}
        routes_changed()

    def template(self, key: Any, scope: Mapping[str, Any]) -> str | None:
        entry = self._entries.get(id(key))
        if entry is None:
            return None
        # One application mounted at several places: the place is where the request has come through.
        root = str(scope.get("root_path", "")).removeprefix(str(scope.get("app_root_path", "")))
        for place in entry.places:
            if place.root.fullmatch(root):
                return place.template
        return entry.places[0].template

    def keep(self, key: Any, template: str) -> None:
        self._entries[id(key)] = self.kept[id(key)] = _Entry(key, [_Place(re.compile(""), template)])
        self.ready[id(key)] = template

    def match(self, path: str, method: str) -> str | None:
        """The template that a path not yet routed will meet. Linear in the routes, as the router itself is."""
        partial = None
        for pattern, methods, template in self.ordered:
            if pattern.match(path):
                if methods is None or method in methods:
                    return template
                partial = partial or template
        return partial

    def _walk(self, routes: Sequence[Any], template: str, pattern: str, above: list[int]) -> None:
        for key, route in _reached(routes):
            if id(key) in above:
                continue
            host = getattr(route, "host_format", None)
            below = getattr(route, "routes", None)
            if host is not None:
                self._walk_app(route, f"//{host}{template}", pattern, [*above, id(key)])
                continue
            path_format = getattr(route, "path_format", None)
            if not isinstance(path_format, str) or not isinstance(getattr(route, "path_regex", None), re.Pattern):
                continue  # another framework's, as Litestar's: all of it is unrouted
            if below is not None and path_format.endswith(_MOUNT_TAIL):
                inner = path_format.removesuffix(_MOUNT_TAIL)
                self._walk_app(route, template + inner, pattern + _mount_pattern(route), [*above, id(key)])
                continue
            entry = self._entries.setdefault(id(key), _Entry(key, []))
            full = template + path_format
            if all(place.template != full for place in entry.places):
                entry.places.append(_Place(re.compile(_unnamed(pattern)), full))
            own = route.path_regex.pattern.removeprefix("^")
            methods = getattr(route, "methods", None)
            self.ordered.append((re.compile(_unnamed(pattern + own)), frozenset(methods) if methods else None, full))

    def _walk_app(self, mount: Any, template: str, pattern: str, above: list[int]) -> None:
        before = len(self.ordered)
        self._walk(_routes_of(mount), template, pattern, above)
        if before == len(self.ordered):
            # A mounted application without routes to see: all of it is one route.
            self.ordered.append((re.compile(_unnamed(pattern) + "/"), None, template + _MOUNT_TAIL))


def _reached(routes: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Each route as (what a request's scope will hold, what it is reached by)."""
    # FastAPI keeps the routes of an included router as they were written; this tells how each is reached. Not imported:
    # where no application is FastAPI's there is nothing to ask.
    iter_route_contexts = getattr(sys.modules.get("fastapi.routing"), "iter_route_contexts", None)
    if iter_route_contexts is None:
        for route in routes:
            yield route, route
        return
    for reached in iter_route_contexts(routes):
        context = getattr(reached, "_route_context", None)
        if context is None:
            yield reached.route, reached.route
        else:
            starlette_route = getattr(context, "starlette_route", None)
            yield context, context if starlette_route is None else starlette_route


def _routes_of(mount: Any) -> Sequence[Any]:
    """A mount's routes, also where its application is wrapped in middleware (`wrapper.app`, by custom)."""
    routes = mount.routes
    app = getattr(mount, "app", None)
    for _ in range(_UNWRAP_MAX):
        if routes or app is None:
            break
        routes = getattr(app, "routes", ())
        app = getattr(app, "app", None)
    return routes or ()


def _mount_pattern(mount: Any) -> str:
    """What a mount matches, as a pattern without its tail."""
    pattern: str = mount.path_regex.pattern
    return pattern.removeprefix("^").removesuffix("$").removesuffix("/(?P<path>.*)")


def _unnamed(pattern: str) -> str:
    """Without group names: a parameter may be called the same in a mount and in a route below it."""
    return re.sub(r"\(\?P<[^>]*>", "(", pattern)


def _scope_key(scope: Mapping[str, Any]) -> Any:
    """The object that stands for the met route: FastAPI's effective context of an included route, else the route."""
    route = scope.get("route")
    context = (scope.get("fastapi") or {}).get("effective_route_context")
    if context is not None:
        original = getattr(context, "original_route", None)
        # A context left by an outer router speaks of another route: of the mount this request has come through.
        if route is None or original is route or getattr(context, "starlette_route", None) is route:
            return context
    return route


def route_template(scope: Mapping[str, Any]) -> str | None:
    """The template of a request that has been routed; None where no route can be told."""
    router = scope.get("router")  # the outermost: Starlette and FastAPI set it once
    key = scope.get("route") if not scope.get("fastapi") else _scope_key(scope)
    try:
        return router._tidegate_routes.ready[id(key)]  # type: ignore[union-attr, no-any-return]
    except (AttributeError, KeyError):
        return None if key is None else _find(router, key, scope)


def _find(router: Any, key: Any, scope: Mapping[str, Any]) -> str | None:
    found = table_of(router).template(key, scope)
    if found is None:
        table = table_of(router, anew=True)
        found = table.template(key, scope)
        if found is None:
            # Not below the outermost router in any way known here. Its own template, without what stands in front.
            own = getattr(getattr(key, "starlette_route", None), "path_format", None)
            found = own or getattr(key, "path_format", None)
            if not found:
                return None
            table.keep(key, found)
    return found


def table_of(router: Any, anew: bool = False) -> RouteTable:
    """The table of an outermost router, made when first asked for."""
    table: RouteTable | None = getattr(router, _TABLE, None)
    if table is None or anew:
        table = RouteTable(router, None if table is None else table.kept)
        if router is not None:
            with contextlib.suppress(AttributeError):  # one with slots: looked through each time
                setattr(router, _TABLE, table)
                setattr(router, _READY, table.ready)
    return table
