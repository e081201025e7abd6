"""What happens to a finished install: drives that vanish or are swapped, damaged slices; and how it is mended."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from deltafin.errors import (
    DriveMissingError,
    DriveSwappedError,
    ManifestError,
    ReadError,
    SliceCorruptError,
    SliceMissingError,
    StoreError,
)
from deltafin.store import DriveSpec, Store, create_store
from deltafin.store import drives as drives_module
from deltafin.store.manifest import MANIFEST_NAME, Manifest, PresenceLog
from deltafin.store.survey import inspect_store, relocate_store
from deltafin.store.verify import repair_store, verify_store
from store.installs_help import all_bytes, make_drives, read, released_bytes, striped_install, tiny_checkpoint


@pytest.fixture
def home(tiny_once: Path, tmp_path: Path) -> Path:
    """Striped over drive0, drive1, drive2; the home lies elsewhere."""
    drives = make_drives(tmp_path, (1.0, 2.0, 3.0))
    return create_store(tiny_once, drives, layout="striped", home=tmp_path / "home")


@pytest.fixture
def in_place(tmp_path: Path) -> tuple[Path, Path]:
    """(home, model folder) of an install in place."""
    model = tiny_checkpoint(tmp_path / "model")
    return create_store(model, [], layout="in-place", home=tmp_path / "home"), model


def slice_file(home: Path, drive: int, name: str = "layer-0001.slices") -> Path:
    return next((home.parent / f"drive{drive}").glob(f"deltafin-*/{name}"))


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_a_missing_drive(home: Path) -> None:
    drive = home.parent / "drive1"
    drive.rename(home.parent / "unplugged")
    with pytest.raises(DriveMissingError) as caught:
        Store.open(home)
    assert str(drive) in caught.value.message
    assert "store relocate" in caught.value.remedy
    report = inspect_store(home)
    assert [d.state for d in report.drives] == ["ok", "missing", "ok"]
    assert not report.complete
    with pytest.raises(DriveMissingError):
        verify_store(home)
    drive.mkdir()  # an empty mount point
    with pytest.raises(DriveSwappedError):
        Store.open(home)


@pytest.fixture
def volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose subfolders are what the system reports as mounted."""
    folder = tmp_path / "Volumes"
    folder.mkdir()
    monkeypatch.setattr(drives_module, "_mount_points", lambda: sorted(folder.iterdir()))
    return folder


@pytest.mark.parametrize("below", ["", "models/k3"])
@pytest.mark.parametrize("ghost", [False, True], ids=["the old place is gone", "an empty directory stayed"])
def test_a_drive_under_another_volume_name_is_followed(
    below: str, ghost: bool, volumes: Path, tiny_once: Path, tmp_path: Path
) -> None:
    places = [volumes / name / below for name in ("K3", "Other")]
    for place in places:
        place.mkdir(parents=True)
    home = create_store(tiny_once, [DriveSpec(p, 1.0) for p in places], layout="striped", home=tmp_path / "home")
    (volumes / "K3").rename(volumes / "K3 1")
    if ghost:
        (volumes / "K3").mkdir()
    told: list[str] = []
    before = (home / MANIFEST_NAME).read_bytes()
    with Store.open(home, notify=told.append) as store:
        assert store.drives[0].path == volumes / "K3 1" / below
        assert store.drives[1].path == places[1]
        assert all_bytes(store) == released_bytes(tiny_once)
    assert (home / MANIFEST_NAME).read_bytes() == before
    assert len(told) == 1
    assert str(volumes / "K3 1" / below) in told[0]
    (volumes / "K3 1").rename(tmp_path / "unplugged")
    with pytest.raises((DriveMissingError, DriveSwappedError)) as caught:
        Store.open(home)
    assert "NEW_PATH" in caught.value.remedy


def test_a_home_on_a_volume_of_another_name_is_pointed_out(volumes: Path, tiny_once: Path) -> None:
    (volumes / "K3").mkdir()
    home = create_store(tiny_once, [DriveSpec(volumes / "K3", 1.0)], layout="striped")
    (volumes / "K3").rename(volumes / "K3 1")
    for lost, place in ((volumes / "K3", volumes / "K3 1"), (home, volumes / "K3 1" / home.name)):
        with pytest.raises(ManifestError) as caught:
            Store.open(lost)
        assert f"--store '{place}'" in caught.value.remedy
    with Store.open(volumes / "K3 1") as store:
        assert len(store.drives) == 1


def test_a_foreign_volume_is_never_followed(volumes: Path, home: Path, tiny_once: Path, tmp_path: Path) -> None:
    other = make_drives(tmp_path / "second", (1.0, 2.0, 3.0))
    create_store(tiny_once, other, layout="striped", home=tmp_path / "other-home")
    for spec in other:
        spec.path.rename(volumes / spec.path.name)  # the same names, of another install
    (home.parent / "drive1").rename(tmp_path / "unplugged")
    with pytest.raises(DriveMissingError):
        Store.open(home)


def test_other_commands_are_told_the_new_place(volumes: Path, home: Path) -> None:
    (home.parent / "drive1").rename(volumes / "drive1")
    m = Manifest.load(home)
    with pytest.raises(DriveMissingError) as caught:
        drives_module.check_drive(m, m.drives[1])
    assert caught.value.remedy.endswith(f"deltafin store relocate {home} --drive '{volumes / 'drive1'}'")
    assert relocate_store(home, [volumes / "drive1"])[1].path == volumes / "drive1"


def test_swapped_drives(home: Path) -> None:
    one, two = home.parent / "drive0", home.parent / "drive1"
    one.rename(home.parent / "x")
    two.rename(one)
    (home.parent / "x").rename(two)
    with pytest.raises(DriveSwappedError) as caught:
        Store.open(home)
    assert str(one) in caught.value.message
    assert [d.state for d in inspect_store(home).drives] == ["swapped", "swapped", "ok"]
    moved = relocate_store(home, [one, two])
    assert [d.path for d in moved] == [two, one, home.parent / "drive2"]
    with Store.open(home) as store:
        assert len(all_bytes(store)) > 100


@pytest.mark.parametrize(
    "marker", [b"", b"{}", b"[[[", b"\xff", b'{"format": 1}', b'{"format": 1, "store": 3, "drive": []}', b"9" * 5000]
)
def test_a_marker_that_is_not_ours(home: Path, marker: bytes) -> None:
    slice_file(home, 2, "deltafin-drive.json").write_bytes(marker)
    with pytest.raises(DriveSwappedError):
        Store.open(home)


def test_the_drive_of_another_install(home: Path, tiny_once: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = create_store(tiny_once, make_drives(tmp_path / "other", (1.0,)), layout="striped")
    shutil.copy(other / "deltafin-drive.json", slice_file(home, 0, "deltafin-drive.json"))
    with pytest.raises(DriveSwappedError):
        Store.open(home)


def test_relocation(home: Path, tmp_path: Path) -> None:
    released = None
    with Store.open(home) as store:
        released = all_bytes(store)
    (tmp_path / "volumes").mkdir()
    for number in range(3):
        (tmp_path / f"drive{number}").rename(tmp_path / "volumes" / f"disk {number}")
    places = [tmp_path / "volumes" / f"disk {number}" for number in (2, 0, 1)]
    with pytest.raises(DriveMissingError, match="drive 1"):
        relocate_store(home, places[:2])
    with pytest.raises(DriveSwappedError, match="no drive of the install"):
        relocate_store(home, [tmp_path])
    relocate_store(home, places[2:])  # the two found before are remembered
    with Store.open(home) as store:
        assert all_bytes(store) == released


def test_a_home_on_a_drive_that_moved(tiny_once: Path, tmp_path: Path) -> None:
    home = striped_install(tiny_once, tmp_path / "mnt", (1.0,))
    (tmp_path / "mnt").rename(tmp_path / "media")
    moved = tmp_path / "media" / home.relative_to(tmp_path / "mnt")
    with pytest.raises(DriveMissingError):
        Store.open(moved)
    assert relocate_store(moved, [])[0].path == moved.parent
    with Store.open(moved) as store:
        assert all_bytes(store) == released_bytes(tiny_once)


def test_truncated_and_missing_slice_files(home: Path, tiny_once: Path) -> None:
    path = slice_file(home, 1)
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    with pytest.raises(ReadError, match="is truncated") as caught:
        Store.open(home)
    assert str(path) in caught.value.message
    assert "store repair" in caught.value.remedy
    assert inspect_store(home).drives[1].damaged_files == (str(path.relative_to(home.parent / "drive1")),)
    path.unlink()
    with pytest.raises(ReadError, match="is missing"):
        Store.open(home)
    with pytest.raises(ReadError, match="is missing"):
        create_store(tiny_once, make_drives(home.parent, (None, None, None)), layout="striped", home=home)
    report = verify_store(home)
    assert report.bad
    assert {bad.path for bad in report.bad} == {path}
    assert repair_store(home, tiny_once).bad == report.bad
    with Store.open(home) as store:
        assert all_bytes(store) == released_bytes(tiny_once)


def test_a_flipped_bit_is_never_delivered(home: Path, tiny_once: Path) -> None:
    path = slice_file(home, 2)
    m = Manifest.load(home)
    chosen = next(i for i in range(m.first[6]) if m.file_path(int(m.file[i])) == path)
    blob = int(m.blobs[chosen])
    flip(path, int(m.offset[chosen]) + 100)
    with Store.open(home) as store:
        plan = store.expert_plan(1 + blob // 6, blob % 6)
        with pytest.raises(SliceCorruptError) as caught:
            read(store.reader, plan)
        assert str(path) in caught.value.message
        assert f"expert {blob % 6} of layer {1 + blob // 6}" in caught.value.message
        assert store.reader.stats()[2].retries == 0
        for other in range(12):
            if other != blob:
                read(store.reader, store.expert_plan(1 + other // 6, other % 6))
    report = verify_store(home)
    assert [(bad.blob, bad.path, bad.offset) for bad in report.bad] == [(blob, path, int(m.offset[chosen]))]
    assert report.slices == len(m.present)
    before = {p: p.stat().st_mtime_ns for p in home.parent.rglob("*.slices")}
    assert repair_store(home, tiny_once).bad == report.bad
    touched = [p for p, mtime in before.items() if p.stat().st_mtime_ns != mtime]
    assert touched == [path]
    assert verify_store(home).bad == ()
    with Store.open(home) as store:
        assert all_bytes(store) == released_bytes(tiny_once)


def test_a_flipped_bit_in_the_spine_and_in_padding(home: Path, tiny_once: Path) -> None:
    m = Manifest.load(home)
    unit = m.units["layer.2"]
    first = int(m.first[unit.first_blob])
    flip(m.file_path(int(m.file[first])), int(m.offset[first]))
    last = int(m.first[5 + 1]) - 1
    flip(m.file_path(int(m.file[last])), int(m.offset[last] + m.length[last]))  # just behind the slice
    with Store.open(home) as store:
        with pytest.raises(SliceCorruptError, match=r"spine unit layer\.2"):
            read(store.reader, store.spine_unit("layer.2").plan)
        read(store.reader, store.spine_unit("layer.1").plan)
    assert [bad.name for bad in verify_store(home).bad] == ["spine unit layer.2"]


def test_an_unfinished_install_serves_what_it_has(home: Path, tiny_once: Path) -> None:
    log = PresenceLog(home / MANIFEST_NAME)
    m = Manifest.load(home)
    log.forget([(4, int(m.first[5] - m.first[4]) - 1), (m.units["head"].first_blob, 0)])
    log.close()
    with Store.open(home) as store:
        read(store.reader, store.expert_plan(1, 3))
        with pytest.raises(SliceMissingError, match="expert 4 of layer 1") as caught:
            store.expert_plan(1, 4)
        assert "store create" in caught.value.remedy
        with pytest.raises(SliceMissingError, match="spine unit head"):
            store.spine_unit("head")
        store.spine_unit("embed")
    assert verify_store(home).absent == 2
    assert not inspect_store(home).complete
    assert repair_store(home, tiny_once).absent == 2
    assert inspect_store(home).complete


def test_damage_in_place(in_place: tuple[Path, Path]) -> None:
    home, model = in_place
    shard = sorted(model.glob("*.safetensors"))[1]
    flip(shard, int(Manifest.load(home).offset[0]))
    with Store.open(home) as store, pytest.raises(SliceCorruptError, match=shard.name):
        read(store.reader, store.expert_plan(1, 0))
    assert len(verify_store(home).bad) == 1
    with pytest.raises(StoreError, match="is damaged") as caught:
        repair_store(home, model)
    assert "fetch this file again" in caught.value.remedy
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(ReadError, match="is truncated"):
        Store.open(home)
    for path in model.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(DriveSwappedError, match="released shards"):
        Store.open(home)


def test_in_place_relocation(in_place: tuple[Path, Path]) -> None:
    home, model = in_place
    released = released_bytes(model)
    moved = model.rename(model.parent / "elsewhere")
    with pytest.raises(DriveMissingError):
        Store.open(home)
    relocate_store(home, [moved])
    with Store.open(home) as store:
        assert all_bytes(store) == released


def test_repair_needs_the_same_model(home: Path, tmp_path: Path) -> None:
    from deltafin.bench.synthetic import TINY, write_synthetic_checkpoint

    overrides = TINY | {"moe_intermediate_size": 96, "routed_expert_hidden_size": 128}
    write_synthetic_checkpoint(tmp_path / "twin", layers=3, experts=6, vocab_size=512, text_overrides=overrides, seed=1)
    with pytest.raises(StoreError, match="another model"):
        repair_store(home, tmp_path / "twin")


def test_reports_can_be_printed_as_json(home: Path) -> None:
    from dataclasses import asdict

    report = json.loads(json.dumps(asdict(inspect_store(home)), default=str))
    assert report["layout"] == "striped"
    assert sum(d["bytes"] for d in report["drives"]) == report["expert_bytes"] + report["spine_bytes"]
    assert inspect_store(home).complete


def test_file_order_follows_the_files(in_place: tuple[Path, Path]) -> None:
    with Store.open(in_place[0]) as store:
        ordered = store.file_order(1, range(6))
        offsets = [store.expert_plan(1, expert).extents[0].offset for expert in ordered]
        assert offsets == sorted(offsets)
        assert store.file_order(2, [5, 0, 3]) == [0, 3, 5]


def test_unknown_blobs_are_programming_errors(in_place: tuple[Path, Path]) -> None:
    with Store.open(in_place[0]) as store:
        for layer, expert in ((0, 0), (3, 0), (1, 6), (1, -1)):
            with pytest.raises(IndexError):
                store.expert_plan(layer, expert)
        with pytest.raises(KeyError):
            store.spine_unit("layer.9")


def test_lost_metadata(home: Path) -> None:
    (home / "generation_config.json").unlink()
    with pytest.raises(ManifestError, match=r"generation_config\.json cannot be read"):
        Store.open(home)
