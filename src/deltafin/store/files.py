"""Small durable file operations."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from deltafin.store.types import SLICE_ALIGN

T = TypeVar("T")
_TRIES = 3

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
    except OSError as e:
        if e.errno != errno.EINVAL or not path.is_dir():
            raise  # some file systems (exFAT in user space) write directories at once and have no sync for them
    finally:
        os.close(fd)


def patiently(step: Callable[[], T]) -> T:
    """Runs ``step``, and again when the drive fails for a moment: cables and hubs do.

    Raises:
        OSError: it fails every time, or in another way.
    """
    for _ in range(_TRIES - 1):
        try:
            return step()
        except OSError as e:
            if e.errno != errno.EIO:
                raise
    return step()


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


def write_padded(fd: int, data: memoryview, offset: int) -> None:
    """Writes all of a slice, and zeros up to the next slice's place: a direct read rounds out to whole pages.

    Raises:
        OSError: the drive failed.
    """
    padded = bytes(data) + bytes(-(offset + len(data)) % SLICE_ALIGN)
    done = 0
    while done < len(padded):
        done += os.pwrite(fd, padded[done:], offset + done)


READERS_NAME = "readers.lock"


def hold(home: Path) -> int | None:
    """A descriptor that keeps files of the install at ``home`` from being deleted until it is closed; None when it
    cannot be written (then nothing there can be moved either)."""
    try:
        fd = os.open(home / READERS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def unread(home: Path) -> bool:
    """Whether no process holds the install at ``home``."""
    try:
        fd = os.open(home / READERS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
