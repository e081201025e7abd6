"""How much memory this process may use: the machine's free memory, capped by control groups."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be used without paging, the tighter of the machine's and the control group's figure."""
    free = int(psutil.virtual_memory().available)
    room = _cgroup_room()
    return free if room is None else min(free, room)


def _cgroup_room() -> int | None:
    """Bytes left in this process's own version 2 control group, or None without a limit."""
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").strip().rpartition("::")[2]
        folder = _CGROUP / own.lstrip("/")
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
