"""Frames: page-aligned buffers of one expert each, mapped once and given back to the system when memory is short."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Protocol

from deltafin.store.buffers import aligned_memory

_DISCARD: int | None = getattr(mmap, "MADV_FREE" if sys.platform == "darwin" else "MADV_DONTNEED", None)


class Frames(Protocol):
    """Memory for experts, one page-aligned frame each.

    Attributes:
        free: frames ready for use; ``pop`` and ``append`` them.
    """

    free: list[int]

    def view(self, frame: int) -> memoryview:
        """The writable memory of a frame."""

    def address(self, frame: int) -> int:
        """Address of a frame's first byte."""

    def retire(self, frame: int) -> None:
        """Takes a frame that nobody uses out of service and gives its memory to the system."""

    def revive(self, count: int) -> None:
        """Puts up to ``count`` retired frames back into service."""


class Arena:
    """``count`` frames of ``frame_bytes`` in one anonymous mapping; untouched frames cost no memory.

    Attributes:
        free: frames ready for use; ``pop`` and ``append`` them. Those used last are used again first, so that a small
            working set stays in few pages.
    """

    def __init__(self, count: int, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self._memory = aligned_memory(count * frame_bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.free = list(range(count - 1, -1, -1))
        self._retired: list[int] = []

    def view(self, frame: int) -> memoryview:
        """The memory of a frame."""
        return self._memory[frame * self.frame_bytes : (frame + 1) * self.frame_bytes]

    def address(self, frame: int) -> int:
        """Address of a frame's first byte."""
        return self._base + frame * self.frame_bytes

    def retire(self, frame: int) -> None:
        """Takes a frame that nobody uses out of service and gives its pages to the system."""
        self._retired.append(frame)
        mapping = self._memory.obj
        if _DISCARD is not None and isinstance(mapping, mmap.mmap):
            mapping.madvise(_DISCARD, frame * self.frame_bytes, self.frame_bytes)

    def revive(self, count: int) -> None:
        """Puts up to ``count`` retired frames back into service."""
        for _ in range(min(count, len(self._retired))):
            self.free.insert(0, self._retired.pop())
