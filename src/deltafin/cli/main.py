"""The command tree, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
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


_COMMANDS = {
    "run": "run.run",
    "demo": "demo.demo",
    "serve": "serve.serve",
    "info": "info.info",
    "heat": "heat.heat",
    "warm": "warm.warm",
    "simulate": "simulate.simulate",
    "bench": "bench.app",
    "store": "store.app",
    "setup": "setup.app",
    "drives": "drives.app",
    "doctor": "doctor.doctor",
    "upgrade": "setup.upgrade",
    "fetch": "fetch.fetch",
    "verify": "fetch.verify",
    "repair": "fetch.repair",
}
"""Where each command is, in the order of the help."""


def _add_commands(arguments: Sequence[str]) -> None:
    # Only what is called is imported: setting up or looking at drives need not wait a second for PyTorch.
    wanted = next((text for text in arguments if not text.startswith("-")), "")
    for name in [wanted] if wanted in _COMMANDS else _COMMANDS:
        module, _, attribute = _COMMANDS[name].partition(".")
        command = getattr(importlib.import_module(f"deltafin.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)


def main() -> None:
    """Entry point; never shows a traceback, always exits with a documented code."""
    sys.exit(_run())


def _run() -> int:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    offline.guard()
    _add_commands(sys.argv[1:])
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
