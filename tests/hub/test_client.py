"""A hub that is slow, wrong or hostile: ranges arrive whole and right, or not at all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from deltafin import offline
from deltafin.bench.hub import Fault, LocalHub
from deltafin.errors import DeltafinError, HubChecksumError, HubError, Interrupted, OfflineError, TensorFileError
from deltafin.hub import install
from deltafin.hub.client import Hub, RemoteFile
from deltafin.hub.download import SEGMENT, fetch_file, fetch_small
from deltafin.hub.pins import Pin
from deltafin.hub.released import fetch_released
from store.installs_help import make_drives

SHARD = "model-00001-of-000004.safetensors"


def get(client: Hub, pin: Pin, served: LocalHub, offset: int = 1000, nbytes: int = 300_000) -> None:
    """Reads a range and compares it."""
    file = client.files(pin)[SHARD]
    view = memoryview(bytearray(nbytes))
    client.read(pin, file, offset, view)
    data = served.files[pin.repo][SHARD].path.read_bytes()
    assert bytes(view) == data[offset : offset + nbytes]


@pytest.mark.parametrize(
    ("where", "what", "value"),
    [
        ("cdn", "reset", 0),
        ("cdn", "cut", 1),
        ("cdn", "short-length", 0),
        ("cdn", "long-length", 0),
        ("cdn", "wrong-range", 0),
        ("cdn", "no-ranges", 0),
        ("cdn", "new-etag", 0),
        ("cdn", "html", 0),
        ("cdn", "huge-header", 0),
        ("cdn", "busy", 0),
        ("cdn", "later", 0),
        ("cdn", "status", 500),
        ("cdn", "status", 403),
        ("resolve", "status", 502),
        ("resolve", "busy", 0),
        ("resolve", "relative", 0),
        ("api", "busy", 0),
        ("api", "status", 503),
        ("api", "reset", 0),
    ],
)
def test_what_heals(client: Hub, pin: Pin, served: LocalHub, where: str, what: str, value: int) -> None:
    get(client, pin, served)
    served.faults.append(Fault(where, what, times=1 if value == 403 else 2, value=value))
    if where == "resolve":
        client._resolved.clear()
    get(client, pin, served, offset=77)
    assert served.faults[0].times < 2, "the fault was met"


@pytest.mark.parametrize(
    ("where", "what", "said"),
    [
        ("resolve", "loop", "in circles"),
        ("resolve", "foreign", "no host of this hub"),
        ("resolve", "other-etag", "announced with the checksum"),
        ("cdn", "foreign", "no host of this hub"),
        ("cdn", "reset", "cannot be fetched"),
        ("cdn", "cut", ""),
        ("cdn", "html", "a web page"),
        ("api", "other-commit", "answers with revision"),
        ("api", "wrong-size", "no usable size"),
        ("api", "endless", "has no end"),
    ],
)
def test_what_does_not(client: Hub, pin: Pin, served: LocalHub, where: str, what: str, said: str) -> None:
    served.faults.append(Fault(where, what, times=-1, value=0))
    if what == "cut":  # every answer ends early, but brings something: it arrives in the end
        get(client, pin, served)
        return
    with pytest.raises(HubError, match=said):
        get(client, pin, served)
    assert len(served.log) < 100, "it is given up"


def test_reading_goes_on_where_it_was_cut(client: Hub, pin: Pin, served: LocalHub) -> None:
    get(client, pin, served)
    served.faults.append(Fault("cdn", "cut", times=2, value=100_000))
    asked = len(served.requests("cdn"))
    get(client, pin, served, offset=0)
    begins = [int(r.range.removeprefix("bytes=").partition("-")[0]) for r in served.requests("cdn")[asked:]]
    assert begins[0] == 0
    assert begins == sorted(begins)
    assert begins[-1] >= 100_000


def test_an_outage_is_told_once(pin: Pin, served: LocalHub) -> None:
    said: list[str] = []
    client = Hub(served.endpoint, hosts=["localhost"], backoff=(0.01, 0.05), notify=said.append)
    get(client, pin, served)
    served.faults.append(Fault("cdn", "reset", times=5))
    get(client, pin, served)
    assert len(said) == 1
    assert SHARD in said[0]
    assert "trying again" in said[0]
    client.close()


def test_addresses_expire(client: Hub, pin: Pin, served: LocalHub) -> None:
    get(client, pin, served)
    served.expire()
    get(client, pin, served, offset=5)


def test_a_stalled_connection_is_given_up(client: Hub, pin: Pin, served: LocalHub) -> None:
    served.faults.append(Fault("cdn", "stall"))
    get(client, pin, served)


def test_the_token_stays_with_the_hub(client: Hub, pin: Pin, served: LocalHub) -> None:
    served.faults.append(Fault("resolve", "relative"))
    get(client, pin, served)
    assert {r.token for r in served.requests("resolve")} == {"Bearer hf_test_token"}
    assert len(served.requests("resolve")) == 2, "one of them after a redirect within the hub"
    assert {r.token for r in served.requests("cdn")} == {""}


def test_names_that_leave_the_folder_are_not_taken(client: Hub, pin: Pin, served: LocalHub) -> None:
    served.faults.append(Fault("api", "traversal"))
    assert client.files(pin).keys() == served.files["mini/k3"].keys()


def test_a_rate_limit_is_waited_for(client: Hub, pin: Pin, served: LocalHub) -> None:
    get(client, pin, served)
    served.faults.append(Fault("cdn", "busy", value=1))
    started = time.monotonic()
    get(client, pin, served)
    assert time.monotonic() - started > 0.9


def test_a_file_that_shrank(client: Hub, pin: Pin, served: LocalHub) -> None:
    file = client.files(pin)[SHARD]
    longer = RemoteFile(file.name, file.size + 100_000, "", "0" * 40)
    with pytest.raises(HubError):
        client.read(pin, longer, file.size + 10, memoryview(bytearray(1000)))


def test_stop(client: Hub, pin: Pin) -> None:
    client.stop()
    with pytest.raises(Interrupted):
        client.files(pin)


def test_no_hub_when_the_network_is_off(served: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(offline._state, "forbidden", True)
    with pytest.raises(OfflineError):
        Hub(served.endpoint)


def test_pinned_checksums_outrank_the_hub(client: Hub, served: LocalHub, tmp_path: Path) -> None:
    mirror = Pin("mini/k3", served.revision, {SHARD: "1" * 64, "config.json": "2" * 64})
    files = client.files(mirror)
    with pytest.raises(HubChecksumError, match="known is 111"):
        fetch_file(client, mirror, files[SHARD], tmp_path / SHARD)
    with pytest.raises(HubChecksumError, match=r"config\.json"):
        fetch_small(client, mirror, files["config.json"], 1 << 20)
    with pytest.raises(HubChecksumError):
        fetch_released(client, mirror, tmp_path)
    with pytest.raises(HubError, match="more than 10"):
        fetch_small(client, Pin("mini/k3", served.revision), files["config.json"], 10)


def test_a_corrupt_small_file(client: Hub, pin: Pin, served: LocalHub, tmp_path: Path) -> None:
    served.faults.append(Fault("resolve", "corrupt", name="config.json"))
    with pytest.raises(HubChecksumError, match=r"config\.json"):
        fetch_released(client, pin, tmp_path)


def test_a_download_resumes_and_is_verified(
    client: Hub, pin: Pin, served: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltafin.hub.download.SEGMENT", 1 << 20)
    assert SEGMENT > 1 << 20
    file = client.files(pin)[SHARD]
    target = tmp_path / SHARD
    served.faults.append(Fault("cdn", "reset", times=-1, after=5))
    with pytest.raises(HubError):
        fetch_file(client, pin, file, target)
    assert not target.exists()
    served.faults.clear()
    asked = len(served.requests("cdn"))
    fetch_file(client, pin, file, target)
    assert len(served.requests("cdn")) - asked < 10, "finished segments are not fetched again"
    assert target.read_bytes() == served.files["mini/k3"][SHARD].path.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == [SHARD]
    served.faults.append(Fault("cdn", "corrupt", after=2))
    with pytest.raises(HubChecksumError, match="was deleted"):
        fetch_file(client, pin, file, tmp_path / "again")
    assert not (tmp_path / "again.part").exists()


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\n", b"<html>hello</html>", b"\xff" * 64]
)
def test_no_shard_where_one_should_be(
    content: bytes, mini_target: Path, tmp_path: Path, client: Hub, served: LocalHub
) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    for path in mini_target.iterdir():
        (folder / path.name).write_bytes(content if path.name == SHARD else path.read_bytes())
    with LocalHub({"bad/k3": folder}) as bad:
        hub = Hub(bad.endpoint, hosts=["localhost"], backoff=(0.01, 0.05))
        pin, drives = Pin("bad/k3", bad.revision), make_drives(tmp_path, (1.0,))
        with pytest.raises((TensorFileError, HubError)) as failure:
            install.install_striped(hub, pin, drives, tmp_path / "home", experts=True)
        hub.close()
    assert SHARD in str(failure.value)
    assert isinstance(failure.value, DeltafinError)
