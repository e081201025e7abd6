"""sha256 of a file whose pieces arrive in any order."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

_PIECE = 16 << 20
_PENDING = 256 << 20


class RunningDigest:
    """Hashes pieces in file order as they come; what came too early and did not fit in memory is read back at the end.

    Args:
        size: bytes of the file.
        read_back: (offset, bytes) → those bytes, from where they were written.
        pending: most bytes kept of pieces that came early.
    """

    def __init__(self, size: int, read_back: Callable[[int, int], bytes | memoryview], pending: int = _PENDING) -> None:
        self._size = size
        self._read_back = read_back
        self._room = pending
        self._hash = hashlib.sha256()
        self._at = 0
        self._early: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def offer(self, offset: int, data: memoryview | bytes) -> None:
        """A piece has arrived; the memory is the caller's again when this returns. May be called from any thread."""
        with self._lock:
            if offset == self._at:
                self._take(data)
            elif offset > self._at and len(data) <= self._room and offset not in self._early:
                self._early[offset] = bytes(data)
                self._room -= len(data)

    def finish(self) -> str:
        """The digest; every byte must have been written where ``read_back`` finds it."""
        with self._lock:
            while self._at < self._size:
                following = min((at for at in self._early if at > self._at), default=self._size)
                self._take(self._read_back(self._at, min(_PIECE, following - self._at)))
            return self._hash.hexdigest()

    def _take(self, data: memoryview | bytes) -> None:
        self._hash.update(data)
        self._at += len(data)
        while (early := self._early.pop(self._at, None)) is not None:
            self._room += len(early)
            self._hash.update(early)
            self._at += len(early)
        for at in [at for at in self._early if at < self._at]:
            self._room += len(self._early.pop(at))
