"""Making an install from a released checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from deltafin.store.types import DriveSpec, IngestProgress


def create_store(
    checkpoint_dir: Path,
    drives: Sequence[DriveSpec],
    *,
    layout: Literal["striped", "in-place"],
    home: Path | None = None,
    progress: Callable[[IngestProgress], None] | None = None,
) -> Path:
    """Creates, or resumes creating, an install; returns its home."""
    raise NotImplementedError
