"""Expert reads through the store against raw direct reads of the same files, and over throttled drives.

Writes a synthetic checkpoint with experts of true size (17,547,264 bytes) into a temporary folder, makes installs in
place and striped, and reads random experts once each per round. The ceiling is measured in the same run, arms in random
order: plain threads calling preadv with O_DIRECT on the same byte ranges at the same depth, in the best of several
request sizes. fio, where installed, is a second opinion. Nothing is left behind.

    python benchmarks/store_reads.py --dir /mnt/ssd --experts 256
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

from deltafin.bench.synthetic import SMALL_SPINE, write_synthetic_checkpoint
from deltafin.store import DriveSpec, ReadPlan, Store, aligned_memory, create_store
from deltafin.store.direct import DirectFile
from deltafin.store.manifest import Manifest
from deltafin.store.replicas import replicate

RAW_REQUESTS = (1 << 20, 4 << 20, 16 << 20)
PAGE = 4096


def expert_memory(store: Store, window: int) -> list[memoryview]:
    """Buffers for ``window`` experts, every page touched: an engine's arena is warm long before it is measured."""
    buffers = [aligned_memory(store.expert_buffer_bytes) for _ in range(window)]
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    return buffers


def raw_seconds(
    store: Store, plans: Sequence[ReadPlan], buffers: Sequence[memoryview], depth: int, request: int
) -> float:
    """Time to read the plans' byte ranges with nothing but threads and preadv; ``depth`` threads per drive.

    The bytes land in the same buffers that the store fills: small private ones would stay in the processor's cache.
    """
    manifest = store._manifest
    files: dict[int, DirectFile] = {}
    ranges: dict[int, SimpleQueue[tuple[int, int, int] | None]] = {d.index: SimpleQueue() for d in store.drives}
    for plan in plans:
        for e in plan.extents:
            if e.file not in files:
                files[e.file] = DirectFile(manifest.file_path(e.file))
            begin, end = e.offset // PAGE * PAGE, e.offset + e.length
            for offset in range(begin, end, request):
                ranges[e.drive].put((e.file, offset, min(request, end - offset)))

    spots: SimpleQueue[memoryview] = SimpleQueue()
    for buffer in buffers:
        for at in range(0, len(buffer) - request + 1, request):
            spots.put(buffer[at : at + request])

    def work(todo: SimpleQueue[tuple[int, int, int] | None]) -> None:
        while (item := todo.get()) is not None:
            file, offset, wanted = item
            memory = spots.get()
            files[file].read(memory[: -(-wanted // PAGE) * PAGE], offset, wanted)
            spots.put(memory)

    threads = [threading.Thread(target=work, args=(todo,)) for todo in ranges.values() for _ in range(depth)]
    for todo in ranges.values():
        for _ in range(depth):
            todo.put(None)
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    for file in files.values():
        file.close()
    return elapsed


def store_seconds(store: Store, plans: Sequence[ReadPlan], buffers: Sequence[memoryview]) -> float:
    """Time to read the plans through the store with one expert in flight per buffer."""
    free = list(buffers)
    done: SimpleQueue[tuple[memoryview, BaseException | None]] = SimpleQueue()
    start = time.perf_counter()
    flying = 0
    for plan in plans:
        if not free:
            buffer, error = done.get()
            if error:
                raise error
            free.append(buffer)
            flying -= 1
        buffer = free.pop()
        store.reader.submit(plan, buffer, lambda error, buffer=buffer: done.put((buffer, error)))
        flying += 1
    for _ in range(flying):
        error = done.get()[1]
        if error:
            raise error
    return time.perf_counter() - start


def fio_rate(folder: Path, depth: int) -> float | None:
    """Bytes per second according to fio, None where it is not installed."""
    if not shutil.which("fio"):
        return None
    names = ":".join(str(path) for path in sorted(folder.glob("*.safetensors")) if path.stat().st_size > 1 << 30)
    command = [
        "fio",
        "--name=read",
        f"--filename={names}",
        "--rw=randread",
        "--bs=8m",
        "--direct=1",
        "--ioengine=psync",
    ]
    command += [f"--numjobs={depth}", "--thread", "--readonly", "--time_based", "--runtime=5", "--group_reporting"]
    result = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True, check=True)
    return float(json.loads(result.stdout)["jobs"][0]["read"]["bw_bytes"])


def compare(title: str, home: Path, depth: int, rounds: int, experts: int, window: int) -> None:
    with Store.open(home, depth=depth) as store:
        layer = store.config.moe_layers[0]
        plans = [store.expert_plan(layer, expert) for expert in range(store.config.experts)]
        nbytes = plans[0].nbytes * min(experts, len(plans))
        buffers = expert_memory(store, window)
        arms: dict[str, list[float]] = {"store": []} | {f"raw {r >> 20} MiB": [] for r in RAW_REQUESTS}
        for _ in range(rounds):
            chosen = random.sample(plans, min(experts, len(plans)))
            for arm in random.sample(list(arms), len(arms)):
                if arm == "store":
                    seconds = store_seconds(store, chosen, buffers)
                else:
                    seconds = raw_seconds(store, chosen, buffers, depth, int(arm.split()[1]) << 20)
                arms[arm].append(nbytes / seconds)
        for arm, rates in arms.items():
            spread = f"{min(rates) / 1e9:.2f}..{max(rates) / 1e9:.2f}"
            print(f"  {arm:12s} median {statistics.median(rates) / 1e9:6.3f} GB/s   ({spread})")
        raw = [rates for arm, rates in arms.items() if arm != "store"]
        typical = statistics.median(arms["store"]) / max(map(statistics.median, raw))
        undisturbed = max(arms["store"]) / max(map(max, raw))
        print(f"  {title}: {typical:.1%} of the best raw arm by medians, {undisturbed:.1%} by best rounds\n")


def throttled(home: Path, rates: Sequence[float], window: int, depth: int, experts: int) -> None:
    with Store.open(home, depth=depth, max_bytes_per_s=dict(enumerate(rates))) as store:
        layer = store.config.moe_layers[0]
        count = min(experts, store.config.experts)
        plans = [store.expert_plan(layer, e) for e in random.sample(range(store.config.experts), count)]
        rate = sum(plan.nbytes for plan in plans) / store_seconds(store, plans, expert_memory(store, window))
    drives = " + ".join(f"{r / 1e6:.0f}" for r in rates)
    print(f"  throttled to {drives} MB/s: {rate / 1e6:.1f} MB/s, {rate / sum(rates):.1%} of the sum")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="folder on the drive to measure (default: temporary)")
    parser.add_argument("--experts", type=int, default=192, help="experts written (17.5 MB each, twice)")
    parser.add_argument("--per-round", type=int, default=96, help="experts read per arm and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=4, help="requests in flight per drive")
    parser.add_argument("--window", type=int, default=16, help="experts in flight")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[60e6, 90e6, 120e6, 150e6], help="throttled drives, bytes/s"
    )
    options = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, python {platform.python_version()}, {time.strftime('%F')}")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="deltafin-bench-") as name:
        root = Path(name)
        write_synthetic_checkpoint(
            root / "model", layers=2, experts=options.experts, vocab_size=1024, text_overrides=SMALL_SPINE
        )
        in_place = create_store(root / "model", [], layout="in-place", home=root / "in-place")
        compare("in place", in_place, options.depth, options.rounds, options.per_round, options.window)
        if (rate := fio_rate(root / "model", options.depth)) is not None:
            print(f"  fio, 4 MiB random direct reads: {rate / 1e9:.3f} GB/s\n")
        drives = [root / f"drive{index}" for index in range(len(options.rates))]
        for drive in drives:
            drive.mkdir()
        specs = [DriveSpec(drive, weight) for drive, weight in zip(drives, options.rates, strict=True)]
        striped = create_store(root / "model", specs, layout="striped")
        shutil.rmtree(root / "model")
        compare(
            f"striped over {len(drives)} folders",
            striped,
            options.depth,
            options.rounds,
            options.per_round,
            options.window,
        )
        for window in (1, 4, 16):
            print(f"  {window} experts in flight:", end="")
            throttled(striped, options.rates, window, options.depth, options.per_round // 2)
        print("  the last drive at a third of its speed:")
        today = [*options.rates[:-1], options.rates[-1] / 3]
        throttled(striped, today, 16, options.depth, options.per_round // 2)
        replicate(striped, range(Manifest.load(striped).expert_blobs), progress=None)
        print("  the same, every expert on two drives:")
        for window in (4, 16):
            print(f"  {window} experts in flight:", end="")
            throttled(striped, today, window, options.depth, options.per_round // 2)


if __name__ == "__main__":
    main()
