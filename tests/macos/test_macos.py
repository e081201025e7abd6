"""The Mac's own conditions, each against a simulated system: what is asked for, and that a refusal changes nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltafin.macos import awake, backup, memory, power, priority, spotlight, system
from deltafin.macos.memory import GIB, Pressure, UnifiedMemory
from deltafin.residency import machine
from deltafin.store import direct
from deltafin.store.direct import DirectFile
from macos.fake_mac import FakeMac, pretend


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> FakeMac:
    return pretend(monkeypatch)


@pytest.fixture
def silent_mac(mac: FakeMac, monkeypatch: pytest.MonkeyPatch) -> FakeMac:
    """A Mac that has none of what is asked for."""
    monkeypatch.setattr(system, "library", lambda: None)
    mac.outputs.clear()
    return mac


# ---- asking ----------------------------------------------------------------------------------------------------------


def test_system_variables_of_both_sizes_are_read(mac: FakeMac) -> None:
    mac.variables |= {"four": 7, "eight": 1 << 40, "odd": 1}
    mac.widths |= {"four": 4, "odd": 3}
    assert system.sysctl("four") == 7
    assert system.sysctl("eight") == 1 << 40
    assert system.sysctl("odd") is None
    assert system.sysctl("no.such.variable") is None


def test_this_systems_own_library_answers_or_says_nothing() -> None:
    assert system.call("no_such_function_anywhere", 1, 2) is False
    assert system.sysctl("no.such.variable") is None


def test_programs_that_fail_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.output(sys.executable, "-c", "print('text')") == "text\n"
    assert system.output(sys.executable, "-c", "raise SystemExit(1)") is None
    assert system.output("/no/such/program") is None

    def late(*_: Any, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("program", 5)

    monkeypatch.setattr(system.subprocess, "run", late)
    assert system.output("slow") is None


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "limit_mb", "metal", "gpu", "chosen", "exact"),
    [
        (128 * GIB, 0, None, 96 * GIB, False, False),
        (24 * GIB, 0, None, 16 * GIB, False, False),
        (128 * GIB, 120 * 1024, None, 120 * GIB, True, True),
        (128 * GIB, 0, 90 * GIB, 90 * GIB, False, True),
        (128 * GIB, 120 * 1024, 90 * GIB, 120 * GIB, True, True),
        (128 * GIB, 1 << 40, None, 96 * GIB, False, False),
        (128 * GIB, 0, 1 << 60, 96 * GIB, False, False),
    ],
    ids=["large", "small", "set by the user", "Metal's", "user before Metal", "absurd setting", "absurd Metal"],
)
def test_what_the_gpu_may_hold(
    mac: FakeMac,
    monkeypatch: pytest.MonkeyPatch,
    total: int,
    limit_mb: int,
    metal: int | None,
    gpu: int,
    chosen: bool,
    exact: bool,
) -> None:
    mac.variables |= {"hw.memsize": total, "iogpu.wired_limit_mb": limit_mb}
    fake: Any = SimpleNamespace(
        device_info=lambda: {} if metal is None else {"max_recommended_working_set_size": metal}
    )
    monkeypatch.setitem(sys.modules, "mlx.core", fake)
    assert memory.unified_memory() == UnifiedMemory(total, gpu, chosen, exact)
    assert memory.gpu_room(lambda: GIB) == gpu - GIB
    assert memory.gpu_room(lambda: 1 << 50) == 0


def test_a_figure_never_costs_an_import_of_mlx(mac: FakeMac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    assert memory.unified_memory() == UnifiedMemory(128 * GIB, 96 * GIB, chosen=False, exact=False)
    assert "mlx.core" not in sys.modules


def test_how_to_raise_the_limit() -> None:
    assert UnifiedMemory(128 * GIB, 96 * GIB, False, True).command == f"sudo sysctl iogpu.wired_limit_mb={112 * 1024}"
    assert UnifiedMemory(128 * GIB, 112 * GIB, True, True).command == ""
    assert UnifiedMemory(16 * GIB, 11 * GIB, False, True).command == ""  # the rest is what macOS needs


def test_a_budget_beyond_the_limit_is_commented_on(mac: FakeMac) -> None:
    assert memory.beyond_gpu(96 * GIB) == ""
    said = memory.beyond_gpu(120 * GIB)
    assert "96 GiB of the 120 GiB" in said
    assert f"sudo sysctl iogpu.wired_limit_mb={112 * 1024}" in said
    mac.variables["iogpu.wired_limit_mb"] = 112 * 1024
    assert "sysctl" not in memory.beyond_gpu(120 * GIB)


def test_an_intel_mac_and_a_silent_one_have_no_limit(mac: FakeMac, monkeypatch: pytest.MonkeyPatch) -> None:
    del mac.variables["iogpu.wired_limit_mb"]
    assert memory.gpu_room(lambda: 0) is None
    monkeypatch.setattr(system, "library", lambda: None)
    assert memory.unified_memory() is None
    assert memory.pressure() is Pressure.NORMAL


def test_the_budget_ends_at_the_gpus_limit(mac: FakeMac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cgroup_room", lambda: None)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=127 * GIB, total=128 * GIB))
    monkeypatch.setattr(
        machine.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=6 * GIB))
    )
    assert machine.available_memory() == 90 * GIB
    mac.variables["iogpu.wired_limit_mb"] = 112 * 1024
    assert machine.available_memory() == 106 * GIB


@pytest.mark.parametrize(("level", "free"), [(1, True), (2, False), (4, False), (77, True)])
def test_experts_are_given_back_while_memory_is_short(mac: FakeMac, level: int, free: bool) -> None:
    mac.variables["kern.memorystatus_vm_pressure_level"] = level
    assert (machine.free_memory() > 0) is free
    watch = machine.MemoryWatch(machine.free_memory, every=0.0)
    frames = watch.tier_frames(100, 100, 1 << 20)
    assert free or frames < 100


# ---- priorities ------------------------------------------------------------------------------------------------------


def test_a_thread_asks_for_performance_cores_and_important_reads(mac: FakeMac) -> None:
    assert priority.raise_thread()
    assert mac.calls == [("pthread_set_qos_class_self_np", 0x19, 0), ("setiopolicy_np", 0, 1, 1)]


@pytest.mark.parametrize("name", ["pthread_set_qos_class_self_np", "setiopolicy_np"])
def test_a_refused_priority_is_told_and_the_other_still_asked_for(mac: FakeMac, name: str) -> None:
    mac.refused.add(name)
    assert not priority.raise_thread()
    assert len(mac.calls) == 2


def test_without_the_functions_nothing_happens(silent_mac: FakeMac) -> None:
    assert not priority.raise_thread()


# ---- sleep -----------------------------------------------------------------------------------------------------------


class Caffeine:
    def __init__(self, command: Sequence[str], *, stubborn: bool = False) -> None:
        self.command, self.stubborn, self.ended = tuple(command), stubborn, ""

    def terminate(self) -> None:
        self.ended = "terminated"

    def wait(self, timeout: float) -> None:
        if self.stubborn:
            raise subprocess.TimeoutExpired("caffeinate", timeout)

    def kill(self) -> None:
        self.ended = "killed"


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_mac_stays_awake_as_long_as_the_work(mac: FakeMac, monkeypatch: pytest.MonkeyPatch, stubborn: bool) -> None:
    started: list[Caffeine] = []

    def start(command: Sequence[str]) -> Any:
        started.append(Caffeine(command, stubborn=stubborn))
        return started[-1]

    monkeypatch.setattr(system, "start", start)

    def work() -> None:
        with awake.awake():
            assert started[0].ended == ""
            raise KeyError

    with pytest.raises(KeyError):
        work()
    (process,) = started
    assert process.command[:4] == ("/usr/bin/caffeinate", "-i", "-m", "-w")
    assert process.command[4].isdigit()
    assert process.ended == ("killed" if stubborn else "terminated")


def test_work_goes_on_where_nothing_keeps_it_awake(mac: FakeMac, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "PROGRAM", "/no/such/program")
    with awake.awake():
        pass


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("Active Profiles:\n Currently in use:\n disksleep            10\n sleep                1\n", 10),
        (" disksleep            0\n", 0),
        (" sleep 1\n", None),
        ("disksleep never", None),
    ],
)
def test_when_drives_sleep(mac: FakeMac, text: str, minutes: int | None) -> None:
    mac.outputs["/usr/bin/pmset"] = text
    assert power.drive_sleep_minutes() == minutes


@pytest.mark.parametrize(("text", "low"), [(" lowpowermode 1\n", True), (" lowpowermode 0\n", False), ("", False)])
def test_low_power_mode(mac: FakeMac, text: str, low: bool) -> None:
    mac.outputs["/usr/bin/pmset"] = text
    assert power.low_power() is low


@pytest.mark.parametrize(("command", "kept"), [("run", True), ("serve", True), ("setup", True), ("info", False)])
def test_commands_that_work_for_long_keep_the_mac_awake(
    mac: FakeMac, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, kept: bool
) -> None:
    started: list[Caffeine] = []

    def start(command: Sequence[str]) -> Any:
        started.append(Caffeine(command))
        return started[-1]

    monkeypatch.setattr(system, "start", start)
    main = importlib.import_module("deltafin.cli.main")  # the package has a function of this name
    main._add_commands([command])
    main.app([command, "--help"], standalone_mode=False)
    assert "Usage" in capsys.readouterr().out
    assert [process.ended for process in started] == ["terminated"] * kept


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_folder_of_slices_is_marked_against_spotlight(mac: FakeMac, tmp_path: Path) -> None:
    spotlight.keep_out(tmp_path)
    spotlight.keep_out(tmp_path)
    assert (tmp_path / ".metadata_never_index").exists()
    spotlight.keep_out(tmp_path / "absent")  # refused by the file system, and of no consequence


@pytest.mark.parametrize(("text", "known"), [("0\n", 0), ("184\n", 184), ("what?", None), (None, None)])
def test_what_spotlight_knows(mac: FakeMac, tmp_path: Path, text: str | None, known: int | None) -> None:
    if text is not None:
        mac.outputs["/usr/bin/mdfind"] = text
    assert spotlight.indexed(tmp_path) == known
    assert str(tmp_path) in mac.commands[0]


@pytest.mark.parametrize(("text", "included"), [("[Included] /x\n", True), ("[Excluded] /x\n", False), (None, False)])
def test_what_time_machine_copies(mac: FakeMac, tmp_path: Path, text: str | None, included: bool) -> None:
    if text is not None:
        mac.outputs["/usr/bin/tmutil"] = text
    assert backup.backed_up(tmp_path) is included


@pytest.mark.parametrize("ahead_refused", [False, True])
def test_reads_bypass_the_page_cache_and_its_reading_ahead(
    mac: FakeMac, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_refused: bool
) -> None:
    asked: list[tuple[int, int]] = []

    def control(fd: int, command: int, value: int) -> int:
        asked.append((command, value))
        if ahead_refused and command == direct._F_RDAHEAD:
            raise OSError(25, "not supported")
        return 0

    monkeypatch.setattr(direct.fcntl, "fcntl", control)
    path = tmp_path / "file"
    path.write_bytes(b"k3")
    file = DirectFile(path)
    file.close()
    assert asked == [(48, 1), (45, 0)]
    assert file.direct


# ---- elsewhere -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(system.is_mac(), reason="this is a Mac")
def test_nothing_happens_on_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked")

    for name in ("library", "output", "start"):
        monkeypatch.setattr(system, name, never)
    assert memory.unified_memory() is None
    assert memory.gpu_room(never) is None
    assert memory.beyond_gpu(1 << 60) == ""
    assert memory.pressure() is Pressure.NORMAL
    assert not priority.raise_thread()
    assert power.drive_sleep_minutes() is None
    assert not power.low_power()
    assert not backup.backed_up(tmp_path)
    assert spotlight.indexed(tmp_path) is None
    spotlight.keep_out(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with awake.awake():
        pass
