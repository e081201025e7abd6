"""What the store's tests share: a small checkpoint, installs of it, and the library's view of its bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import xxhash
from safetensors import deserialize

from deltafin.bench.synthetic import TINY, write_synthetic_checkpoint
from deltafin.checkpoint import expert_inventory
from deltafin.checkpoint.inventory import expert_prefix
from deltafin.store import DriveInfo, DriveSpec, Extent, Reader, ReadPlan, Store, aligned_memory, create_store

PAGE = 4096


def tiny_checkpoint(folder: Path) -> Path:
    """Three layers (KDA dense, KDA + experts, MLA + experts), six experts of 19.5 kB."""
    overrides = TINY | {"moe_intermediate_size": 96, "routed_expert_hidden_size": 128}
    write_synthetic_checkpoint(folder, layers=3, experts=6, vocab_size=512, text_overrides=overrides)
    return folder


def released_bytes(folder: Path) -> dict[str, bytes]:
    """Every tensor as the safetensors library reads it."""
    tensors: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= {name: bytes(value["data"]) for name, value in deserialize(path.read_bytes())}
    return tensors


def make_drives(base: Path, weights: Sequence[float | None]) -> list[DriveSpec]:
    """One folder per weight."""
    specs = [DriveSpec(base / f"drive{index}", weight) for index, weight in enumerate(weights)]
    for spec in specs:
        spec.path.mkdir(parents=True, exist_ok=True)
    return specs


def striped_install(checkpoint: Path, base: Path, weights: Sequence[float | None]) -> Path:
    """A striped install over fresh folders."""
    return create_store(checkpoint, make_drives(base, weights), layout="striped")


def read(reader: Reader, plan: ReadPlan, memory: memoryview | None = None) -> bytes:
    """Reads a plan and returns its blob, raising what the reader reports."""
    memory = memory or aligned_memory(plan.buffer_bytes)
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    reader.submit(plan, memory, done.put)
    error = done.get(timeout=30)
    if error is not None:
        raise error
    return bytes(memory[plan.view_offset : plan.view_offset + plan.nbytes])


def all_bytes(store: Store) -> dict[str, bytes]:
    """Every tensor as the store delivers it."""
    tensors: dict[str, bytes] = {}
    for key in store.spine_keys:
        unit = store.spine_unit(key)
        data = read(store.reader, unit.plan)
        tensors |= {t.name: data[t.offset : t.offset + t.nbytes] for t in unit.tensors}
    for layer in store.config.moe_layers:
        for expert in range(store.config.experts):
            data = read(store.reader, store.expert_plan(layer, expert))
            at = 0
            for part, spec in expert_inventory(store.config).items():
                tensors[expert_prefix(layer, expert) + part] = data[at : at + spec.nbytes]
                at += spec.nbytes
            assert at == len(data)
    return tensors


def file_drives(base: Path, contents: Sequence[bytes]) -> tuple[list[DriveInfo], list[tuple[int, Path]]]:
    """One drive with one file per element, for readers without an install."""
    drives, files = [], []
    for index, content in enumerate(contents):
        folder = base / f"raw{index}"
        folder.mkdir()
        (folder / "file").write_bytes(content)
        drives.append(DriveInfo(index, f"u{index}", folder, 1.0, 0.0))
        files.append((index, folder / "file"))
    return drives, files


def extent(content: bytes, offset: int, length: int, *, drive: int = 0, page: int = 0) -> Extent:
    """An extent with its true checksum, landing on the given page of the buffer."""
    at = page * PAGE + offset % PAGE
    return Extent(drive, drive, offset, length, at, xxhash.xxh3_64_intdigest(content[offset : offset + length]))


def plan_of(*extents: Extent) -> ReadPlan:
    """A plan whose blob is everything from the first extent's first byte to the last one's end."""
    first, end = extents[0], max(e.at + e.length for e in extents)
    return ReadPlan(extents, first.at, end - first.at, -(-end // PAGE) * PAGE, "the blob")


def open_descriptors() -> set[str]:
    """Files this process has open."""
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    names = set()
    for fd in os.listdir(folder):
        try:
            names.add(f"{fd}:{os.readlink(f'{folder}/{fd}')}")
        except OSError:
            continue
    return {name for name in names if not name.endswith("/fd")}


def scattered_checkpoint(source: Path, folder: Path, *, odd: bool = False) -> Path:
    """The checkpoint with each shard's tensors in reverse order; ``odd`` starts the payload at an odd byte."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
            continue
        header, payload = {}, b""
        for name, value in sorted(deserialize(path.read_bytes()), reverse=not odd):
            data = bytes(value["data"])
            span = [len(payload), len(payload) + len(data)]
            header[name] = {"dtype": value["dtype"], "shape": value["shape"], "data_offsets": span}
            payload += data
        text = json.dumps(header).encode()
        text += b" " * ((1 if odd else 0) - len(text) % 8 + 8)
        (folder / path.name).write_bytes(len(text).to_bytes(8, "little") + text + payload)
    return folder
