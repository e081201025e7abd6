"""safetensors headers and the shard index, parsed as hostile input: bounded, strict, nothing of the payload
touched.

Container: an 8-byte little-endian header length N, N bytes of JSON mapping each name to ``dtype``,
``shape`` and ``data_offsets`` (relative to byte 8 + N), then the row-major payload without holes.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, Protocol

from deltafin.checkpoint.inventory import ITEM_BYTES
from deltafin.errors import TensorFileError

MAX_HEADER_BYTES = 512 << 20
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
_REFETCH = "fetch this file again from the model's repository"
_MAX_AXES = 8
_MAX_NAME = 512


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor of a checkpoint lies.

    Attributes:
        file: shard name inside the checkpoint's folder.
        offset: first byte in the file, counted from the file's beginning.
        nbytes: bytes of the payload.
        dtype: ``BF16``, ``F32`` or ``U8``.
        shape: row-major.
    """

    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class Shards(Protocol):
    """Where the shards of a checkpoint are: files in its folder, or ranges of remote files."""

    def header(self, path: Path, max_bytes: int) -> tuple[int, int, bytes]:
        """(bytes of the file, bytes of its header, the header) of the shard named like ``path``.

        Raises:
            TensorFileError: missing, no tensor file, or a header longer than ``max_bytes``.
        """

    def read(self, path: Path, offset: int, nbytes: int) -> bytes:
        """A small range of the shard named like ``path``.

        Raises:
            TensorFileError: it cannot be read.
        """


class LocalShards:
    """Shards that are files."""

    def header(self, path: Path, max_bytes: int) -> tuple[int, int, bytes]:
        return _header_bytes(path, max_bytes)

    def read(self, path: Path, offset: int, nbytes: int) -> bytes:
        try:
            with open_regular(path) as file:
                file.seek(offset)
                data = file.read(nbytes)
        except OSError as e:
            raise TensorFileError(f"{path} cannot be read: {e.strerror}", remedy=_REFETCH) from None
        if len(data) != nbytes:
            raise TensorFileError(f"{path} is truncated", remedy=_REFETCH)
        return data


LOCAL = LocalShards()


def read_header(
    path: Path, *, max_header_bytes: int = MAX_HEADER_BYTES, shards: Shards = LOCAL
) -> dict[str, TensorInfo]:
    """Parses and checks the header of one safetensors file.

    Args:
        path: the file; a symbolic link is followed, as hub caches use them.
        max_header_bytes: refuse longer headers before reading them.
        shards: where the file is.

    Raises:
        TensorFileError: missing, not a regular file, or malformed in any way; the message names the file.
    """
    size, length, raw = shards.header(path, max_header_bytes)
    header = parse_json(raw, path)
    if not isinstance(header, dict):
        raise TensorFileError(f"{path}: the header is not a JSON object", remedy=_REFETCH)
    payload = 8 + length
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _entry(path, name, entry, payload)
    end = payload
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset < end:
            raise TensorFileError(f"{path}: tensor {quoted(name)} overlaps another tensor", remedy=_REFETCH)
        if info.offset > end:
            raise TensorFileError(f"{path}: unused bytes before tensor {quoted(name)}", remedy=_REFETCH)
        end = info.offset + info.nbytes
    if end > size:
        raise TensorFileError(f"{path} is truncated: it has {size} of {end} bytes", remedy=_REFETCH)
    if end < size:
        raise TensorFileError(f"{path} has {size - end} bytes after its last tensor", remedy=_REFETCH)
    return tensors


def read_index(path: Path, *, max_bytes: int = MAX_HEADER_BYTES) -> dict[str, str]:
    """Parses ``model.safetensors.index.json``: tensor name to shard name, each a plain name inside the
    folder.

    Raises:
        TensorFileError: missing, too large, malformed, or naming a file outside the folder.
    """
    raw = read_bounded(path, max_bytes)
    index = parse_json(raw, path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise TensorFileError(f"{path} has no weight_map", remedy=_REFETCH)
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):
            raise TensorFileError(
                f"{path}: tensor {quoted(name)} is placed in {quoted(file)}, which is not a plain shard name",
                remedy="this index does not come from the released model; " + _REFETCH,
            )
    return weight_map


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Reads a whole small file.

    Raises:
        TensorFileError: missing, not a regular file, larger than ``max_bytes``, or unreadable.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise TensorFileError(f"{path} has {size} bytes, more than {max_bytes}", remedy=_REFETCH)
            return file.read(size)
    except OSError as e:
        raise TensorFileError(f"{path} cannot be read: {e.strerror}", remedy=_REFETCH) from None


def open_regular(path: Path) -> FileIO:
    """Opens a regular file for reading, unbuffered, and nothing else: a FIFO or device would hang or lie.

    Raises:
        TensorFileError: the file is missing or is not a regular file.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        dangling = f", a link to {os.readlink(path)}, which is gone" if path.is_symlink() else ""
        raise TensorFileError(
            f"{path} does not exist{dangling}", remedy="complete the download of the model, then try again"
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise TensorFileError(f"{path} is not a regular file", remedy=_REFETCH)
    return FileIO(fd, "rb")


def parse_json(raw: bytes, path: Path) -> Any:
    """Decodes strict JSON: UTF-8, no duplicate keys, no NaN, bounded nesting.

    Raises:
        TensorFileError: anything else.
    """
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as e:
        raise TensorFileError(f"{path} is not valid JSON: {str(e)[:200]}", remedy=_REFETCH) from None


def quoted(value: object) -> str:
    """Untrusted text, printable and short enough for a message."""
    text = ascii(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _header_bytes(path: Path, max_header_bytes: int) -> tuple[int, int, bytes]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                kind = what_it_is(prefix)
                raise TensorFileError(f"{path} {kind} (its {size} bytes cannot hold a header)", remedy=_REFETCH)
            if length > max_header_bytes:
                raise TensorFileError(
                    f"{path}: a header of {length} bytes exceeds the {max_header_bytes} this model can need",
                    remedy=_REFETCH,
                )
            raw = bytearray()
            while len(raw) < length and (piece := file.read(length - len(raw))):
                raw += piece
            if len(raw) < length:
                raise TensorFileError(f"{path} shrank while it was read", remedy=_REFETCH)
            return size, length, bytes(raw)
    except OSError as e:
        raise TensorFileError(f"{path} cannot be read: {e.strerror}", remedy=_REFETCH) from None


def what_it_is(prefix: bytes) -> str:
    """What a file that begins with ``prefix`` is in place of a tensor file, as the end of a sentence."""
    # The two things that failed downloads leave in place of a shard.
    if prefix.startswith(b"version "):
        return "is a Git LFS pointer, not a tensor file"
    if prefix.lstrip()[:1] == b"<":
        return "is a web page, not a tensor file"
    return "is truncated or not a tensor file"


def _entry(path: Path, name: str, entry: Any, payload: int) -> TensorInfo:
    if len(name) > _MAX_NAME:
        raise TensorFileError(f"{path}: tensor name {quoted(name)} is too long", remedy=_REFETCH)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(f"{path}: malformed entry for {quoted(name)}", remedy=_REFETCH)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise TensorFileError(f"{path}: {quoted(name)} has dtype {quoted(dtype)}, not BF16, F32 or U8", remedy=_REFETCH)
    if not _naturals(shape) or len(shape) > _MAX_AXES:
        raise TensorFileError(f"{path}: {quoted(name)} has shape {quoted(shape)}", remedy=_REFETCH)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise TensorFileError(f"{path}: {quoted(name)} has data_offsets {quoted(offsets)}", remedy=_REFETCH)
    nbytes = prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise TensorFileError(
            f"{path}: {quoted(name)} needs {nbytes} bytes and is given {offsets[1] - offsets[0]}",
            remedy=_REFETCH,
        )
    return TensorInfo(path.name, payload + offsets[0], nbytes, dtype, tuple(shape))


def _naturals(value: Any) -> bool:
    # bool is an int in Python; 2**53 is far beyond any file and keeps products small.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 53 for n in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    decoded = dict(pairs)
    if len(decoded) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {quoted(twice)} occurs twice")
    return decoded


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")
