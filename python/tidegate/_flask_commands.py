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


def _limiters() -> dict[str, Limiter]:
    """Every limiter of the application by its name."""
    found: dict[str, Limiter] = {}
    for guard in _guards():
        if guard.limit is not None:
            found[guard.limit.limiter.name] = guard.limit.limiter
        for limit in guard.limits.values():
            found[limit.limiter.name] = limit.limiter
    for view in current_app.view_functions.values():
        for limit in getattr(view, "__tidegate_enforces__", ()):
            found[limit.limiter.name] = limit.limiter
    return found


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
            asked = next(iter(_limiters().values()), None)
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
        known = _limiters()
        try:
            limiter = known.get(name) or _policy(name, known)
            limiter.reset(dims=dims)
        except (Error, ValueError) as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"{name}: {', '.join(values)} is forgotten")

    return group


def _policy(name: str, known: dict[str, Limiter]) -> Limiter:
    for guard in _guards():
        if guard._policy is not None:
            limiter: Limiter = guard._policy(policy=name)
            return limiter
    raise click.ClickException(f"reset: no limit {name!r} in this application; there are: {', '.join(sorted(known)) or 'none'}")
