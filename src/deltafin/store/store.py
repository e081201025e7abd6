"""An opened install: plans for experts and spine units, and the reader that carries them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from deltafin.checkpoint.config import K3Config
from deltafin.kernels.layout import ExpertLayout
from deltafin.store.reader import Reader
from deltafin.store.types import DriveInfo, ReadPlan, SpineUnit


class Store:
    """An opened install; a context manager."""

    config: K3Config
    metadata_dir: Path
    identity: str
    layout: str
    drives: Sequence[DriveInfo]
    expert_layout: ExpertLayout
    expert_buffer_bytes: int
    spine_keys: tuple[str, ...]
    reader: Reader

    @classmethod
    def open(
        cls, home: Path, *, depth: int | None = None, max_bytes_per_s: Mapping[int, float] | None = None
    ) -> Store:
        """Opens the install at ``home``."""
        raise NotImplementedError

    def expert_plan(self, layer: int, expert: int) -> ReadPlan:
        """How to read one expert."""
        raise NotImplementedError

    def file_order(self, layer: int, experts: Sequence[int]) -> list[int]:
        """``experts`` sorted by position on the drives."""
        raise NotImplementedError

    def spine_unit(self, key: str) -> SpineUnit:
        """How to read one spine unit."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops the reader and closes all files."""
        raise NotImplementedError

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
