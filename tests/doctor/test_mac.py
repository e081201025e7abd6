"""What ``doctor`` says about a Mac, simulated; nothing elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltafin.doctor import Finding, Level, examine
from deltafin.doctor.mac import examine_mac
from deltafin.macos import awake, spotlight, system
from deltafin.store import create_store
from macos.fake_mac import FakeMac, pretend
from store.installs_help import make_drives, tiny_checkpoint


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMac:
    fake = pretend(monkeypatch)
    fake.outputs |= {"/usr/bin/mdfind": "0\n", "/usr/bin/pmset": " disksleep 0\n"}
    program = tmp_path / "caffeinate"
    program.touch()
    monkeypatch.setattr(awake, "PROGRAM", str(program))
    fake.variables["iogpu.wired_limit_mb"] = 112 * 1024
    return fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    slices = tmp_path / "slices"
    slices.mkdir()
    (slices / spotlight.MARKER).touch()
    return slices


def one(folder: Path, said: str) -> Finding:
    (found,) = [f for f in examine_mac([folder]) if said in f.what]
    return found


def test_a_mac_in_order(mac: FakeMac, folder: Path) -> None:
    found = list(examine_mac([folder]))
    assert [f for f in found if f.level is not Level.OK] == []
    assert len(found) >= 5


def test_a_limit_that_can_be_raised(mac: FakeMac, folder: Path) -> None:
    mac.variables["iogpu.wired_limit_mb"] = 0
    found = one(folder, "the GPU may hold")
    assert found.level is Level.NOTE
    assert found.remedy == f"sudo sysctl iogpu.wired_limit_mb={112 * 1024}"


def test_a_limit_that_starves_the_system(mac: FakeMac, folder: Path) -> None:
    mac.variables["iogpu.wired_limit_mb"] = 127 * 1024
    found = one(folder, "the GPU may hold")
    assert found.level is Level.WARN
    assert found.remedy == f"sudo sysctl iogpu.wired_limit_mb={112 * 1024}"


@pytest.mark.parametrize(("level", "word"), [(2, "short"), (4, "critically")])
def test_memory_pressure(mac: FakeMac, folder: Path, level: int, word: str) -> None:
    mac.variables["kern.memorystatus_vm_pressure_level"] = level
    found = one(folder, "memory is")
    assert found.level is Level.WARN
    assert word in found.what


def test_the_rest_is_named_with_its_remedy(mac: FakeMac, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mac.variables["sysctl.proc_translated"] = 1
    mac.refused.add("setiopolicy_np")
    mac.outputs |= {
        "/usr/bin/mdfind": "93\n",
        "/usr/bin/pmset": " disksleep 10\n lowpowermode 1\n",
        "/usr/bin/tmutil": "[Included] slices\n",
    }
    monkeypatch.setattr(awake, "PROGRAM", "/no/such/program")
    bad = [f for f in examine_mac([folder]) if f.level is not Level.OK]
    assert len(bad) == 7
    assert all(f.meaning and f.remedy for f in bad)
    words = " ".join(f.what for f in bad)
    named = ("Intel", "priorities", "/no/such/program", "10 minutes", "Low Power", "Spotlight", "93", "Time Machine")
    assert all(word in words for word in named)


def test_an_unmarked_folder(mac: FakeMac, folder: Path) -> None:
    (folder / spotlight.MARKER).unlink()
    assert one(folder, "not marked").remedy == f"touch '{folder / spotlight.MARKER}'"


def test_a_mac_without_unified_memory(mac: FakeMac, folder: Path) -> None:
    del mac.variables["iogpu.wired_limit_mb"]
    assert one(folder, "unified memory").level is Level.NOTE


def test_an_install_made_on_a_mac_is_marked_and_examined(mac: FakeMac, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    home = create_store(model, make_drives(tmp_path, (1.0, 1.0)), layout="striped", home=tmp_path / "home")
    assert len(list(tmp_path.glob("drive*/deltafin-*/" + spotlight.MARKER))) == 2
    left_alone = [f for f in examine(home, tmp_path) if "Spotlight leaves" in f.what]
    assert len(left_alone) == 2


@pytest.mark.skipif(system.is_mac(), reason="this is a Mac")
def test_nothing_is_said_elsewhere(folder: Path) -> None:
    assert list(examine_mac([folder])) == []
