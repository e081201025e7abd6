"""``deltafin heat``: which experts were used, as a table, a file or a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from deltafin import installs
from deltafin.cli import options
from deltafin.errors import UsageError
from deltafin.generation.engine import heat_file
from deltafin.history import picture
from deltafin.history.heat import Heat, load
from deltafin.residency.value import hit_curve
from deltafin.store.store import Store

SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
_GIB = 1 << 30


def heat(
    model: options.Model = None,
    store: options.Store = None,
    export: Annotated[
        Path | None, typer.Option(help="Write all counts to this new file: .csv, or .json otherwise.")
    ] = None,
    picture_to: Annotated[Path | None, typer.Option("--picture", help="Draw into this new SVG file.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Also list every layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which experts were used so far, how concentrated use is, and what memory for experts would be worth."""
    settings, _ = options.settings_from(model=model, store=store)
    console = Console(stderr=True, soft_wrap=True)
    with options.ingest_progress(console) as progress:
        install = installs.resolve(settings, progress)
    with Store.open(install.home) as opened:
        config, blob = opened.config, opened.expert_layout.nbytes
        path = heat_file(options.heat_folder(settings), opened)
        known = load(path, opened.identity, len(config.moe_layers), config.experts)
    if known.problem:
        console.print(f"the heat file is not used: {known.problem}", style="yellow", markup=False)
    curve = hit_curve(known.counts)
    rows = [(share, round(share * (len(curve) - 1))) for share in SHARES]
    if export is not None:
        _write(export, _csv(known, config.dense_layers) if export.suffix == ".csv" else _json(known, path))
    if picture_to is not None:
        title = f"{install.label}: {known.total_tokens:,} tokens"
        _write(picture_to, picture.svg(known.counts, curve, expert_bytes=blob, title=title))
    if as_json:
        facts = {
            "file": str(path),
            "problem": known.problem,
            "tokens": known.total_tokens,
            "hit_rate": [{"share": s, "experts": n, "bytes": n * blob, "predicted": float(curve[n])} for s, n in rows],
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{known.total_tokens:,} tokens counted in {path}", markup=False)
    if not known.total_tokens:
        out.print("nothing is known yet: run something first")
        return
    table = Table("experts in RAM", "GiB", "predicted hit rate", box=None, pad_edge=False)
    for share, count in rows:
        table.add_row(f"{share:.0%} ({count:,})", f"{count * blob / _GIB:,.2f}", f"{curve[count]:.1%}")
    out.print(table)
    if layers:
        out.print(_by_layer(known, config.dense_layers))


def _by_layer(known: Heat, first: int) -> Table:
    table = Table("layer", "experts ever used", "for half of the uses", "hottest", box=None, pad_edge=False)
    for layer, counts in enumerate(known.counts, first):
        half = int(np.searchsorted(hit_curve(counts), 0.5))
        hottest = np.argsort(-counts, kind="stable")[:8].tolist()
        table.add_row(str(layer), str(int((counts > 0).sum())), str(half), " ".join(map(str, hottest)))
    return table


def _csv(known: Heat, first: int) -> str:
    shares = known.counts / max(known.tokens, 1e-9)
    lines = ["layer,expert,count,share_of_tokens"]
    for layer, (counts, share) in enumerate(zip(known.counts.tolist(), shares.tolist(), strict=True), first):
        lines += [f"{layer},{e},{c:.6g},{s:.6g}" for e, (c, s) in enumerate(zip(counts, share, strict=True))]
    return "\n".join(lines) + "\n"


def _json(known: Heat, path: Path) -> str:
    return json.dumps({"file": str(path), "tokens": known.tokens, "counts": known.counts.tolist()}) + "\n"


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists already", remedy="name a new file") from None
    except OSError as e:
        raise UsageError(f"{path} cannot be written: {e.strerror}", remedy="name another file") from None
