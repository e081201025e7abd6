"""Keeping Spotlight off the slices: its importer would read 1.4 TB to find no words in it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from deltafin.macos import system

MARKER = ".metadata_never_index"


def keep_out(folder: Path) -> None:
    """Asks Spotlight to leave ``folder`` alone, by its marker file. What it makes of that, ``indexed`` tells."""
    if system.is_mac():
        # A drive without room or rights is reported by those who write what matters.
        with suppress(OSError):
            (folder / MARKER).touch()


def indexed(folder: Path) -> int | None:
    """How many files in ``folder`` Spotlight knows; None when it does not say."""
    if not system.is_mac():
        return None
    found = system.output("/usr/bin/mdfind", "-count", "-onlyin", str(folder), "kMDItemFSName == '*'")
    try:
        return None if found is None else int(found.strip())
    except ValueError:
        return None
