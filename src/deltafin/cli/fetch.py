"""``deltafin fetch``, ``verify`` and ``repair``: complete an install piece by piece, check it, mend it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from deltafin.cli import options
from deltafin.cli.store import print_verification, shown_progress
from deltafin.errors import ExitCode, UsageError
from deltafin.history.heat import load
from deltafin.hub import install
from deltafin.hub.mend import mend
from deltafin.settings import Settings
from deltafin.store.manifest import Manifest
from deltafin.store.store import Store, find_home
from deltafin.store.verify import verify_store

_KEPT = "what was fetched is kept: run the same command again to continue"
_MOST = 1 << 20


def fetch(
    layers: Annotated[str | None, typer.Option(help="Layers, e.g. 1-10,92. [default: all]")] = None,
    experts: Annotated[str | None, typer.Option(help="Experts of these layers, e.g. 0-99,800. [default: all]")] = None,
    hot: Annotated[int | None, typer.Option(help="Only the N experts used most in earlier runs.", min=1)] = None,
    store: options.Store = None,
    offline: options.Offline = None,
) -> None:
    """Bring experts that a streaming install lacks."""
    if hot is not None and (layers is not None or experts is not None):
        raise UsageError("--hot chooses layers and experts itself", remedy="drop --layers and --experts, or --hot")
    settings, _ = options.settings_from(store=store, offline=offline)
    home = _home(settings)
    wanted_layers = None if layers is None else numbers(layers, "--layers")
    wanted_experts = None if experts is None else numbers(experts, "--experts")
    with closing(options.hub(settings)) as hub, install.opened(home, hub) as (manifest, checkpoint, released):
        spine = range(manifest.expert_blobs, len(manifest.first) - 1)
        chosen = install.select(manifest, wanted_layers, wanted_experts)
        blobs = [*spine, *(chosen if hot is None else hottest(settings, home, manifest, hot))]
        nbytes = install.missing_bytes(manifest, blobs)
        with shown_progress(_KEPT) as show:
            install.bring(manifest, checkpoint, released, hub, blobs, show)
    typer.echo(f"{nbytes / 1e9:,.2f} GB fetched")


def verify(
    store: options.Store = None,
    again: Annotated[bool, typer.Option("--repair", help="Fetch what is damaged again from the hub.")] = False,
    limit: Annotated[float | None, typer.Option(help="Read at most this many MB/s from each drive.", min=1)] = None,
    offline: options.Offline = None,
) -> None:
    """Read every slice and compare it with its checksum. Exit code 4 when any is damaged and stays so."""
    settings, _ = options.settings_from(store=store, offline=offline)
    home = _home(settings)
    rate = limit * 1e6 if limit else None
    if again:
        _mend(settings, home, rate)
        return
    with shown_progress("nothing was changed") as show:
        report = verify_store(home, max_bytes_per_s=rate, progress=show)
    print_verification(report, home)
    if report.bad:
        raise typer.Exit(ExitCode.STORE)


def repair(
    store: options.Store = None,
    limit: Annotated[float | None, typer.Option(help="Read at most this many MB/s from each drive.", min=1)] = None,
) -> None:
    """Read everything, and fetch exactly the damaged slices again from the hub."""
    settings, _ = options.settings_from(store=store)
    _mend(settings, _home(settings), limit * 1e6 if limit else None)


def _mend(settings: Settings, home: Path, rate: float | None) -> None:
    with closing(options.hub(settings)) as hub, shown_progress(_KEPT) as show:
        report = mend(home, hub, max_bytes_per_s=rate, progress=show)
    typer.echo(f"{report.slices:,} slices read, {len(report.bad)} damaged, {len(report.bad)} fetched again")


def hottest(settings: Settings, home: Path, manifest: Manifest, count: int | None = None) -> list[int]:
    """Blob numbers of the ``count`` experts used most in earlier runs (None: all that were used), most used first.

    Raises:
        UsageError: no use has been recorded.
    """
    from deltafin.generation.engine import heat_file  # brings PyTorch along

    with Store.open(home) as store:
        path = heat_file(options.heat_folder(settings), store)
    heat = load(path, manifest.identity, len(manifest.config.moe_layers), manifest.config.experts)
    counts = heat.counts.reshape(-1)
    if not counts.any():
        raise UsageError("no use of experts has been recorded yet", remedy="run something first, or name --layers")
    order = np.argsort(-counts, kind="stable")[:count]
    return [int(blob) for blob in order if counts[blob] > 0]


def _home(settings: Settings) -> Path:
    return find_home(settings.store or settings.home / "store")


def numbers(text: str, flag: str) -> list[int]:
    """Parses ``1-3,7``.

    Raises:
        UsageError: it is something else.
    """
    found: list[int] = []
    try:
        for part in text.split(","):
            low, dash, high = part.strip().partition("-")
            first, last = int(low), int(high if dash else low)
            if not 0 <= first <= last < _MOST:
                raise ValueError
            found += range(first, last + 1)
    except ValueError:
        raise UsageError(f"{flag} {text[:80]!r} is no list of numbers", remedy="write it like 1-10,92") from None
    return found
