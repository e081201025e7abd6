"""Which backend computes: chosen by the user or by the machine, and imported only then."""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec
from typing import Literal

from deltafin.contract import Backend, BackendName
from deltafin.errors import MachineError, UsageError

BackendChoice = Literal["auto", "torch", "mlx"]
Precision = Literal["auto", "bf16", "fp32"]

_BY_SPEED: tuple[BackendName, BackendName] = ("mlx", "torch")
"""On Apple Silicon; elsewhere the other way round."""


def apple_silicon() -> bool:
    """Whether this is a Mac on which MLX has a GPU."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def choose(choice: BackendChoice) -> BackendName:
    """The backend that ``choice`` means on this machine: for ``auto`` the faster one here that is installed."""
    if choice != "auto":
        return choice
    first, second = _BY_SPEED if apple_silicon() else reversed(_BY_SPEED)
    return second if not _installed(first) and _installed(second) else first


def open_backend(choice: BackendChoice = "auto", precision: Precision = "auto") -> Backend:
    """Imports the chosen backend.

    Args:
        precision: of activations; ``auto`` is fp32 with PyTorch and bf16, as K3 is served, with MLX.

    Raises:
        MachineError: its packages are not installed.
        UsageError: it does not compute in this precision.
    """
    name = choose(choice)
    if name == "torch":
        if precision == "bf16":
            raise UsageError(
                "the torch backend computes with fp32 activations only",
                remedy="drop --precision, or use --backend mlx",
            )
        _require("torch", "torch", choice)
        from deltafin.model.backend import TorchBackend

        return TorchBackend()
    _require("mlx", "mlx" if sys.platform == "darwin" else "mlx[cpu]", choice)
    from deltafin.apple.backend import MlxBackend

    return MlxBackend("fp32" if precision == "fp32" else "bf16")


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _require(module: str, package: str, choice: BackendChoice) -> None:
    if not _installed(module):
        other = "torch" if module == "mlx" else "mlx"
        hint = "" if choice == "auto" else f", or use --backend {other}"
        raise MachineError(f"the {module} backend is not installed here", remedy=f"pip install '{package}'{hint}")
