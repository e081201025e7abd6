"""Loads the compiled kernels; threads and instruction sets."""

from __future__ import annotations

import os

from deltafin.errors import MachineError

try:
    from deltafin.kernels import _native
except ImportError as e:
    raise MachineError(
        f"the native kernels are not built ({e})",
        remedy="install a C++17 compiler and run `pip install .` in the source folder",
    ) from None

__all__ = ["_native", "available_isas", "isa", "select_isa", "set_threads", "threads"]


def set_threads(n: int) -> None:
    """Uses ``n`` threads, the caller included. At start: as many as this process may run on.

    Raises:
        ValueError: ``n`` is not in 1..1024.
    """
    if not 1 <= n <= 1024:
        raise ValueError(f"{n} threads")
    _native.set_threads(n)


def threads() -> int:
    """Threads in use, the caller included."""
    return _native.threads()


def isa() -> str:
    """Instruction set in use: ``avx512``, ``avx2``, ``neon`` or ``portable``."""
    return _native.isa()


def available_isas() -> tuple[str, ...]:
    """Instruction sets this machine and build can run, fastest first."""
    return _native.available_isas()


def select_isa(name: str) -> None:
    """Uses one instruction set from now on (the environment variable ``K3_ISA`` does so at start).

    Raises:
        MachineError: ``name`` is not among ``available_isas()``.
    """
    if not _native.select_isa(name):
        raise MachineError(
            f"instruction set {name!r} is not available here",
            remedy=f"choose one of {', '.join(available_isas())} or leave K3_ISA unset",
        )


if os.environ.get("K3_ISA"):
    select_isa(os.environ["K3_ISA"])
