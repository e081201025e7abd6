"""Whole files from a hub: verified, resumable, and under their name only when complete."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from deltafin.checkpoint.tensorfile import read_bounded
from deltafin.errors import DriveError, DriveFullError, HubChecksumError, HubError, ReadError
from deltafin.hub.client import Hub, RemoteFile
from deltafin.hub.digest import RunningDigest
from deltafin.hub.pins import Pin
from deltafin.store.files import fsync_path, patiently, sync, write_atomic

SEGMENT = 16 << 20
WORKERS = 8
_COMMIT_SECONDS = 2.0
_AGAIN = "run the same command again; if it happens again, this hub or mirror holds other bytes"


def expected_sha256(pin: Pin, file: RemoteFile) -> str:
    """The checksum that counts for ``file``; empty when only its git id is known.

    Raises:
        HubChecksumError: the hub announces other bytes than the pin.
    """
    pinned = pin.sha256.get(file.name, "")
    if pinned and file.sha256 and pinned != file.sha256:
        raise HubChecksumError(
            f"{file.name} of {pin.repo}: the hub announces {file.sha256}, known is {pinned}",
            remedy="this hub or mirror holds other files than the released ones",
        )
    return pinned or file.sha256


def fetch_small(hub: Hub, pin: Pin, file: RemoteFile, limit: int) -> bytes:
    """A small file, whole and verified.

    Raises:
        HubError: larger than ``limit``, or it cannot be fetched.
        HubChecksumError: its bytes differ from the checksum.
    """
    if file.size > limit:
        raise HubError(
            f"{file.name} of {pin.repo} has {file.size} bytes, more than {limit}",
            remedy="this is not the released file; check repository and mirror",
        )
    data = bytearray(file.size)
    hub.read(pin, file, 0, memoryview(data))
    sha256 = expected_sha256(pin, file)
    wrong = sha256 and hashlib.sha256(data).hexdigest() != sha256
    if not file.sha256 and file.git_sha1:
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
        wrong = wrong or blob.hexdigest() != file.git_sha1
    if wrong:
        raise HubChecksumError(f"{file.name} of {pin.repo} differs from its checksum", remedy=_AGAIN)
    return bytes(data)


def fetch_file(
    hub: Hub, pin: Pin, file: RemoteFile, target: Path, progress: Callable[[int], None] = lambda _: None
) -> str:
    """Brings a large file to ``target``, going on where an earlier call was cut off.

    Args:
        hub: where from.
        pin: repository and revision.
        file: its metadata.
        target: where to; written beside it as ``NAME.part`` until complete and verified.
        progress: told bytes as they are finished, those of earlier calls included.

    Returns:
        The sha256.

    Raises:
        HubError: it cannot be fetched; HubChecksumError: the bytes are wrong and were deleted.
        DriveError, DriveFullError: it cannot be written; finished segments are kept.
    """
    sha256 = expected_sha256(pin, file)
    if not sha256:
        raise HubError(f"{pin.repo} gives no sha256 for {file.name}", remedy="check repository and mirror")
    part = target.with_name(target.name + ".part")
    state = target.with_name(target.name + ".part.json")
    try:
        _fetch_parts(hub, pin, file, sha256, part, state, progress)
        os.replace(part, target)
        fsync_path(target.parent)
        state.unlink(missing_ok=True)
    except OSError as e:
        if e.errno in (28, 122):  # ENOSPC, EDQUOT
            raise DriveFullError(
                f"{target.parent} is full", remedy="free some space, then run the same command again to continue"
            ) from None
        raise DriveError(
            f"{target} cannot be written: {e.strerror}", remedy="check the drive, then try again"
        ) from None
    return sha256


def _fetch_parts(
    hub: Hub, pin: Pin, file: RemoteFile, sha256: str, part: Path, state: Path, progress: Callable[[int], None]
) -> None:
    segments = range(0, file.size, SEGMENT)
    done = _finished(part, state, file, sha256)
    progress(sum(min(SEGMENT, file.size - at) for at in done))
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    memory = threading.local()

    def read_back(offset: int, nbytes: int) -> bytes:
        data = os.pread(fd, nbytes, offset)
        if not data:
            raise HubError(f"{part} shrank while it was written", remedy="run the same command again")
        return data

    def known(offset: int) -> int:
        at = offset // SEGMENT * SEGMENT
        return min(at + SEGMENT, file.size) - offset if at in done else 0

    digest = RunningDigest(file.size, read_back, known)

    def bring(at: int) -> int:
        buffer = getattr(memory, "buffer", None)
        if buffer is None:
            buffer = memory.buffer = memoryview(bytearray(SEGMENT))
        view = buffer[: min(SEGMENT, file.size - at)]
        hub.read(pin, file, at, view)
        written = 0
        while written < len(view):
            written += os.pwrite(fd, view[written:], at + written)
        digest.offer(at, view, wait=True)
        return at

    def commit() -> None:
        sync(fd)
        finished = {"size": file.size, "sha256": sha256, "segment": SEGMENT, "done": sorted(done)}
        write_atomic(state, json.dumps(finished).encode())

    try:
        todo = iter([at for at in segments if at not in done])
        last = time.monotonic()
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="fetch") as pool:
            flying: set[Future[int]] = set()
            try:
                while True:
                    while len(flying) < WORKERS and (at := next(todo, None)) is not None:
                        flying.add(pool.submit(bring, at))
                    if not flying:
                        break
                    landed, flying = wait(flying, return_when=FIRST_COMPLETED)
                    for future in landed:
                        at = future.result()
                        done.add(at)
                        progress(min(SEGMENT, file.size - at))
                    if time.monotonic() - last > _COMMIT_SECONDS:
                        commit()
                        last = time.monotonic()
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt):
                    hub.stop()
                for future in wait(flying).done:
                    if future.exception() is None:
                        done.add(future.result())
                commit()
                raise
        commit()
        if digest.finish() != sha256:
            state.unlink(missing_ok=True)
            part.unlink(missing_ok=True)
            raise HubChecksumError(
                f"{file.name} of {pin.repo} differs from its checksum and was deleted", remedy=_AGAIN
            )
    finally:
        os.close(fd)


def _finished(part: Path, state: Path, file: RemoteFile, sha256: str) -> set[int]:
    """Offsets of the segments that an earlier call finished; empty when its notes do not fit."""
    with suppress(Exception):
        notes = json.loads(read_bounded(state, 16 << 20))
        size = part.stat().st_size
        if (notes["size"], notes["sha256"], notes["segment"]) == (file.size, sha256, SEGMENT):
            ends = {at: min(at + SEGMENT, file.size) for at in range(0, file.size, SEGMENT)}
            return {at for at in notes["done"] if type(at) is int and at in ends and ends[at] <= size}
    return set()


def sha256_of(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """sha256 of a file, read once.

    Raises:
        ReadError: it cannot be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(4 << 20))
    try:
        with open(path, "rb", buffering=0) as file:
            while got := patiently(lambda: file.readinto(buffer)):
                digest.update(buffer[:got])
                progress(got)
    except OSError as e:
        raise ReadError(
            f"{path} cannot be read: {e.strerror}", remedy="check the drive and its cable, or fetch this file again"
        ) from None
    return digest.hexdigest()
