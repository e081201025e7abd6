"""``deltafin bench``: measures this machine with the real thing's dimensions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deltafin.bench.slice import (
    PREFILL_TIER,
    Step,
    measure_decode,
    measure_prefill,
    medians,
    open_slice,
    slice_bytes,
    slice_install,
)

app = typer.Typer(no_args_is_help=True, help="Measure this machine.")


@app.callback()
def _root() -> None:
    pass


@app.command("slice")
def slice_(
    folder: Annotated[list[Path], typer.Option("--dir", help="Folder on a drive to measure. Once per drive.")],
    layers: Annotated[int, typer.Option(help="Decoder layers; the first is dense.")] = 3,
    experts: Annotated[int, typer.Option(help="Routed experts per layer.")] = 896,
    tokens: Annotated[int, typer.Option(help="Measured tokens.", min=1, max=10_000)] = 16,
    prefill: Annotated[list[int] | None, typer.Option(help="Also measure a prompt of so many tokens.")] = None,
    depth: Annotated[int | None, typer.Option(help="Reads in flight per drive.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a few layers of true K3 dimensions, measure reading, computing and their overlap cold, and clean up."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"a slice of {slice_bytes(layers, experts) / 1e9:,.1f} GB; it is removed afterwards")
    rows: list[tuple[str, Step]] = []
    with console.status("writing") as status:

        def progress(what: str, share: float) -> None:
            status.update(f"{what}: {share:.0%}")

        with slice_install(folder, layers=layers, experts=experts, progress=progress) as home:
            status.update("measuring")
            for ahead in (False, True):
                with open_slice(home, prefetch=ahead, depth=depth) as engine:
                    name = f"token, read ahead {'on' if ahead else 'off'}"
                    decoded = measure_decode(engine, tokens)
                    rows.append((name, medians([d.token for d in decoded])))
                    if layers > 2:
                        rows.append(("  its layers from 2", medians([d.settled for d in decoded])))
            if prefill:
                with open_slice(home, depth=depth, tier=PREFILL_TIER) as engine:
                    rows += [(f"prompt of {n:,}", measure_prefill(engine, n)) for n in prefill]
    if as_json:
        typer.echo(json.dumps([{"what": n, **asdict(s), "over_ceiling": s.over_ceiling} for n, s in rows], indent=2))
        return
    table = Table("", "read", "compute", "total", "total / ceiling", "GB/s", box=None, pad_edge=False)
    for name, s in rows:
        times = (f"{t * 1e3:,.1f} ms" for t in (s.read, s.compute, s.total))
        table.add_row(name, *times, f"{s.over_ceiling:.3f}", f"{s.nbytes / s.total / 1e9:.2f}")
    Console(highlight=False, soft_wrap=True).print(table)
