"""`flask tidegate`: explain, stats and reset, for the limits that an application has.

The words are those of the program `tidegate` (docs/cli.md), asked in the application's own environment: its rules file, its
store. Must not enter: judging.
"""

from __future__ import annotations

from typing import Any

import click
from flask import current_app
from flask.cli import AppGroup

from tidegate._core import Error, Gate, Limiter, store_metrics
from tidegate._explain import explain


def _guards() -> list[Any]:
    guards: list[Any] = current_app.extensions.get("tidegate", [])
    return guards


def _gate(option: str) -> Gate:
    for guard in _guards():
        if guard.gate is not None:
            gate: Gate = guard.gate
            return gate
    raise click.ClickException(f"{option}: no Tidegate object of this application has a rules file (config= or gate=)")


def _limiters() -> dict[str, list[tuple[bool, Limiter]]]:
    """Every limiter of the application by its name, each with whether it counts by route: limits without a name are all
    called `default`, that of the application and those of its views."""
    limits = []
    for guard in _guards():
        limits += [guard.limit] if guard.limit is not None else []
        limits += guard.limits.values()
    for view in current_app.view_functions.values():
        limits += getattr(view, "__tidegate_enforces__", ())
    found: dict[str, list[tuple[bool, Limiter]]] = {}
    for limit in limits:
        found.setdefault(limit.limiter.name, []).append((getattr(limit, "limit", limit).needs_route, limit.limiter))
    return found


def _meant(name: str, by_route: bool) -> list[Limiter]:
    """What is reset under a name: with a route what counts by it, else what does not."""
    known = _limiters()
    if name not in known:
        return [_policy(name, known)]
    meant = [limiter for routed, limiter in known[name] if routed == by_route]
    if not meant and not by_route:
        raise click.ClickException(f"reset: {name!r} counts by route: add method=POST route=/login, or what they are")
    return meant or [limiter for _, limiter in known[name]]


def commands() -> AppGroup:
    """The group, made anew for each application."""
    group = AppGroup("tidegate", help="Look at the limits of this application, and forget a client.")

    @group.command("explain")
    @click.argument("request", metavar="'POST /login'")
    @click.option("--ip", default="127.0.0.1", help="The client's address.")
    @click.option("--user", help="Who is signed in.")
    @click.option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="May be repeated.")
    @click.option("--json", "as_json", is_flag=True, help="One JSON object.")
    def explain_command(request: str, ip: str, user: str | None, headers: tuple[str, ...], as_json: bool) -> None:
        """What a request would meet by the rules file, and why. Takes nothing."""
        pairs = []
        for header in headers:
            name, colon, value = header.partition(":")
            if not colon:
                raise click.BadParameter(f"{header!r} is no NAME:VALUE", param_hint="--header")
            pairs.append((name.strip(), value.strip()))
        gate = _gate("explain")
        try:
            if as_json:
                method, _, path = request.rpartition(" ")
                click.echo(
                    gate.explain_as(method or "GET", path, headers=tuple(pairs), peer=ip, user=user, json=True), nl=False
                )
            else:
                click.echo(str(explain(request, config=gate, ip=ip, user=user, headers=pairs)), nl=False)
        except (Error, ValueError) as error:
            raise click.ClickException(str(error)) from error

    @group.command("stats")
    @click.option("--format", "form", type=click.Choice(["text", "json", "prometheus"]), default="text")
    def stats_command(form: str) -> None:
        """What all processes have counted in the application's store."""
        asked: Gate | Limiter | None = next((guard.gate for guard in _guards() if guard.gate is not None), None)
        if asked is None:
            asked = next((limiter for named in _limiters().values() for _, limiter in named), None)
        if asked is None:
            raise click.ClickException("stats: this application has no limits yet")
        try:
            click.echo(store_metrics(asked, form), nl=False)
        except (Error, ValueError) as error:
            raise click.ClickException(str(error)) from error

    @group.command("reset")
    @click.argument("name")
    @click.argument("values", nargs=-1, required=True, metavar="KIND=VALUE...")
    def reset_command(name: str, values: tuple[str, ...]) -> None:
        """Forget a client under the limit or the policy NAME: reset login ip=203.0.113.9"""
        dims = {}
        for value in values:
            kind, equals, text = value.partition("=")
            if not equals:
                raise click.BadParameter(f"{value!r} is no KIND=VALUE, such as ip=203.0.113.9", param_hint="VALUES")
            dims[kind] = text
        try:
            for limiter in _meant(name, "route" in dims):
                limiter.reset(dims=dims)
        except (Error, ValueError) as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"{name}: {', '.join(values)} is forgotten")

    return group


def _policy(name: str, known: dict[str, list[tuple[bool, Limiter]]]) -> Limiter:
    for guard in _guards():
        if guard._policy is not None:
            limiter: Limiter = guard._policy(policy=name)
            return limiter
    raise click.ClickException(f"reset: no limit {name!r} in this application; there are: {', '.join(sorted(known)) or 'none'}")
