"""Installing from a hub on this machine against plain downloading and plain writing; cold experts; the doctor's time.

Serves a synthetic checkpoint with experts of true size (17,547,264 bytes) over real HTTP from another process. Arms run
in random order, each after the page cache was told to forget what was written before:

* download: one thread per connection receives the same shards into one buffer and forgets them
* write:    the same number of bytes written to the same folders, 16 MiB at a time, synced at the end
* install:  a full striped install, sha256 of every shard and checksum of every slice included

The ceiling of an install is the slower of the two; both use the same processors here as the server, so a ratio near one
means that nothing is left to gain. A cold expert is compared with one bare request for the same bytes at 50 ms latency.

    python benchmarks/setup.py --dir /mnt/ssd --experts 96 --drives 2
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from urllib.parse import urlsplit

from deltafin.bench.synthetic import SMALL_SPINE, released_config, write_synthetic_checkpoint
from deltafin.checkpoint.config import K3Config
from deltafin.doctor import examine
from deltafin.hub import install
from deltafin.hub.client import Hub
from deltafin.hub.line import Line
from deltafin.hub.pins import Pin
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
    threads = [threading.Thread(target=work) for _ in range(CONNECTIONS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def write(folders: list[Path], nbytes: int) -> float:
    """Seconds to write ``nbytes`` over all folders and sync."""
    data = memoryview(bytearray(os.urandom(PIECE)))

    def work(folder: Path) -> None:
        left = nbytes // len(folders)
        with open(folder / "plain", "wb", buffering=0) as file:
            while left > 0:
                left -= file.write(data[: min(PIECE, left)])
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.fsync(file.fileno())

    threads = [threading.Thread(target=work, args=(folder,)) for folder in folders]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def installs(server: Server, base: Path, folders: list[Path]) -> float:
    """Seconds of a full striped install."""
    hub = server.hub()
    start = time.perf_counter()
    install.install_striped(hub, server.pin, [DriveSpec(f, 1.0) for f in folders], base / "home", experts=True)
    seconds = time.perf_counter() - start
    hub.close()
    return seconds


def cold_experts(checkpoint: Path, base: Path, latency: float, count: int = 16) -> dict[str, float]:
    """Milliseconds: one bare request, one cold expert, ``count`` cold experts at once."""
    server = Server(checkpoint, latency)
    folders = [base / "cold-a", base / "cold-b"]
    for folder in folders:
        folder.mkdir()
    hub = server.hub()
    install.install_striped(hub, server.pin, [DriveSpec(f, 1.0) for f in folders], base / "cold-home", experts=False)
    name, size = max(((p.name, p.stat().st_size) for p in checkpoint.glob("*.safetensors")), key=lambda item: item[1])
    bare, single, many = [], [], []
    with Store.open(base / "cold-home", supplier=supplier_for(lambda: hub)) as store:
        layer, experts = store.config.moe_layers[0], list(range(store.config.experts))
        buffers = [aligned_memory(store.expert_buffer_bytes) for _ in range(count)]
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))

        def fetch(chosen: list[int]) -> float:
            done: SimpleQueue[BaseException | None] = SimpleQueue()
            start = time.perf_counter()
            for expert, buffer in zip(chosen, buffers, strict=False):
                store.reader.submit(store.expert_plan(layer, expert), buffer, done.put)
            for _ in chosen:
                assert done.get() is None
            return 1000 * (time.perf_counter() - start)

        fetch([experts.pop()])  # connects and reads the shard's header
        nbytes = store.expert_layout.nbytes
        line, url = Line(60.0), f"{server.endpoint}/cdn/{REPO}/{name}?epoch=0"
        for _ in range(4):
            start = time.perf_counter()
            receive(line, url, size - nbytes, buffers[0][:nbytes])
            bare.append(1000 * (time.perf_counter() - start))
            single.append(fetch([experts.pop()]))
        many.append(fetch([experts.pop() for _ in range(count)]))
    hub.close()
    server.close()
    return {
        "latency_ms": 1000 * latency,
        "one_request_ms": statistics.median(bare[1:]),
        "one_expert_ms": statistics.median(single[1:]),
        "sixteen_experts_ms": many[0],
    }


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
        rates: dict[str, list[float]] = {"download": [], "write": [], "install": []}
        for number in range(arguments.rounds):
            work = base / f"round-{number}"
            folders = [work / f"drive-{i}" for i in range(arguments.drives)]
            arms: dict[str, Callable[[], float]] = {
                "download": lambda: download(server, shards),
                "write": lambda folders=folders: write(folders, total),  # type: ignore[misc]
                "install": lambda work=work, folders=folders: installs(server, work, folders),  # type: ignore[misc]
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
        result["cold"] = cold_experts(checkpoint, base, latency=0.05)
        result["doctor"] = doctor_seconds(base)
        print(json.dumps(result, indent=2))
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
