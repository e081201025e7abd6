"""What an install remembers of the hub it came from: revision, checksums, headers, and which shards are proved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deltafin.checkpoint import METADATA_FILES, Checkpoint
from deltafin.checkpoint.tensorfile import (
    INDEX_NAME,
    SINGLE_NAME,
    parse_json,
    read_bounded,
    read_index,
    what_it_is,
)
from deltafin.errors import DeltafinError, HubError, TensorFileError
from deltafin.hub.client import Hub, RemoteFile
from deltafin.hub.download import expected_sha256, fetch_small
from deltafin.hub.pins import Pin
from deltafin.store.files import write_atomic

FOLDER = "released"
RECORD_NAME = "source.json"
_MAX_RECORD_BYTES = 4 << 20
_FIRST_READ = 2 << 20  # a released header has about 1 MB
_KEPT_READ = 1 << 20
_OPTIONAL = ("generation_config.json", "LICENSE", INDEX_NAME)
_AGAIN = "run deltafin setup again with the same options"


@dataclass(slots=True)
class Released:
    """The hub's side of an install, kept in ``HOME/released``.

    Attributes:
        folder: with the small released files and the shards' headers.
        pin: repository and revision.
        files: what the hub said about metadata and shards, by name.
        proved: shards whose bytes in the install have been compared with the hub's sha256 as a whole.
        needed: shards with tensors of the text model; empty while that is not known.
    """

    folder: Path
    pin: Pin
    files: dict[str, RemoteFile]
    proved: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)

    def save(self) -> None:
        """Writes the record, durably."""
        record = {
            "format": 1,
            "repo": self.pin.repo,
            "revision": self.pin.revision,
            "pinned": dict(self.pin.sha256),
            "files": [asdict(file) for file in self.files.values()],
            "proved": sorted(self.proved),
            "needed": sorted(self.needed),
        }
        write_atomic(self.folder / RECORD_NAME, json.dumps(record, indent=1).encode())

    @classmethod
    def load(cls, home: Path) -> Released | None:
        """The record of the install at ``home``; None when it did not come from a hub.

        Raises:
            HubError: the record is damaged.
        """
        folder = home / FOLDER
        path = folder / RECORD_NAME
        if not path.is_file():
            return None
        try:
            record = parse_json(read_bounded(path, _MAX_RECORD_BYTES), path)
            pin = Pin(str(record["repo"]), str(record["revision"]), _texts(record["pinned"]))
            files = {}
            for entry in record["files"]:
                file = RemoteFile(str(entry["name"]), int(entry["size"]), str(entry["sha256"]), str(entry["git_sha1"]))
                files[file.name] = file
            return cls(folder, pin, files, set(map(str, record["proved"])), set(map(str, record.get("needed", ()))))
        except (KeyError, TypeError, ValueError, AttributeError, DeltafinError) as e:
            raise HubError(f"{path} is damaged: {str(e)[:160]}", remedy=f"delete {folder}, then {_AGAIN}") from None

    def need(self, names: Iterable[str]) -> None:
        """Notes which shards are needed."""
        if self.needed != set(names):
            self.needed = set(names)
            self.save()

    def checkpoint(self, hub: Hub | None, progress: Callable[[str], None] = lambda _: None) -> Checkpoint:
        """The released checkpoint, its shards' headers taken from the folder or, where absent, from the hub.

        Args:
            hub: None uses only what is here.
            progress: told what is being fetched.

        Raises:
            HubError: something is needed from the hub and cannot be had.
            CheckpointError: the files are not K3's, or disagree with each other.
        """
        shards = HubShards(self, hub)
        if hub is not None:
            names = self.shard_names()
            missing = [name for name in names if not (self.folder / f"{name}.header").exists()]
            if missing:
                progress(f"reading the headers of {len(missing)} shards")
                with ThreadPoolExecutor(8, thread_name_prefix="header") as pool:
                    list(pool.map(lambda name: shards.header(self.folder / name, 1 << 40), missing))
        return Checkpoint.open(self.folder, shards)

    def shard_names(self) -> list[str]:
        """Names of all shards, in order."""
        index = self.folder / INDEX_NAME
        if not index.exists():
            return [SINGLE_NAME]
        names = sorted(set(read_index(index).values()))
        for name in names:
            if name not in self.files:
                raise HubError(f"{self.pin.repo} has no {name}, which its index names", remedy="check the repository")
        return names


def _texts(value: Mapping[object, object]) -> dict[str, str]:
    return {str(key): str(text) for key, text in value.items()}


def fetch_released(hub: Hub, pin: Pin, home: Path) -> Released:
    """Asks the hub what ``pin`` holds and brings the small files; one that is here already is not fetched again.

    Raises:
        HubError: the hub cannot be used; HubChecksumError: a file differs from its checksum.
    """
    known = Released.load(home)
    if known is not None and (known.pin.repo, known.pin.revision) == (pin.repo, pin.revision):
        here = [(known.folder / name).exists() for name in METADATA_FILES if name in known.files]
        if here and all(here):
            return known
    listed = hub.files(pin)
    folder = home / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    wanted = _wanted(pin, listed)
    released = Released(folder, pin, {file.name: file for file in wanted})
    for file in wanted:
        if file.name in METADATA_FILES:
            write_atomic(folder / file.name, fetch_small(hub, pin, file, METADATA_FILES[file.name]))
        else:
            expected_sha256(pin, file)
    released.save()
    return released


def _wanted(pin: Pin, listed: Mapping[str, RemoteFile]) -> Iterable[RemoteFile]:
    """The inert files that are taken: metadata by name, and safetensors."""
    for name in METADATA_FILES:
        if name not in listed and name not in _OPTIONAL:
            raise HubError(f"{pin.repo} has no {name}", remedy="check the repository's name and revision")
    return [f for n, f in listed.items() if n in METADATA_FILES or n.endswith(".safetensors")]


class HubShards:
    """Shards on a hub; headers and small payloads once read are kept in the record's folder."""

    def __init__(self, released: Released, hub: Hub | None) -> None:
        self._released = released
        self._hub = hub

    def header(self, path: Path, max_bytes: int) -> tuple[int, int, bytes]:
        """See ``checkpoint.tensorfile.Shards``."""
        file = self._file(path)
        kept = path.with_name(path.name + ".header")
        if kept.exists():
            raw = read_bounded(kept, max_bytes + 8)
            length = int.from_bytes(raw[:8], "little")
            if len(raw) == 8 + length:
                return file.size, length, raw[8:]
        first = self._fetch(file, 0, min(_FIRST_READ, file.size))
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 or length > file.size - 8:
            raise TensorFileError(f"{path.name} on the hub {what_it_is(first[:8])}", remedy="use another mirror")
        if length > min(max_bytes, 512 << 20):
            raise TensorFileError(
                f"{path.name} on the hub has a header of {length} bytes, more than this model can need",
                remedy="use another mirror",
            )
        raw = first[: 8 + length]
        if len(raw) < 8 + length:
            raw += self._fetch(file, len(raw), 8 + length - len(raw))
        write_atomic(kept, raw)
        return file.size, length, raw[8:]

    def read(self, path: Path, offset: int, nbytes: int) -> bytes:
        """See ``checkpoint.tensorfile.Shards``."""
        file = self._file(path)
        kept = path.with_name(f"{path.name}.{offset}-{nbytes}")
        with suppress(TensorFileError):
            data = read_bounded(kept, _KEPT_READ)
            if len(data) == nbytes:
                return data
        data = self._fetch(file, offset, nbytes)
        if nbytes <= _KEPT_READ:
            write_atomic(kept, data)
        return data

    def _file(self, path: Path) -> RemoteFile:
        file = self._released.files.get(path.name)
        if file is None:
            raise TensorFileError(f"{self._released.pin.repo} has no {path.name}", remedy="check the repository")
        return file

    def _fetch(self, file: RemoteFile, offset: int, nbytes: int) -> bytes:
        if self._hub is None:
            raise HubError(f"part of {file.name} is needed from the hub", remedy=_AGAIN)
        data = bytearray(nbytes)
        self._hub.read(self._released.pin, file, offset, memoryview(data))
        return bytes(data)
