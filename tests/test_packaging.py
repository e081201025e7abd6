"""A Mac gets MLX and no PyTorch, Linux the reverse, and who tests on Linux gets both."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
FRAMEWORKS = {"torch", "mlx", "mlx-lm"}


def wanted(texts: list[str], system: str, machine: str) -> set[str]:
    where = {"sys_platform": system, "platform_machine": machine}
    required = [Requirement(text) for text in texts]
    return {r.name for r in required if r.marker is None or r.marker.evaluate(where)} & FRAMEWORKS


@pytest.mark.parametrize(
    ("system", "machine", "run", "test"),
    [
        ("linux", "x86_64", {"torch"}, {"mlx", "mlx-lm"}),
        ("linux", "aarch64", {"torch"}, {"mlx", "mlx-lm"}),
        ("darwin", "arm64", {"mlx", "mlx-lm"}, {"torch", "mlx", "mlx-lm"}),
    ],
)
def test_which_framework_is_installed(system: str, machine: str, run: set[str], test: set[str]) -> None:
    assert wanted(PROJECT["dependencies"], system, machine) == run
    assert wanted(PROJECT["optional-dependencies"]["test"], system, machine) == test
