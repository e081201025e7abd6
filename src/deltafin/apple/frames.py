"""Expert frames in MLX's memory, and the windows through which the gather product sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from deltafin.apple.memory import Landing
from deltafin.expert_layout import GROUP, ExpertLayout

SLAB_BYTES = 64 << 20
_MOST_SHARED = 1 << 20
"""Frames that share one array are multiplied by one call. Experts up to this size share; the released ones, 17.5 MB
each, do not, so that a frame given back to the system is really given back."""

_MOST_WINDOWS = 256
_MOST_SLAB = 1 << 30


@dataclass(frozen=True, slots=True)
class Windows:
    """The experts of one slab as weights of ``gather_qmm``; packed uint32 and scales uint8, sharing the slab's memory.

    ``gate_up`` [frames, 2, intermediate, latent / 8]: w1 and w3 of frame f are matrices 2f and 2f + 1.
    ``down`` [frames, latent, intermediate / 8].
    """

    gate_up: mx.array
    gate_up_scales: mx.array
    down: mx.array
    down_scales: mx.array


@dataclass(slots=True)
class _Slab:
    landing: Landing
    windows: dict[int, Windows] = field(default_factory=dict)


class MlxFrames:
    """Frames of one expert each; see ``streaming.arena.Frames``. Memory is taken when a frame is first used.

    Args:
        count: frames.
        frame_bytes: of each, whole pages.
        slab_bytes: frames share arrays of about this size.

    Attributes:
        copied_bytes: expert bytes copied after they were read; only blobs at odd addresses are.
    """

    def __init__(self, count: int, frame_bytes: int, slab_bytes: int = SLAB_BYTES) -> None:
        self.frame_bytes = frame_bytes
        self.free = list(range(count - 1, -1, -1))
        self.copied_bytes = 0
        self._count = count
        self._retired: list[int] = []
        shared = min(slab_bytes, _MOST_SLAB) // frame_bytes if frame_bytes <= _MOST_SHARED else 1
        self.per_slab = max(1, shared)
        self._slabs: dict[int, _Slab] = {}

    def view(self, frame: int) -> memoryview:
        """The memory of a frame."""
        slab, index = divmod(frame, self.per_slab)
        first = index * self.frame_bytes
        return self._slab(slab).landing.bytes[first : first + self.frame_bytes]

    def address(self, frame: int) -> int:
        """Address of a frame's first byte."""
        slab, index = divmod(frame, self.per_slab)
        held = self._slabs.get(slab) or self._slab(slab)
        return held.landing.address + index * self.frame_bytes

    def retire(self, frame: int) -> None:
        """Takes a frame out of service; its memory goes back once no frame of its slab is in service."""
        self._retired.append(frame)
        slab = frame // self.per_slab
        members = range(slab * self.per_slab, min((slab + 1) * self.per_slab, self._count))
        if all(member in self._retired for member in members):
            self._slabs.pop(slab, None)
            mx.clear_cache()

    def revive(self, count: int) -> None:
        """Puts up to ``count`` retired frames back into service."""
        for _ in range(min(count, len(self._retired))):
            self.free.insert(0, self._retired.pop())

    def windows(self, slab: int, offset: int, layout: ExpertLayout) -> Windows:
        """The weights of a slab's frames whose blobs begin at ``offset`` inside each frame."""
        held = self._slab(slab)
        if offset % 4:
            # MLX reads words where words may lie. No released file needs this; the copy is made anew for each use.
            self.copied_bytes += layout.nbytes
            landing = held.landing
            raw = landing.base[landing.start + offset % 4 : landing.start + landing.nbytes]
            raw = mx.contiguous(mx.concatenate([raw, mx.zeros((offset % 4,), dtype=mx.uint8)]))
            return self._make(raw, offset - offset % 4, layout)
        found = held.windows.get(offset)
        if found is None:
            if len(held.windows) >= _MOST_WINDOWS:  # released files in place: every blob may have its own offset
                held.windows.clear()
            landing = held.landing
            raw = landing.base[landing.start : landing.start + landing.nbytes]
            found = held.windows[offset] = self._make(raw, offset, layout)
        return found

    def _slab(self, slab: int) -> _Slab:
        held = self._slabs.get(slab)
        if held is None:
            frames = min(self.per_slab, self._count - slab * self.per_slab)
            held = self._slabs[slab] = _Slab(Landing.of(frames * self.frame_bytes))
        return held

    def _make(self, raw: mx.array, offset: int, layout: ExpertLayout) -> Windows:
        step, frames = self.frame_bytes, raw.size // self.frame_bytes
        n, m = layout.latent, layout.intermediate
        words = raw.view(mx.uint32)
        pair, scale_pair = layout.w3_packed - layout.w1_packed, layout.w3_scale - layout.w1_scale
        windows = Windows(
            mx.as_strided(
                words,
                (frames, 2, m, n // 8),
                (step // 4, pair // 4, n // 8, 1),
                (offset + layout.w1_packed) // 4,
            ),
            mx.as_strided(raw, (frames, 2, m, n // GROUP), (step, scale_pair, n // GROUP, 1), offset + layout.w1_scale),
            mx.as_strided(words, (frames, n, m // 8), (step // 4, m // 8, 1), (offset + layout.w2_packed) // 4),
            mx.as_strided(raw, (frames, n, m // GROUP), (step, m // GROUP, 1), offset + layout.w2_scale),
        )
        mx.eval(windows.gate_up, windows.gate_up_scales, windows.down, windows.down_scales)
        return windows
