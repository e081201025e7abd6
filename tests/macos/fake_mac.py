"""A simulated Mac: its C library, its variables and its programs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from deltafin.macos import system
from deltafin.macos.memory import GIB


class FakeMac:
    """A C library with system variables, and programs with fixed output. Records what was asked for."""

    def __init__(self) -> None:
        self.variables = {"hw.memsize": 128 * GIB, "iogpu.wired_limit_mb": 0, "kern.memorystatus_vm_pressure_level": 1}
        self.widths: dict[str, int] = {}
        self.refused: set[str] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.outputs: dict[str, str] = {}
        self.commands: list[tuple[str, ...]] = []

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, new_size: ctypes.c_size_t) -> int:
        assert new is None
        assert new_size.value == 0
        found = self.variables.get(name.decode())
        if found is None:
            return -1
        size._obj.value = self.widths.get(name.decode(), 8)
        value._obj.value = found
        return 0

    def pthread_set_qos_class_self_np(self, *arguments: Any) -> int:
        return self._called("pthread_set_qos_class_self_np", arguments)

    def setiopolicy_np(self, *arguments: Any) -> int:
        return self._called("setiopolicy_np", arguments)

    def _called(self, name: str, arguments: Sequence[Any]) -> int:
        self.calls.append((name, *(argument.value for argument in arguments)))
        return -1 if name in self.refused else 0

    def run(self, command: Sequence[str], **how: Any) -> Any:
        assert how["timeout"] > 0
        self.commands.append(tuple(command))
        if command[0] not in self.outputs:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(returncode=0, stdout=self.outputs[command[0]].encode())


def pretend(monkeypatch: pytest.MonkeyPatch) -> FakeMac:
    """Makes Deltafin believe that it runs on this Mac."""
    fake = FakeMac()
    monkeypatch.setattr(system, "is_mac", lambda: True)
    monkeypatch.setattr(system, "library", lambda: fake)
    monkeypatch.setattr(system.subprocess, "run", fake.run)
    return fake
