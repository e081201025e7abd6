"""An upgrade fetches what differs, keeps what does not, and can be cut anywhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deltafin.bench.hub import Fault, LocalHub
from deltafin.errors import HubError, StoreError, UsageError
from deltafin.hub import install
from deltafin.hub.client import Hub
from deltafin.hub.pins import Pin
from deltafin.hub.upgrade import upgrade
from deltafin.store import Store
from deltafin.store.manifest import Manifest
from store.installs_help import all_bytes, make_drives, released_bytes

SHARD = "model-00003-of-000004.safetensors"


@pytest.fixture
def newer(mini_target: Path, tmp_path: Path) -> Path:
    """A later revision: one shard and the generation settings differ."""
    folder = tmp_path / "newer"
    shutil.copytree(mini_target, folder)
    data = bytearray((folder / SHARD).read_bytes())
    data[-5000:] = bytes(b ^ 1 for b in data[-5000:])
    (folder / SHARD).write_bytes(data)
    (folder / "generation_config.json").write_text('{"max_length": 7}')
    return folder


@pytest.fixture
def later(newer: Path) -> Iterator[LocalHub]:
    with LocalHub({"mini/k3": newer}, revision="b" * 40) as hub:
        yield hub


@pytest.mark.parametrize("experts", [True, False])
def test_only_what_differs(
    experts: bool, client: Hub, pin: Pin, later: LocalHub, newer: Path, tmp_path: Path, mini_target: Path
) -> None:
    home = tmp_path / "home"
    install.install_striped(client, pin, make_drives(tmp_path, (1.0, 1.0)), home, experts=experts)
    before = Manifest.load(home)
    with pytest.raises(UsageError, match="deltafin upgrade"):  # only when told to
        install.install_striped(
            client, Pin("mini/k3", "b" * 40), make_drives(tmp_path, (1.0, 1.0)), home, experts=experts
        )
    hub = Hub(later.endpoint, hosts=["localhost"], backoff=(0.01, 0.05))
    later.faults.append(Fault("cdn", "status", times=-1, name=SHARD, value=404, after=4))
    with pytest.raises(HubError):
        upgrade(home, hub, Pin("mini/k3", later.revision))
    later.faults.clear()
    nbytes = upgrade(home, hub, Pin("mini/k3", later.revision))
    hub.close()
    # Some parts of the spine lie in two shards, so a little more than the changed one.
    assert 0 < nbytes < 2 * (newer / SHARD).stat().st_size
    asked = {name: len(later.requests("cdn", name)) for name in later.files["mini/k3"]}
    assert max(asked, key=lambda name: asked[name]) == SHARD
    after = Manifest.load(home)
    assert np.array_equal(after.present, before.present)
    assert (home / "generation_config.json").read_text() == '{"max_length": 7}'
    if experts:
        with Store.open(home) as store:
            assert all_bytes(store) == released_bytes(newer)


def test_what_cannot_be_upgraded(client: Hub, pin: Pin, served: LocalHub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    install.install_striped(client, pin, make_drives(tmp_path, (1.0,)), home, experts=False)
    with Store.open(home), pytest.raises(StoreError, match="in use"):
        upgrade(home, client, pin)
    with pytest.raises(StoreError, match="not mini/other"):
        upgrade(home, client, Pin("mini/other", served.revision))
    assert upgrade(home, client, pin) == 0
