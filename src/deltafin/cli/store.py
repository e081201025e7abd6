"""``deltafin store``: make, look at, check and mend installs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from deltafin.errors import ExitCode, Interrupted
from deltafin.store.create import create_store
from deltafin.store.store import find_home
from deltafin.store.survey import StoreReport, inspect_store, relocate_store
from deltafin.store.types import DriveSpec, IngestProgress
from deltafin.store.verify import VerifyReport, repair_store, verify_store

app = typer.Typer(no_args_is_help=True, help="Make, look at, check and mend installs.")

Home = Annotated[Path, typer.Argument(help="The install's folder, or a drive that holds exactly one install.")]
_MOST_SHOWN = 20
_LOG_SECONDS = 60.0


class Layout(StrEnum):
    """How an install holds the bytes."""

    STRIPED = "striped"
    IN_PLACE = "in-place"


@app.command()
def create(
    model: Annotated[Path, typer.Option(help="Folder with the released Kimi K3 files.")],
    drive: Annotated[
        list[str] | None,
        typer.Option(help="Directory on a drive, optionally with its share: PATH or PATH:WEIGHT. Once per drive."),
    ] = None,
    layout: Annotated[
        Layout, typer.Option(help="striped: every expert on all drives. in-place: leave the shards where they are.")
    ] = Layout.STRIPED,
    home: Annotated[Path | None, typer.Option(help="Folder for the manifest. [default: on the first drive]")] = None,
) -> None:
    """Make an install, or continue an unfinished one."""
    with shown_progress("finished work is kept: run the same command again to continue") as show:
        made = create_store(
            model, [drive_spec(text) for text in drive or []], layout=layout.value, home=home, progress=show
        )
    typer.echo(str(made))


@app.command()
def inspect(home: Home, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show layout, drives and what is present."""
    report = inspect_store(home)
    if as_json:
        typer.echo(json.dumps(asdict(report) | {"complete": report.complete}, default=str, indent=2))
    else:
        _print_report(report)


@app.command()
def verify(
    home: Home,
    limit: Annotated[float | None, typer.Option(help="Read at most this many MB/s from each drive.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read every slice and compare it with its checksum. Exit code 4 when any is damaged or absent."""
    with shown_progress("nothing was changed") as show:
        report = verify_store(home, max_bytes_per_s=limit * 1e6 if limit else None, progress=show)
    if as_json:
        typer.echo(json.dumps(asdict(report), default=str, indent=2))
    else:
        print_verification(report, find_home(home))
    if report.bad or report.absent:
        raise typer.Exit(ExitCode.STORE)


@app.command()
def repair(home: Home, model: Annotated[Path, typer.Option(help="Folder with the released Kimi K3 files.")]) -> None:
    """Verify, and write damaged or absent slices again from the released files."""
    with shown_progress("finished work is kept: run the same command again to continue") as show:
        report = repair_store(home, model, progress=show)
    typer.echo(f"{len(report.bad)} damaged and {report.absent} absent slices were written again")


@app.command()
def relocate(
    home: Home,
    drive: Annotated[list[Path] | None, typer.Option(help="Where a drive is now. Once per moved drive.")] = None,
) -> None:
    """Find the drives again after mount points changed."""
    for found in relocate_store(home, drive or []):
        typer.echo(f"drive {found.index}: {found.path}")


def drive_spec(text: str) -> DriveSpec:
    """Parses ``PATH`` or ``PATH:WEIGHT``; an existing directory whose name ends like a weight is a path."""
    path, colon, weight = text.rpartition(":")
    if colon and not Path(text).exists():
        try:
            return DriveSpec(Path(path), float(weight))
        except ValueError:
            pass
    return DriveSpec(Path(text))


@contextmanager
def shown_progress(after_interrupt: str) -> Iterator[Callable[[IngestProgress], None]]:
    """A progress bar on a terminal, a line per minute in a pipe; Ctrl-C becomes one clear sentence."""
    console = Console(stderr=True)
    try:
        if not console.is_terminal:
            yield _Log(time.monotonic())
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[rates]}"), console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None, rates="")

            def show(p: IngestProgress) -> None:
                rates = " + ".join(f"{rate / 1e6:,.0f}" for rate in p.bytes_per_s)
                bar.update(
                    task, description=p.phase, completed=p.done_bytes, total=p.total_bytes, rates=f"{rates} MB/s"
                )

            yield show
    except KeyboardInterrupt:
        raise Interrupted("stopped", remedy=after_interrupt) from None


class _Log:
    """Progress where nobody watches: one line per minute, for work that takes days."""

    def __init__(self, start: float) -> None:
        self._last = start

    def __call__(self, p: IngestProgress) -> None:
        now = time.monotonic()
        if now - self._last < _LOG_SECONDS:
            return
        self._last = now
        left = "" if p.eta_seconds is None else f", {p.eta_seconds / 3600:,.1f} h left"
        done = f"{p.done_bytes / 1e9:,.1f} of {p.total_bytes / 1e9:,.1f} GB"
        typer.echo(f"{p.phase}: {done}, {sum(p.bytes_per_s) / 1e6:,.0f} MB/s{left}", err=True)


def _print_report(report: StoreReport) -> None:
    console = Console()
    console.print(f"{report.home}", style="bold", highlight=False, soft_wrap=True)
    console.print(
        f"  {report.layout}, {report.layers} layers, {report.experts} experts per layer, model {report.identity[:12]}"
    )
    total = report.expert_bytes + report.spine_bytes
    console.print(
        f"  {total / 1e9:,.2f} GB: experts {report.expert_bytes / 1e9:,.2f}, spine {report.spine_bytes / 1e9:,.2f}"
    )
    console.print(f"  {report.present_slices:,} of {report.slices:,} slices present")
    table = Table(
        "drive", Column("directory", overflow="fold"), "state", "share", "GB present", "GB", "files", "measured MB/s"
    )
    weights = sum(d.weight for d in report.drives)
    for d in report.drives:
        state = f"{len(d.damaged_files)} files damaged" if d.damaged_files else d.state
        cells = (f"{d.weight / weights:.1%}", f"{d.present_bytes / 1e9:,.2f}", f"{d.bytes / 1e9:,.2f}", f"{d.files}")
        table.add_row(f"{d.index}", str(d.path), state, *cells, f"{d.bytes_per_s / 1e6:,.0f}" if d.bytes_per_s else "")
    console.print(table)


def print_verification(report: VerifyReport, home: Path) -> None:
    """What a verification found, and what to do about it."""
    from_hub = (home / "released").is_dir()
    rate = report.bytes / max(report.seconds, 1e-9) / 1e6
    typer.echo(
        f"{report.slices:,} slices, {report.bytes / 1e9:,.2f} GB read in {report.seconds:,.1f} s ({rate:,.0f} MB/s)"
    )
    for bad in report.bad[:_MOST_SHOWN]:
        typer.echo(f"damaged: {bad.name}: {bad.reason}")
    if len(report.bad) > _MOST_SHOWN:
        typer.echo(f"... and {len(report.bad) - _MOST_SHOWN} more; all of them with --json")
    if report.absent:
        again = f"deltafin fetch --store {home}" if from_hub else "run the same deltafin store create again"
        typer.echo(f"{report.absent:,} slices are absent: {again}")
    if report.bad:
        again = f"deltafin verify --repair --store {home}" if from_hub else f"deltafin store repair {home} --model DIR"
        typer.echo(f"{len(report.bad)} slices are damaged: {again}")
    elif not report.absent:
        typer.echo("everything is in order")
