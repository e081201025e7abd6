"""``deltafin setup``: from an empty machine and some drives to a working K3."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltafin.checkpoint.config import K3Config
from deltafin.cli import options
from deltafin.cli.store import Layout, drive_spec, shown_progress
from deltafin.errors import DriveFullError, OfflineError, StoreError, UsageError
from deltafin.hub import install, pins
from deltafin.hub.client import Hub
from deltafin.hub.pins import Pin
from deltafin.hub.plan import SetupPlan, draft_bytes, free_at, measure_link, plan_setup
from deltafin.hub.released import Released, fetch_released
from deltafin.hub.upgrade import upgrade as upgrade_install
from deltafin.settings import Settings
from deltafin.store.create import check_specs
from deltafin.store.store import find_home
from deltafin.store.types import DriveSpec

app = typer.Typer(invoke_without_command=True, help="Bring K3 and its drafts onto your drives, and keep them there.")

_KEPT = "what was fetched is kept: run the same command again to continue"


class Kind(StrEnum):
    """What a setup brings."""

    FULL = "full"
    STREAM = "stream"
    ADOPT = "adopt"


Repo = Annotated[str | None, typer.Option(help="Another repository, OWNER/NAME.")]
Revision = Annotated[str | None, typer.Option(help="Its commit, 40 hexadecimal digits.")]


@app.callback()
def setup(
    context: typer.Context,
    full: Annotated[
        bool, typer.Option("--full", help="Everything: 1.56 TB. Works without the network for good.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Spine and draft, 122 GB; experts are fetched on first use and stay.")
    ] = False,
    adopt: Annotated[
        Path | None,
        typer.Option(help="Use a download that exists: a folder, or a Hugging Face cache. Nothing is copied."),
    ] = None,
    drive: Annotated[
        list[str] | None,
        typer.Option(help="Directory on a drive, optionally with its share: PATH or PATH:WEIGHT. Once per drive."),
    ] = None,
    layout: Annotated[
        Layout, typer.Option(help="striped: every expert on all drives. in-place: whole released files.")
    ] = Layout.STRIPED,
    store: Annotated[
        Path | None, typer.Option(help="Folder for manifest and small files. [default: the default install]")
    ] = None,
    draft: Annotated[bool, typer.Option("--draft/--no-draft", help="Bring the DSpark draft too.")] = True,
    include_qwen: Annotated[
        bool, typer.Option("--include-qwen", help="Bring the drafts for raw completions too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    repo: Repo = None,
    revision: Revision = None,
    draft_repo: Annotated[str | None, typer.Option(help="Another draft, OWNER/NAME@COMMIT.")] = None,
) -> None:
    """Bring K3 onto your drives. Without --full, --stream or --adopt: propose what fits."""
    if context.invoked_subcommand is not None:
        return
    if full + stream + (adopt is not None) > 1:
        raise UsageError("--full, --stream and --adopt exclude each other", remedy="give one of them")
    settings, _ = options.settings_from(store=None)
    home = store or settings.store or settings.home / "store"
    pin = _pin(repo, revision, pins.K3)
    drafts = [("dspark", _draft_pin(draft_repo))] if draft else []
    if include_qwen:
        drafts += [(f"qwen/{name}", qwen_pin) for name, qwen_pin in pins.QWEN.items()]
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if adopt is not None:
        _adopt(settings, adopt, home, pin, drafts, console, dry_run=dry_run)
        return
    if settings.offline:
        raise OfflineError("setup needs the hub", remedy="use --adopt DIR for files that are here")
    specs = [drive_spec(text) for text in drive or []]
    if not specs:
        raise UsageError("no drive is named", remedy="add --drive DIR, once per drive")
    check_specs(specs, "striped")
    with closing(options.hub(settings)) as hub:
        if dry_run or not (full or stream):
            _propose(hub, pin, specs, drafts, home, full=full, stream=stream, as_json=as_json)
            return
        _install(hub, pin, specs, home, drafts, full=full, layout=layout, console=console)
    typer.echo(str(home))


@app.command()
def qwen(
    store: options.Store = None,
    repo: Repo = None,
    revision: Revision = None,
) -> None:
    """Bring the drafts for raw completions."""
    settings, _ = options.settings_from(store=store)
    home = settings.store or settings.home / "store"
    chosen = {f"qwen/{name}": pin for name, pin in pins.QWEN.items()}
    if repo is not None:
        chosen = {"qwen": _pin(repo, revision, pins.QWEN["probe"])}
    if settings.offline:
        raise OfflineError("setup needs the hub", remedy="run it once with the network")
    with closing(options.hub(settings)) as hub:
        _drafts(hub, home, list(chosen.items()))
    typer.echo(str(home / "qwen"))


def upgrade(
    store: options.Store = None,
    repo: Repo = None,
    revision: Revision = None,
) -> None:
    """Move the install to the revision that this version pins (or --revision), fetching only what differs."""
    settings, _ = options.settings_from(store=store)
    home = find_home(settings.store or settings.home / "store")
    pin = _pin(repo, revision, pins.K3)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with closing(options.hub(settings)) as hub, shown_progress(_KEPT) as show:
        nbytes = upgrade_install(
            hub=hub, home=home, pin=pin, progress=show, say=lambda t: console.print(t, markup=False)
        )
    typer.echo(f"{home} holds {pin.repo} at {pin.revision[:12]}; {_gb(nbytes)} differed and were fetched")


def _install(
    hub: Hub,
    pin: Pin,
    specs: Sequence[DriveSpec],
    home: Path,
    drafts: Sequence[tuple[str, Pin]],
    *,
    full: bool,
    layout: Layout,
    console: Console,
) -> None:
    if layout is Layout.IN_PLACE and not full:
        raise UsageError("--stream needs slices", remedy="use --layout striped")

    def say(text: str) -> None:
        console.print(text, style="dim", markup=False)

    _check_drafts(hub, home, drafts)
    with _writing(home), shown_progress(_KEPT) as show:
        home.mkdir(parents=True, exist_ok=True)
        if layout is Layout.IN_PLACE:
            install.install_in_place(hub, pin, specs, home, progress=show, say=say)
        else:
            install.install_striped(hub, pin, specs, home, experts=full, progress=show, say=say)
    _drafts(hub, home, drafts)


def _check_drafts(hub: Hub, home: Path, drafts: Sequence[tuple[str, Pin]]) -> None:
    """The drafts come last: that they exist and fit is made sure of before days are spent on the rest."""
    missing = 0
    for folder, pin in drafts:
        if not install.draft_complete(home / folder, pin):
            missing += draft_bytes(hub.files(pin))
            parts = (home / folder).glob("model.safetensors*")
            missing -= sum(path.stat().st_blocks * 512 for path in parts if path.is_file())
    free = free_at(home)
    if missing > free:
        raise DriveFullError(
            f"{home} has {_gb(free)} free; the drafts need {_gb(missing)}",
            remedy="name a folder with more room with --store, or leave them out with --no-draft",
        )


@contextmanager
def _writing(home: Path) -> Iterator[None]:
    """Errors of the small files' drive, which nothing below names."""
    try:
        yield
    except OSError as e:
        raise StoreError(
            f"{e.filename or home} cannot be written: {e.strerror}",
            remedy=f"name another folder with --store, or make room there; {_KEPT}",
        ) from None


def _drafts(hub: Hub, home: Path, drafts: Sequence[tuple[str, Pin]]) -> None:
    for folder, pin in drafts:
        with _writing(home), shown_progress(_KEPT) as show:
            install.fetch_draft(hub, pin, home / folder, show)


def _adopt(
    settings: Settings,
    folder: Path,
    home: Path,
    pin: Pin,
    drafts: Sequence[tuple[str, Pin]],
    console: Console,
    *,
    dry_run: bool,
) -> None:
    found = install.find_snapshot(folder.resolve(), pin)
    if dry_run:
        typer.echo(f"use {found} in place; every byte is read once to check it; nothing is copied")
        return
    hub = None if settings.offline else options.hub(settings)
    try:
        with _writing(home), shown_progress(_KEPT) as show:
            home.mkdir(parents=True, exist_ok=True)
            install.adopt(found, home, hub, pin, progress=show, say=lambda text: console.print(text, markup=False))
        if hub is not None:
            _drafts(hub, home, drafts)
    finally:
        if hub is not None:
            hub.close()
    typer.echo(str(home))


def _pin(repo: str | None, revision: str | None, default: Pin) -> Pin:
    if repo is None and revision is None:
        return default
    if repo is None or revision is None:
        raise UsageError("--repo and --revision belong together", remedy="give both")
    return default if (repo, revision) == (default.repo, default.revision) else Pin(repo, revision)


def _draft_pin(text: str | None) -> Pin:
    if text is None:
        return pins.DSPARK
    repo, at, revision = text.partition("@")
    if not at:
        raise UsageError(f"--draft-repo {text} names no commit", remedy="write it as OWNER/NAME@COMMIT")
    return Pin(repo, revision)


def _propose(
    hub: Hub,
    pin: Pin,
    specs: Sequence[DriveSpec],
    drafts: Sequence[tuple[str, Pin]],
    home: Path,
    *,
    full: bool,
    stream: bool,
    as_json: bool,
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        released = Released.load(home) or fetch_released(hub, pin, Path(scratch))
        config = K3Config.load(released.folder)
        link = measure_link(hub, pin, released)
    extra = sum(draft_bytes(hub.files(draft)) for _, draft in drafts)
    kinds = [Kind.FULL] if full else [Kind.STREAM] if stream else [Kind.FULL, Kind.STREAM]
    plans = [plan_setup(kind.value, config, specs, home, extra, link) for kind in kinds]
    if as_json:
        typer.echo(json.dumps([asdict(plan) for plan in plans], default=str, indent=2))
        return
    for plan in plans:
        _print_plan(plan)
    if not (full or stream):
        fitting = next((plan.kind for plan in plans if plan.fits), None)
        named = " ".join(f"--drive {spec.path}" + (f":{spec.weight:g}" if spec.weight else "") for spec in specs)
        if pin.repo != pins.K3.repo:
            named += f" --repo {pin.repo} --revision {pin.revision}"
        if fitting is None:
            typer.echo("neither fits: free some space, or name more drives")
        else:
            typer.echo(f"proposed: deltafin setup --{fitting} {named}")


def _print_plan(plan: SetupPlan) -> None:
    typer.echo(f"{plan.kind}: {_gb(plan.bytes)} to fetch" + ("" if plan.fits else ", which does not fit"))
    for drive in plan.drives:
        speed = f", reads {drive.bytes_per_s / 1e6:,.0f} MB/s" if drive.bytes_per_s else ""
        typer.echo(f"  {drive.path}: {_gb(drive.bytes)} of {_gb(drive.free)} free{speed}")
    if plan.draft_bytes:
        typer.echo(
            f"  {plan.home.path}: {_gb(plan.home.bytes)} of {_gb(plan.home.free)} free, for drafts and small files"
        )
    if plan.kind == "stream":
        typer.echo(f"  experts ({_gb(plan.expert_bytes)} in all) are fetched on first use and stay")
    if plan.seconds is not None:
        typer.echo(
            f"  about {_time(plan.seconds)} at {plan.link_bytes_per_s / 1e6:,.0f} MB/s, measured on one connection"
        )
    if plan.tokens_per_s is not None:
        typer.echo(f"  at most {plan.tokens_per_s:.2f} tokens per second from these drives before caches and drafts")


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB"


def _time(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
