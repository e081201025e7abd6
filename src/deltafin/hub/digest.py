"""sha256 of a file whose pieces arrive in any order."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable

_PIECE = 16 << 20
_PENDING = 256 << 20
STALL_SECONDS = 1.0
"""A piece waits for its turn as long as those before it make progress; after so long without any it is let go."""


class RunningDigest:
    """Hashes pieces in file order as they come; what came too early and did not fit in memory is read back later.

    One caller at a time hashes, outside the lock. The others wait for their turn with the piece where it is, or leave a
    copy and go on. Waiting is what keeps a fast line from running ahead of the hash: everything that did would have to
    be read back from the drives, one read at a time, after the line has long been idle.

    Args:
        size: bytes of the file.
        read_back: (offset, bytes) → those bytes, from where they were written.
        known: offset → how many bytes from there ``read_back`` can find already.
        head: the file's first bytes, when they are at hand.
        pending: most bytes kept of pieces that came early.
    """

    def __init__(
        self,
        size: int,
        read_back: Callable[[int, int], bytes | memoryview],
        known: Callable[[int], int] = lambda offset: 0,
        *,
        head: bytes = b"",
        pending: int = _PENDING,
    ) -> None:
        self.size = size
        self._read_back = read_back
        self._known = known
        self._room = pending
        self._hash = hashlib.sha256(head)
        self._at = len(head)
        self._busy = False
        self._early: dict[int, bytes] = {}
        self._turn = threading.Condition()

    @property
    def done(self) -> int:
        """Bytes hashed."""
        return self._at

    def offer(self, offset: int, data: memoryview | bytes, *, wait: bool = False) -> None:
        """A piece has arrived; the memory is the caller's again when this returns. May be called from any thread.

        Args:
            offset: its first byte.
            data: its bytes.
            wait: let the caller wait for the pieces before it, which others must be about to offer.
        """
        with self._turn:
            if wait:
                self._wait_for(offset)
            mine = offset == self._at and not self._busy
            keep = not mine and offset >= self._at and len(data) <= self._room
            self._busy |= mine
            if keep:
                self._room -= len(data)
        if mine:
            self._take(data)
        elif keep:
            copy = bytes(data)
            with self._turn:
                if offset < self._at or offset in self._early:
                    self._room += len(copy)
                else:
                    self._early[offset] = copy
                if self._busy or self._at not in self._early:
                    return
                self._busy = True
            self._take(b"")

    def finish(self) -> str:
        """The digest; every byte must have been offered or written where ``read_back`` finds it, and no offer may be
        under way."""
        while self._at < self.size:
            following = min((at for at in self._early if at > self._at), default=self.size)
            self._busy = True
            self._take(self._read_back(self._at, min(_PIECE, following - self._at)))
        return self._hash.hexdigest()

    def wake(self) -> None:
        """More may be known now."""
        with self._turn:
            self._turn.notify_all()

    def _wait_for(self, offset: int) -> None:
        """Returns when it is the turn of ``offset``, or when nothing moves; the caller holds the lock."""
        before, patience = self._at, time.monotonic() + STALL_SECONDS
        while offset > self._at or (offset == self._at and self._busy):
            if self._busy or self._at != before:
                before, patience = self._at, time.monotonic() + STALL_SECONDS
            elif self._known(before):
                # What lies before was there from an earlier run, or was let go and is on the drives by now.
                self._busy = True
                self._turn.release()
                try:
                    self._take(b"")
                finally:
                    self._turn.acquire()
                continue
            elif time.monotonic() >= patience:
                return
            self._turn.wait(max(0.0, patience - time.monotonic()))

    def _take(self, data: memoryview | bytes) -> None:
        """Hashes the piece at the position, and those kept or known that follow; the caller has set ``_busy``."""
        try:
            while True:
                self._hash.update(data)
                with self._turn:
                    self._at += len(data)
                    for at in [at for at in self._early if at < self._at]:
                        self._room += len(self._early.pop(at))
                    following = self._early.pop(self._at, None)
                    self._room += len(following or b"")
                    nbytes = 0 if following is not None else min(self._known(self._at), _PIECE)
                    self._busy = following is not None or nbytes > 0
                    self._turn.notify_all()
                    if not self._busy:
                        return
                data = following if following is not None else self._read_back(self._at, nbytes)
        except BaseException:
            with self._turn:
                self._busy = False
                self._turn.notify_all()
            raise
