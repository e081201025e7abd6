"""Installs from a hub hold the released bytes, whatever the line does."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafin import offline
from deltafin.bench.hub import Fault, LocalHub
from deltafin.checkpoint.inventory import expert_prefix
from deltafin.errors import HubChecksumError
from deltafin.hub import install
from deltafin.hub.client import Hub
from deltafin.hub.mend import mend
from deltafin.hub.pins import Pin
from deltafin.hub.released import Released
from deltafin.hub.supplier import supplier_for
from deltafin.store import Store
from deltafin.store.manifest import Manifest
from deltafin.store.store import find_home
from store.installs_help import all_bytes, make_drives, read, released_bytes


@pytest.fixture(scope="session")
def released(mini_target: Path) -> dict[str, bytes]:
    return released_bytes(mini_target)


def test_full_install(client: Hub, pin: Pin, tmp_path: Path, released: dict[str, bytes], served: LocalHub) -> None:
    drives = make_drives(tmp_path, (1.0, 2.0, 1.0))
    home = tmp_path / "home"
    install.install_striped(client, pin, drives, home, experts=True)
    with Store.open(home) as store:
        assert all_bytes(store) == released
    record = Released.load(home)
    assert record is not None
    assert len(record.proved) == 4
    before = len(served.log)
    install.install_striped(client, pin, drives, home, experts=True)
    assert len(served.log) == before, "a finished install asks for nothing"


def test_stream_install_fetches_on_first_use(
    client: Hub, pin: Pin, served: LocalHub, tmp_path: Path, released: dict[str, bytes]
) -> None:
    home = tmp_path / "home"
    install.install_striped(client, pin, make_drives(tmp_path, (1.0, 1.0)), home, experts=False)
    manifest = Manifest.load(home)
    assert not manifest.present[: manifest.first[manifest.expert_blobs]].any()
    assert manifest.present[manifest.first[manifest.expert_blobs] :].all()
    requests = len(served.requests("cdn"))
    with Store.open(home, supplier=supplier_for(lambda: client)) as store:
        plan = store.expert_plan(store.config.moe_layers[0], 3)
        assert plan.absent
        read(store.reader, plan)
        assert len(served.requests("cdn")) == requests + 1, "a cold expert is one request"
        assert all_bytes(store) == released
    assert Manifest.load(home).present.all()
    with Store.open(home) as store:
        assert all_bytes(store) == released


@pytest.mark.parametrize("what", ["reset", "cut", "short-length", "long-length", "wrong-range", "no-ranges", "html"])
def test_faults_on_the_line(
    what: str, client: Hub, pin: Pin, served: LocalHub, tmp_path: Path, released: dict[str, bytes]
) -> None:
    served.faults += [Fault("cdn", what, times=4, after=3), Fault("cdn", what, times=3, after=30)]
    home = tmp_path / "home"
    install.install_striped(client, pin, make_drives(tmp_path, (1.0, 1.0)), home, experts=True)
    with Store.open(home) as store:
        assert all_bytes(store) == released
    assert not any(fault.times for fault in served.faults), "the faults were met"


def test_one_wrong_byte_never_counts(client: Hub, pin: Pin, served: LocalHub, tmp_path: Path) -> None:
    served.faults.append(Fault("cdn", "corrupt", times=20, name="model-00002-of-000004.safetensors", after=8))
    drives, home = make_drives(tmp_path, (1.0, 1.0)), tmp_path / "home"
    with pytest.raises(HubChecksumError, match="model-00002-of-000004"):
        install.install_striped(client, pin, drives, home, experts=True)
    manifest = Manifest.load(home)
    assert not manifest.present.all()
    index = json.loads((home / "model.safetensors.index.json").read_text())["weight_map"]
    layer, expert = manifest.config.moe_layers[-1], 0
    for layer in manifest.config.moe_layers:
        if index[f"{expert_prefix(layer, expert)}w1.weight_packed"] == "model-00002-of-000004.safetensors":
            break
    blob = (layer - manifest.config.dense_layers) * manifest.config.experts + expert
    rows = slice(manifest.first[blob], manifest.first[blob + 1])
    assert not (manifest.present | manifest.written)[rows].any()
    install.install_striped(client, pin, drives, home, experts=True)
    assert Manifest.load(home).present.all()


def test_fetch_by_layers_and_experts(client: Hub, pin: Pin, tmp_path: Path, released: dict[str, bytes]) -> None:
    home = tmp_path / "home"
    install.install_striped(client, pin, make_drives(tmp_path, (1.0, 1.0)), home, experts=False)
    with install.opened(home, client) as (manifest, checkpoint, record):
        layer = manifest.config.moe_layers[0]
        install.bring(manifest, checkpoint, record, client, install.select(manifest, [layer], [0, 5]))
    manifest = Manifest.load(home)
    blobs = np.flatnonzero(np.logical_and.reduceat(manifest.present, manifest.first[:-1]))
    assert [b for b in blobs.tolist() if b < manifest.expert_blobs] == [0, 5]
    with install.opened(home, client) as (manifest, checkpoint, record):
        install.bring(manifest, checkpoint, record, client, None)
    record = Released.load(home)
    assert record is not None
    assert len(record.proved) == 4, "whole shards are compared once they are whole"
    with Store.open(home) as store:
        assert all_bytes(store) == released


def test_in_place(client: Hub, pin: Pin, tmp_path: Path, released: dict[str, bytes], served: LocalHub) -> None:
    served.faults += [Fault("cdn", "cut", times=2)]
    home = tmp_path / "home"
    install.install_in_place(client, pin, make_drives(tmp_path, (None, None)), home)
    with Store.open(home) as store:
        assert all_bytes(store) == released


def test_mend_fetches_exactly_the_bad_slices(client: Hub, pin: Pin, served: LocalHub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    install.install_striped(client, pin, make_drives(tmp_path, (1.0, 1.0)), home, experts=True)
    m = Manifest.load(home)
    for index in (5, 300):
        with open(m.file_path(int(m.file[index])), "r+b") as file:
            file.seek(int(m.offset[index]) + 7)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 255]))
    asked = len(served.requests("cdn"))
    report = mend(home, client)
    assert len(report.bad) == 2
    spans = [r.range for r in served.requests("cdn")[asked:]]
    lengths = sorted(int(b) - int(a) + 1 for a, b in (s.removeprefix("bytes=").split("-") for s in spans))
    assert lengths == sorted(int(m.length[i]) for i in (5, 300))
    assert not mend(home, client).bad


def test_damage_during_use_is_mended(
    client: Hub, pin: Pin, tmp_path: Path, released: dict[str, bytes], served: LocalHub
) -> None:
    home = tmp_path / "home"
    install.install_striped(client, pin, make_drives(tmp_path, (1.0, 1.0)), home, experts=True)
    m = Manifest.load(home)
    with open(m.file_path(0), "r+b") as file:
        file.write(b"\xff" * 100_000)
    with Store.open(home, supplier=supplier_for(lambda: client)) as store:
        assert all_bytes(store) == released
    with Store.open(home) as store:  # and stays mended
        assert all_bytes(store) == released


def test_draft(client: Hub, served: LocalHub, tmp_path: Path) -> None:
    served.faults.append(Fault("cdn", "cut", times=2))
    install.fetch_draft(client, Pin("mini/dspark", served.revision), tmp_path / "dspark")
    for file in served.files["mini/dspark"].values():
        assert hashlib.sha256((tmp_path / "dspark" / file.path.name).read_bytes()).hexdigest() == file.sha256
    asked = len(served.log)
    install.fetch_draft(client, Pin("mini/dspark", served.revision), tmp_path / "dspark")
    assert len(served.log) == asked


def test_home_lookup(client: Hub, pin: Pin, tmp_path: Path) -> None:
    home = tmp_path / "home"
    install.install_striped(client, pin, make_drives(tmp_path, (1.0,)), home, experts=False)
    assert find_home(home) == home


@pytest.mark.slow
def test_after_all_prompts_the_network_is_not_needed(
    client: Hub,
    pin: Pin,
    served: LocalHub,
    tmp_path: Path,
    prompts: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    from deltafin.generation.engine import Engine, EngineOptions
    from deltafin.generation.events import TokenDecided

    home = tmp_path / "home"
    install.install_striped(client, pin, make_drives(tmp_path, (1.0, 1.0)), home, experts=False)

    def answers(options: EngineOptions) -> list[list[int]]:
        with Engine.open(home, options) as engine:
            return [
                [
                    e.token
                    for e in engine.session().generate(p["ids"], max_new=8, stop=())
                    if isinstance(e, TokenDecided)
                ]
                for p in prompts
            ]

    options = EngineOptions(context=1024, draft="off", supplier=supplier_for(lambda: client))
    first = answers(options)
    asked = len(served.log)
    monkeypatch.setitem(offline._state, "forbidden", True)
    assert answers(EngineOptions(context=1024, draft="off")) == first
    assert len(served.log) == asked
