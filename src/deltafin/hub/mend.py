"""Mending an install from its hub: exactly the bad slices, striped or in place."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from deltafin.errors import DriveError, HubChecksumError, StoreError
from deltafin.hub.client import Hub
from deltafin.hub.install import Progress, bring, opened
from deltafin.hub.released import Released
from deltafin.hub.supplier import HubSupplier
from deltafin.store.create import lock_home
from deltafin.store.files import sync
from deltafin.store.manifest import Manifest, PresenceLog
from deltafin.store.store import find_home
from deltafin.store.verify import BadSlice, VerifyReport, verify_store

_OTHER_BYTES = "the hub or mirror holds other bytes: use the one this install was made from"


def mend(
    home: Path, hub: Hub, *, max_bytes_per_s: float | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Reads everything, and fetches exactly the slices that are bad.

    In place, they are put back where they belong in the released files; nothing else there is touched. Shards that have
    become whole expert by expert are compared with the hub's checksum afterwards.

    Returns:
        What was found before.

    Raises:
        StoreError: the install did not come from a hub, or its files must not be written to.
        HubChecksumError: what was fetched differs from what was recorded; nothing was written.
        HubError: it cannot be fetched.
    """
    home = find_home(home)
    report = verify_store(home, max_bytes_per_s=max_bytes_per_s, progress=progress)
    if Manifest.load(home).layout == "in-place":
        if report.bad:
            _mend_in_place(home, hub, report.bad)
        return report
    if report.bad:
        _mend_striped(home, hub, report.bad, progress)
    record = Released.load(home)
    if record is not None and not (record.needed and record.needed <= record.proved):
        with opened(home, hub) as (manifest, checkpoint, released):
            bring(manifest, checkpoint, released, hub, (), progress)
    return report


def _mend_striped(home: Path, hub: Hub, bad: Sequence[BadSlice], progress: Progress | None) -> None:
    with opened(home, hub) as (manifest, checkpoint, released):
        _forget(manifest, [(slice_.blob, slice_.part) for slice_ in bad])
        before = {
            (slice_.blob, slice_.part): int(manifest.checksum[manifest.first[slice_.blob] + slice_.part])
            for slice_ in bad
        }
        # Shards that were proved stay so: the checksums of what is fetched again are known.
        bring(Manifest.load(home), checkpoint, released, hub, sorted({slice_.blob for slice_ in bad}), progress)
        after = Manifest.load(home)
        wrong = [
            key for key, checksum in before.items() if int(after.checksum[after.first[key[0]] + key[1]]) != checksum
        ]
        if wrong:
            _forget(after, wrong)
            raise HubChecksumError(
                f"{after.blob_name(wrong[0][0])} was fetched again and differs from what was recorded",
                remedy=_OTHER_BYTES,
            )


def _forget(manifest: Manifest, rows: Sequence[tuple[int, int]]) -> None:
    log = PresenceLog(manifest.path)
    try:
        log.forget(rows)
    finally:
        log.close()


def _mend_in_place(home: Path, hub: Hub, bad: Sequence[BadSlice]) -> None:
    released = Released.load(home)
    if released is None:
        raise StoreError(
            f"{bad[0].path} is damaged, and the install at {home} was made from files, not from a hub",
            remedy="fetch this file again from the model's repository",
        )
    with lock_home(home):
        m = Manifest.load(home)
        for path in {slice_.path for slice_ in bad}:
            _check_ours(path, released)
        supplier = HubSupplier(m, released, lambda: hub)
        for slice_ in bad:
            index = int(m.first[slice_.blob]) + slice_.part
            data = memoryview(bytearray(slice_.length))
            supplier.fetch(slice_.blob, int(m.at[index] - m.at[m.first[slice_.blob]]), data, lambda: False)
            if xxhash.xxh3_64_intdigest(data) != int(m.checksum[index]):
                raise HubChecksumError(
                    f"{slice_.name} was fetched again and differs from what was recorded", remedy=_OTHER_BYTES
                )
            _overwrite(slice_.path, slice_.offset, data)


def _check_ours(path: Path, released: Released) -> None:
    """Refuses to write to files that others rely on."""
    if path.parent.name == "blobs" and (path.parent.parent / "snapshots").is_dir():
        raise StoreError(
            f"{path} is damaged, and it belongs to a Hugging Face cache that other programs use",
            remedy=f"delete this file, then: hf download {released.pin.repo} --revision {released.pin.revision}",
        )


def _overwrite(path: Path, offset: int, data: memoryview) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], offset + done)
            sync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        refused = e.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
        raise DriveError(
            f"{path} is damaged and cannot be mended: {e.strerror}",
            remedy="make it writable for this user, then run the same command again"
            if refused
            else "check the drive, or fetch this file again from the model's repository",
        ) from None
