"""``create`` killed with signal 9 at random points: nothing finished is redone, nothing unfinished counts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash

import deltafin
from deltafin.errors import ExitCode
from deltafin.store import DriveSpec, Store, create_store
from deltafin.store.manifest import MANIFEST_NAME, Manifest
from store.installs_help import all_bytes, make_drives, released_bytes

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")

# Runs create in small, slow batches and logs every write (path, offset, length) before it happens.
DRIVER = """
import os, sys, time
from pathlib import Path
import deltafin.store.ingest as ingest
from deltafin.store import DriveSpec, create_store
log = open(sys.argv[1], "a", buffering=1)
real = os.pwritev
def pwritev(fd, views, offset):
    log.write(f"{os.readlink(f'/proc/self/fd/{fd}')}\\t{offset}\\t{sum(len(v) for v in views)}\\n")
    time.sleep(0.0005)
    return real(fd, views, offset)
os.pwritev = pwritev
ingest.BATCH_BYTES = 400_000
print("ready", flush=True)
drives = [DriveSpec(Path(p), float(i + 1)) for i, p in enumerate(sys.argv[4:])]
create_store(Path(sys.argv[2]), drives, layout="striped", home=Path(sys.argv[3]))
print("done", flush=True)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(deltafin.__file__).parents[1])}


def start(log: Path, checkpoint: Path, home: Path, drives: list[DriveSpec]) -> subprocess.Popen[str]:
    paths = [str(spec.path) for spec in drives]
    command = [sys.executable, "-c", DRIVER, str(log), str(checkpoint), str(home), *paths]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def finished_slices(home: Path) -> dict[tuple[str, int, int], int]:
    """(path, offset, length) → checksum of everything marked present, after checking the bytes on the drives."""
    if not (home / MANIFEST_NAME).exists():
        return {}
    m = Manifest.load(home)
    finished = {}
    for index in range(len(m.present)):
        if m.present[index]:
            path, offset, length = m.file_path(int(m.file[index])), int(m.offset[index]), int(m.length[index])
            with open(path, "rb") as file:
                file.seek(offset)
                assert xxhash.xxh3_64_intdigest(file.read(length)) == int(m.checksum[index])
            finished[str(path), offset, length] = int(m.checksum[index])
    return finished


def run_with_kills(checkpoint: Path, base: Path, kills: int, seed: int) -> int:
    """Returns how many of the kills left a part of the slices present."""
    drives, home = make_drives(base, (None, None, None)), base / "home"
    chooser = random.Random(seed)
    finished: dict[tuple[str, int, int], int] = {}
    partly = 0
    for attempt in range(kills):
        log = base / f"log{attempt}"
        process = start(log, checkpoint, home, drives)
        if attempt:  # the first is killed while it prepares, the others after some writes
            writes = chooser.randrange(150, 500)
            while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < writes):
                time.sleep(0.002)
        time.sleep(chooser.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        check_no_rewrite(log, finished)
        now = finished_slices(home)
        assert finished.items() <= now.items()  # nothing that was finished is lost
        finished = now
        partly += bool(finished)
        if process.returncode == 0:
            break
    last = start(log := base / "log-last", checkpoint, home, drives)
    assert "done" in last.communicate(timeout=120)[0]
    check_no_rewrite(log, finished)
    with Store.open(home) as store:
        assert all_bytes(store) == released_bytes(checkpoint)
    specs = [DriveSpec(spec.path, float(i + 1)) for i, spec in enumerate(drives)]
    assert create_store(checkpoint, specs, layout="striped", home=home) == home
    return partly


def check_no_rewrite(log: Path, finished: dict[tuple[str, int, int], int]) -> None:
    starts = {(path, offset) for path, offset, _ in finished}
    for line in log.read_text().splitlines() if log.exists() else []:
        path, offset, *_ = line.split("\t")
        assert (path, int(offset)) not in starts, "a finished slice was written again"


def test_kills_lose_only_work_in_flight(mini_target: Path, tmp_path: Path) -> None:
    assert run_with_kills(mini_target, tmp_path, kills=5, seed=1) > 0


@pytest.mark.slow
def test_fifty_kills(mini_target: Path, tmp_path: Path) -> None:
    total = 0
    for seed in range(10):
        base = tmp_path / str(seed)
        base.mkdir()
        total += run_with_kills(mini_target, base, kills=5, seed=100 + seed)
    assert total > 10


def test_ctrl_c_leaves_a_state_to_continue_and_says_so(mini_target: Path, tmp_path: Path) -> None:
    drives, home = make_drives(tmp_path, (1.0, 1.0)), tmp_path / "home"
    script = (
        "import os, time\n"
        "import deltafin.store.ingest as ingest\n"
        "real, count = os.pwritev, 0\n"
        "def pwritev(fd, views, offset):\n"
        "    global count\n"
        "    count += 1\n"
        "    os.write(1, b'writing\\n'); time.sleep(0.002 if count < 100 else 0.01); return real(fd, views, offset)\n"
        "os.pwritev = pwritev\n"
        "from deltafin.cli.main import main\n"
        "main()\n"
    )
    options = ["store", "create", "--model", str(mini_target), "--home", str(home)]
    for spec in drives:
        options += ["--drive", f"{spec.path}:1"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    for _ in range(100):
        assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    m = Manifest.load(home)
    assert 0 < m.present.sum() < len(m.present)
    finished_slices(home)
    create_store(mini_target, drives, layout="striped", home=home)
    with Store.open(home) as store:
        assert all_bytes(store) == released_bytes(mini_target)
