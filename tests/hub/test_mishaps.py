"""What happens at home: full disks, plain file systems, drives that stutter or move, mirrors that are nearly right."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltafin.bench.hub import Fault, LocalHub
from deltafin.checkpoint.tensorfile import INDEX_NAME
from deltafin.errors import (
    CheckpointError,
    DriveError,
    DriveFullError,
    DriveMissingError,
    HubChecksumError,
    HubError,
    ReadError,
    StoreError,
)
from deltafin.hub import install
from deltafin.hub.client import Hub
from deltafin.hub.download import fetch_file
from deltafin.hub.pins import Pin
from deltafin.hub.released import Released
from deltafin.store import Store
from deltafin.store.direct import DirectFile
from deltafin.store.manifest import Manifest
from deltafin.store.survey import relocate_store
from store.installs_help import all_bytes, make_drives, released_bytes, scattered_checkpoint

REAL_PREADV, REAL_PWRITEV, REAL_PWRITE = os.preadv, os.pwritev, os.pwrite


def same(home: Path, model: Path) -> bool:
    with Store.open(home) as store:
        return all_bytes(store) == released_bytes(model)


def full_at(limit: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Writes of payload fail once ``limit`` bytes have been written; returns the count."""
    written, lock = [0], threading.Lock()

    def counted(real: Callable[..., int], size: Callable[[Any], int]) -> Callable[..., int]:
        def write(fd: int, data: Any, offset: int) -> int:
            with lock:
                written[0] += size(data)
                full = written[0] > limit
            if full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data, offset)

        return write

    monkeypatch.setattr(os, "pwritev", counted(REAL_PWRITEV, lambda views: sum(len(view) for view in views)))
    monkeypatch.setattr(os, "pwrite", counted(REAL_PWRITE, len))
    return written


def bytes_asked(hub: LocalHub, since: int) -> int:
    spans = [r.range.removeprefix("bytes=").split("-") for r in hub.requests("cdn")[since:]]
    return sum(int(end) - int(begin) + 1 for begin, end in spans)


def test_a_disk_that_fills_at_97_percent(
    small: LocalHub,
    small_client: Hub,
    small_pin: Pin,
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drives, home = make_drives(tmp_path, (1.0,)), tmp_path / "home"
    total = sum(p.stat().st_size for p in small_model.glob("*.safetensors"))
    needed = full_at(1 << 40, monkeypatch)
    install.install_striped(small_client, small_pin, make_drives(tmp_path / "x", (1.0,)), tmp_path / "y", experts=True)
    full_at(needed[0] * 97 // 100, monkeypatch)
    with pytest.raises(DriveFullError, match="is full") as caught:
        install.install_striped(small_client, small_pin, drives, home, experts=True)
    assert str(drives[0].path) in caught.value.message
    assert "run the same command again" in caught.value.remedy
    monkeypatch.undo()
    asked = len(small.requests("cdn"))
    client = Hub(small.endpoint, hosts=["localhost"])
    install.install_striped(client, small_pin, drives, home, experts=True)
    client.close()
    assert 0 < bytes_asked(small, asked) < total * 3 // 4, "what was there is not fetched again"
    assert same(home, small_model)


def test_a_disk_that_fills_under_a_whole_file(
    served: LocalHub, client: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltafin.hub.download.SEGMENT", 1 << 18)
    pin = Pin("mini/dspark", served.revision)
    file = client.files(pin)["model.safetensors"]
    full_at(file.size * 97 // 100, monkeypatch)
    with pytest.raises(DriveFullError, match="is full"):
        fetch_file(client, pin, file, tmp_path / file.name)
    assert not (tmp_path / file.name).exists()
    monkeypatch.undo()
    monkeypatch.setattr("deltafin.hub.download.SEGMENT", 1 << 18)
    asked = len(served.requests("cdn"))
    fetch_file(client, pin, file, tmp_path / file.name)
    assert bytes_asked(served, asked) < file.size // 2
    assert hashlib.sha256((tmp_path / file.name).read_bytes()).hexdigest() == file.sha256


def test_a_complete_part_is_not_asked_for(
    served: LocalHub, client: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking for what follows the last byte is answered 416, and tools that do so start over."""
    pin = Pin("mini/dspark", served.revision)
    file = client.files(pin)["model.safetensors"]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltafin.hub.download.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch_file(client, pin, file, tmp_path / file.name)
    monkeypatch.undo()
    state = {"size": file.size, "sha256": file.sha256, "segment": 16 << 20, "done": [0]}
    (tmp_path / f"{file.name}.part.json").write_text(json.dumps(state))
    assert (tmp_path / f"{file.name}.part").stat().st_size == file.size
    asked = len(served.requests("cdn"))
    fetch_file(client, pin, file, tmp_path / file.name)
    assert len(served.requests("cdn")) == asked
    assert hashlib.sha256((tmp_path / file.name).read_bytes()).hexdigest() == file.sha256


@pytest.fixture
def plain_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """As exFAT: no links, no permissions, no direct writes, no sync of directories."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    for name in ("symlink", "link", "chmod", "fchmod", "chown"):
        monkeypatch.setattr(os, name, refused)
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("deltafin.store.ingest._O_DIRECT", 0)


@pytest.mark.usefixtures("plain_file_system")
def test_drives_without_links_and_permissions(
    small_client: Hub, small_pin: Pin, small_model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    install.install_striped(small_client, small_pin, make_drives(tmp_path, (1.0, 2.0)), home, experts=True)
    assert same(home, small_model)


@pytest.mark.usefixtures("plain_file_system")
def test_whole_files_need_links_and_say_so_first(
    small: LocalHub, small_client: Hub, small_pin: Pin, tmp_path: Path
) -> None:
    with pytest.raises(DriveError, match="without links") as caught:
        install.install_in_place(small_client, small_pin, make_drives(tmp_path, (None,)), tmp_path / "home")
    assert "--store" in caught.value.remedy
    assert not small.requests("cdn"), "before anything large is fetched"


def stutter(times: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[int]:
    """Reads of one page below ``folder`` fail ``times`` times; returns the countdown."""
    left = [times]
    real = DirectFile._pread

    def pread(self: DirectFile, view: memoryview, offset: int) -> int:
        if left[0] and self.path.is_relative_to(folder) and offset == 0:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, view, offset)

    monkeypatch.setattr(DirectFile, "_pread", pread)
    return left


@pytest.mark.parametrize("times", [2, 99])
def test_a_page_that_cannot_be_read_back(
    times: int,
    small_client: Hub,
    small_pin: Pin,
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is kept in memory here, so that the proof has to read the drives."""
    monkeypatch.setattr("deltafin.hub.slices.RunningDigest.offer", lambda *_, **__: None)
    drives, home = make_drives(tmp_path, (1.0,)), tmp_path / "home"
    left = stutter(times, monkeypatch, tmp_path / "drive0")
    if times == 2:
        install.install_striped(small_client, small_pin, drives, home, experts=True)
        assert left == [0]
    else:
        with pytest.raises(ReadError, match="cannot be read back"):
            install.install_striped(small_client, small_pin, drives, home, experts=True)
        assert not Manifest.load(home).present.all()
        monkeypatch.undo()
        install.install_striped(small_client, small_pin, drives, home, experts=True)
    monkeypatch.undo()
    assert same(home, small_model)


@pytest.mark.parametrize("times", [2, 99])
def test_a_page_of_an_adopted_file_that_cannot_be_read(
    times: int, small_pin: Pin, small_client: Hub, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, home = tmp_path / "download", tmp_path / "home"
    shutil.copytree(small_model, folder)
    left = stutter(times, monkeypatch, folder)
    if times == 2:
        install.adopt(folder, home, small_client, small_pin)
        assert left == [0]
    else:
        with pytest.raises(ReadError, match="Input/output error"):
            install.adopt(folder, home, small_client, small_pin)
        monkeypatch.undo()
        install.adopt(folder, home, small_client, small_pin)
    monkeypatch.undo()
    assert same(home, small_model)


def test_a_drive_that_returns_elsewhere_between_two_attempts(
    small: LocalHub, small_client: Hub, small_pin: Pin, small_model: Path, tmp_path: Path
) -> None:
    drives, home = make_drives(tmp_path, (1.0, 1.0)), tmp_path / "home"
    small.faults.append(Fault("cdn", "status", times=-1, value=404, after=12))
    with pytest.raises(HubError):
        install.install_striped(small_client, small_pin, drives, home, experts=True)
    small.faults.clear()
    done = Manifest.load(home)
    drives[1].path.rename(tmp_path / "media")
    with pytest.raises((DriveMissingError, StoreError)):
        install.install_striped(small_client, small_pin, drives, home, experts=True)
    now = [drives[0], type(drives[1])(tmp_path / "media", 1.0)]
    with pytest.raises(StoreError) as caught:
        install.install_striped(small_client, small_pin, now, home, experts=True)
    assert "deltafin store relocate" in caught.value.remedy
    relocate_store(home, [tmp_path / "media"])
    install.install_striped(small_client, small_pin, now, home, experts=True)
    assert (done.present | done.written).any()
    assert same(home, small_model)


def mirror(model: Path, folder: Path) -> Path:
    """A copy in which one byte of one shard differs."""
    shutil.copytree(model, folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    return shard


def test_a_mirror_one_byte_different(small: LocalHub, small_pin: Pin, small_model: Path, tmp_path: Path) -> None:
    """The metadata are the hub's, the bytes the mirror's."""
    shard = mirror(small_model, tmp_path / "mirror")
    drives, home = make_drives(tmp_path, (1.0, 1.0)), tmp_path / "home"
    with LocalHub({"small/k3": tmp_path / "mirror"}) as wrong:
        wrong.files["small/k3"][shard.name] = type(small.files["small/k3"][shard.name])(
            shard,
            *(getattr(small.files["small/k3"][shard.name], name) for name in ("size", "sha256", "git_sha1", "lfs")),
        )
        hub = Hub(wrong.endpoint, hosts=["localhost"], backoff=(0.01, 0.05))
        with pytest.raises(HubChecksumError, match=shard.name):
            install.install_striped(hub, small_pin, drives, home, experts=True)
        hub.close()
    hub = Hub(small.endpoint, hosts=["localhost"])
    install.install_striped(hub, small_pin, drives, home, experts=True)
    hub.close()
    assert same(home, small_model)


def test_a_hub_whose_checksums_are_of_other_files(
    small: LocalHub, small_client: Hub, small_pin: Pin, tmp_path: Path
) -> None:
    small.faults.append(Fault("api", "wrong-sha", times=-1))
    with pytest.raises((HubChecksumError, HubError)):
        install.install_striped(small_client, small_pin, make_drives(tmp_path, (1.0,)), tmp_path / "home", experts=True)
    assert not (tmp_path / "home/manifest.sqlite").exists() or not Manifest.load(tmp_path / "home").present.any()


@pytest.mark.parametrize("how", ["wrong", "twice", "nowhere"])
def test_an_index_that_contradicts_its_shards(how: str, small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model, folder)
    index = json.loads((folder / INDEX_NAME).read_text())
    names = sorted(set(index["weight_map"].values()))
    tensor = next(name for name, file in index["weight_map"].items() if file == names[0])
    if how == "wrong":
        index["weight_map"][tensor] = names[1]
    elif how == "nowhere":
        index["weight_map"][tensor] = "model-00099-of-000099.safetensors"
    else:  # a second shard holds it too
        shutil.copy(folder / names[0], folder / "model-extra.safetensors")
        other = next(name for name, file in index["weight_map"].items() if file == names[0] and name != tensor)
        index["weight_map"][other] = "model-extra.safetensors"
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with LocalHub({"small/k3": folder}) as bad:
        hub = Hub(bad.endpoint, hosts=["localhost"], backoff=(0.01, 0.05))
        drives = make_drives(tmp_path, (1.0,))
        with pytest.raises((CheckpointError, HubError)):
            install.install_striped(hub, Pin("small/k3", bad.revision), drives, tmp_path / "home", experts=True)
        hub.close()
        assert not list(tmp_path.rglob("*.slices"))


def test_a_cache_is_only_read_and_may_reach_another_volume(
    small: LocalHub, small_pin: Pin, small_model: Path, tmp_path: Path
) -> None:
    """Relative links, one of them leading on to another folder by an absolute one; nothing may be written there."""
    cache, volume = tmp_path / "hub/models--small--k3", tmp_path / "volume"
    snapshot = cache / "snapshots" / small.revision
    for folder in (snapshot, cache / "blobs", volume):
        folder.mkdir(parents=True)
    elsewhere = sorted(small_model.glob("*.safetensors"))[-1].name
    for file in small.files["small/k3"].values():
        blob = cache / "blobs" / (file.sha256 if file.lfs else file.git_sha1)
        if file.path.name == elsewhere:
            shutil.copy(file.path, volume / blob.name)
            blob.symlink_to(volume / blob.name)
        else:
            shutil.copy(file.path, blob)
        (snapshot / file.path.name).symlink_to(Path("../../blobs") / blob.name)
    folders = [p for base in (cache, volume) for p in [base, *base.rglob("*")]]
    for path in folders:
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)

    def state() -> dict[str, tuple[int, int]]:
        return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for base in (cache, volume) for p in base.rglob("*")}

    before = state()
    try:
        install.adopt(tmp_path / "hub", tmp_path / "home", None, small_pin)
        assert same(tmp_path / "home", small_model)
    finally:
        for path in folders:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
    assert state() == before
    assert {drive.path for drive in Manifest.load(tmp_path / "home").drives} == {cache / "blobs", volume}


def test_reads_that_heal_during_generation(mini_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from deltafin.generation.engine import Engine, EngineOptions
    from deltafin.generation.events import TokenDecided

    with Engine.open(mini_store, EngineOptions(context=256, tier=0, draft="off")) as engine:

        def answer() -> list[int]:
            events = engine.session().generate([40, 41, 42], max_new=4, stop=())
            return [e.token for e in events if isinstance(e, TokenDecided)]

        expected = answer()
        calls = [0]

        def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
            calls[0] += 1
            if calls[0] % 50 == 7:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return REAL_PREADV(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        assert answer() == expected
        assert sum(drive.retries for drive in engine.store.reader.stats()) > 0


@pytest.mark.parametrize("odd", [False, True])
def test_shards_in_another_order(odd: bool, small_model: Path, tmp_path: Path) -> None:
    """Experts that are gathered from many places arrive in no order, and are proved all the same."""
    scattered = scattered_checkpoint(small_model, tmp_path / "model", odd=odd)
    with LocalHub({"small/k3": scattered}) as served:
        hub = Hub(served.endpoint, hosts=["localhost"], backoff=(0.01, 0.05))
        home, pin = tmp_path / "home", Pin("small/k3", served.revision)
        install.install_striped(hub, pin, make_drives(tmp_path, (1.0, 1.0)), home, experts=True)
        hub.close()
    record = Released.load(home)
    assert record is not None
    assert record.proved == record.needed == set(record.shard_names())
    assert same(home, small_model)


def test_whole_files_that_are_there_are_used_or_left_alone(
    small: LocalHub, small_client: Hub, small_pin: Pin, small_model: Path, tmp_path: Path
) -> None:
    drives = make_drives(tmp_path, (None,))
    install.install_in_place(small_client, small_pin, drives, tmp_path / "first")
    record = json.loads((tmp_path / "first/released/source.json").read_text())
    # Killed between the last file and the note about it.
    last = record["proved"].pop()
    (tmp_path / "first/released/source.json").write_text(json.dumps(record))
    asked = len(small.requests("cdn"))
    install.install_in_place(small_client, small_pin, drives, tmp_path / "first")
    assert len(small.requests("cdn")) == asked
    # A later revision on the same drive.
    newer = tmp_path / "newer"
    shutil.copytree(small_model, newer)
    data = bytearray((newer / last).read_bytes())
    data[-1] ^= 1
    (newer / last).write_bytes(data)
    before = (tmp_path / "drive0/k3" / last).read_bytes()
    with LocalHub({"small/k3": newer}, revision="c" * 40) as later:
        hub, pin = Hub(later.endpoint, hosts=["localhost"]), Pin("small/k3", later.revision)
        with pytest.raises(StoreError, match="is not the file of small/k3 at cccc"):
            install.install_in_place(hub, pin, drives, tmp_path / "second")
        assert (tmp_path / "drive0/k3" / last).read_bytes() == before
        (tmp_path / "drive0/k3" / last).rename(tmp_path / "drive0" / last)
        install.install_in_place(hub, pin, drives, tmp_path / "second")
        assert {r.name for r in later.requests("cdn")} == {last}, "what is the same is not fetched again"
        hub.close()
    assert same(tmp_path / "second", newer)
