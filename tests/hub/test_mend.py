"""Mending from the hub: exactly the bad slices, in slices and in released files; and proof that comes later."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from deltafin.bench.hub import Fault, LocalHub
from deltafin.doctor import examine
from deltafin.errors import DriveError, HubChecksumError, StoreError
from deltafin.hub import install
from deltafin.hub.client import Hub
from deltafin.hub.mend import mend
from deltafin.hub.pins import Pin
from deltafin.hub.released import Released
from deltafin.hub.supplier import supplier_for
from deltafin.store import Store
from deltafin.store.manifest import Manifest
from deltafin.store.verify import verify_store
from store.installs_help import all_bytes, make_drives, released_bytes


def damage(m: Manifest, *indices: int) -> None:
    """Flips a byte in each of these slices."""
    for index in indices:
        with open(m.file_path(int(m.file[index])), "r+b") as file:
            file.seek(int(m.offset[index]) + 7)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 255]))


def sums(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.safetensors")}


def cache_of(hub: LocalHub, folder: Path) -> Path:
    """The served repository as a Hugging Face cache with relative links."""
    cache = folder / "models--small--k3"
    snapshot = cache / "snapshots" / hub.revision
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for file in hub.files["small/k3"].values():
        blob = cache / "blobs" / (file.sha256 if file.lfs else file.git_sha1)
        shutil.copy(file.path, blob)
        (snapshot / file.path.name).symlink_to(Path("../../blobs") / blob.name)
    return cache


@pytest.fixture
def home(small_client: Hub, small_pin: Pin, tmp_path: Path) -> Path:
    """An install in place, its files downloaded to a drive."""
    install.install_in_place(small_client, small_pin, make_drives(tmp_path, (None,)), tmp_path / "home")
    return tmp_path / "home"


def test_exactly_the_bad_bytes_in_place(
    home: Path, small_client: Hub, small: LocalHub, small_model: Path, tmp_path: Path
) -> None:
    m = Manifest.load(home)
    damage(m, 2, 9)
    report = mend(home, small_client)
    assert len(report.bad) == 2
    spans = [r.range.removeprefix("bytes=").split("-") for r in small.requests("cdn")]
    lengths = [int(end) - int(begin) + 1 for begin, end in spans]
    assert lengths.count(int(m.length[2])) == 2
    assert sums(tmp_path / "drive0") == sums(small_model)
    assert not mend(home, small_client).bad


def test_wrong_bytes_are_not_written_in_place(home: Path, small_client: Hub, small: LocalHub, tmp_path: Path) -> None:
    m = Manifest.load(home)
    damage(m, 2)
    before = sums(tmp_path / "drive0")
    small.faults.append(Fault("cdn", "corrupt", times=-1))
    with pytest.raises((HubChecksumError, StoreError)):
        mend(home, small_client)
    assert sums(tmp_path / "drive0") == before


def test_a_folder_that_cannot_be_written(home: Path, small_client: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(Manifest.load(home), 2)
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith(".safetensors") and flags & os.O_WRONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(DriveError, match="Read-only") as caught:
        mend(home, small_client)
    assert "make it writable" in caught.value.remedy


def test_a_cache_is_left_to_its_owner(small: LocalHub, small_pin: Pin, small_client: Hub, tmp_path: Path) -> None:
    cache = cache_of(small, tmp_path)
    install.adopt(tmp_path, tmp_path / "home", None, small_pin)
    m = Manifest.load(tmp_path / "home")
    damage(m, 0)
    path = m.file_path(int(m.file[0]))
    assert path.parent == cache / "blobs"
    before = path.read_bytes()
    with pytest.raises(StoreError, match="Hugging Face cache") as caught:
        mend(tmp_path / "home", small_client)
    assert f"hf download small/k3 --revision {small.revision}" in caught.value.remedy
    assert path.read_bytes() == before


def test_damage_in_place_is_bridged_during_use(
    home: Path, small_client: Hub, small_model: Path, tmp_path: Path
) -> None:
    damage(Manifest.load(home), 2, 9)
    before = sums(tmp_path / "drive0")
    said: list[str] = []
    with Store.open(home, supplier=supplier_for(lambda: small_client), notify=said.append) as store:
        assert all_bytes(store) == released_bytes(small_model)
    assert len(said) == 1
    assert "verify --repair" in said[0]
    assert sums(tmp_path / "drive0") == before, "a run writes to nobody's files"


def fetched(small: LocalHub, home: Path) -> dict[str, bytes]:
    """Every tensor, what is absent or damaged brought from the hub."""
    supplier = supplier_for(lambda: Hub(small.endpoint, hosts=["localhost"], backoff=(0.01, 0.05)))
    with Store.open(home, supplier=supplier) as store:
        return all_bytes(store)


def notes(home: Path, base: Path) -> str:
    return " ".join(f.what for f in examine(home, base) if f.area == "install")


def test_what_came_expert_by_expert_is_proved_once_whole(
    small_client: Hub, small_pin: Pin, small: LocalHub, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    install.install_striped(small_client, small_pin, make_drives(tmp_path, (1.0, 1.0)), home, experts=False)
    fetched(small, home)
    record = Released.load(home)
    assert record is not None
    shards = len(record.shard_names())
    assert len(record.proved) < shards
    assert f"{len(record.proved)} of {shards} released files were compared" in notes(home, tmp_path)
    mend(home, small_client)
    assert f"{shards} of {shards} released files were compared" in notes(home, tmp_path)


def test_an_expert_that_came_wrong_is_found_once_its_shard_is_whole(
    small_client: Hub, small_pin: Pin, small: LocalHub, small_model: Path, tmp_path: Path
) -> None:
    install.install_striped(small_client, small_pin, make_drives(tmp_path, (1.0,)), tmp_path / "home", experts=False)
    small.faults.append(Fault("cdn", "corrupt"))  # the first expert fetched
    assert fetched(small, tmp_path / "home") != released_bytes(small_model)
    assert not verify_store(tmp_path / "home").bad, "nothing here knows better"
    with pytest.raises(HubChecksumError, match="differs from the hub's own checksum"):
        mend(tmp_path / "home", small_client)
    assert not Manifest.load(tmp_path / "home").present.all(), "it was given up"
    install.install_striped(small_client, small_pin, make_drives(tmp_path, (1.0,)), tmp_path / "home", experts=True)
    with Store.open(tmp_path / "home") as store:
        assert all_bytes(store) == released_bytes(small_model)


def test_a_later_adoption_compares_what_an_earlier_could_not(
    small: LocalHub, small_pin: Pin, small_client: Hub, small_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "download"
    shutil.copytree(small_model, folder)
    shard = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    install.adopt(folder, tmp_path / "home", None, small_pin)
    assert "0 of" in notes(tmp_path / "home", tmp_path)
    with pytest.raises(HubChecksumError, match=shard.name):
        install.adopt(folder, tmp_path / "home", small_client, small_pin)
