"""Moving an install to another revision of its model, fetching only what differs."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import xxhash

from deltafin.checkpoint import METADATA_FILES, Checkpoint
from deltafin.checkpoint.tensorfile import read_bounded
from deltafin.errors import ManifestError, StoreError
from deltafin.hub.client import Hub
from deltafin.hub.install import Progress, Say, bring, missing_bytes
from deltafin.hub.pins import Pin
from deltafin.hub.released import FOLDER, Released, fetch_released
from deltafin.hub.slices import ShardMap
from deltafin.store.create import lock_home
from deltafin.store.drives import check_drive
from deltafin.store.files import fsync_path, unread, write_atomic
from deltafin.store.manifest import Manifest, PresenceLog
from deltafin.store.store import find_home

_NEXT = "released-next"


def upgrade(home: Path, hub: Hub, pin: Pin, *, progress: Progress | None = None, say: Say = lambda _: None) -> int:
    """Makes the striped install at ``home`` hold ``pin``; slices of shards with the same sha256 stay as they are.

    A streaming install stays one: experts that were absent stay absent, those that were present are fetched anew where
    their shard differs. A kill leaves an install that this call continues.

    Returns:
        Bytes that differed and were fetched.

    Raises:
        StoreError: the install did not come from a hub, is in use, or the new revision has another geometry.
        HubError: the hub cannot be used; finished work is kept.
    """
    home = find_home(home)
    with lock_home(home):
        m = Manifest.load(home)
        old = Released.load(home)
        if old is None:
            raise StoreError(f"{home} did not come from a hub", remedy="make a new install with deltafin setup")
        if m.layout != "striped":
            raise StoreError(
                f"{home} uses whole files in place",
                remedy="set the new revision up with another --store: files that are the same are used, not fetched",
            )
        for drive in m.drives:
            check_drive(m, drive)
        if not unread(home):
            raise StoreError(f"{home} is in use", remedy="stop deltafin run and serve, then try again")
        if old.pin.repo != pin.repo:
            raise StoreError(f"{home} holds {old.pin.repo}, not {pin.repo}", remedy="make a new install")
        if old.pin.revision != pin.revision:
            # Anything left of an upgrade to yet another revision is of no use.
            shutil.rmtree(home / _NEXT, ignore_errors=True)
            new = _prepare(home, hub, pin, say)
            checkpoint = _same_geometry(home, m, new, hub, say)
            _exchange(home, m, old, new, checkpoint)
            old = Released.load(home)
            assert old is not None
        checkpoint = old.checkpoint(hub, say)
        wanted = _wanted(home, m)
        _adopt_identity(home, old, checkpoint)
        m = Manifest.load(home)
        nbytes = missing_bytes(m, wanted)
        bring(m, checkpoint, old, hub, wanted, progress)
        (home / _WANTED).unlink(missing_ok=True)
        return nbytes


_WANTED = "upgrade.json"


def _prepare(home: Path, hub: Hub, pin: Pin, say: Say) -> Released:
    say(f"asking for {pin.repo} at {pin.revision[:12]}")
    staging = home / _NEXT
    staging.mkdir(exist_ok=True)
    return fetch_released(hub, pin, staging)


def _same_geometry(home: Path, m: Manifest, new: Released, hub: Hub, say: Say) -> Checkpoint:
    checkpoint = new.checkpoint(hub, say)
    if checkpoint.config != m.config:
        raise StoreError(
            f"revision {new.pin.revision[:12]} of {new.pin.repo} has other dimensions than the install at {home}",
            remedy="make a new install of it with deltafin setup --store DIR",
        )
    return checkpoint


def _exchange(home: Path, m: Manifest, old: Released, new: Released, checkpoint: Checkpoint) -> None:
    """Gives up the slices of shards that differ, then makes the new record the install's own."""
    changed = {
        name
        for name, file in new.files.items()
        if name.endswith(".safetensors") and (name not in old.files or old.files[name].sha256 != file.sha256)
    }
    shards = ShardMap(m, checkpoint)
    blobs = sorted({blob for name in changed & shards.pieces.keys() for blob in shards.blobs(name)})
    # Which blobs the user had, for this call to bring back even after a kill.
    had = np.flatnonzero(np.logical_and.reduceat(m.present, m.first[:-1]))
    write_atomic(home / _WANTED, json.dumps({"revision": new.pin.revision, "blobs": had.tolist()}).encode())
    new.proved = {name for name in old.proved if name not in changed and name in new.files}
    new.save()
    log = PresenceLog(m.path)
    try:
        log.forget((b, part) for b in blobs for part in range(int(m.first[b + 1] - m.first[b])))
    finally:
        log.close()
    before = home / f"{FOLDER}-old"
    shutil.rmtree(before, ignore_errors=True)
    os.rename(home / FOLDER, before)
    os.rename(home / _NEXT / FOLDER, home / FOLDER)
    fsync_path(home)
    shutil.rmtree(before, ignore_errors=True)
    shutil.rmtree(home / _NEXT, ignore_errors=True)


def _wanted(home: Path, m: Manifest) -> list[int]:
    """The spine, and the experts that the install had."""
    spine = list(range(m.expert_blobs, len(m.first) - 1))
    path = home / _WANTED
    had = np.flatnonzero(np.logical_and.reduceat(m.present | m.written, m.first[:-1])).tolist()
    if path.exists():
        record = json.loads(read_bounded(path, 64 << 20))
        had = [int(blob) for blob in record["blobs"] if 0 <= int(blob) < len(m.first) - 1]
    return sorted({*spine, *had})


def _adopt_identity(home: Path, released: Released, checkpoint: Checkpoint) -> None:
    """Puts the new small files and the new identity into place; again after a kill, to the same effect."""
    metadata: dict[str, int] = {}
    for name, limit in METADATA_FILES.items():
        if (released.folder / name).exists():
            data = read_bounded(released.folder / name, limit)
            metadata[name] = xxhash.xxh3_64_intdigest(data)
            write_atomic(home / name, data)
    db = sqlite3.connect(home / "manifest.sqlite", isolation_level=None, timeout=30)
    try:
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE info SET value = ? WHERE key = 'identity'", (checkpoint.identity,))
        db.execute("UPDATE info SET value = ? WHERE key = 'metadata'", (json.dumps(metadata),))
        db.execute("COMMIT")
    except sqlite3.Error as e:
        raise ManifestError(f"{home} cannot be written: {e}", remedy="check free space and permissions") from None
    finally:
        db.close()
