"""Power settings that slow work down, as ``pmset`` tells them: drives that fall asleep, and Low Power Mode."""

from __future__ import annotations

import re

from deltafin.macos import system

KEEP_DRIVES_AWAKE = "sudo pmset -a disksleep 0"
FULL_POWER = "sudo pmset -a lowpowermode 0"


def drive_sleep_minutes() -> int | None:
    """Idle minutes after which drives are stopped, 0 for never; None when that is not known."""
    return _setting("disksleep")


def low_power() -> bool:
    """Whether Low Power Mode holds the processors back."""
    return _setting("lowpowermode") == 1


def _setting(name: str) -> int | None:
    if not system.is_mac():
        return None
    text = system.output("/usr/bin/pmset", "-g") or ""
    found = re.search(rf"^\s*{name}\s+(\d{{1,6}})\b", text, re.MULTILINE)
    return int(found[1]) if found else None
