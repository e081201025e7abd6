"""Opens what is remembered for one engine."""

from __future__ import annotations

import shutil
from pathlib import Path

from deltafin.generation.engine import Engine
from deltafin.sessions.files import PointFiles
from deltafin.sessions.points import PointCache
from deltafin.sessions.reuse import ReusingSession
from deltafin.sessions.turns import TurnLog

MOST_DISK = 64 << 30
FOLDER = "states"


def open_sessions(
    engine: Engine, home: Path, *, ram: int, disk: int | None, name: str = FOLDER
) -> tuple[ReusingSession, TurnLog]:
    """The session and the log of replies that share ``home``.

    Args:
        home: Deltafin's own folder.
        ram: bytes for points in RAM.
        disk: bytes for points on disk, 0 for nothing on disk; None: a tenth of the free space, at most ``MOST_DISK``.
    """
    folder = home / name
    if disk is None:
        try:
            home.mkdir(parents=True, exist_ok=True)
            disk = min(MOST_DISK, shutil.disk_usage(home).free // 10)
        except OSError:
            disk = 0
    files = PointFiles(folder, engine.store.identity, engine.backend.numerics(), disk) if disk else None
    turns = TurnLog(folder / "turns.sqlite" if disk else None, engine.store.identity)
    return ReusingSession(engine, PointCache(ram), files), turns


def ram_share(budget: int) -> int:
    """Bytes for points in RAM when the user names none."""
    return budget // 16
