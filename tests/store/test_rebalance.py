"""Slices move between drives without a byte changing, whatever interrupts the move and whoever reads meanwhile."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltafin.errors import ManifestError, StoreError, UsageError
from deltafin.store import DriveSpec, Store, create_store
from deltafin.store.manifest import Manifest, PresenceLog
from deltafin.store.rebalance import add_drive, rebalance, remove_drive
from deltafin.store.verify import verify_store
from store.installs_help import all_bytes, make_drives, released_bytes


@pytest.fixture
def home(tiny_once: Path, tmp_path: Path) -> Path:
    return create_store(tiny_once, make_drives(tmp_path, (1.0, 2.0)), layout="striped", home=tmp_path / "home")


@pytest.fixture
def released(tiny_once: Path) -> dict[str, bytes]:
    return released_bytes(tiny_once)


def check(home: Path, released: dict[str, bytes], shares: list[float]) -> None:
    """Every byte is there, and on each drive about its share."""
    with Store.open(home) as store:
        assert all_bytes(store) == released
    m = Manifest.load(home)
    assert m.target is None
    assert not verify_store(home).bad
    on = [sum(int(n) for n, f in zip(m.length, m.file, strict=True) if m.files[f].drive == d.index) for d in m.drives]
    for nbytes, share in zip(on, shares, strict=True):
        assert nbytes / sum(on) == pytest.approx(share / sum(shares), abs=0.1)
    for drive in m.drives:  # nothing is left over
        named = {m.file_path(i) for i, e in enumerate(m.files) if e.drive == drive.index and e.nbytes}
        assert set((drive.path / m.files[0].name.partition("/")[0]).glob("*.slices")) == named


def test_add_remove_and_rebalance(home: Path, released: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    add_drive(home, DriveSpec(tmp_path / "new", 3.0))
    check(home, released, [1, 2, 3])
    rebalance(home, [1.0, 1.0, 1.0])
    check(home, released, [1, 1, 1])
    remove_drive(home, tmp_path / "drive0")
    check(home, released, [1, 1])
    assert not list((tmp_path / "drive0").iterdir())
    assert [drive.index for drive in Manifest.load(home).drives] == [0, 1]


def test_a_running_engine_keeps_its_files(home: Path, released: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with Store.open(home) as store:
        add_drive(home, DriveSpec(tmp_path / "new", 1.0))
        assert all_bytes(store) == released, "files that were never opened before are still there"
        with Store.open(home) as fresh:
            assert all_bytes(fresh) == released
    rebalance(home, [2.0, 1.0, 1.0])  # sweeps
    check(home, released, [2, 1, 1])


def test_an_old_view_cannot_write_into_new_rows(home: Path, tmp_path: Path) -> None:
    old = Manifest.load(home)
    rebalance(home, [2.0, 1.0])
    log = PresenceLog(old.path, old.generation)
    with pytest.raises(ManifestError, match="slices are being moved"):
        log.commit([(0, 0, 1234)])
    log.close()
    assert not verify_store(home).bad


def test_absent_blobs_stay_absent(home: Path, tmp_path: Path, tiny_once: Path, released: dict[str, bytes]) -> None:
    m = Manifest.load(home)
    log = PresenceLog(m.path)
    log.forget((3, part) for part in range(int(m.first[4] - m.first[3])))
    log.close()
    (tmp_path / "new").mkdir()
    add_drive(home, DriveSpec(tmp_path / "new", 1.0))
    m = Manifest.load(home)
    assert not m.present[m.first[3] : m.first[4]].any()
    assert m.present.sum() == len(m.present) - (m.first[4] - m.first[3])
    assert not verify_store(home).bad


_MOVE = """
import sys
from pathlib import Path
from deltafin.store.rebalance import rebalance
print("ready", flush=True)
rebalance(Path(sys.argv[1]), None)
"""


def test_kills(mini_target: Path, tmp_path: Path) -> None:
    home = create_store(mini_target, make_drives(tmp_path, (1.0, 2.0)), layout="striped", home=tmp_path / "home")
    (tmp_path / "new").mkdir()
    released = released_bytes(mini_target)
    chooser = random.Random(5)
    import deltafin.store.rebalance as module

    m = Manifest.load(home)
    module._set_target(m, [2.0, 1.0])
    for attempt in range(6):
        process = subprocess.Popen([sys.executable, "-c", _MOVE, str(home)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(chooser.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if attempt % 3 == 0:
            with Store.open(home) as store:
                assert all_bytes(store) == released, "the install can be used at any point"
    if Manifest.load(home).target is not None:
        rebalance(home, None)
    check(home, released, [2, 1])


def test_wrong_requests(home: Path, tmp_path: Path, tiny_once: Path) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        add_drive(home, DriveSpec(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="already"):
        add_drive(home, DriveSpec(tmp_path / "drive0"))
    with pytest.raises(UsageError, match="no drive of"):
        remove_drive(home, tmp_path)
    with pytest.raises(UsageError, match="2 positive weights"):
        rebalance(home, [1.0])
    own = create_store(tiny_once, make_drives(tmp_path / "own", (1.0, 1.0)), layout="striped")
    with pytest.raises(UsageError, match="manifest itself"):
        remove_drive(own, tmp_path / "own/drive0")
    flat = create_store(tiny_once, [], layout="in-place", home=tmp_path / "flat")
    with pytest.raises(StoreError, match="in place"):
        rebalance(flat, [1.0])
