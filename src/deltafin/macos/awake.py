"""Keeping a Mac awake during long work with the system's own ``caffeinate``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from deltafin.macos import system

PROGRAM = "/usr/bin/caffeinate"


@contextmanager
def awake() -> Iterator[None]:
    """Neither machine nor drives fall asleep from idleness inside the context; a closed lid still puts it to sleep.

    ``caffeinate`` watches this process and ends with it, so nothing is left behind by a kill. Does nothing on other
    systems or when the program cannot be started.
    """
    if not system.is_mac():
        yield
        return
    process = system.start([PROGRAM, "-i", "-m", "-w", str(os.getpid())])
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
