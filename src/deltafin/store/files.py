"""Small durable file operations."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)


def sync(fd: int) -> None:
    """Makes an open file's content durable.

    Raises:
        OSError: the drive failed.
    """
    if _F_FULLFSYNC is not None:
        try:
            fcntl.fcntl(fd, _F_FULLFSYNC)  # on macOS fsync leaves the data in the drive's volatile cache
            return
        except OSError:
            pass  # not every file system has it
    os.fsync(fd)


def fsync_path(path: Path) -> None:
    """Makes a file's content, or a directory's entries, durable.

    Raises:
        OSError: the drive failed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces ``path`` by ``data``: after a crash there is the old file or the new one, durable, never a
    part.

    Raises:
        OSError: the drive cannot be written.
    """
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        sync(file.fileno())
    os.replace(temporary, path)
    fsync_path(path.parent)
