"""``deltafin warm``: which experts to bring to the drives ahead of time."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console

from deltafin import installs
from deltafin.cli import options
from deltafin.cli.store import shown_progress
from deltafin.errors import UsageError
from deltafin.generation.engine import heat_file
from deltafin.history.heat import Heat, load
from deltafin.history.trace import read_trace
from deltafin.hub.install import bring
from deltafin.hub.install import opened as opened_for_fetching
from deltafin.store.store import Store


def warm(
    model: options.Model = None,
    store: options.Store = None,
    trace: Annotated[Path | None, typer.Option(help="Take the experts of this router trace.")] = None,
    heat: Annotated[bool, typer.Option("--heat", help="Take the hottest experts of earlier runs.")] = False,
    most: Annotated[str | None, typer.Option(help="Most bytes to fetch, e.g. 100GB. [default: all of them]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON; implies --dry-run.")] = False,
    offline: options.Offline = None,
) -> None:
    """Fetch the likeliest experts that a stream install lacks, ahead of their use; the plan is shown first."""
    if heat == (trace is not None):
        raise UsageError("the plan needs exactly one source", remedy="give --heat or --trace PATH")
    settings, _ = options.settings_from(model=model, store=store, offline=offline)
    limit = None if most is None else _size(most)
    console = Console(stderr=True, soft_wrap=True)
    with options.ingest_progress(console) as progress:
        install = installs.resolve(settings, progress)
    with Store.open(install.home) as opened:
        config, blob = opened.config, opened.expert_layout.nbytes
        layers, first = len(config.moe_layers), config.dense_layers
        if trace is None:
            known = load(heat_file(options.heat_folder(settings), opened), opened.identity, layers, config.experts)
        else:
            recorded = read_trace(trace)
            shape = recorded.shape
            if (shape.layers, shape.experts) != (layers, config.experts) or shape.model not in ("", opened.identity):
                raise UsageError(f"{trace} was recorded with another model", remedy="record one with this model")
            known = Heat.empty(opened.identity, layers, config.experts)
            known.add(recorded.routes)
        order = np.argsort(-known.counts.reshape(-1), kind="stable")
        likely = [divmod(int(i), config.experts) for i in order[: int((known.counts > 0).sum())]]
        absent = [(layer + first, e) for layer, e in likely if not opened.has_expert(layer + first, e)]
    chosen = absent if limit is None else absent[: limit // blob]
    counted = float(known.counts.sum())
    gain = sum(float(known.counts[layer - first, e]) for layer, e in chosen) / counted if counted else 0.0
    if as_json:
        plan = {"experts": chosen, "bytes": len(chosen) * blob, "share_of_uses": gain, "likely": len(likely)}
        typer.echo(json.dumps(plan))
        return
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{len(likely):,} experts are likely to be used; {len(likely) - len(absent):,} of them are on the drives")
    if not chosen:
        out.print("there is nothing to fetch")
        return
    out.print(f"plan: {len(chosen):,} experts, {len(chosen) * blob / 1e9:,.1f} GB, {gain:.1%} of the uses")
    if dry_run:
        return
    blobs = [(layer - first) * config.experts + expert for layer, expert in chosen]
    kept = "what was fetched is kept: run the same command again to continue"
    with (
        closing(options.hub(settings)) as hub,
        opened_for_fetching(install.home, hub) as (manifest, checkpoint, released),
        shown_progress(kept) as show,
    ):
        bring(manifest, checkpoint, released, hub, blobs, show)
    out.print(f"{len(chosen):,} experts fetched")


def _size(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise UsageError(f"{text!r} is not a size", remedy="write for example 100GB or 64GiB") from None
