"""``deltafin drives``: take a drive in, take one out, follow changed speeds, hold hot experts twice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from deltafin.cli import options
from deltafin.cli.fetch import hottest
from deltafin.cli.store import drive_spec, shown_progress
from deltafin.errors import UsageError
from deltafin.store.manifest import Manifest
from deltafin.store.rebalance import add_drive, rebalance, remove_drive
from deltafin.store.replicas import remove_replicas
from deltafin.store.replicas import replicate as replicate_experts
from deltafin.store.store import find_home

app = typer.Typer(
    no_args_is_help=True,
    help="Move slices between drives, layer by layer; the install stays usable, and every move can be interrupted.",
)
_KEPT = "finished work is kept, and the install can be used: deltafin drives rebalance continues"


@app.command()
def add(
    drive: Annotated[str, typer.Argument(help="Directory on the new drive: PATH or PATH:WEIGHT.")],
    store: options.Store = None,
) -> None:
    """Take a drive in and move its share of every expert onto it."""
    home = _home(store)
    with shown_progress(_KEPT) as show:
        add_drive(home, drive_spec(drive), show)
    _report(home)


@app.command()
def remove(
    drive: Annotated[Path, typer.Argument(help="The drive's directory.")],
    store: options.Store = None,
) -> None:
    """Move everything off a drive and take it out."""
    home = _home(store)
    with shown_progress(_KEPT) as show:
        remove_drive(home, drive, show)
    _report(home)


@app.command()
def replicate(
    hot: Annotated[int | None, typer.Option(help="Only the N experts used most in earlier runs.", min=1)] = None,
    gb: Annotated[float | None, typer.Option(help="At most this many GB of replicas in all.", min=0.001)] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete all replicas.")] = False,
    store: options.Store = None,
) -> None:
    """Copy the experts used most to a second drive each, so that a slow or busy drive is helped by the others."""
    settings, _ = options.settings_from(store=store)
    home = find_home(settings.store or settings.home / "store")
    if remove:
        if hot is not None or gb is not None:
            raise UsageError("--remove deletes all replicas", remedy="drop --hot and --gb")
        remove_replicas(home)
        typer.echo("no replicas are left")
        return
    if hot is None and gb is None:
        raise UsageError("how many experts are to be replicated?", remedy="give --hot N, --gb N, or both")
    manifest = Manifest.load(home)
    with shown_progress("replicas made so far are kept: the same command continues") as show:
        limit = None if gb is None else int(gb * 1e9)
        made = replicate_experts(home, hottest(settings, home, manifest, hot), limit=limit, progress=show)
    whole = np.logical_and.reduceat(made.drive >= 0, manifest.first[:-1])
    nbytes = int(manifest.length[made.drive >= 0].sum())
    typer.echo(f"{int(whole.sum()):,} experts lie on a second drive, {nbytes / 1e9:,.2f} GB")


@app.command("rebalance")
def _rebalance(
    weights: Annotated[
        str | None, typer.Option(help="Shares, one per drive, e.g. 1,2,1. [default: measure the drives]")
    ] = None,
    store: options.Store = None,
) -> None:
    """Continue an interrupted move, or cut everything anew by the drives' speeds."""
    home = _home(store)
    shares = None
    if weights is not None:
        try:
            shares = [float(part) for part in weights.split(",")]
        except ValueError:
            raise UsageError(f"--weights {weights[:80]!r} are no numbers", remedy="write them like 1,2,1") from None
    with shown_progress(_KEPT) as show:
        rebalance(home, shares, show)
    _report(home)


def _home(store: Path | None) -> Path:
    settings, _ = options.settings_from(store=store)
    return find_home(settings.store or settings.home / "store")


def _report(home: Path) -> None:
    drives = Manifest.load(home).drives
    total = sum(drive.weight for drive in drives)
    for drive in drives:
        typer.echo(f"drive {drive.index}: {drive.path} ({drive.weight / total:.1%})")
