"""Time Machine: it would copy every slice, though all of them can be fetched again."""

from __future__ import annotations

from pathlib import Path

from deltafin.macos import system


def backed_up(folder: Path) -> bool:
    """Whether Time Machine includes ``folder`` (most external volumes it does not); False when it does not say."""
    if not system.is_mac():
        return False
    return (system.output("/usr/bin/tmutil", "isexcluded", str(folder)) or "").startswith("[Included]")
