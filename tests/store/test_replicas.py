"""A second copy helps a slow drive and stands in for a damaged one; whatever is wrong with it, the bytes stay right."""

from __future__ import annotations

import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltafin.errors import DriveFullError, SliceCorruptError, StoreError
from deltafin.store import ReadPlan, Store, aligned_memory, create_store
from deltafin.store.manifest import Manifest
from deltafin.store.rebalance import rebalance
from deltafin.store.replicas import INDEX_NAME, load, remove_replicas, replica_path, replicate
from store.installs_help import all_bytes, make_drives, read, released_bytes


@pytest.fixture
def home(tiny_once: Path, tmp_path: Path) -> Path:
    return create_store(tiny_once, make_drives(tmp_path, (1.0, 2.0, 1.0)), layout="striped", home=tmp_path / "home")


@pytest.fixture(scope="module")
def released(tiny_once: Path) -> dict[str, bytes]:
    return released_bytes(tiny_once)


def everything(home: Path) -> range:
    return range(Manifest.load(home).expert_blobs)


def expert_plans(store: Store) -> list[ReadPlan]:
    return [store.expert_plan(layer, e) for layer in store.config.moe_layers for e in range(store.config.experts)]


def damage(m: Manifest, drive: int, *, replicas: bool) -> None:
    """Flips a bit of every page of every slice file of a drive, or of its replicas."""
    paths = [m.file_path(i) for i, entry in enumerate(m.files) if entry.drive == drive and entry.nbytes]
    for path in [replica_path(m, drive)] if replicas else paths:
        data = bytearray(path.read_bytes())
        for at in range(0, len(data), 512):
            data[at] ^= 1
        path.write_bytes(data)


def test_every_slice_gets_a_copy_elsewhere(home: Path, released: dict[str, bytes]) -> None:
    made = replicate(home, everything(home), progress=None)
    m = Manifest.load(home)
    experts = int(m.first[m.expert_blobs])
    assert made.count == experts
    assert (made.drive[:experts] >= 0).all()
    assert (made.drive[experts:] == -1).all()
    for i in range(experts):
        assert made.drive[i] != m.files[m.file[i]].drive
        data = replica_path(m, int(made.drive[i])).read_bytes()[int(made.offset[i]) :][: int(m.length[i])]
        assert data == m.file_path(int(m.file[i])).read_bytes()[int(m.offset[i]) :][: int(m.length[i])]
    with Store.open(home) as store:
        assert all_bytes(store) == released
    # Doing it again changes nothing.
    before = [replica_path(m, d.index).read_bytes() for d in m.drives]
    assert replicate(home, everything(home), progress=None).count == experts
    assert [replica_path(m, d.index).read_bytes() for d in m.drives] == before
    remove_replicas(home)
    assert not load(m).count
    assert not any(replica_path(m, d.index).exists() for d in m.drives)
    with Store.open(home) as store:
        assert all_bytes(store) == released


def test_a_slow_drive_is_helped(home: Path) -> None:
    replicate(home, everything(home), progress=None)
    with Store.open(home) as store:
        expected = [read(store.reader, plan) for plan in expert_plans(store)]
    # Alone the drive would need seconds: the others are long done with their own by then.
    with Store.open(home, depth=1, max_bytes_per_s={0: 2e4}) as store:
        plans = expert_plans(store)
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        buffers = [aligned_memory(plan.buffer_bytes) for plan in plans]
        for plan, buffer in zip(plans, buffers, strict=True):
            store.reader.submit(plan, buffer, done.put)
        assert [done.get(timeout=30) for _ in plans] == [None] * len(plans)
        stats = store.reader.stats()
        assert stats[0].helped_bytes == 0 < stats[1].helped_bytes + stats[2].helped_bytes
        assert sum(s.bytes for s in stats) == sum(plan.nbytes for plan in plans)
        assert stats[0].bytes < sum(e.length for plan in plans for e in plan.extents if e.drive == 0)
        for plan, buffer, blob in zip(plans, buffers, expected, strict=True):
            assert buffer[plan.view_offset :][: plan.nbytes] == blob


@pytest.mark.parametrize("replicas", [False, True])
def test_damage_of_one_copy_costs_nothing_but_time(home: Path, released: dict[str, bytes], replicas: bool) -> None:
    replicate(home, everything(home), progress=None)
    m = Manifest.load(home)
    with Store.open(home) as store:
        plans = expert_plans(store)
        expected = [read(store.reader, plan) for plan in plans]
        damage(m, 1, replicas=replicas)
        assert [read(store.reader, plan) for plan in plans] == expected
        if not replicas:
            damage(m, 0, replicas=True)
            damage(m, 2, replicas=True)
            lost = next(plan for plan in plans if any(e.drive == 1 for e in plan.extents))
            with pytest.raises(SliceCorruptError):
                read(store.reader, lost)


def test_an_unreadable_copy_is_not_missed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replicate(home, everything(home), progress=None)
    m = Manifest.load(home)
    with Store.open(home) as store:
        plans = expert_plans(store)
        expected = [read(store.reader, plan) for plan in plans]
        broken = {
            os.stat(m.file_path(i)).st_ino for i, entry in enumerate(m.files) if entry.drive == 1 and entry.nbytes
        }
        preadv = os.preadv

        def failing(fd: int, buffers: Any, offset: int) -> int:
            if os.fstat(fd).st_ino in broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", failing)
        assert [read(store.reader, plan) for plan in plans] == expected
        broken.clear()
    with Store.open(home) as store:
        for drive in m.drives:
            replica_path(m, drive.index).unlink()  # while it is in use, and before it was opened
        assert [read(store.reader, plan) for plan in plans] == expected


def test_only_as_many_as_asked_for(home: Path) -> None:
    m = Manifest.load(home)
    limit = 5 * 3 * 16384  # the copies of each expert take one to three whole alignments
    made = replicate(home, [7, 3, 5, 1, 0, 2, 4, 6], limit=limit, progress=None)
    has = [bool((made.drive[m.first[b] : m.first[b + 1]] >= 0).all()) for b in range(m.expert_blobs)]
    assert has[7]
    assert has[3]
    assert not all(has[:8])
    assert sum(os.path.getsize(replica_path(m, d.index)) for d in m.drives) <= limit
    again = replicate(home, everything(home), progress=None)
    assert again.count == int(m.first[m.expert_blobs])


def test_where_there_is_nothing_to_copy_to(tiny_once: Path, tmp_path: Path) -> None:
    alone = create_store(tiny_once, make_drives(tmp_path / "a", (1.0,)), layout="striped")
    released = create_store(tiny_once, [], layout="in-place", home=tmp_path / "b")
    for home in (alone, released):
        with pytest.raises(StoreError, match="several drives"):
            replicate(home, [0], progress=None)
        remove_replicas(home)


def test_moved_slices_make_replicas_useless(home: Path, released: dict[str, bytes]) -> None:
    replicate(home, everything(home), progress=None)
    rebalance(home, [1.0, 1.0, 3.0])
    m = Manifest.load(home)
    assert "moved" in load(m).problem
    with Store.open(home) as store:
        assert all_bytes(store) == released
    assert not replicate(home, everything(home), progress=None).problem
    with Store.open(home) as store:
        assert all_bytes(store) == released


def test_a_full_drive(home: Path, released: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, left = os.pwrite, [3]

    def full(fd: int, data: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DriveFullError, match="is full"):
            replicate(home, everything(home), progress=None)
    with Store.open(home) as store:
        assert all_bytes(store) == released
    assert replicate(home, everything(home), progress=None).count


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_index_of_any_content_is_harmless(home: Path, released: dict[str, bytes], data: st.DataObject) -> None:
    remove_replicas(home)
    made = replicate(home, [0, 1, 2], progress=None)
    m = Manifest.load(home)
    path = home / INDEX_NAME
    kind = data.draw(st.sampled_from(["bytes", "row", "info", "short"]))
    if kind == "bytes":
        raw = bytearray(path.read_bytes())
        for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=40)):
            raw[at] = data.draw(st.integers(0, 255))
        path.write_bytes(raw)
    elif kind == "short":
        replica_path(m, int(made.drive[0])).write_bytes(b"")
    else:
        number = st.one_of(st.integers(-3, 20), st.integers(-(1 << 63), (1 << 63) - 1))
        with sqlite3.connect(path) as db:
            if kind == "info":
                key = data.draw(st.sampled_from(["format", "store", "generation"]))
                db.execute("UPDATE info SET value = ? WHERE key = ?", (data.draw(st.text(max_size=5)), key))
            else:
                row = [data.draw(number) for _ in range(4)]
                db.execute("INSERT OR REPLACE INTO replicas VALUES (?, ?, ?, ?)", row)
        db.close()
    found = load(m)
    assert found.count in (0, made.count, made.count + 1)
    assert bool(found.problem) or found.count
    with Store.open(home) as store:
        assert all_bytes(store) == released


@pytest.mark.slow
def test_killed_while_copying(home: Path, released: dict[str, bytes]) -> None:
    program = (
        "import sys, pathlib, deltafin.store.replicas as r; r._BATCH = 1; "
        "r.replicate(pathlib.Path(sys.argv[1]), range(12), progress=lambda p: print(p.done_bytes, flush=True))"
    )
    chance = random.Random(3)
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", program, str(home)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(chance.random() * 0.02)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert not load(Manifest.load(home)).problem
        with Store.open(home) as store:
            assert all_bytes(store) == released
    assert replicate(home, everything(home), progress=None).count == int(Manifest.load(home).first[12])
