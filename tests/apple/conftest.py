"""MLX engines over the miniature; skipped where MLX is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from deltafin.generation.engine import Engine, EngineOptions


def options(**how: object) -> EngineOptions:
    """Options of an MLX engine without a draft; bf16 unless told otherwise."""
    return EngineOptions(**({"backend": "mlx", "precision": "bf16", "context": 1024, "draft": "off"} | how))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bf16(mini_store: Path) -> Iterator[Engine]:
    with Engine.open(mini_store, options(context=2048)) as opened:
        yield opened


@pytest.fixture(scope="module")
def fp32(mini_store: Path) -> Iterator[Engine]:
    with Engine.open(mini_store, options(context=2048, precision="fp32")) as opened:
        yield opened
