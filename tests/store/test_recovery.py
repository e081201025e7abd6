"""A drive that vanishes while it is read: the read waits, goes on when the drive is back, and can be given up."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest

from deltafin.checkpoint import Checkpoint
from deltafin.errors import HubError, Interrupted, ReadError, SliceCorruptError, SliceMissingError
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.generation.events import Finished, TokenDecided
from deltafin.store import ReadPlan, Store, aligned_memory, create_store
from deltafin.store import drives as drives_module
from deltafin.store.direct import DirectFile
from deltafin.store.manifest import Manifest, PresenceLog
from deltafin.store.source import BlobSource
from store.installs_help import all_bytes, make_drives, read, released_bytes


class Plug:
    """Pulls a drive's plug: its directory is gone, and reads through open files fail."""

    def __init__(self, drive: Path) -> None:
        self.drive = drive
        self.away = drive.with_name(drive.name + "-unplugged")
        self.out = False
        self.generation = 0

    def pull(self) -> None:
        self.drive.rename(self.away)
        self.out = True
        self.generation += 1

    def put_back(self) -> None:
        self.away.rename(self.drive)
        self.out = False


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plug:
    plug = Plug(tmp_path / "drive1")
    opened: dict[int, int] = {}
    real_read, real_init = DirectFile.read, DirectFile.__init__

    def init(self: DirectFile, path: Path) -> None:
        real_init(self, path)
        opened[id(self)] = plug.generation

    def patched(self: DirectFile, view: memoryview, offset: int, wanted: int) -> None:
        # Descriptors from before the plug was pulled stay dead, as those of a real drive do.
        if self.path.is_relative_to(plug.drive) and (plug.out or opened.get(id(self), 0) != plug.generation):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real_read(self, view, offset, wanted)

    monkeypatch.setattr(DirectFile, "__init__", init)
    monkeypatch.setattr(DirectFile, "read", patched)
    return plug


def on_drive_1(store: Store) -> ReadPlan:
    """An expert of which a slice is on drive 1."""
    plans = [store.expert_plan(1, expert) for expert in range(6)]
    return next(plan for plan in plans if any(extent.drive == 1 for extent in plan.extents))


def later(seconds: float, step: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, step)
    timer.daemon = True
    timer.start()


def test_a_read_waits_for_its_drive(tiny_once: Path, tmp_path: Path, plug: Plug) -> None:
    home = create_store(tiny_once, make_drives(tmp_path, (1.0, 1.0)), layout="striped", home=tmp_path / "home")
    said: list[str] = []
    with Store.open(home, notify=said.append) as store:
        plan = on_drive_1(store)
        first = read(store.reader, plan)
        plug.pull()
        later(0.7, plug.put_back)
        assert read(store.reader, plan) == first
        assert [("is gone" in s, "going on" in s) for s in said] == [(True, False), (False, True)]
        assert all_bytes(store) == released_bytes(tiny_once)
        assert len(said) == 2, "descriptors were renewed: later reads are ordinary ones"


def test_a_read_goes_on_where_its_drive_is_mounted_now(
    tiny_once: Path, tmp_path: Path, plug: Plug, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = create_store(tiny_once, make_drives(tmp_path, (1.0, 1.0)), layout="striped", home=tmp_path / "home")
    now = tmp_path / "Volumes" / "drive1"
    now.parent.mkdir()
    monkeypatch.setattr(drives_module, "_mount_points", lambda: [now.parent])
    said: list[str] = []
    with Store.open(home, notify=said.append) as store:
        plan = on_drive_1(store)
        first = read(store.reader, plan)
        plug.pull()
        plug.away.rename(now)
        plug.drive.mkdir()  # what macOS leaves behind
        assert read(store.reader, plan) == first
        assert ["is gone" in s for s in said] == [True, False]
        assert f"{now}, is back" in said[1]
        assert all_bytes(store) == released_bytes(tiny_once)
        assert len(said) == 2
        assert store.reader.stats()[1].path == now


def test_a_waiting_read_can_be_given_up(tiny_once: Path, tmp_path: Path, plug: Plug) -> None:
    home = create_store(tiny_once, make_drives(tmp_path, (1.0, 1.0)), layout="striped", home=tmp_path / "home")
    with Store.open(home, notify=lambda _: None) as store:
        plan = on_drive_1(store)
        plug.pull()
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        ticket = store.reader.submit(plan, aligned_memory(plan.buffer_bytes), done.put)
        time.sleep(0.2)
        assert done.empty()
        assert not ticket.cancel()
        assert isinstance(done.get(timeout=5), ReadError)
        # Closing ends waits too.
        store.reader.submit(plan, aligned_memory(plan.buffer_bytes), done.put)
        time.sleep(0.2)
    assert isinstance(done.get(timeout=5), ReadError)


def test_generation_pauses_and_continues(mini_target: Path, tmp_path: Path, plug: Plug) -> None:
    home = create_store(mini_target, make_drives(tmp_path, (1.0, 1.0)), layout="striped", home=tmp_path / "home")
    prompt = list(range(40, 60))

    def run(engine: Engine, at: int, step: Callable[[], None]) -> tuple[list[int], str]:
        tokens, reason = [], ""
        for event in engine.session().generate(prompt, max_new=8, stop=()):
            if isinstance(event, TokenDecided):
                tokens.append(event.token)
                if len(tokens) == at:
                    step()
            elif isinstance(event, Finished):
                reason = event.reason
        return tokens, reason

    with Engine.open(home, EngineOptions(tier=0, draft="off")) as engine:
        expected, _ = run(engine, 0, lambda: None)

        def pull() -> None:
            plug.pull()
            later(0.5, plug.put_back)

        assert run(engine, 3, pull) == (expected, "length")

        def pull_and_stop() -> None:
            plug.pull()
            later(0.3, engine.stop.set)

        session = engine.session()
        tokens = []
        for event in session.generate(prompt, max_new=8, stop=()):
            if isinstance(event, TokenDecided):
                tokens.append(event.token)
                if len(tokens) == 3:
                    pull_and_stop()
            elif isinstance(event, Finished):
                assert event.reason == "interrupted"
        assert tokens == expected[: len(tokens)]
        assert session.tokens == [*prompt, *tokens], "what was decided is kept"
        plug.put_back()
        more = [e.token for e in session.generate(session.tokens, max_new=2, stop=()) if isinstance(e, TokenDecided)]
        assert tokens + more == expected[: len(tokens) + 2]


class Neighbour:
    """A supplier that reads the released files."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self.manifest, self.checkpoint = manifest, Checkpoint.open(folder)
        self.asked: list[tuple[int, int, int]] = []
        self.wrong = False
        self.refuse = False

    def fetch(self, blob: int, begin: int, view: memoryview, stopped: Callable[[], bool]) -> None:
        self.asked.append((blob, begin, len(view)))
        if self.refuse:
            raise HubError("nobody is there")
        source = BlobSource(self.manifest, self.checkpoint)
        view[:] = source.read(blob)[begin : begin + len(view)]
        if self.wrong:
            view[0] ^= 1
        source.close()

    def close(self) -> None:
        pass


@pytest.fixture
def damaged(tiny_once: Path, tmp_path: Path) -> Path:
    """An install in which slice 0 is damaged and blob 3 absent."""
    home = create_store(tiny_once, make_drives(tmp_path, (1.0, 1.0)), layout="striped", home=tmp_path / "home")
    m = Manifest.load(home)
    with open(m.file_path(int(m.file[0])), "r+b") as file:
        file.seek(int(m.offset[0]))
        file.write(b"damage")
    log = PresenceLog(m.path)
    log.forget([(3, 0), (3, 1)])
    log.close()
    return home


def test_absent_and_damaged_slices_are_brought_and_kept(damaged: Path, tiny_once: Path) -> None:
    made: list[Neighbour] = []

    def supplier(manifest: Manifest) -> Neighbour:
        made.append(Neighbour(manifest, tiny_once))
        return made[0]

    with Store.open(damaged, supplier=supplier) as store:
        assert all_bytes(store) == released_bytes(tiny_once)
    m = Manifest.load(damaged)
    assert sorted(made[0].asked) == [(0, 0, int(m.length[0])), (3, 0, 19584)], "exactly what was bad, at once"
    with Store.open(damaged) as store:
        assert all_bytes(store) == released_bytes(tiny_once)


def test_a_supplier_that_lies_or_is_away(damaged: Path, tiny_once: Path) -> None:
    made: list[Neighbour] = []

    def supplier(manifest: Manifest) -> Neighbour:
        made.append(Neighbour(manifest, tiny_once))
        return made[0]

    with Store.open(damaged, supplier=supplier) as store:
        made[0].wrong = True
        with pytest.raises(SliceCorruptError, match="differs from what was recorded"):
            read(store.reader, store.expert_plan(1, 0))
        made[0].refuse = True
        with pytest.raises(SliceCorruptError, match="nobody is there"):
            read(store.reader, store.expert_plan(1, 0))
        with pytest.raises(HubError, match="nobody is there"):
            read(store.reader, store.expert_plan(1, 3))
    with Store.open(damaged) as store, pytest.raises(SliceMissingError):
        store.expert_plan(1, 3)


def test_what_cannot_be_kept_is_still_used(damaged: Path, tiny_once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("deltafin.store.keeper.os.pwrite", full)
    said: list[str] = []
    with Store.open(damaged, supplier=lambda m: Neighbour(m, tiny_once), notify=said.append) as store:
        assert all_bytes(store) == released_bytes(tiny_once)
        assert all_bytes(store) == released_bytes(tiny_once)
    assert len(said) == 1
    assert "cannot be kept" in said[0]
    assert not Manifest.load(damaged).present.all()


def test_an_interrupted_supplier_ends_with_the_read(damaged: Path, tiny_once: Path) -> None:
    class Slow(Neighbour):
        def fetch(self, blob: int, begin: int, view: memoryview, stopped: Callable[[], bool]) -> None:
            while not stopped():
                time.sleep(0.01)
            raise Interrupted("stopped")

    with Store.open(damaged, supplier=lambda m: Slow(m, tiny_once)) as store:
        plan = store.expert_plan(1, 3)
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        ticket = store.reader.submit(plan, aligned_memory(plan.buffer_bytes), done.put)
        time.sleep(0.1)
        assert not ticket.cancel()
        assert isinstance(done.get(timeout=5), Interrupted)
