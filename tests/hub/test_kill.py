"""kill -9 at random moments of a setup: nothing finished is lost or fetched again, nothing unfinished counts."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash

from deltafin.bench.hub import LocalHub
from deltafin.store import Store
from deltafin.store.manifest import MANIFEST_NAME, Manifest
from store.installs_help import all_bytes, make_drives, released_bytes

_SETUP = """
import sys
from pathlib import Path
from deltafin.hub import install
from deltafin.hub.client import Hub
from deltafin.hub.pins import Pin
from deltafin.store.types import DriveSpec
from deltafin.store import ingest
ingest.BATCH_SECONDS = 0.02
endpoint, revision, home, *drives = sys.argv[1:]
print("ready", flush=True)
hub = Hub(endpoint, hosts=["localhost"])
specs = [DriveSpec(Path(d), 1.0) for d in drives]
install.install_striped(hub, Pin("mini/k3", revision), specs, Path(home), experts=True)
print("done", flush=True)
"""


def start(hub: LocalHub, home: Path, drives: list[Path]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _SETUP, hub.endpoint, hub.revision, str(home), *map(str, drives)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def durable(home: Path) -> set[int]:
    """Slices that the manifest calls written or present; each is checked against its checksum."""
    if not (home / MANIFEST_NAME).exists():
        return set()
    m = Manifest.load(home)
    found = set()
    for index in range(len(m.present)):
        if m.present[index] or m.written[index]:
            with open(m.file_path(int(m.file[index])), "rb") as file:
                file.seek(int(m.offset[index]))
                assert xxhash.xxh3_64_intdigest(file.read(int(m.length[index]))) == int(m.checksum[index])
            found.add(index)
    return found


def with_kills(hub: LocalHub, base: Path, checkpoint: Path, kills: int, seed: int) -> None:
    drives = [spec.path for spec in make_drives(base, (1.0, 1.0))]
    home = base / "home"
    chooser = random.Random(seed)
    finished: set[int] = set()
    partly = 0
    for _ in range(kills):
        process = start(hub, home, drives)
        # Moments are counted in requests, not in seconds: a busy machine must not turn them all into "too early".
        moment = len(hub.log) + chooser.randrange(400)
        while len(hub.log) < moment and process.poll() is None:
            time.sleep(0.001)
        time.sleep(chooser.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        now = durable(home)
        assert finished <= now, "nothing that was finished is lost"
        partly += len(now) > 0
        finished = now
    asked = len(hub.requests("cdn"))
    out, err = start(hub, home, drives).communicate(timeout=120)
    assert "done" in out, err
    m = Manifest.load(home)
    assert m.present.all()
    left = {int(b) for i, b in enumerate(m.blobs) if i not in finished}
    # Every blob that was finished stays out of the line; only gathering may read past the gap to a neighbour.
    assert len(hub.requests("cdn")) - asked <= 2 * len(left) + 8
    assert partly
    with Store.open(home) as store:
        assert all_bytes(store) == released_bytes(checkpoint)


def test_kills(served: LocalHub, tmp_path: Path, mini_target: Path) -> None:
    with_kills(served, tmp_path, mini_target, kills=4, seed=3)


@pytest.mark.slow
def test_fifty_kills(served: LocalHub, tmp_path: Path, mini_target: Path) -> None:
    served.latency = 0.01
    with_kills(served, tmp_path, mini_target, kills=50, seed=4)
