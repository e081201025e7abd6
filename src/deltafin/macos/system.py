"""The three ways to ask a Mac something: a C function, a system variable, a command. All of them may answer nothing."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

_PATIENCE_SECONDS = 5.0
_MOST_OUTPUT = 1 << 20


def is_mac() -> bool:
    """Whether this is macOS."""
    return sys.platform == "darwin"


@cache
def library() -> Any:
    """The C library, which holds every function used here; None where there is none."""
    try:
        return ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):
        return None


def call(name: str, *arguments: int) -> bool:
    """Calls a C function of integers that returns 0 when it did what was asked; False for everything else."""
    try:
        function = getattr(library(), name)
        return int(function(*(ctypes.c_int(argument) for argument in arguments))) == 0
    except (AttributeError, TypeError, ValueError, ctypes.ArgumentError):
        return False


def sysctl(name: str) -> int | None:
    """The integer system variable ``name``; None when there is no such variable."""
    value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)
    try:
        ask = library().sysctlbyname
        failed = ask(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    except (AttributeError, TypeError, ctypes.ArgumentError):
        return None
    # Variables have four or eight bytes; a Mac is little-endian, so both begin where the value begins.
    return None if failed or size.value not in (4, 8) else int(value.value)


def output(*command: str) -> str | None:
    """What a command of the system prints; None when it is missing, fails, or takes longer than five seconds."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return None if done.returncode else done.stdout[:_MOST_OUTPUT].decode(errors="replace")


def start(command: Sequence[str]) -> subprocess.Popen[bytes] | None:
    """Starts a command in the background, silent; None when that is not possible."""
    quiet = subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError:
        return None
