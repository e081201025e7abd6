"""The manifest: what an install holds, in SQLite, loaded whole into arrays and believed only after checks.

A slice's ``present`` becomes true in a committed transaction after its bytes are durable, never before. The
file lies on a user's drive, so opening treats it as hostile: the schema must be ours to the letter, every
number is bounded against the configuration and the file table, and every file name stays inside its drive's
directory.
"""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from deltafin.checkpoint.config import K3Config
from deltafin.checkpoint.inventory import ITEM_BYTES, expert_inventory, spine_inventory
from deltafin.errors import ManifestError
from deltafin.store.files import fsync_path
from deltafin.store.slicing import InstallPlan
from deltafin.store.types import PAGE, SPINE_PAGE, DriveInfo

MANIFEST_NAME = "manifest.sqlite"
FORMAT = 1
MAX_MANIFEST_BYTES = 2 << 30
MAX_DRIVES = 256

_SCHEMA = (
    "CREATE TABLE info (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    "CREATE TABLE drives (drive INTEGER PRIMARY KEY, uuid TEXT NOT NULL, path TEXT NOT NULL, "
    "weight REAL NOT NULL, bytes_per_s REAL NOT NULL) STRICT",
    "CREATE TABLE files (file INTEGER PRIMARY KEY, drive INTEGER NOT NULL, name TEXT NOT NULL, "
    "nbytes INTEGER NOT NULL) STRICT",
    "CREATE TABLE units (unit INTEGER PRIMARY KEY, first_blob INTEGER NOT NULL, blobs INTEGER NOT NULL, "
    "buffer_bytes INTEGER NOT NULL) STRICT",
    "CREATE TABLE tensors (name TEXT PRIMARY KEY, offset INTEGER NOT NULL) STRICT",
    "CREATE TABLE slices (blob INTEGER NOT NULL, part INTEGER NOT NULL, file INTEGER NOT NULL, "
    "offset INTEGER NOT NULL, length INTEGER NOT NULL, at INTEGER NOT NULL, checksum INTEGER NOT NULL DEFAULT 0, "
    "present INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (blob, part)) STRICT, WITHOUT ROWID",
)
_REBUILD = "restore the manifest from a copy, or delete it and run deltafin store create again"

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the install: its drive, its name relative to the drive's directory, the bytes it must
    have."""

    drive: int
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class UnitEntry:
    """A spine unit's blobs and the bytes of its buffer."""

    first_blob: int
    blobs: int
    buffer_bytes: int


@dataclass(frozen=True)
class Manifest:
    """A loaded manifest. Arrays have one element per slice, sorted by blob and part.

    Attributes:
        path: the SQLite file.
        config: the model the manifest was checked against.
        identity: of the model.
        store_uuid: of this install.
        layout: ``striped`` or ``in-place``.
        metadata: xxh3_64 by name of the small files beside the manifest.
        drives: in index order.
        files: in index order.
        units: by spine key, in reading order.
        tensor_offsets: position of each spine tensor in its unit's buffer.
        first: [blobs + 1] index of each blob's first slice.
        file, offset, length, at: int64, see ``Extent``.
        checksum: uint64.
        present: bool.
        generation: grows whenever rows are exchanged, so that an older view of the manifest cannot write into it.
        target, suffix: while drives are being balanced, the shares it is going to and the mark of the new files.
        written: bool, durable with its checksum recorded, but not yet believed (see ``PresenceLog.commit``).
    """

    path: Path
    config: K3Config
    identity: str
    store_uuid: str
    layout: str
    metadata: dict[str, int]
    drives: tuple[DriveInfo, ...]
    files: tuple[FileEntry, ...]
    units: dict[str, UnitEntry]
    tensor_offsets: dict[str, int]
    first: Int64
    file: Int64
    offset: Int64
    length: Int64
    at: Int64
    checksum: npt.NDArray[np.uint64]
    present: npt.NDArray[np.bool_]
    written: npt.NDArray[np.bool_]
    generation: int = 0
    target: tuple[float, ...] | None = None
    suffix: str = ""

    @property
    def expert_blobs(self) -> int:
        """Blobs 0 … expert_blobs - 1 are routed experts."""
        return len(self.config.moe_layers) * self.config.experts

    @property
    def blobs(self) -> Int64:
        """[slices] blob of each slice."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def reading_order(self) -> Int64:
        """Indices of all slices in the order in which their files grow: unit by unit, within it by offset."""
        # Striped, the files of one unit stand together in the table, one per drive.
        together = len(self.drives) if self.layout == "striped" else 1
        return np.lexsort((self.offset, self.file // together))

    def needed_sizes(self) -> list[int]:
        """For each file the end in bytes of its last present slice; 0 when nothing is there."""
        needed = np.zeros(len(self.files), dtype=np.int64)
        np.maximum.at(needed, self.file[self.present], (self.offset + self.length)[self.present])
        return list(map(int, needed))

    def blob_name(self, blob: int) -> str:
        """What a blob is, for messages."""
        if blob < self.expert_blobs:
            layer, expert = divmod(blob, self.config.experts)
            return f"expert {expert} of layer {layer + self.config.dense_layers}"
        key = next(k for k, u in self.units.items() if u.first_blob <= blob < u.first_blob + u.blobs)
        return f"spine unit {key}"

    def file_path(self, file: int) -> Path:
        """Where a file is expected now."""
        entry = self.files[file]
        return self.drives[entry.drive].path / entry.name

    @classmethod
    def load(cls, home: Path) -> Manifest:
        """Loads and checks ``home/manifest.sqlite`` against ``home/config.json``.

        Raises:
            ManifestError: missing, damaged, of another format, or inconsistent in any way.
            ConfigError: the configuration beside it is missing or not K3's.
        """
        path = home / MANIFEST_NAME
        if not path.is_file():
            raise ManifestError(f"{home} holds no install ({MANIFEST_NAME} is missing)", remedy=_CREATE)
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ManifestError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes", remedy=_REBUILD)
        config = K3Config.load(home)
        try:
            with read_only(path) as db:
                return _load(cls, path, config, db)
        except (sqlite3.Error, KeyError, TypeError, ValueError, OverflowError, RecursionError) as e:
            raise ManifestError(f"{path} is damaged: {str(e)[:200]}", remedy=_REBUILD) from None


_CREATE = "make it with deltafin setup --drive DIR, or name the right folder with --store"


def write_manifest(
    home: Path,
    plan: InstallPlan,
    drives: Sequence[DriveInfo],
    *,
    identity: str,
    store_uuid: str,
    layout: str,
    metadata: dict[str, int],
) -> None:
    """Writes a new manifest in which nothing is present; it appears under its name complete and durable, or
    not at all."""
    temporary = home / (MANIFEST_NAME + ".new")
    temporary.unlink(missing_ok=True)
    db = sqlite3.connect(temporary, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = OFF")  # a crash leaves only a file that the next run deletes
        db.execute("BEGIN")
        for statement in _SCHEMA:
            db.execute(statement)
        info = {
            "format": str(FORMAT),
            "identity": identity,
            "store": store_uuid,
            "layout": layout,
            "metadata": json.dumps(metadata),
        }
        db.executemany("INSERT INTO info VALUES (?, ?)", info.items())
        db.executemany(
            "INSERT INTO drives VALUES (?, ?, ?, ?, ?)",
            [(d.index, d.uuid, str(d.path), d.weight, d.bytes_per_s) for d in drives],
        )
        db.executemany("INSERT INTO files VALUES (?, ?, ?, ?)", ((i, *row) for i, row in enumerate(plan.files)))
        db.executemany("INSERT INTO units VALUES (?, ?, ?, ?)", ((i, *row) for i, row in enumerate(plan.units)))
        db.executemany("INSERT INTO tensors VALUES (?, ?)", plan.tensors)
        db.executemany(
            "INSERT INTO slices (blob, part, file, offset, length, at) VALUES (?, ?, ?, ?, ?, ?)", plan.slices
        )
        db.execute("COMMIT")
    finally:
        db.close()
    fsync_path(temporary)
    os.replace(temporary, home / MANIFEST_NAME)
    fsync_path(home)


class PresenceLog:
    """Records finished slices; one transaction per batch, durable when ``commit`` returns.

    Args:
        path: the manifest.
        generation: of the view the rows come from; when the manifest has moved on, nothing is recorded.

    Raises:
        ManifestError: the manifest cannot be written.
    """

    def __init__(self, path: Path, generation: int | None = None) -> None:
        self._path = path
        self._generation = generation
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=30)
            self._db.execute("PRAGMA journal_mode = DELETE")
            self._db.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error as e:
            raise self._error(e) from None

    def commit(self, rows: Iterable[tuple[int, int, int]], *, believed: bool = True) -> None:
        """Marks (blob, part, checksum) present, or only written when the bytes must still prove themselves.

        Raises:
            ManifestError: the transaction failed and was rolled back.
        """
        value = 1 if believed else 2
        signed = [(c - (1 << 64) if c >> 63 else c, value, blob, part) for blob, part, c in rows]
        self._run("UPDATE slices SET checksum = ?, present = ? WHERE blob = ? AND part = ?", signed)

    def believe(self, blobs: Iterable[int]) -> None:
        """Marks what is written of ``blobs`` present.

        Raises:
            ManifestError: the transaction failed and was rolled back.
        """
        self._run("UPDATE slices SET present = 1 WHERE blob = ? AND present = 2", [(blob,) for blob in blobs])

    def forget(self, rows: Iterable[tuple[int, int]]) -> None:
        """Marks (blob, part) absent.

        Raises:
            ManifestError: the transaction failed and was rolled back.
        """
        self._run("UPDATE slices SET present = 0 WHERE blob = ? AND part = ?", list(rows))

    def move(self, rows: Iterable[tuple[str, int]]) -> None:
        """Records (path, drive).

        Raises:
            ManifestError: the transaction failed and was rolled back.
        """
        self._run("UPDATE drives SET path = ? WHERE drive = ?", list(rows))

    def close(self) -> None:
        """Closes the connection."""
        self._db.close()

    def _run(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            if self._generation is not None:
                found = self._db.execute("SELECT value FROM info WHERE key = 'generation'").fetchone()
                if int(found[0] if found else 0) != self._generation:
                    self._db.execute("ROLLBACK")
                    raise ManifestError(
                        f"{self._path} has changed: slices are being moved",
                        remedy="restart after deltafin drives is done",
                    )
            self._db.executemany(statement, rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as e:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise self._error(e) from None

    def _error(self, e: sqlite3.Error) -> ManifestError:
        return ManifestError(
            f"{self._path} cannot be written: {e}", remedy="check free space and permissions of this folder"
        )


@contextmanager
def read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection for reading a file that we wrote, also when a killed run left it in the middle of a change."""
    try:
        db = _connect(path, "ro")
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        # A killed run left a journal to roll back, which needs write access once.
        db = _connect(path, "rw")
    try:
        yield db
    finally:
        db.close()


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=30)
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")
    return db


def _load(cls: type[Manifest], path: Path, config: K3Config, db: sqlite3.Connection) -> Manifest:
    schema = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 64")}
    if schema != set(_SCHEMA):
        raise ManifestError(f"{path} is not a manifest of format {FORMAT}", remedy=_REBUILD)
    info = dict(db.execute("SELECT key, value FROM info LIMIT 64"))
    if info.get("format") != str(FORMAT):
        raise ManifestError(f"{path} has format {info.get('format')}, this version reads {FORMAT}", remedy=_REBUILD)
    _require(info.get("layout") in ("striped", "in-place"), "unknown layout")
    metadata = json.loads(info["metadata"])
    sound = isinstance(metadata, dict) and all(_is_plain(n) and type(v) is int for n, v in metadata.items())
    _require(sound, "metadata table")
    drives = _drives(db)
    target, suffix = _balance(info.get("target"), len(drives))
    files = _files(db, len(drives))
    units, expert_blobs, blobs = _units(db, config)
    offsets = _tensor_offsets(db, config, units)
    table = _slice_table(db, blobs, max(len(drives), 1))
    part = table[:, 1]
    first = np.searchsorted(table[:, 0], np.arange(blobs + 1))
    manifest = cls(
        path=path,
        config=config,
        identity=info["identity"],
        store_uuid=info["store"],
        layout=info["layout"],
        metadata=metadata,
        drives=drives,
        files=files,
        units=units,
        tensor_offsets=offsets,
        first=first,
        file=table[:, 2].copy(),
        offset=table[:, 3].copy(),
        length=table[:, 4].copy(),
        at=table[:, 5].copy(),
        checksum=table[:, 6].copy().view(np.uint64),
        present=table[:, 7] == 1,
        written=table[:, 7] == 2,
        generation=int(info.get("generation", "0")),
        target=target,
        suffix=suffix,
    )
    _require(bool(np.all(np.diff(first) > 0)) and int(first[-1]) == len(table), "blobs without slices")
    _require(
        bool(np.array_equal(part, np.arange(len(table)) - np.repeat(first[:-1], np.diff(first)))),
        "slice parts",
    )
    _check_ranges(manifest)
    _check_experts(manifest, expert_blobs)
    _check_spine(manifest, int(first[expert_blobs]))
    return manifest


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"inconsistent {what}")


def _balance(text: str | None, drives: int) -> tuple[tuple[float, ...] | None, str]:
    if text is None:
        return None, ""
    record = json.loads(text)
    weights, suffix = tuple(map(float, record["weights"])), record["suffix"]
    sound = len(weights) == drives and all(0 <= w < 1e18 for w in weights) and sum(weights) > 0
    _require(sound and isinstance(suffix, str) and suffix.isalnum() and len(suffix) < 20, "target of the balance")
    return weights, suffix


def _drives(db: sqlite3.Connection) -> tuple[DriveInfo, ...]:
    rows = db.execute(
        f"SELECT drive, uuid, path, weight, bytes_per_s FROM drives ORDER BY drive LIMIT {MAX_DRIVES + 1}"
    )
    drives = tuple(DriveInfo(index, uuid, Path(path), weight, rate) for index, uuid, path, weight, rate in rows)
    _require(0 < len(drives) <= MAX_DRIVES and [d.index for d in drives] == list(range(len(drives))), "drive table")
    _require(all(d.path.is_absolute() and "\0" not in str(d.path) and d.weight > 0 for d in drives), "drive table")
    return drives


def _files(db: sqlite3.Connection, drives: int) -> tuple[FileEntry, ...]:
    rows = db.execute("SELECT file, drive, name, nbytes FROM files ORDER BY file LIMIT 4194304").fetchall()
    _require([row[0] for row in rows] == list(range(len(rows))), "file table")
    for _, drive, name, nbytes in rows:
        _require(0 <= drive < drives and 0 <= nbytes < 1 << 62, "file table")
        parts = PurePosixPath(name).parts
        if not 1 <= len(parts) <= 2 or not all(_is_plain(p) for p in parts) or "/".join(parts) != name:
            raise ValueError(f"the file name {ascii(name)[:120]} does not stay inside its drive")
    return tuple(FileEntry(drive, name, nbytes) for _, drive, name, nbytes in rows)


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and len(name) < 256 and not set(name) & {"/", "\\", "\0"}


def _units(db: sqlite3.Connection, config: K3Config) -> tuple[dict[str, UnitEntry], int, int]:
    inventory = spine_inventory(config)
    rows = db.execute(
        f"SELECT unit, first_blob, blobs, buffer_bytes FROM units ORDER BY unit LIMIT {len(inventory) + 1}"
    )
    units: dict[str, UnitEntry] = {}
    expert_blobs = end = len(config.moe_layers) * config.experts
    for (unit, first, blobs, nbytes), (key, tensors) in zip(rows.fetchall(), inventory.items(), strict=True):
        payload = sum(spec.nbytes for spec in tensors.values())
        _require(unit == len(units) and first == end, "spine units")
        # Each tensor can cost a blob of its own and two partial pages, not more.
        _require(0 < blobs <= payload // SPINE_PAGE + 2 * len(tensors), "spine units")
        _require(
            payload <= nbytes <= payload + 2 * PAGE * (len(tensors) + 1) and nbytes % PAGE == 0,
            "spine buffer",
        )
        units[key] = UnitEntry(first, blobs, nbytes)
        end = first + blobs
    return units, expert_blobs, end


def _tensor_offsets(db: sqlite3.Connection, config: K3Config, units: dict[str, UnitEntry]) -> dict[str, int]:
    inventory = spine_inventory(config)
    limit = sum(len(tensors) for tensors in inventory.values())
    offsets: dict[str, int] = dict(db.execute(f"SELECT name, offset FROM tensors LIMIT {limit + 1}"))
    _require(len(offsets) == limit, "spine tensors")
    for key, tensors in inventory.items():
        for name, spec in tensors.items():
            offset = offsets.get(name, -1)
            fits = 0 <= offset <= units[key].buffer_bytes - spec.nbytes and offset % ITEM_BYTES[spec.dtype] == 0
            _require(fits, "spine tensors")
    return offsets


def _slice_table(db: sqlite3.Connection, blobs: int, drives: int) -> Int64:
    limit = blobs * drives
    rows = db.execute(
        "SELECT blob, part, file, offset, length, at, checksum, present FROM slices ORDER BY blob, part "
        f"LIMIT {limit + 1}"
    )
    # One flat stream of integers: no Python object survives per row, and a full-size table loads in well
    # under a second.
    flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64)
    table = flat.reshape(-1, 8)
    _require(len(table) <= limit, "slice table")
    return table


def _check_ranges(m: Manifest) -> None:
    _require(bool(np.all((m.file >= 0) & (m.file < len(m.files)))), "slice files")
    sizes = np.array([f.nbytes for f in m.files], dtype=np.int64)[m.file]
    inside = (m.offset >= 0) & (m.length > 0) & (m.length <= sizes) & (m.offset <= sizes - m.length)
    _require(bool(np.all(inside)), "slice ranges")
    _require(bool(np.all((m.at >= 0) & (m.at < 1 << 48) & ((m.at - m.offset) % PAGE == 0))), "slice alignment")


def _check_experts(m: Manifest, expert_blobs: int) -> None:
    if not expert_blobs:
        return
    starts, count = m.first[:expert_blobs], int(m.first[expert_blobs])
    at, length = m.at[:count], m.length[:count]
    nbytes = sum(spec.nbytes for spec in expert_inventory(m.config).values())
    _require(bool(np.all(np.add.reduceat(length, starts) == nbytes)), "expert slices")
    later = np.ones(count, dtype=bool)
    later[starts] = False
    _require(bool(np.all(at[~later] < PAGE)), "expert slices")
    follows = np.flatnonzero(later)
    _require(bool(np.all(at[follows] == at[follows - 1] + length[follows - 1])), "expert slices")
    _require(bool(np.all(at[follows] % PAGE == 0)), "expert slices")


def _check_spine(m: Manifest, begin: int) -> None:
    inventory = spine_inventory(m.config)
    for key, unit in m.units.items():
        low, high = int(m.first[unit.first_blob]), int(m.first[unit.first_blob + unit.blobs])
        at, end = m.at[low:high], m.at[low:high] + m.length[low:high]
        _require(bool(np.all(end <= unit.buffer_bytes)), "spine slices")
        # Sorted, and no page shared: a rounded-out read must not overwrite its neighbour.
        _require(bool(np.all(at[1:] // PAGE >= -(-end[:-1] // PAGE))), "spine slices")
        gaps = np.concatenate(([0], np.cumsum(at[1:] != end[:-1])))
        for name, spec in inventory[key].items():
            offset = m.tensor_offsets[name]
            first = int(np.searchsorted(at, offset, side="right")) - 1
            last = int(np.searchsorted(at, offset + spec.nbytes - 1, side="right")) - 1
            covered = first >= 0 and gaps[first] == gaps[last] and offset + spec.nbytes <= int(end[last])
            _require(bool(covered), f"spine slices of {name}")
    _require(begin == int(m.first[m.expert_blobs]), "spine slices")
