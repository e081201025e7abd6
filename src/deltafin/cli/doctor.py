"""``deltafin doctor``: what is wrong, what it means, and the command that mends it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from deltafin import doctor as room
from deltafin.cli import options
from deltafin.cli.store import shown_progress
from deltafin.doctor import Level

_STYLES = {Level.OK: "green", Level.NOTE: "dim", Level.WARN: "yellow", Level.FAIL: "red"}


def doctor(
    backend: options.Backend = None,
    store: options.Store = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every slice and compare its checksum.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check machine, runtime, install, drafts and sessions. Changes nothing and contacts nothing."""
    settings, _ = options.settings_from(backend=backend, store=store)
    home = settings.store or settings.home / "store"
    with shown_progress("nothing was changed") as show:
        findings = list(room.examine(home, settings.home, backend=settings.backend, deep=deep, progress=show))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        out = Console(highlight=False, soft_wrap=True)
        for finding in findings:
            out.print(
                f"{finding.level.value:4}  {finding.area}: {finding.what}", style=_STYLES[finding.level], markup=False
            )
            if finding.meaning:
                out.print(f"        {finding.meaning}", markup=False)
            if finding.remedy:
                out.print(f"        what to do: {finding.remedy}", markup=False)
    worst = next((finding for finding in findings if finding.level is Level.FAIL), None)
    if worst is not None:
        raise typer.Exit(worst.code)
