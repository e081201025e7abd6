"""``deltafin info``: what is installed, the memory plan, the usable context, the settings and where they came from."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from deltafin import __version__, installs
from deltafin.backends import open_backend
from deltafin.cli import options, show
from deltafin.generation.engine import heat_file, plan_with_draft
from deltafin.history.heat import load
from deltafin.residency.machine import default_threads
from deltafin.store.store import Store


def info(
    backend: options.Backend = None,
    precision: options.Precision = None,
    model: options.Model = None,
    store: options.Store = None,
    ram: options.Ram = None,
    threads: options.Threads = None,
    context: options.Context = None,
    depth: options.Depth = None,
    draft: options.Draft = None,
    draft_dir: options.DraftDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is installed, the memory plan and the usable context."""
    settings, sources = options.settings_from(
        backend=backend,
        precision=precision,
        model=model,
        store=store,
        ram=ram,
        threads=threads,
        context=context,
        depth=depth,
        draft=draft,
        draft_dir=draft_dir,
    )
    with options.ingest_progress(Console(stderr=True)) as progress:
        install = installs.resolve(settings, progress)
    computes = open_backend(settings.backend, settings.precision)
    with Store.open(install.home, depth=settings.depth) as opened:
        raw = settings.draft == "qwen"
        plan, found, status = plan_with_draft(opened, options.engine_options(settings, install, raw=raw))
        config = opened.config
        facts = {
            "version": __version__,
            "install": install.label,
            "home": str(install.home),
            "layout": opened.layout,
            "identity": opened.identity,
            "drives": [{"path": str(d.path), "weight": d.weight, "bytes_per_s": d.bytes_per_s} for d in opened.drives],
            "layers": config.layers,
            "experts_per_layer": config.experts,
            "experts_per_token": config.experts_per_token,
            "expert_bytes": opened.expert_layout.nbytes,
            "backend": computes.name,
            "kernels": computes.describe(),
            "threads": settings.threads or default_threads(),
            "draft": {"kind": found.kind if found else None, "bytes": found.nbytes if found else 0, "status": status},
            "usable_context": plan.context,
            "planned_bytes": plan.planned,
            "plan": {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(plan).items()},
            "settings": {
                name: {"value": str(getattr(settings, name)), "source": source} for name, source in sources.items()
            },
        }
        size = f", {found.nbytes / (1 << 20):,.0f} MiB" if found else ""
        lines = [*show.plan_lines(plan, len(opened.spine_keys)), f"draft: {status}{size}"]
        shape = len(config.moe_layers), config.experts
        known = load(heat_file(options.heat_folder(settings), opened), opened.identity, *shape)
        if known.total_tokens:
            uses = shape[0] * config.experts_per_token
            lines.append(show.tier_value_line(known.counts, plan, uses, sum(d.bytes_per_s for d in opened.drives)))
        elif known.problem:
            lines.append(f"the heat of earlier runs is not used: {known.problem}")
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"Deltafin {__version__}, {facts['kernels']}, {facts['threads']} threads", markup=False)
    out.print(
        f"{install.label}: {config.layers} layers, {config.experts} experts a layer, {config.experts_per_token} a token"
    )
    out.print(
        f"manifest in {install.home}, layout {facts['layout']}, model {str(facts['identity'])[:16]}",
        markup=False,
    )
    for d in opened.drives:
        speed = f", {show.gigabytes(d.bytes_per_s)}/s measured" if d.bytes_per_s else ""
        out.print(f"  drive {d.index + 1}: {d.path} (share {d.weight:g}{speed})", markup=False)
    for line in lines:
        out.print(line, markup=False)
    out.print("settings:")
    for name, source in sources.items():
        value = getattr(settings, name)
        out.print(
            f"  {name.replace('_', '-'):18} {'automatic' if value is None else value} ({source})",
            markup=False,
        )
