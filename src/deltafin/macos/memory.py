"""Unified memory: how much of it the GPU may hold at once, and whether the system runs short of it.

The GPU can only use memory that is wired, that is never paged or compressed. macOS limits how much may be wired for it:
by default to two thirds of the memory on small machines and three quarters on larger ones, or to what the user set with
``sudo sysctl iogpu.wired_limit_mb=N``, which lasts until the next start. Work beyond it is not refused: it pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from deltafin.macos import system

GIB = 1 << 30
_MIB = 1 << 20
_LARGE = 36 * GIB
_OWN = 8 * GIB
"""Memory that macOS and its windows should keep, or an eighth of a large machine."""


class Pressure(IntEnum):
    """How short memory is, in the kernel's words (``kern.memorystatus_vm_pressure_level``)."""

    NORMAL = 1
    WARN = 2
    CRITICAL = 4


@dataclass(frozen=True, slots=True)
class UnifiedMemory:
    """Figures in bytes.

    Attributes:
        total: of the machine.
        gpu: what the GPU may hold at once.
        chosen: whether the user has set that limit; otherwise it is the system's own.
        exact: whether ``gpu`` is the system's figure rather than our estimate of its default.
    """

    total: int
    gpu: int
    chosen: bool
    exact: bool

    @property
    def raised(self) -> int:
        """The limit that leaves the system enough to work with."""
        return self.total - max(_OWN, self.total // 8)

    @property
    def command(self) -> str:
        """How to raise the limit until the next start; empty when it is there already, or hardly less."""
        return f"sudo sysctl iogpu.wired_limit_mb={self.raised // _MIB}" if self.gpu < self.raised - GIB else ""


def unified_memory() -> UnifiedMemory | None:
    """The machine's figures; None on anything but a Mac whose GPU shares its memory."""
    if not system.is_mac():
        return None
    total, limit = system.sysctl("hw.memsize"), system.sysctl("iogpu.wired_limit_mb")
    if total is None or limit is None:  # Intel Macs have no such variable
        return None
    limit *= _MIB
    if 0 < limit <= total:
        return UnifiedMemory(total, limit, chosen=True, exact=True)
    metal = _metal_limit()
    if metal is not None and 0 < metal <= total:
        return UnifiedMemory(total, metal, chosen=False, exact=True)
    return UnifiedMemory(total, total * 2 // 3 if total <= _LARGE else total * 3 // 4, chosen=False, exact=False)


def gpu_room(used: Callable[[], int]) -> int | None:
    """Bytes this process may still take before the GPU's limit; None without one.

    Args:
        used: tells the bytes the process has. Nearly all of a large process is weights, which the GPU reads.
    """
    memory = unified_memory()
    return None if memory is None else max(0, memory.gpu - used())


def beyond_gpu(nbytes: int) -> str:
    """A sentence for a user who asked for more memory than the GPU may hold; empty when there is nothing to say."""
    memory = unified_memory()
    if memory is None or nbytes <= memory.gpu:
        return ""
    figures = f"{memory.gpu / GIB:,.0f} GiB of the {nbytes / GIB:,.0f} GiB asked for"
    limit = f"the GPU may hold {figures}: beyond that macOS pages"
    return f"{limit}; raise the limit with {memory.command}" if memory.command else limit


def pressure() -> Pressure:
    """How short memory is now; ``NORMAL`` where that cannot be known."""
    if not system.is_mac():
        return Pressure.NORMAL
    level = system.sysctl("kern.memorystatus_vm_pressure_level")
    try:
        return Pressure(Pressure.NORMAL if level is None else level)
    except ValueError:
        return Pressure.NORMAL


def _metal_limit() -> int | None:
    """Metal's recommended working set, where MLX is in use anyway: importing it for a figure would cost PyTorch's users
    memory and time."""
    mlx: Any = sys.modules.get("mlx.core")
    try:
        return int(mlx.device_info()["max_recommended_working_set_size"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return None
