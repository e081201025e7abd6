"""Models that several oracle tests share; loading one costs a second or two."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import recorded, tiny
from .dspark_float64 import Float64DSpark
from .float64 import Float64K3


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny target, float32."""
    return tiny.write_tiny_target(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny draft, float32."""
    return tiny.write_tiny_draft(tmp_path_factory.mktemp("tiny-draft"))


@pytest.fixture(scope="session")
def mini() -> Float64K3:
    """The miniature target in float64."""
    return Float64K3(recorded.TARGET)


@pytest.fixture(scope="session")
def mini_draft(mini: Float64K3) -> Float64DSpark:
    """The miniature draft in float64."""
    return Float64DSpark(recorded.DSPARK, mini)
