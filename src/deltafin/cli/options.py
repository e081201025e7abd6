"""Flags that several commands share, each defined once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from deltafin import installs
from deltafin.hub.client import Hub
from deltafin.hub.supplier import supplier_for
from deltafin.macos.memory import beyond_gpu
from deltafin.settings import Settings, load_settings
from deltafin.store.types import IngestProgress

if TYPE_CHECKING:
    from deltafin.generation.engine import Engine, EngineOptions

Backend = Annotated[str | None, typer.Option(help="What computes: auto, torch or mlx. [default: auto]")]
Precision = Annotated[
    str | None, typer.Option(help="Activations of the mlx backend: bf16 (as K3 is served) or fp32. [default: auto]")
]
_LACKING = "fetching what the drives lack from"

Model = Annotated[Path | None, typer.Option(help="Folder with the released Kimi K3 files, used in place.")]
Store = Annotated[Path | None, typer.Option(help="Folder of an install made with `deltafin store create`.")]
Ram = Annotated[
    str | None, typer.Option(help="Memory for the whole process, e.g. 48GiB. [default: 4/5 of what is free]")
]
Threads = Annotated[int | None, typer.Option(help="Compute threads. [default: physical cores]")]
Context = Annotated[int | None, typer.Option(help="Positions for prompt and reply together. [default: 16384]")]
Offline = Annotated[bool | None, typer.Option("--offline", help="Contact nothing; a missing expert is an error.")]
Depth = Annotated[int | None, typer.Option(help="Reads in flight per drive.")]
RouterTrace = Annotated[
    Path | None, typer.Option(help="Record the experts of every token in this new file, for deltafin simulate.")
]


Draft = Annotated[str | None, typer.Option(help="Draft that guesses ahead: auto, off, dspark or qwen. [default: auto]")]
DraftWidth = Annotated[int | None, typer.Option(help="Most guesses checked in one pass, 1 to 7.")]
DraftDir = Annotated[Path | None, typer.Option(help="Folder with the draft's subfolder dspark or qwen.")]


StateDisk = Annotated[
    str | None, typer.Option(help="Disk space for states of earlier turns, 0 for none. [default: 1/10 of what is free]")
]


def settings_from(**flags: Any) -> tuple[Settings, dict[str, str]]:
    """Merges flags with environment and config file; paths and sizes are validated there."""
    return load_settings(flags)


def engine_options(
    settings: Settings,
    install: installs.Install,
    *,
    raw: bool = False,
    reserve: int = 0,
    trace: Path | None = None,
) -> EngineOptions:
    """The engine's part of the settings.

    Args:
        raw: sessions are raw completions, not chats.
        reserve: bytes of the budget that are promised to others.
        trace: new file for the routes of every committed token.
    """
    from deltafin.generation.engine import EngineOptions  # only when an engine is wanted

    own = () if settings.draft_dir is None else (settings.draft_dir,)
    return EngineOptions(
        backend=settings.backend,
        precision=settings.precision,
        ram=None if settings.ram is None else int(settings.ram),
        threads=settings.threads,
        context=settings.context,
        depth=settings.depth,
        draft=settings.draft,
        draft_width=settings.draft_width,
        draft_folders=own or (*install.draft_folders, settings.home),
        raw=raw,
        reserve=reserve,
        prefetch=settings.prefetch,
        heat=heat_folder(settings) if settings.heat else None,
        trace=trace,
        supplier=None if settings.offline else supplier_for(lambda: hub(settings, _LACKING)),
    )


def heat_folder(settings: Settings) -> Path:
    """Where heat histograms are kept."""
    return settings.home / "heat"


def hub(settings: Settings, purpose: str = "") -> Hub:
    """The hub that the settings mean.

    Args:
        purpose: said to the user, who did not ask for the network with this command.

    Raises:
        OfflineError: the network was switched off.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    made = Hub(
        hosts=[host.strip() for host in settings.hub_hosts.split(",") if host.strip()],
        notify=lambda text: console.print(text, style="dim", markup=False),
    )
    if purpose:
        console.print(f"{purpose} {made.endpoint} (--offline forbids it)", style="dim", markup=False)
    return made


@contextmanager
def ingest_progress(console: Console) -> Iterator[Callable[[IngestProgress], None]]:
    """A progress bar for making an install; nothing outside a terminal, and nothing when there is nothing to do."""
    if not console.is_terminal:
        yield lambda _: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("preparing", total=None, visible=False)

        def update(p: IngestProgress) -> None:
            bar.update(task, description=p.phase, completed=p.done_bytes, total=p.total_bytes, visible=True)

        yield update


def open_engine(
    settings: Settings,
    install: installs.Install,
    console: Console,
    *,
    raw: bool = False,
    reserve: int = 0,
    trace: Path | None = None,
) -> Engine:
    """Opens the engine, showing the loading of the spine on a terminal."""
    from deltafin.generation.engine import Engine

    chosen = engine_options(settings, install, raw=raw, reserve=reserve, trace=trace)
    if chosen.ram is not None and (warning := beyond_gpu(chosen.ram)):
        console.print(warning, style="yellow", markup=False)
    if not console.is_terminal:
        return Engine.open(install.home, chosen)
    with Progress(
        TextColumn("loading the spine"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None)
        return Engine.open(
            install.home,
            chosen,
            on_load=lambda done, total: bar.update(task, completed=done, total=total),
        )
