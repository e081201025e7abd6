"""Router traces: the routed experts of every committed token, in order, compactly and without any text.

A file is a JSON header line and then blocks. A block is its header (``<IIQ``: tokens, compressed bytes, xxh3_64 of
them) and zlib-compressed uint16 expert numbers [tokens, layers, k]. The high bit of a block's token count marks the
start of a new sequence. Blocks are written whole; a torn last block, left by a kill, is ignored on reading.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import xxhash

from deltafin.errors import UsageError

_MAGIC = "deltafin-router-trace"
_VERSION = 1
_BLOCK = struct.Struct("<IIQ")
_NEW_SEQUENCE = 1 << 31
_MAX_HEADER = 4096
_MAX_BLOCK_BYTES = 64 << 20
_MAX_TRACE_BYTES = 4 << 30
_REMEDY = "record it again with --router-trace"

Routes = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Geometry of a trace: routed layers, experts per layer, experts per token; and the model it comes from."""

    layers: int
    experts: int
    k: int
    model: str = ""

    def __post_init__(self) -> None:
        if not (1 <= self.layers <= 4096 and 1 <= self.k <= self.experts <= 65536):
            raise ValueError(f"{self.layers} layers with {self.k} of {self.experts} experts")


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded trace.

    Attributes:
        routes: uint16 [tokens, layers, k].
        starts: indices of tokens that begin a sequence.
        torn: whether the file ended inside a block.
    """

    shape: TraceShape
    routes: Routes
    starts: tuple[int, ...]
    torn: bool = False


class TraceWriter:
    """Appends to a new trace file.

    Args:
        path: must not exist, so that a recording is never overwritten by a repeated command.

    Raises:
        UsageError: the file exists or cannot be created.
    """

    def __init__(self, path: Path, shape: TraceShape) -> None:
        self._shape = shape
        try:
            self._file: IO[bytes] = path.open("xb", buffering=0)
            header = {"magic": _MAGIC, "version": _VERSION, "layers": shape.layers, "experts": shape.experts}
            self._file.write(json.dumps(header | {"k": shape.k, "model": shape.model}).encode() + b"\n")
        except FileExistsError:
            raise UsageError(f"{path} exists already", remedy="name another file with --router-trace") from None
        except OSError as e:
            raise UsageError(f"{path} cannot be written: {e.strerror}", remedy="name another file") from None

    def write(self, routes: npt.NDArray[np.integer], *, new_sequence: bool) -> None:
        """Appends a block of tokens [tokens, layers, k].

        Raises:
            OSError: the disk is full or gone.
        """
        per_token = self._shape.layers * self._shape.k * 2
        step = max(1, _MAX_BLOCK_BYTES // per_token)
        for i in range(0, len(routes), step):
            part = np.ascontiguousarray(routes[i : i + step], np.uint16)
            data = zlib.compress(part.tobytes(), 6)
            count = len(part) | (_NEW_SEQUENCE if new_sequence and i == 0 else 0)
            self._file.write(_BLOCK.pack(count, len(data), xxhash.xxh3_64_intdigest(data)) + data)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_trace(path: Path) -> Trace:
    """Reads a trace.

    Raises:
        UsageError: unreadable, not a trace, damaged before its last block, or absurdly large.
    """
    try:
        if path.stat().st_size > _MAX_TRACE_BYTES:
            raise UsageError(f"{path} is larger than {_MAX_TRACE_BYTES >> 30} GiB", remedy="record a shorter trace")
        with path.open("rb") as file:
            shape = _header(path, file.readline(_MAX_HEADER))
            return _blocks(path, file, shape)
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror}", remedy="name a readable trace") from None


def _header(path: Path, line: bytes) -> TraceShape:
    try:
        header = json.loads(line)
        if header["magic"] != _MAGIC or header["version"] != _VERSION:
            raise ValueError
        numbers = [header[name] for name in ("layers", "experts", "k")]
        if not all(type(n) is int for n in numbers) or not isinstance(header["model"], str):
            raise ValueError
        layers, experts, k = numbers
        return TraceShape(layers, experts, k, header["model"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{path} is not a router trace of this version", remedy=_REMEDY) from None


def _blocks(path: Path, file: IO[bytes], shape: TraceShape) -> Trace:
    parts: list[Routes] = []
    starts: list[int] = []
    done, torn = 0, False
    limit = _MAX_TRACE_BYTES  # of decompressed bytes, so that a small file cannot ask for all memory
    while head := file.read(_BLOCK.size):
        if len(head) < _BLOCK.size:
            torn = True
            break
        count, size, checksum = _BLOCK.unpack(head)
        new, count = bool(count & _NEW_SEQUENCE), count & ~_NEW_SEQUENCE
        nbytes = count * shape.layers * shape.k * 2
        limit -= nbytes
        if not 0 < nbytes <= max(_MAX_BLOCK_BYTES, shape.layers * shape.k * 2) or size > nbytes + 4096 or limit < 0:
            raise UsageError(f"{path} is damaged at token {done}", remedy=_REMEDY)
        data = file.read(size)
        if len(data) < size:
            torn = True
            break
        raw = b""
        if xxhash.xxh3_64_intdigest(data) == checksum:
            try:
                raw = zlib.decompressobj().decompress(data, nbytes + 1)
            except zlib.error:
                raw = b""
        routes = np.frombuffer(raw, np.uint16)
        if len(raw) != nbytes or int(routes.max()) >= shape.experts:
            raise UsageError(f"{path} is damaged at token {done}", remedy=_REMEDY)
        if new or not parts:
            starts.append(done)
        parts.append(routes.reshape(count, shape.layers, shape.k))
        done += count
    if not parts:
        raise UsageError(f"{path} holds no token", remedy=_REMEDY)
    return Trace(shape, np.concatenate(parts), tuple(starts), torn)
