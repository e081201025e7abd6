"""State points on disk: one checksummed file each, written atomically, bounded in total size.

The file's name says which tokens it belongs to, so a lookup opens at most the file it wants. A file that is damaged,
of another model, of other arithmetic or of other tokens is not used, and a damaged one is removed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
import xxhash
from safetensors import SafetensorError, safe_open

from deltafin.contract import Host
from deltafin.sessions.points import Point, Rows, Tokens, as_tokens

FORMAT = "1"
_NAME = re.compile(r"([0-9]{1,9})-([0-9a-f]{32})\.state")
_TOKENS = "tokens"
MAX_PENDING_BYTES = 2 << 30
"""Of points waiting to be written. They hold memory, so the oldest is let go when more arrive than the disk takes."""


class PointFiles:
    """Points of one model in one folder, shared with other processes.

    Args:
        folder: where; made when needed.
        identity: of the model.
        numerics: of the backend, see ``Backend.numerics``.
        limit: most bytes of all files of this model together.
    """

    def __init__(self, folder: Path, identity: str, numerics: str, limit: int) -> None:
        self.key = xxhash.xxh3_128_hexdigest(f"{FORMAT} {identity} {numerics}".encode())
        self.folder = folder / self.key
        self.limit = limit
        self.failure: str | None = None
        self._queue: queue.Queue[Point | None] = queue.Queue()
        self._pending = 0
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._remove_others(folder)

    def find(self, tokens: Tokens, longer_than: int = 0) -> Point | None:
        """The longest stored point of more than ``longer_than`` tokens that ``tokens`` begin with."""
        lengths: dict[int, set[str]] = {}
        for path in self._files():
            match = _NAME.fullmatch(path.name)
            if match and longer_than < int(match[1]) <= len(tokens):
                lengths.setdefault(int(match[1]), set()).add(path.name)
        digest, done, names = xxhash.xxh3_128(), 0, []
        for n in sorted(lengths):
            digest.update(np.ascontiguousarray(tokens[done:n], dtype="<i4").tobytes())
            done = n
            if (name := f"{n}-{digest.hexdigest()}.state") in lengths[n]:
                names.append(name)
        for name in reversed(names):
            point = self._read(self.folder / name)
            if point is not None and point.begins(tokens):
                return point
        return None

    def save(self, point: Point) -> None:
        """Writes ``point`` in the background. A failure is kept in ``failure`` and costs only the file."""
        if self.limit <= 0:
            return
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="state-writer", daemon=True)
            self._writer.start()
        self._count(point.nbytes)
        self._queue.put(point)
        while self._pending > MAX_PENDING_BYTES and self._queue.qsize() > 1:
            with contextlib.suppress(queue.Empty):
                if (oldest := self._queue.get_nowait()) is not None:
                    self._count(-oldest.nbytes)

    def close(self) -> None:
        """Waits until everything is written."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join()
            self._writer = None

    def _write_all(self) -> None:
        while (point := self._queue.get()) is not None:
            try:
                self._write(point)
            except (OSError, SafetensorError) as e:
                self.failure = f"states are not being saved: {e}"
            finally:
                self._count(-point.nbytes)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._pending += nbytes

    def _write(self, point: Point) -> None:
        path = self.folder / f"{point.name}.state"
        if path.exists():
            os.utime(path)
            return
        tensors = {name: np.ascontiguousarray(t) for name, t in point.tensors().items()}
        tensors[_TOKENS] = point.tokens
        size = sum(t.nbytes for t in tensors.values())
        if size > self.limit:
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._make_room(size)
        metadata = {f"xxh3.{name}": _checksum(name, t) for name, t in tensors.items()}
        temporary = self.folder / f"{point.name}.{os.getpid()}.tmp"
        try:
            safetensors.numpy.save_file(tensors, temporary, metadata={"key": self.key, **metadata})
            with temporary.open("rb+") as f:
                os.fchmod(f.fileno(), 0o600)
                os.fsync(f.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        directory = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self.failure = None

    def _read(self, path: Path) -> Point | None:
        try:
            if path.stat().st_size > self.limit:
                return None
            tensors: dict[str, Host] = {}
            with safe_open(path, framework="np") as f:
                metadata: Mapping[str, str] = f.metadata() or {}
                names = list(f.keys())
                if metadata.get("key") != self.key:
                    raise ValueError("another model or arithmetic")
                # A tensor without a checksum or a checksum without a tensor: something was taken away or added.
                if {f"xxh3.{name}" for name in names} != set(metadata) - {"key"}:
                    raise ValueError("incomplete")
                for name in names:
                    tensors[name] = f.get_tensor(name)
                    if _checksum(name, tensors[name]) != metadata[f"xxh3.{name}"]:
                        raise ValueError(f"{name} is damaged")
            tokens = tensors.pop(_TOKENS)
            if tokens.dtype != np.int32 or tokens.ndim != 1:
                raise ValueError("tokens are malformed")
            point = _point(as_tokens(tokens.tolist()), tensors)
            if f"{point.name}.state" != path.name:
                raise ValueError("tokens do not belong to the name")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, SafetensorError):
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return point

    def _files(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except OSError:
            return []

    def _make_room(self, size: int) -> None:
        """Removes the least recently used files until ``size`` more bytes fit, and what killed writers left."""
        found = []
        for path in self._files():
            with contextlib.suppress(OSError):
                if path.suffix == ".tmp":
                    if not _alive(path):
                        path.unlink()
                    continue
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(item[1] for item in found)
        for _, used, path in sorted(found, key=lambda item: item[0]):
            if total + size <= self.limit:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= used

    def _remove_others(self, folder: Path) -> None:
        """States of other builds and models can never be used by this one; only the newest other folder stays, so that
        two models may be used in turn."""
        with contextlib.suppress(OSError):
            others = [p for p in folder.iterdir() if re.fullmatch("[0-9a-f]{32}", p.name) and p.name != self.key]
            for old in sorted(others, key=lambda p: p.stat().st_mtime)[:-1]:
                for path in old.iterdir():
                    path.unlink()
                old.rmdir()


def _point(tokens: Tokens, tensors: Mapping[str, Host]) -> Point:
    rows = {name: t for name, t in tensors.items() if name.endswith(".rows")}
    if any(len(t) != len(tokens) for t in rows.values()):
        raise ValueError("rows do not belong to the tokens")
    fixed = {name: t for name, t in tensors.items() if name not in rows}
    return Point(tokens, fixed, (Rows(0, len(tokens), rows),) if rows else ())


def _checksum(name: str, tensor: Host) -> str:
    digest = xxhash.xxh3_128(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _alive(temporary: Path) -> bool:
    """Whether the process that writes ``<point>.<pid>.tmp`` still runs."""
    try:
        os.kill(int(temporary.suffixes[-2][1:]), 0)
    except (ProcessLookupError, ValueError, IndexError):
        return False
    except PermissionError:
        return True
    return True
