"""Runs the real command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def environment(home: Path) -> dict[str, str]:
    """The caller's environment with a private Deltafin folder."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("K3_") or k in ("K3_ISA", "K3_BACKEND")}
    return clean | {"K3_HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "COLUMNS": "200"}


def start(home: Path, *arguments: str, **how: object) -> subprocess.Popen[bytes]:
    """Starts ``deltafin`` with pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "deltafin", *arguments],
        stdin=how.get("stdin", subprocess.DEVNULL),  # type: ignore[call-overload]
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(home) | dict(how.get("env", {})),  # type: ignore[call-overload]
    )


def deltafin(home: Path, *arguments: str, stdin: bytes | None = None, **env: str) -> tuple[int, str, str]:
    """Runs ``deltafin`` to its end.

    Returns:
        (exit code, standard output, standard error).
    """
    done = subprocess.run(
        [sys.executable, "-m", "deltafin", *arguments],
        input=stdin if stdin is not None else b"",
        capture_output=True,
        env=environment(home) | env,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()
