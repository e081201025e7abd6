"""Installing from a hub on this machine against plain downloading and plain writing; cold experts; the doctor's time.

Serves a synthetic checkpoint with experts of true size (17,547,264 bytes) over real HTTP from another process. Arms run
in random order, each after the page cache was told to forget what was written before:

* download: one thread per connection receives the same shards into one buffer and forgets them
* write:    the same number of bytes written to the same folders, 16 MiB at a time, synced at the end
* together: both at once, and the same number of bytes through sha256 in one thread: the least an install must do
* install:  a full striped install, sha256 of every shard and checksum of every slice included

The goal's ceiling is the slower of download and write. Hub, client and drives share this machine's processors, and
sha256 alone takes half a second per gigabyte of one: ``together`` is what they can reach at all. A cold expert is
compared with one bare request, and sixteen at once with sixteen bare requests, for the same bytes at 50 ms latency.

    python benchmarks/setup.py --dir /mnt/ssd --experts 96 --drives 2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from urllib.parse import urlsplit

from deltafin.bench.synthetic import SMALL_SPINE, released_config, write_synthetic_checkpoint
from deltafin.checkpoint.config import K3Config
from deltafin.doctor import examine
from deltafin.hub import install
from deltafin.hub.client import Hub, RemoteFile
from deltafin.hub.line import Line
from deltafin.hub.pins import Pin
from deltafin.hub.released import Released
from deltafin.hub.supplier import supplier_for
from deltafin.store import DriveInfo, DriveSpec, Store, aligned_memory
from deltafin.store.drives import slice_folder, write_marker
from deltafin.store.manifest import Manifest, write_manifest
from deltafin.store.slicing import plan_striped

REPO = "bench/k3"
PIECE = 16 << 20
CONNECTIONS = 8


class Server:
    """The hub in a process of its own."""

    def __init__(self, folder: Path, latency: float = 0.0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deltafin.bench.hub", f"{REPO}={folder}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HUB_LATENCY": str(latency)},
        )
        assert self._process.stdout is not None
        self.endpoint, _, self.revision = self._process.stdout.readline().split()
        self.pin = Pin(REPO, self.revision)

    def hub(self, connections: int = 32) -> Hub:
        return Hub(self.endpoint, hosts=["localhost"], connections=connections)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def forget(folder: Path) -> None:
    """Tells the page cache to drop what was written below ``folder``."""
    for path in folder.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def receive(line: Line, url: str, begin: int, view: memoryview) -> None:
    """One ranged request, nothing checked."""
    with line.get(urlsplit(url), {"Range": f"bytes={begin}-{begin + len(view) - 1}"}) as response:
        done = 0
        while done < len(view):
            done += response.readinto(view[done:])


def download(server: Server, shards: list[tuple[str, int]]) -> float:
    """Seconds to fetch all shards and throw them away."""
    ranges: SimpleQueue[tuple[str, int, int]] = SimpleQueue()
    for name, size in shards:
        for begin in range(0, size, PIECE):
            ranges.put((name, begin, min(begin + PIECE, size)))

    def work() -> None:
        buffer = memoryview(bytearray(PIECE))
        while True:
            try:
                name, begin, end = ranges.get_nowait()
            except Empty:
                return
            receive(line, f"{server.endpoint}/cdn/{REPO}/{name}?epoch=0", begin, buffer[: end - begin])

    line = Line(60.0)
    seconds = at_once([work] * CONNECTIONS)
    line.close()
    return seconds


def at_once(steps: Sequence[Callable[[], object]]) -> float:
    """Seconds until all of ``steps``, each in a thread of its own, are done."""
    threads = [threading.Thread(target=step) for step in steps]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def digest(nbytes: int) -> None:
    """sha256 of ``nbytes`` in memory."""
    running, data = hashlib.sha256(), memoryview(bytearray(os.urandom(PIECE)))
    for left in range(nbytes, 0, -PIECE):
        running.update(data[: min(left, PIECE)])


def write(folders: list[Path], nbytes: int) -> float:
    """Seconds to write ``nbytes`` over all folders and sync, past the page cache where the system allows it."""
    data = aligned_memory(PIECE)
    data[:] = os.urandom(PIECE)

    def work(folder: Path) -> None:
        left = -(-nbytes // len(folders) // PIECE) * PIECE
        direct = getattr(os, "O_DIRECT", 0)
        with open(
            folder / "plain", "wb", buffering=0, opener=lambda path, flags: os.open(path, flags | direct)
        ) as file:
            while left > 0:
                left -= file.write(data[: min(PIECE, left)])
            os.fsync(file.fileno())

    return at_once([partial(work, folder) for folder in folders])


def together(server: Server, shards: list[tuple[str, int]], folders: list[Path]) -> float:
    """Seconds to download, write and hash the same bytes side by side."""
    total = sum(size for _, size in shards)
    return at_once([partial(download, server, shards), partial(write, folders, total), partial(digest, total)])


def installs(server: Server, base: Path, folders: list[Path]) -> float:
    """Seconds of a full striped install."""
    hub = server.hub()
    start = time.perf_counter()
    install.install_striped(hub, server.pin, [DriveSpec(f, 1.0) for f in folders], base / "home", experts=True)
    seconds = time.perf_counter() - start
    hub.close()
    return seconds


def cold_experts(checkpoint: Path, base: Path, latency: float, count: int = 16) -> dict[str, object]:
    """Milliseconds: a bare request and a cold expert, one and ``count`` at a time; the first round, which connects, is
    left out of the medians."""
    server = Server(checkpoint, latency)
    folders = [base / "cold-a", base / "cold-b"]
    for folder in folders:
        folder.mkdir()
    hub = server.hub()
    install.install_striped(hub, server.pin, [DriveSpec(f, 1.0) for f in folders], base / "cold-home", experts=False)
    name, size = max(((p.name, p.stat().st_size) for p in checkpoint.glob("*.safetensors")), key=lambda item: item[1])
    took: dict[str, list[float]] = {f"{n}_{what}_ms": [] for n in (1, count) for what in ("bare", "expert")}
    with Store.open(base / "cold-home", supplier=supplier_for(lambda: hub)) as store:
        layer, experts = store.config.moe_layers[0], list(range(store.config.experts))
        buffers = [aligned_memory(store.expert_buffer_bytes) for _ in range(count)]
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))
        nbytes = store.expert_layout.nbytes
        line, url = Line(60.0), f"{server.endpoint}/cdn/{REPO}/{name}?epoch=0"

        def bare(number: int) -> None:
            at_once([partial(receive, line, url, size - nbytes, buffer[:nbytes]) for buffer in buffers[:number]])

        def expert(number: int) -> None:
            done: SimpleQueue[BaseException | None] = SimpleQueue()
            for buffer in buffers[:number]:
                store.reader.submit(store.expert_plan(layer, experts.pop()), buffer, done.put)
            for _ in range(number):
                assert done.get() is None

        for _ in range(min(6, len(experts) // (count + 1))):
            for number, what, step in (
                (1, "bare", bare),
                (1, "expert", expert),
                (count, "bare", bare),
                (count, "expert", expert),
            ):
                start = time.perf_counter()
                step(number)
                took[f"{number}_{what}_ms"].append(1000 * (time.perf_counter() - start))
                time.sleep(0.5)  # what was fetched is written meanwhile
    hub.close()
    server.close()
    medians = {key: round(statistics.median(values[1:]), 1) for key, values in took.items()}
    spread = [round(value) for value in took[f"{count}_expert_ms"]]
    return {"latency_ms": 1000 * latency, **medians, f"{count}_expert_all_ms": spread}


def doctor_seconds(base: Path, drives: int = 3) -> dict[str, float]:
    """Time of a doctor's visit to a manifest of the full model's size; its slice files are sparse."""
    home = base / "full"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(released_config()))
    config = K3Config.load(home)
    folder = slice_folder("0badcafe")
    plan = plan_striped(config, [1.0] * drives, folder)
    infos = [DriveInfo(i, f"drive-{i}", base / f"full-{i}", 1.0, 0.0) for i in range(drives)]
    for info in infos:
        (info.path / folder).mkdir(parents=True)
        write_marker(info.path / folder, "store", info)
    for drive, name, nbytes in plan.files:
        with open(infos[drive].path / name, "wb") as file:
            file.truncate(nbytes)
    write_manifest(home, plan, infos, identity="0" * 64, store_uuid="store", layout="striped", metadata={})
    db = sqlite3.connect(home / "manifest.sqlite")
    db.execute("UPDATE slices SET present = 1")
    db.commit()
    db.close()
    shards = {
        f"model-{i:05}.safetensors": RemoteFile(f"model-{i:05}.safetensors", 1 << 34, "0" * 64, "") for i in range(96)
    }
    (home / "released").mkdir()
    Released(home / "released", Pin(REPO, "0" * 40), shards, set(shards), set(shards)).save()
    start = time.perf_counter()
    findings = list(examine(home, base))
    seconds = time.perf_counter() - start
    experts = Manifest.load(home).expert_blobs
    return {"experts": experts, "drives": drives, "findings": len(findings), "seconds": seconds}


def main() -> None:
    """Runs all parts and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", type=Path, default=None, help="where to write; several gigabytes are needed")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--drives", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="deltafin-setup-", dir=arguments.dir))
    machine = f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()}"
    result: dict[str, object] = {"machine": machine, "load": os.getloadavg()[0]}
    try:
        checkpoint = base / "model"
        write_synthetic_checkpoint(
            checkpoint, layers=2, experts=arguments.experts, vocab_size=512, text_overrides=SMALL_SPINE
        )
        for name in ("tokenizer_config.json", "tiktoken.model"):  # a repository without them is refused
            (checkpoint / name).write_text("{}")
        shards = [(path.name, path.stat().st_size) for path in sorted(checkpoint.glob("*.safetensors"))]
        total = sum(size for _, size in shards)
        server = Server(checkpoint)
        rates: dict[str, list[float]] = {name: [] for name in ("download", "write", "together", "install")}
        for number in range(arguments.rounds):
            work = base / f"round-{number}"
            folders = [work / f"drive-{i}" for i in range(arguments.drives)]
            arms: dict[str, Callable[[], float]] = {
                "download": lambda: download(server, shards),
                "write": partial(write, folders, total),
                "together": partial(together, server, shards, folders),
                "install": partial(installs, server, work, folders),
            }
            for name in random.sample(list(arms), len(arms)):
                for folder in folders:
                    folder.mkdir(parents=True, exist_ok=True)
                rates[name].append(total / arms[name]() / 1e6)
                forget(work)
            shutil.rmtree(work)
        server.close()
        medians = {name: statistics.median(values) for name, values in rates.items()}
        ceiling = min(medians["download"], medians["write"])
        result["bytes"] = total
        result["mb_per_s"] = {name: [round(v) for v in values] for name, values in rates.items()}
        result["install_to_ceiling"] = round(medians["install"] / ceiling, 3)
        result["install_to_together"] = round(medians["install"] / medians["together"], 3)
        result["cold"] = cold_experts(checkpoint, base, latency=0.05)
        result["doctor"] = doctor_seconds(base)
        print(json.dumps(result, indent=2))
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
