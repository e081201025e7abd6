"""The command tree, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from typing import Annotated

import typer
from rich.console import Console

import deltafin
from deltafin import offline
from deltafin.errors import DeltafinError, ExitCode
from deltafin.macos.awake import awake

# Typer carries its own copy of click or uses the installed one, depending on its version; both share this base class.
_CommandLineError = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="deltafin",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Runs the complete, unaltered Kimi K3 on one machine by streaming its expert bytes from several drives.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltafin {deltafin.__version__}")
        raise typer.Exit


_LONG = {"run", "demo", "serve", "setup", "upgrade", "fetch", "warm", "verify", "repair", "store", "drives", "bench"}


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    no_network: Annotated[bool, typer.Option("--offline", help="Contact nothing, whatever the command.")] = False,
) -> None:
    if no_network:
        offline.forbid()
    if context.invoked_subcommand in _LONG:
        context.with_resource(awake())


def _add_commands() -> None:
    # Imported here so that `deltafin --help` and usage errors do not wait for PyTorch.
    from deltafin.cli import bench, demo, doctor, drives, fetch, heat, info, run, serve, setup, simulate, store, warm

    app.command("run")(run.run)
    app.command("demo")(demo.demo)
    app.command("serve")(serve.serve)
    app.command("info")(info.info)
    app.command("heat")(heat.heat)
    app.command("warm")(warm.warm)
    app.command("simulate")(simulate.simulate)
    app.add_typer(bench.app, name="bench")
    app.add_typer(store.app, name="store")
    app.add_typer(setup.app, name="setup")
    app.add_typer(drives.app, name="drives")
    app.command("doctor")(doctor.doctor)
    app.command("upgrade")(setup.upgrade)
    app.command("fetch")(fetch.fetch)
    app.command("verify")(fetch.verify)
    app.command("repair")(fetch.repair)


def main() -> None:
    """Entry point; never shows a traceback, always exits with a documented code."""
    sys.exit(_run())


def _run() -> int:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    offline.guard()
    _add_commands()
    try:
        code = app(standalone_mode=False)
        return code if isinstance(code, int) else ExitCode.OK
    except (typer.Abort, KeyboardInterrupt):
        return _stopped(console)
    except DeltafinError as e:
        console.print(f"deltafin: {e.message}", style="red", markup=False, soft_wrap=True)
        if e.remedy:
            console.print(f"  what to do: {e.remedy}", markup=False, soft_wrap=True)
        return e.exit_code
    except SystemExit as e:
        # Typer turns a broken pipe into this. The reader of our output went away (`deltafin run … | head`): nothing is
        # wrong and nobody is left to tell.
        if isinstance(e.__context__, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.OK
        return e.code if isinstance(e.code, int) else ExitCode.INTERNAL
    except Exception as e:
        if isinstance(e, _CommandLineError):
            e.show()  # type: ignore[attr-defined]
            return ExitCode.USAGE
        return _crashed(console)


def _stopped(console: Console) -> int:
    console.print("stopped", style="yellow")
    return ExitCode.INTERRUPTED


def _crashed(console: Console) -> int:
    with tempfile.NamedTemporaryFile(
        "w", prefix="deltafin-crash-", suffix=".txt", delete=False, encoding="utf-8"
    ) as report:
        report.write(traceback.format_exc())
    console.print(f"deltafin: internal error; details are in {report.name}", style="red", markup=False, soft_wrap=True)
    console.print("  what to do: please report it with that file", markup=False)
    return ExitCode.INTERNAL
