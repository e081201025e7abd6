"""Fixtures shared by all rooms: the miniature checkpoint, installs of it, and the recorded oracle."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from deltafin import backends
from deltafin.store.create import create_store
from deltafin.store.types import DriveSpec

ROOT = Path(__file__).parents[1]
MINI = ROOT / "src/deltafin/mini_k3"
ORACLE = ROOT / "tests/data/oracle"


# The same examples on every machine, however slow it is; --hypothesis-profile=default looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

BACKENDS = ("torch", "mlx", "mlx_lm")
"""Frameworks of which a machine needs only one: a Mac has no PyTorch, and MLX is an extra elsewhere."""


def pytest_configure() -> None:
    """A test that names no backend means PyTorch, on every machine that has it."""
    if backends.apple_silicon() and find_spec("torch"):
        os.environ["K3_BACKEND"] = "torch"  # for commands
        backends.apple_silicon = lambda: False  # for engines


class _BackendModule(pytest.Module):
    """A test file; one that imports a framework which is not installed is skipped, naming it."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as e:
            missing = e.__cause__.name if isinstance(e.__cause__, ModuleNotFoundError) else None
            if missing not in BACKENDS:
                raise
            pytest.skip(f"needs {missing}, which is not installed here", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _BackendModule.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that imports such a framework while it runs is skipped too."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if report.failed and isinstance(error, ModuleNotFoundError) and error.name in BACKENDS:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"needs {error.name}, which is not installed here")
    return report


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test reads or writes the user's own Deltafin folder or settings."""
    for name in list(os.environ):
        if name.startswith("K3_") and name not in ("K3_TOKENIZER_DIR", "K3_ISA", "K3_BACKEND"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("K3_HOME", str(tmp_path / "k3-home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "k3-config"))


@pytest.fixture(scope="session")
def mini_target() -> Path:
    """The miniature target's released files."""
    return MINI / "target"


@pytest.fixture(scope="session")
def prompts() -> list[dict[str, Any]]:
    """Recorded prompts with reference continuations."""
    recorded: list[dict[str, Any]] = json.loads((ORACLE / "prompts.json").read_text())["prompts"]
    return recorded


@pytest.fixture(scope="session")
def mini_store(mini_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature striped over two drives."""
    return striped(mini_target, tmp_path_factory.mktemp("mini"), (1.0, 1.0))


def striped(checkpoint: Path, base: Path, weights: tuple[float, ...]) -> Path:
    """An install over one folder per weight."""
    drives = []
    for i, weight in enumerate(weights):
        folder = base / f"drive-{i}"
        folder.mkdir(parents=True)
        drives.append(DriveSpec(folder, weight))
    return create_store(checkpoint, drives, layout="striped")


def in_place(checkpoint: Path, base: Path) -> Path:
    """An install that uses the released files where they are."""
    return create_store(checkpoint, [], layout="in-place", home=base)
