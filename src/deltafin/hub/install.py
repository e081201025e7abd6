"""Installs from a hub: full, streaming, in place; completed piece by piece, and their drafts."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from deltafin.checkpoint import METADATA_FILES, Checkpoint
from deltafin.checkpoint.inventory import is_vision
from deltafin.checkpoint.tensorfile import INDEX_NAME, SINGLE_NAME, read_bounded, read_index
from deltafin.errors import (
    DriveError,
    DriveFullError,
    DriveMissingError,
    HubChecksumError,
    HubError,
    ManifestError,
    StoreError,
    UsageError,
)
from deltafin.hub.client import Hub
from deltafin.hub.download import expected_sha256, fetch_file, fetch_small, sha256_of
from deltafin.hub.pins import DRAFT_FILES, Pin
from deltafin.hub.released import Released, fetch_released
from deltafin.hub.slices import HubSource, ShardMap, ShardProof
from deltafin.store.create import create_store, lock_home, open_install
from deltafin.store.drives import check_drive
from deltafin.store.files import write_atomic
from deltafin.store.ingest import ingest
from deltafin.store.manifest import MANIFEST_NAME, Manifest, PresenceLog
from deltafin.store.store import find_home
from deltafin.store.types import DriveSpec, IngestProgress

MOVERS = 8
"""Blobs fetched at a time: enough to fill a fast line over a long round trip, 140 MB of memory."""

RECORD = "source.json"
Progress = Callable[[IngestProgress], None]
Say = Callable[[str], None]


def install_striped(
    hub: Hub,
    pin: Pin,
    drives: Sequence[DriveSpec],
    home: Path,
    *,
    experts: bool,
    progress: Progress | None = None,
    say: Say = lambda _: None,
) -> None:
    """Brings ``pin`` from the hub straight into slices on ``drives``, or continues what was begun.

    Args:
        hub: where from.
        pin: the model.
        drives: existing directories, optionally with weights.
        home: for manifest and small files.
        experts: all experts (a full install), or none of them (a streaming one).
        progress: called a few times per second.
        say: told single events.

    Raises:
        HubError, HubChecksumError, StoreError, CheckpointError: as named; finished work is kept.
    """
    _check_revision(home, pin)
    released = fetch_released(hub, pin, home)
    checkpoint = released.checkpoint(hub, say)
    with open_install(checkpoint, drives, layout="striped", home=home, progress=progress) as manifest:
        spine = range(manifest.expert_blobs, len(manifest.first) - 1)
        bring(manifest, checkpoint, released, hub, None if experts else spine, progress)


def bring(
    manifest: Manifest,
    checkpoint: Checkpoint,
    released: Released,
    hub: Hub,
    blobs: Collection[int] | None,
    progress: Progress | None = None,
) -> None:
    """Fetches what is missing of ``blobs`` (None: of everything); the caller holds the install's lock.

    A shard of which then every byte is in the install is compared with the hub's sha256 before its slices count; so is
    one that has become whole in between, expert by expert.

    Raises:
        HubChecksumError: a shard is not genuine; its slices were given up and will be fetched again.
        HubError, StoreError: finished work is kept.
    """
    shards = ShardMap(manifest, checkpoint)
    released.need(shards.pieces)
    order = shards.order(blobs)
    proof = ShardProof(manifest, shards, released, hub, order, progress)
    try:
        ingest(
            manifest,
            lambda: HubSource(manifest, checkpoint, released, hub, proof.arrived),
            progress,
            blobs=order,
            movers=MOVERS,
            witness=proof,
            interrupt=hub.stop,
            phase="fetch",
        )
    except HubChecksumError:
        if proof.failed:
            _forget(manifest, shards.blobs(proof.failed))
        raise
    finally:
        proof.close()


def _forget(manifest: Manifest, blobs: Collection[int]) -> None:
    first = manifest.first
    log = PresenceLog(manifest.path)
    try:
        log.forget((b, part) for b in blobs for part in range(int(first[b + 1] - first[b])))
    finally:
        log.close()


def install_in_place(
    hub: Hub,
    pin: Pin,
    drives: Sequence[DriveSpec],
    home: Path,
    *,
    progress: Progress | None = None,
    say: Say = lambda _: None,
) -> None:
    """Downloads whole shards to ``drives`` and uses them where they are.

    Shards go to the drive with most room, into a folder named like the repository; those already there are used.

    Raises:
        HubError, HubChecksumError, StoreError, CheckpointError: as named; finished work is kept. Another file of a
            shard's name is never overwritten.
    """
    _check_revision(home, pin)
    released = fetch_released(hub, pin, home)
    names = text_shards(released)
    released.need(names)
    total = sum(released.files[name].size for name in names)
    with lock_home(home):
        tell = _teller("download", total, progress)
        for name in names:
            target = _place(released, name, drives)
            link = released.folder / name
            if name in released.proved and target.is_file():
                tell(released.files[name].size)
                continue
            say(f"{name} → {target.parent}")
            if not link.is_symlink():
                _link(link, target)
            if target.exists():
                _prove_here(target, released, pin, tell)
            else:
                fetch_file(hub, pin, released.files[name], target, tell)
            released.proved.add(name)
            released.save()
    create_store(released.folder, [], layout="in-place", home=home, progress=progress)


def _prove_here(target: Path, released: Released, pin: Pin, tell: Callable[[int], None]) -> None:
    """A file that is there already, of an earlier revision's install or from before a kill, is used or left alone."""
    file = released.files[target.name]
    if target.stat().st_size != file.size or sha256_of(target, tell) != expected_sha256(pin, file):
        raise StoreError(
            f"{target} exists and is not the file of {pin.repo} at {pin.revision[:12]}",
            remedy="move it or delete it, or name another --drive, then run the same command again",
        )


def _link(link: Path, target: Path) -> None:
    """Notes where a shard is going to be, before days are spent on fetching it."""
    try:
        link.symlink_to(target)
    except OSError as e:
        raise DriveError(
            f"{link.parent} is on a file system without links ({e.strerror})",
            remedy="name a folder on the system's own drive with --store; the drives may be of any kind",
        ) from None


def text_shards(released: Released) -> list[str]:
    """Shards that hold text tensors; the vision tower's are never fetched."""
    index = released.folder / INDEX_NAME
    if not index.exists():
        return [SINGLE_NAME]
    names = sorted({file for name, file in read_index(index).items() if not is_vision(name)})
    for name in names:
        if name not in released.files:
            raise HubError(f"{released.pin.repo} has no {name}, which its index names", remedy="check the repository")
    return names


def _place(released: Released, name: str, drives: Sequence[DriveSpec]) -> Path:
    link = released.folder / name
    if link.is_symlink():
        target = Path(os.readlink(link))
        if not target.parent.is_dir():
            raise DriveMissingError(f"{target.parent} is missing", remedy="connect the drive, then try again")
        return target
    folders = [spec.path.resolve() / released.pin.repo.partition("/")[2] for spec in drives]
    for folder in folders:
        if (folder / name).exists() or (folder / f"{name}.part").exists():
            return folder / name
    folder = max(folders, key=lambda f: shutil.disk_usage(f.parent).free)
    size = released.files[name].size
    if shutil.disk_usage(folder.parent).free < size:
        raise DriveFullError(
            f"no drive has {size / 1e9:.1f} GB free for {name}",
            remedy="free some space or add --drive, then run the same command again to continue",
        )
    folder.mkdir(exist_ok=True)
    return folder / name


def adopt(
    folder: Path, home: Path, hub: Hub | None, pin: Pin, *, progress: Progress | None = None, say: Say = lambda _: None
) -> None:
    """Takes over a download where it is: a plain directory, or a Hugging Face cache with its links.

    Whole shards are compared with the hub's checksums, or, without a hub, with those a cache names its files by.

    Raises:
        UsageError: no released files there.
        HubChecksumError: a file is not the released one.
        CheckpointError, StoreError: as for an install in place.
    """
    folder = find_snapshot(folder, pin)
    with lock_home(home):
        known = Released.load(home)
        proved: set[str] = set()
        if known is not None and known.pin == pin:
            # Those adopted without a checksum are compared now, if there is one.
            proved = {n for n in known.proved if hub is None or (n in known.files and known.files[n].sha256)}
        checkpoint = Checkpoint.open(folder)
        released = _local_record(folder, home, hub, pin, checkpoint)
        released.proved |= proved
        released.need(checkpoint.files)
        todo = [name for name in sorted(checkpoint.files) if name not in proved]
        tell = _teller("check", sum(checkpoint.files[name] for name in todo), progress)
        for name in todo:
            _prove_local(folder / name, released, pin, tell, say)
            released.proved.add(name)
            released.save()
    create_store(folder, [], layout="in-place", home=home, progress=progress)


def find_snapshot(folder: Path, pin: Pin) -> Path:
    """The folder with ``config.json``: ``folder``, or the pinned snapshot in a cache that ``folder`` is part of.

    Raises:
        UsageError: there is none.
    """
    if (folder / "config.json").exists():
        return folder
    repo = "models--" + pin.repo.replace("/", "--")
    for base in (folder, folder / repo, folder / "hub" / repo):
        for found in (base / "snapshots" / pin.revision, *sorted(base.glob("snapshots/*"))):
            if (found / "config.json").exists():
                return found
    raise UsageError(
        f"{folder} holds neither released files nor a cache of {pin.repo}",
        remedy="name the folder that holds config.json and the shards",
    )


def _local_record(folder: Path, home: Path, hub: Hub | None, pin: Pin, checkpoint: Checkpoint) -> Released:
    if hub is not None:
        released = fetch_released(hub, pin, home)
        for name in METADATA_FILES:
            ours, theirs = folder / name, released.folder / name
            if theirs.exists() and ours.exists() and ours.read_bytes() != theirs.read_bytes():
                raise HubChecksumError(
                    f"{ours} differs from the released file of {pin.repo}",
                    remedy="adopt a download of the pinned revision, or name yours with --repo and --revision",
                )
        return released
    from deltafin.hub.client import RemoteFile

    files = {}
    for name, size in checkpoint.files.items():
        blob = (folder / name).resolve().name
        sha256 = blob if len(blob) == 64 and set(blob) <= set("0123456789abcdef") else ""
        files[name] = RemoteFile(name, size, sha256, "")
    (home / "released").mkdir(exist_ok=True)
    return Released(home / "released", pin, files)


def _prove_local(path: Path, released: Released, pin: Pin, tell: Callable[[int], None], say: Say) -> None:
    remote = released.files.get(path.name)
    size = path.stat().st_size
    if remote is None or remote.size != size:
        there = "no such file" if remote is None else f"{remote.size} bytes"
        raise HubChecksumError(f"{path} has {size} bytes; {pin.repo} has {there}", remedy=_REFETCH)
    expected = expected_sha256(pin, remote)
    if not expected:
        say(f"{path.name}: no checksum is known for it, only its form was checked")
        with open(path, "rb") as file:
            file.seek(max(0, size - 4096))
            tail = file.read()
        if not any(tail):
            raise HubChecksumError(f"{path} ends in zeros: its download was never finished", remedy=_REFETCH)
        tell(size)
        return
    if sha256_of(path, tell) != expected:
        with open(path, "rb") as file:
            file.seek(max(0, size - 4096))
            zeros = not any(file.read())
        what = "ends in zeros: its download was never finished" if zeros else "differs from the hub's checksum"
        raise HubChecksumError(f"{path} {what}", remedy=_REFETCH)


_REFETCH = "fetch this file again, then run the same command"


def select(manifest: Manifest, layers: Collection[int] | None, experts: Collection[int] | None) -> list[int]:
    """Blobs of the given layers (None: all) and experts (None: all).

    Raises:
        UsageError: no such layer or expert.
    """
    config = manifest.config
    known = range(config.dense_layers, config.layers)
    for layer in layers or ():
        if layer not in known:
            raise UsageError(f"layer {layer} has no experts", remedy=f"layers {known[0]} to {known[-1]} have")
    for expert in experts or ():
        if not 0 <= expert < config.experts:
            raise UsageError(f"there is no expert {expert}", remedy=f"experts are numbered 0 to {config.experts - 1}")
    return [
        (layer - config.dense_layers) * config.experts + expert
        for layer in (known if layers is None else sorted(set(layers)))
        for expert in (range(config.experts) if experts is None else sorted(set(experts)))
    ]


@contextmanager
def opened(home: Path, hub: Hub) -> Iterator[tuple[Manifest, Checkpoint, Released]]:
    """An install that came from a hub, for this process alone to write to.

    Raises:
        StoreError: it did not come from a hub, a drive is missing, or another process works on it.
    """
    home = find_home(home)
    released = Released.load(home)
    if released is None:
        raise StoreError(
            f"the install at {home} was made from files, not from a hub",
            remedy="complete or mend it with deltafin store repair HOME --model DIR",
        )
    with lock_home(home):
        manifest = Manifest.load(home)
        if manifest.layout != "striped":
            raise StoreError(
                f"the install at {home} uses whole files in place",
                remedy="complete it with the same deltafin setup, mend it with deltafin verify --repair",
            )
        for drive in manifest.drives:
            check_drive(manifest, drive)
        yield manifest, released.checkpoint(hub), released


def fetch_draft(hub: Hub, pin: Pin, folder: Path, progress: Progress | None = None) -> None:
    """Brings a draft's files into ``folder``.

    Raises:
        HubError, HubChecksumError, DriveError: as named; finished work is kept.
    """
    if draft_complete(folder, pin):
        return
    listed = hub.files(pin)
    files = [listed[name] for name in DRAFT_FILES if name in listed]
    for name in ("config.json", SINGLE_NAME):
        if name not in listed:
            raise HubError(f"{pin.repo} has no {name}", remedy="check the repository's name and revision")
    folder.mkdir(parents=True, exist_ok=True)
    tell = _teller("draft", sum(file.size for file in files), progress)
    for file in files:
        limit = DRAFT_FILES[file.name]
        if file.name == SINGLE_NAME:
            fetch_file(hub, pin, file, folder / file.name, tell)
        else:
            write_atomic(folder / file.name, fetch_small(hub, pin, file, limit))
            tell(file.size)
    write_atomic(
        folder / RECORD,
        json.dumps(
            {"repo": pin.repo, "revision": pin.revision, "files": {file.name: file.size for file in files}}, indent=1
        ).encode(),
    )


def draft_complete(folder: Path, pin: Pin) -> bool:
    """Whether ``folder`` holds the draft ``pin`` already."""
    try:
        known = json.loads(read_bounded(folder / RECORD, 1 << 20))
        same = (known["repo"], known["revision"]) == (pin.repo, pin.revision)
        return same and all((folder / name).stat().st_size == size for name, size in known["files"].items())
    except Exception:
        return False


def _check_revision(home: Path, pin: Pin) -> None:
    if not (home / MANIFEST_NAME).exists():
        return
    known = Released.load(home)
    if known is None:
        raise ManifestError(
            f"{home} holds an install that was made from files", remedy="choose another --home, or delete that install"
        )
    if (known.pin.repo, known.pin.revision) != (pin.repo, pin.revision):
        raise UsageError(
            f"{home} holds {known.pin.repo} at revision {known.pin.revision[:12]}",
            remedy="move it to the new revision with deltafin upgrade, or choose another --home",
        )


def _teller(phase: str, total: int, progress: Progress | None) -> Callable[[int], None]:
    """Turns finished bytes into progress reports of one phase."""
    state = {"done": 0, "start": time.monotonic(), "first": -1}

    def tell(nbytes: int) -> None:
        state["done"] += nbytes
        if progress is None:
            return
        elapsed = max(time.monotonic() - state["start"], 1e-9)
        if state["first"] < 0:
            state["first"] = state["done"]  # what earlier runs had finished says nothing about the rate
        rate = (state["done"] - state["first"]) / elapsed
        eta = (total - state["done"]) / rate if rate > 0 else None
        progress(IngestProgress(phase, int(state["done"]), total, int(state["first"]), (rate,), eta))

    return tell


def missing_bytes(manifest: Manifest, blobs: Collection[int] | Mapping[int, object]) -> int:
    """Bytes of ``blobs`` that are not in the install."""
    chosen = np.zeros(len(manifest.first) - 1, dtype=bool)
    chosen[list(blobs)] = True
    return int(manifest.length[chosen[manifest.blobs] & ~manifest.present].sum())
