"""A folder of released K3 files, opened: configuration and the complete, checked table of text tensors."""

from __future__ import annotations

import gc
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deltafin.checkpoint.config import K3Config
from deltafin.checkpoint.inventory import (
    TensorSpec,
    expert_inventory,
    expert_prefix,
    is_vision,
    spine_inventory,
    text_tensor_count,
)
from deltafin.checkpoint.tensorfile import (
    INDEX_NAME,
    LOCAL,
    MAX_HEADER_BYTES,
    SINGLE_NAME,
    Shards,
    TensorInfo,
    quoted,
    read_header,
    read_index,
)
from deltafin.errors import TensorFileError

METADATA_FILES: Mapping[str, int] = {
    "config.json": 1 << 20,
    "generation_config.json": 1 << 20,
    "tokenizer_config.json": 8 << 20,
    "tiktoken.model": 64 << 20,
    "LICENSE": 1 << 20,
    INDEX_NAME: MAX_HEADER_BYTES,
}
"""Small files that travel with an install, each with the most bytes it may have."""

_HEADER_BYTES_PER_TENSOR = 512  # a released entry takes about 180
_VISION_ALLOWANCE = 4096  # tensors; the released vision tower has 168
_REFETCH = "fetch the released files again; all shards must come from the same revision"


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive bytes of one shard: ``nbytes`` from ``offset`` of ``file``."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """Released K3 files, read-only.

    Attributes:
        folder: where they are.
        config: the model's geometry.
        tensors: every text tensor by name; the inventory has been checked to be complete and exact.
        files: size in bytes of each shard that holds text tensors.
        identity: 64 hexadecimal digits that two checkpoints share only if configuration, tensor names,
            dtypes, shapes, their distribution over shards, and the final norm's weights are equal. The last
            is the only payload read: it tells fine-tuned siblings of one geometry apart.
        shards: how the shards' bytes are reached.
    """

    folder: Path
    config: K3Config
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, int]
    identity: str
    shards: Shards = field(default=LOCAL, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path, shards: Shards = LOCAL) -> Checkpoint:
        """Opens and checks ``folder``.

        Args:
            folder: with ``config.json``, the index, and, unless ``shards`` says otherwise, the shards.
            shards: where the shards are.

        Raises:
            ConfigError: the configuration is not K3's.
            TensorFileError: a shard or the index is missing, malformed or truncated, they disagree, or a
                text tensor is missing, unknown, or has a wrong dtype or shape.
        """
        # The real model's half a million entries form no cycles; the collector would walk them again and again.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return cls._open(folder, shards)
        finally:
            if collecting:
                gc.enable()

    @classmethod
    def _open(cls, folder: Path, shards: Shards) -> Checkpoint:
        config = K3Config.load(folder)
        limit = _HEADER_BYTES_PER_TENSOR * (text_tensor_count(config) + _VISION_ALLOWANCE)
        limit = min(limit, MAX_HEADER_BYTES)
        tensors = _indexed(folder, limit, shards) if (folder / INDEX_NAME).exists() else _single(folder, limit, shards)
        _check_inventory(folder, config, tensors)
        sizes: dict[str, int] = {}
        for info in tensors.values():
            sizes[info.file] = max(sizes.get(info.file, 0), info.offset + info.nbytes)
        return cls(folder, config, tensors, sizes, _identity(folder, tensors, shards), shards)

    def expert_runs(self, layer: int, expert: int) -> list[Run]:
        """The bytes of one expert in the released order of its six tensors, adjacent ones merged."""
        prefix = expert_prefix(layer, expert)
        return merged_runs(self.tensors[prefix + part] for part in expert_inventory(self.config))

    def spine_units(self) -> dict[str, dict[str, TensorInfo]]:
        """Spine units in reading order, each with its tensors."""
        units = spine_inventory(self.config)
        return {key: {name: self.tensors[name] for name in unit} for key, unit in units.items()}

    def read(self, name: str) -> bytes:
        """The payload of one tensor; meant for small ones.

        Raises:
            KeyError: no text tensor of that name.
            TensorFileError: the bytes cannot be read.
        """
        return _payload(self.folder, self.tensors[name], self.shards)


def merged_runs(tensors: Iterable[TensorInfo]) -> list[Run]:
    """The byte runs of ``tensors`` in the given order; neighbours that touch in the same shard become one
    run."""
    runs: list[Run] = []
    for info in tensors:
        last = runs[-1] if runs else None
        if last is not None and last.file == info.file and last.offset + last.nbytes == info.offset:
            runs[-1] = Run(last.file, last.offset, last.nbytes + info.nbytes)
        else:
            runs.append(Run(info.file, info.offset, info.nbytes))
    return runs


def _single(folder: Path, limit: int, shards: Shards) -> dict[str, TensorInfo]:
    path = folder / SINGLE_NAME
    if shards is LOCAL and not path.exists():
        raise TensorFileError(
            f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}",
            remedy="point --model at a folder with the released Kimi K3 files",
        )
    header = read_header(path, max_header_bytes=limit, shards=shards)
    return {name: info for name, info in header.items() if not is_vision(name)}


def _indexed(folder: Path, limit: int, shards: Shards) -> dict[str, TensorInfo]:
    index_path = folder / INDEX_NAME
    index = read_index(index_path, max_bytes=limit)
    by_file: dict[str, set[str]] = defaultdict(set)
    for name, file in index.items():
        by_file[file].add(name)
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(by_file):
        if all(is_vision(name) for name in by_file[file]):
            continue  # text-only downloads need not have the vision shards
        header = read_header(folder / file, max_header_bytes=limit, shards=shards)
        _check_agreement(index_path, folder / file, index, by_file[file], header)
        tensors.update((name, info) for name, info in header.items() if not is_vision(name))
    return tensors


def _check_agreement(
    index_path: Path,
    shard: Path,
    index: Mapping[str, str],
    promised: set[str],
    header: Mapping[str, TensorInfo],
) -> None:
    for name in header:
        if name not in promised:
            where = f"places it in {index[name]}" if name in index else "does not know it"
            raise TensorFileError(f"{shard} holds tensor {quoted(name)} but {index_path.name} {where}", remedy=_REFETCH)
    if len(header) != len(promised):
        name = min(promised - header.keys())
        raise TensorFileError(
            f"{index_path} places tensor {quoted(name)} in {shard.name}, which lacks it", remedy=_REFETCH
        )


def _check_inventory(folder: Path, config: K3Config, tensors: Mapping[str, TensorInfo]) -> None:
    checked = 0
    for unit in spine_inventory(config).values():
        for name, spec in unit.items():
            _check_tensor(folder, name, spec, tensors)
            checked += 1
    parts = expert_inventory(config)
    for layer in config.moe_layers:
        for expert in range(config.experts):
            prefix = expert_prefix(layer, expert)
            for part, spec in parts.items():
                _check_tensor(folder, prefix + part, spec, tensors)
                checked += 1
    if checked != len(tensors):
        known = {name for unit in spine_inventory(config).values() for name in unit}
        known |= {
            expert_prefix(layer, e) + part
            for layer in config.moe_layers
            for e in range(config.experts)
            for part in parts
        }
        name = min(tensors.keys() - known)
        raise TensorFileError(
            f"{folder / tensors[name].file} holds tensor {quoted(name)}, which this model does not have",
            remedy="config.json and the shards do not belong together; " + _REFETCH,
        )


def _check_tensor(folder: Path, name: str, spec: TensorSpec, tensors: Mapping[str, TensorInfo]) -> None:
    info = tensors.get(name)
    if info is None:
        raise TensorFileError(f"{folder} lacks tensor {name}", remedy=_REFETCH)
    if info.dtype != spec.dtype or info.shape != spec.shape:
        raise TensorFileError(
            f"{folder / info.file}: tensor {name} is {info.dtype} {list(info.shape)}; "
            f"config.json asks for {spec.dtype} {list(spec.shape)}",
            remedy="config.json and the shards do not belong together; " + _REFETCH,
        )


def _identity(folder: Path, tensors: Mapping[str, TensorInfo], shards: Shards) -> str:
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in sorted(tensors):
        info = tensors[name]
        digest.update(f"\n{name} {info.dtype} {info.shape} {info.file}".encode())
    digest.update(_payload(folder, tensors["language_model.model.norm.weight"], shards))
    return digest.hexdigest()


def _payload(folder: Path, info: TensorInfo, shards: Shards) -> bytes:
    return shards.read(folder / info.file, info.offset, info.nbytes)
