"""Progress of long work on an install: bytes done, rate of each drive, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from deltafin.store.manifest import Manifest
from deltafin.store.types import IngestProgress

REPORT_SECONDS = 0.2

Progress = Callable[[IngestProgress], None]


class Meter:
    """Turns byte counts into progress reports.

    Args:
        manifest: of the install.
        progress: receives the reports.
        phase: ``copy`` and ``checksum`` count towards all slices, ``verify`` towards those present.
        wanted: which slices count; None for all.
    """

    def __init__(
        self,
        manifest: Manifest,
        progress: Progress | None,
        phase: str,
        wanted: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self._progress = progress
        self._phase = phase
        length = manifest.length if wanted is None else manifest.length * wanted
        present = int(length[manifest.present | manifest.written].sum())
        self._total = present if phase == "verify" else int(length.sum())
        self._resumed = 0 if phase == "verify" else present
        self._start = self._last = time.monotonic()
        self._moved = [0] * len(manifest.drives)
        self._rates = [0.0] * len(manifest.drives)

    def report(self, moved: Iterable[int], *, force: bool = False) -> None:
        """Reports when it is time again, or when forced.

        Args:
            moved: bytes of each drive since the meter was made.
            force: report now.
        """
        now = time.monotonic()
        elapsed = now - self._last
        if self._progress is None or (elapsed < REPORT_SECONDS and not force):
            return
        moved = list(moved)
        if elapsed > 0:
            fresh = 1 - 0.5 ** (elapsed / 2.0)  # half of what is shown happened in the last two seconds
            self._rates = [
                rate + fresh * ((n - before) / elapsed - rate)
                for rate, n, before in zip(self._rates, moved, self._moved, strict=True)
            ]
        self._last, self._moved = now, moved
        done = self._resumed + sum(moved)
        average = sum(moved) / max(now - self._start, 1e-9)
        eta = (self._total - done) / average if average > 0 else None
        self._progress(
            IngestProgress(
                phase=self._phase,
                done_bytes=done,
                total_bytes=self._total,
                resumed_bytes=self._resumed,
                bytes_per_s=tuple(self._rates),
                eta_seconds=0.0 if done >= self._total else eta,
            )
        )
