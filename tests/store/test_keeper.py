"""What was fetched during use is kept: whole, whatever the file system takes, and within bounded memory."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from deltafin.store import create_store, keeper
from deltafin.store.keeper import Keeper
from deltafin.store.manifest import Manifest, PresenceLog
from deltafin.store.verify import verify_store
from store.installs_help import make_drives

REAL_PWRITE = os.pwrite


@pytest.fixture
def emptied(tiny_once: Path, tmp_path: Path) -> tuple[Manifest, dict[int, bytes]]:
    """An install that has lost the slices of four experts, and their bytes."""
    home = create_store(tiny_once, make_drives(tmp_path, (1.0,)), layout="striped", home=tmp_path / "home")
    m = Manifest.load(home)
    lost = {}
    for index in range(4):
        with open(m.file_path(int(m.file[index])), "r+b") as file:
            file.seek(int(m.offset[index]))
            lost[index] = file.read(int(m.length[index]))
            file.seek(int(m.offset[index]))
            file.write(bytes(int(m.length[index])))
    log = PresenceLog(m.path)
    log.forget([(int(m.blobs[index]), 0) for index in lost])
    log.close()
    return Manifest.load(home), lost


def keep(m: Manifest, lost: dict[int, bytes], said: list[str]) -> None:
    kept = Keeper(m, said.append)
    for index, data in lost.items():
        kept.put(index, int(m.blobs[index]), int(m.checksum[index]), memoryview(data))
    kept.close()


def test_slices_are_kept(emptied: tuple[Manifest, dict[int, bytes]]) -> None:
    m, lost = emptied
    said: list[str] = []
    keep(m, lost, said)
    report = verify_store(m.path.parent)
    assert (report.bad, report.absent, said) == ((), 0, [])


def test_a_file_system_that_refuses_direct_writes_and_writes_in_parts(
    emptied: tuple[Manifest, dict[int, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & keeper._O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return REAL_PWRITE(fd, data[: 1 + len(data) // 2], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    m, lost = emptied
    said: list[str] = []
    keep(m, lost, said)
    report = verify_store(m.path.parent)
    assert (report.bad, report.absent, said) == ((), 0, [])


def test_who_brings_more_than_the_drives_take_waits(
    emptied: tuple[Manifest, dict[int, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, lost = emptied
    monkeypatch.setattr(keeper, "_MOST_WAITING", 3 * 32768)
    gate, written, most = threading.Event(), [0], [0]

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        gate.wait(30)
        written[0] += len(data)
        return REAL_PWRITE(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    kept = Keeper(m, lambda _: None)

    def bring() -> None:
        for index, data in lost.items():
            kept.put(index, int(m.blobs[index]), int(m.checksum[index]), memoryview(data))
            most[0] = max(most[0], kept._waiting)

    bringer = threading.Thread(target=bring)
    bringer.start()
    bringer.join(0.3)
    assert bringer.is_alive(), "the fourth slice does not fit while nothing is written"
    gate.set()
    bringer.join(30)
    kept.close()
    assert most[0] <= 3 * 32768
    assert verify_store(m.path.parent).absent == 0
