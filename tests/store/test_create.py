from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deltafin.store.create as create_module
import deltafin.store.ingest as ingest_module
import deltafin.store.meter as meter_module
from deltafin.errors import (
    DriveError,
    DriveFullError,
    DriveMissingError,
    DriveSwappedError,
    StoreError,
    TensorFileError,
    UsageError,
)
from deltafin.store import DriveSpec, IngestProgress, Store, create_store
from deltafin.store.manifest import Manifest
from deltafin.store.types import SLICE_ALIGN
from store.installs_help import (
    all_bytes,
    make_drives,
    open_descriptors,
    released_bytes,
    scattered_checkpoint,
    striped_install,
    tiny_checkpoint,
)

real_pwritev = os.pwritev


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([1, 2, 3, 5]).flatmap(lambda n: st.lists(st.floats(0.05, 20), min_size=n, max_size=n)))
def test_striped_bytes_equal_the_released_ones(
    tiny_once: Path, tmp_path_factory: pytest.TempPathFactory, weights: list[float]
) -> None:
    base = tmp_path_factory.mktemp("striped")
    before = open_descriptors()
    home = striped_install(tiny_once, base, weights)
    with Store.open(home) as store:
        assert store.layout == "striped"
        assert store.expert_layout.nbytes <= store.expert_buffer_bytes
        assert all_bytes(store) == released_bytes(tiny_once)
    assert open_descriptors() == before
    shutil.rmtree(base)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0), (1.0, 2.0, 4.0), (5.0, 4.0, 3.0, 2.0, 1.0)])
def test_the_miniature_round_trips(mini_target: Path, tmp_path: Path, weights: tuple[float, ...]) -> None:
    released = released_bytes(mini_target)
    with Store.open(striped_install(mini_target, tmp_path, weights)) as store:
        assert all_bytes(store) == released
        read = [stats.bytes for stats in store.reader.stats()]
        for nbytes, weight in zip(read, weights, strict=True):
            assert nbytes / sum(read) == pytest.approx(weight / sum(weights), abs=0.01)


def test_in_place_bytes_equal_the_released_ones(mini_target: Path, tmp_path: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in mini_target.iterdir()}
    home = create_store(mini_target, [], layout="in-place", home=tmp_path / "home")
    with Store.open(home) as store:
        assert store.layout == "in-place"
        assert all_bytes(store) == released_bytes(mini_target)
        assert [d.path for d in store.drives] == [mini_target.resolve()]
    assert {p: p.stat().st_mtime_ns for p in mini_target.iterdir()} == before  # nothing was written there


def test_in_place_over_several_drives_and_a_hub_cache(tiny_once: Path, tmp_path: Path) -> None:
    # Shards on two drives, linked into one folder as hub caches do, under names that are hashes.
    model = tmp_path / "snapshot"
    shutil.copytree(tiny_once, model)
    places = make_drives(tmp_path, [None, None])
    for number, shard in enumerate(sorted(model.glob("*.safetensors"))):
        target = places[number % 2].path / f"{number:064x}"
        shard.rename(target)
        shard.symlink_to(os.path.relpath(target, model))
    home = create_store(model, places, layout="in-place", home=tmp_path / "home")
    with Store.open(home) as store:
        assert [d.path for d in store.drives] == [spec.path.resolve() for spec in places]
        assert all_bytes(store) == released_bytes(model)
        assert all(stats.bytes for stats in store.reader.stats())
    assert create_store(model, [], layout="in-place", home=tmp_path / "home") == home
    with pytest.raises(UsageError, match="holds shards and is not among the drives"):
        create_store(model, places[:1], layout="in-place", home=tmp_path / "other")
    extra = tmp_path / "extra"
    extra.mkdir()
    with pytest.raises(UsageError, match="holds no shard"):
        create_store(model, [*places, DriveSpec(extra)], layout="in-place", home=tmp_path / "other")


def test_scattered_tensors_are_gathered(tiny_once: Path, tmp_path: Path) -> None:
    for odd in (False, True):
        model = scattered_checkpoint(tiny_once, tmp_path / f"model{odd}", odd=odd)
        with Store.open(striped_install(model, tmp_path / f"drives{odd}", (2.0, 1.0))) as store:
            assert all_bytes(store) == released_bytes(tiny_once)
        with pytest.raises(StoreError, match=r"scattered|not a multiple"):
            create_store(model, [], layout="in-place", home=tmp_path / f"home{odd}")


def test_finished_installs_are_left_alone(tiny_once: Path, tmp_path: Path) -> None:
    drives = make_drives(tmp_path, (1.0, 2.0))
    home = create_store(tiny_once, drives, layout="striped")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.s*")}
    seen: list[IngestProgress] = []
    assert create_store(tiny_once, drives, layout="striped", progress=seen.append) == home
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.s*")} == before
    assert [p.done_bytes == p.total_bytes == p.resumed_bytes for p in seen] == [True]
    assert create_store(tiny_once, [DriveSpec(d.path) for d in drives], layout="striped") == home


def test_what_an_install_consists_of(tiny_once: Path, tmp_path: Path) -> None:
    home = striped_install(tiny_once, tmp_path, (1.0, 1.0))
    names = {p.name for p in home.iterdir()}
    assert home.parent == tmp_path / "drive0"
    assert {"manifest.sqlite", "config.json", "generation_config.json", "deltafin-drive.json"} <= names
    assert not any(name.endswith(".new") for name in names)
    assert [p.name for p in (tmp_path / "drive1").iterdir()] == [home.name]
    slices = sorted(p.name for p in (tmp_path / "drive1" / home.name).iterdir())
    assert "deltafin-drive.json" in slices
    assert "layer-0001.slices" in slices
    for path in tmp_path.rglob("*.slices"):
        assert path.stat().st_size % SLICE_ALIGN == 0
    manifest = Manifest.load(home)
    assert manifest.present.all()
    assert np.all(manifest.offset % SLICE_ALIGN == 0)


def test_progress_adds_up(tiny_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "REPORT_SECONDS", 0.0001)
    seen: list[IngestProgress] = []
    create_store(tiny_once, make_drives(tmp_path, (1.0, 1.0)), layout="striped", progress=seen.append)
    done = [p.done_bytes for p in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total_bytes
    assert seen[-1].eta_seconds == 0.0
    assert {len(p.bytes_per_s) for p in seen} == {2}
    assert {p.phase for p in seen} == {"copy"}


@pytest.mark.parametrize(
    ("weights", "layout", "error", "message"),
    [
        ([], "striped", UsageError, "at least one drive"),
        ([1.0, None], "striped", UsageError, "some drives have weights"),
        ([0.0], "striped", UsageError, "not a positive number"),
        ([-1.0], "striped", UsageError, "not a positive number"),
        ([float("nan")], "striped", UsageError, "not a positive number"),
        ([float("inf")], "striped", UsageError, "not a positive number"),
        ([1.0], "in-place", UsageError, "no effect in place"),
    ],
)
def test_unusable_drives_are_refused(
    tiny_once: Path, tmp_path: Path, weights: list[float | None], layout: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        create_store(tiny_once, make_drives(tmp_path, weights), layout=layout, home=tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_drives_must_exist_and_differ(tiny_once: Path, tmp_path: Path) -> None:
    # An absent directory may be an unmounted drive: creating it would fill the system disk.
    with pytest.raises(DriveMissingError, match="is not a directory"):
        create_store(tiny_once, [DriveSpec(tmp_path / "unmounted")], layout="striped")
    (spec,) = make_drives(tmp_path, [None])
    with pytest.raises(UsageError, match="named twice"):
        create_store(tiny_once, [spec, DriveSpec(tmp_path / "drive0" / ".." / "drive0")], layout="striped")


def test_bandwidth_is_measured_when_it_pays(tiny_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drives = make_drives(tmp_path, (None, None))
    rates = {drives[0].path.resolve(): 3e9, drives[1].path.resolve(): 1e9}
    monkeypatch.setattr(create_module, "measure_bandwidth", lambda path: rates[path])
    with Store.open(create_store(tiny_once, drives, layout="striped")) as store:
        assert [d.weight for d in store.drives] == [1.0, 1.0]  # too small to be worth a test
    monkeypatch.setattr(create_module, "_MEASURE_FROM_BYTES", 0)
    seen: list[IngestProgress] = []
    other = make_drives(tmp_path / "more", (None, None))
    rates |= {other[0].path.resolve(): 3e9, other[1].path.resolve(): 1e9}
    with Store.open(create_store(tiny_once, other, layout="striped", progress=seen.append)) as store:
        assert [d.bytes_per_s for d in store.drives] == [3e9, 1e9]
        assert [d.weight for d in store.drives] == [3e9, 1e9]
    assert seen[0].phase == "measure"


def test_the_speed_test_measures_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import deltafin.store.drives as drives_module

    monkeypatch.setattr(drives_module, "_TEST_BYTES", 8 << 20)
    monkeypatch.setattr(drives_module, "_TEST_SECONDS", 0.05)
    assert drives_module.measure_bandwidth(tmp_path) > 1e6
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DriveError, match="speed test failed"):
        drives_module.measure_bandwidth(tmp_path / "gone")


def test_an_install_of_something_else_is_not_touched(tiny_once: Path, tmp_path: Path) -> None:
    drives = make_drives(tmp_path, (1.0, 2.0))
    home = create_store(tiny_once, drives, layout="striped", home=tmp_path / "home")
    with pytest.raises(StoreError, match="other drives"):
        create_store(tiny_once, drives[:1], layout="striped", home=home)
    equal = [DriveSpec(spec.path, 1.0) for spec in drives]
    with pytest.raises(StoreError, match="other weights"):
        create_store(tiny_once, equal, layout="striped", home=home)
    with pytest.raises(StoreError, match="another model or layout"):
        create_store(tiny_once, [], layout="in-place", home=home)
    # A second home on the same drives would write into the slice folders of the first.
    with pytest.raises(DriveSwappedError, match="belongs to another install"):
        create_store(tiny_once, drives, layout="striped", home=tmp_path / "second")
    with Store.open(home) as store:
        assert all_bytes(store) == released_bytes(tiny_once)


def test_only_one_process_works_on_a_home(tiny_once: Path, tmp_path: Path) -> None:
    with create_module.lock_home(tmp_path / "home"), pytest.raises(StoreError, match="another process"):
        create_store(tiny_once, make_drives(tmp_path, (1.0,)), layout="striped", home=tmp_path / "home")


def test_unwritable_home(tiny_once: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written") as caught:
        create_store(tiny_once, [], layout="in-place", home=tmp_path / "file" / "home")
    assert "--home" in caught.value.remedy


def full_after(monkeypatch: pytest.MonkeyPatch, calls: int, code: int, folder: str) -> None:
    """Writes below ``folder`` fail with ``code`` once ``calls`` of them succeeded."""
    done = [0]

    def pwritev(fd: int, views: Any, offset: int) -> int:
        if f"/{folder}/" in os.readlink(f"/proc/self/fd/{fd}"):
            done[0] += 1
            if done[0] > calls:
                raise OSError(code, os.strerror(code))
        return real_pwritev(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)


linux_only = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")


@linux_only
@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (errno.ENOSPC, DriveFullError, "is full"),
        (errno.EDQUOT, DriveFullError, "is full"),
        (errno.EROFS, DriveError, "cannot be written: Read-only"),
        (errno.EIO, DriveError, "failed while writing"),
    ],
)
def test_a_drive_that_fails_keeps_finished_work(
    tiny_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[DriveError], message: str
) -> None:
    drives = make_drives(tmp_path, (1.0, 1.0))
    before = open_descriptors()
    full_after(monkeypatch, 7, code, "drive1")
    with pytest.raises(error, match=message) as caught:
        create_store(tiny_once, drives, layout="striped", home=tmp_path / "home")
    assert str(drives[1].path) in caught.value.message
    assert "run the same command again" in caught.value.remedy
    assert open_descriptors() == before
    manifest = Manifest.load(tmp_path / "home")
    drive = np.array([f.drive for f in manifest.files])[manifest.file]
    assert manifest.present[drive == 1].sum() == 7
    assert not manifest.present.all()
    monkeypatch.undo()
    seen: list[IngestProgress] = []
    home = create_store(tiny_once, drives, layout="striped", home=tmp_path / "home", progress=seen.append)
    assert seen[-1].resumed_bytes == manifest.length[manifest.present].sum()
    with Store.open(home) as store:
        assert all_bytes(store) == released_bytes(tiny_once)


@linux_only
def test_interrupted_writes_are_completed(tiny_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stutter(fd: int, views: Any, offset: int) -> int:
        data = b"".join(views)
        return real_pwritev(fd, [data[: max(1, len(data) // 2)]], offset)

    monkeypatch.setattr(os, "pwritev", stutter)
    with Store.open(striped_install(tiny_once, tmp_path, (1.0, 3.0))) as store:
        assert all_bytes(store) == released_bytes(tiny_once)
    assert all(path.stat().st_size % SLICE_ALIGN == 0 for path in tmp_path.rglob("*.slices"))


def test_a_failed_sync_marks_nothing(tiny_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ingest_module, "sync", fail)
    with pytest.raises(DriveError, match="failed while writing"):
        create_store(tiny_once, make_drives(tmp_path, (1.0,)), layout="striped", home=tmp_path / "home")
    assert not Manifest.load(tmp_path / "home").present.any()


def test_too_little_space_is_said_before_anything_is_copied(
    tiny_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def tight(path: Any) -> Any:
        class Room:
            f_frsize = real(path).f_frsize
            f_bavail = 3

        return Room()

    monkeypatch.setattr(os, "statvfs", tight)
    with pytest.raises(DriveFullError, match=r"has 0\.0 GB free of 0\.0 needed"):
        striped_install(tiny_once, tmp_path, (1.0, 1.0))
    assert list(tmp_path.rglob("*.slices")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_really_full_file_system(tiny_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    (small,) = make_drives(tmp_path, [1.0])
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small.path], capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        monkeypatch.setattr(ingest_module, "_check_space", lambda *_: None)
        with pytest.raises(DriveFullError, match="is full"):
            create_store(tiny_once, [small], layout="striped", home=tmp_path / "home")
        assert 0 < Manifest.load(tmp_path / "home").present.sum() < 20
        subprocess.run(["mount", "-o", "remount,size=8m", small.path], check=True)
        with Store.open(create_store(tiny_once, [small], layout="striped", home=tmp_path / "home")) as store:
            assert all_bytes(store) == released_bytes(tiny_once)
        # A read-only drive serves reads, and says what is wrong when something must be written.
        subprocess.run(["mount", "-o", "remount,ro", small.path], check=True)
        with Store.open(tmp_path / "home") as store:
            assert all_bytes(store) == released_bytes(tiny_once)
    finally:
        subprocess.run(["umount", small.path], check=True)


def test_a_shard_that_breaks_during_ingest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    shard = sorted(model.glob("*.safetensors"))[1]
    real = ingest_module.ingest

    def damaged_first(*arguments: Any) -> None:
        os.truncate(shard, shard.stat().st_size // 2)
        real(*arguments)

    monkeypatch.setattr(create_module, "ingest", damaged_first)
    with pytest.raises(StoreError, match=shard.name) as caught:
        striped_install(model, tmp_path, (1.0,))
    assert "fetch this file again" in caught.value.remedy
    with pytest.raises(TensorFileError, match="truncated"):
        striped_install(model, tmp_path, (1.0,))
