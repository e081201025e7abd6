"""Drives that fall asleep: the system's setting, as ``pmset`` tells it."""

from __future__ import annotations

import re

from deltafin.macos import system

COMMAND = "sudo pmset -a disksleep 0"


def drive_sleep_minutes() -> int | None:
    """Idle minutes after which drives are stopped, 0 for never; None when that is not known."""
    if not system.is_mac():
        return None
    found = re.search(r"^\s*disksleep\s+(\d{1,6})\b", system.output("/usr/bin/pmset", "-g") or "", re.MULTILINE)
    return int(found[1]) if found else None
