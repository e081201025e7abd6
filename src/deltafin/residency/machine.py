"""How much memory this process may use: what the machine has free, capped by control groups and a Mac's GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil

from deltafin.macos.memory import Pressure, gpu_room, pressure
from deltafin.residency.pressure import reserve_bytes, tier_under_pressure

WATCH_SECONDS = 1.0
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be used without paging: the tightest of machine's, control group's and GPU's figure."""
    rooms = [_cgroup_room(), gpu_room(lambda: int(psutil.Process().memory_info().rss))]
    return min([int(psutil.virtual_memory().available), *(room for room in rooms if room is not None)])


def free_memory() -> int:
    """``available_memory``, or nothing while macOS says that memory is short: its free figure alone hides that others'
    pages are being compressed to keep it up."""
    return available_memory() if pressure() is Pressure.NORMAL else 0


class MemoryWatch:
    """Looks at the free memory from time to time and says how many expert frames the tier may have.

    Args:
        available: the machine's free bytes.
        every: seconds between two looks.
    """

    def __init__(self, available: Callable[[], int], *, every: float = WATCH_SECONDS) -> None:
        self._available = available
        self._every = every
        self._reserve = reserve_bytes(int(psutil.virtual_memory().total))
        self._next = time.monotonic() + every

    def tier_frames(self, now: int, planned: int, frame_bytes: int) -> int:
        """Frames from now on, see ``tier_under_pressure``."""
        if time.monotonic() < self._next:
            return now
        self._next = time.monotonic() + self._every
        available = self._available()
        return tier_under_pressure(now, planned, frame_bytes=frame_bytes, available=available, reserve=self._reserve)


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


def default_threads() -> int:
    """Physical cores this process may use."""
    cores = psutil.cpu_count(logical=False) or 1
    try:
        return max(1, min(cores, len(psutil.Process().cpu_affinity())))
    except AttributeError:  # macOS has no affinity
        return cores
