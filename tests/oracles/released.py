"""Tensors of a released-format folder as float64 arrays, within a memory budget.

Reads the files through NumPy, so that it runs beside any framework or none. Every value of bf16, float32 and MXFP4 is
exactly representable in float64, so nothing here rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

Array = npt.NDArray[np.float64]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_OPENBLAS = ThreadpoolController().select(internal_api="openblas")


def one_blas_thread(f: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates every public computation of the float64 models.

    OpenBLAS's threads spin while they wait for each other: with the machine's cores busy elsewhere, a pass took thirty
    times as long as on one thread.
    """
    wrapped: Callable[_P, _R] = _OPENBLAS.wrap(limits=1)(f)
    return wrapped


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
_BLOCK_ELEMENTS = 1 << 24  # 128 MiB of float64 at a time when a matrix is too large to keep


Stored = npt.NDArray[np.generic]
"""A tensor in its file: float32, uint8, or bf16 as uint16."""

_DTYPES = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Views of all tensors of a safetensors file: eight bytes of header length, the header, and the payload."""
    whole = np.memmap(path, np.uint8, "r")
    start = 8 + int(whole[:8].view(np.uint64)[0])
    header: dict[str, Any] = json.loads(bytes(whole[8:start]))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            # The payload may begin anywhere, and an unaligned array is no trouble to NumPy.
            flat = np.frombuffer(whole, _DTYPES[entry["dtype"]], int(np.prod(entry["shape"])), begin)
            assert flat.nbytes == end - begin
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


def widened(stored: Stored) -> Array:
    """The values of a stored bf16 or float32 tensor."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


class Released:
    """Named tensors of a folder; the first ``keep_bytes`` of decoded ones stay in memory.

    Args:
        folder: holds ``config.json`` and either ``model.safetensors`` or shards with an index.
        keep_bytes: bytes of float64 kept; tensors beyond it are decoded again at each use, in blocks of rows.
    """

    def __init__(self, folder: Path | str, keep_bytes: int = 3 << 29) -> None:
        self.folder = Path(folder)
        self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        index = self.folder / "model.safetensors.index.json"
        files = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.exists()
            else ["model.safetensors"]
        )
        self._stored: dict[str, Stored] = {}
        for name in files:
            self._stored |= stored_tensors(self.folder / name)
        self._tensors: dict[str, Array] = {}
        self._experts: dict[str, tuple[Array, Array, Array]] = {}
        self._room = keep_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        return self._stored[name].shape

    def get(self, name: str) -> Array:
        """The whole tensor, kept while there is room."""
        if name in self._tensors:
            return self._tensors[name]
        value = widened(self._stored[name])
        if self._take(value.nbytes):
            self._tensors[name] = value
        return value

    def rows(self, name: str, ids: Sequence[int]) -> Array:
        """``tensor[ids]`` without decoding the other rows of a large matrix."""
        if self._fits(name):
            return self.get(name)[list(ids)]
        stored = self._stored[name]
        return np.concatenate([widened(stored[i : i + 1]) for i in ids])

    def linear(self, x: Array, name: str) -> Array:
        """``x @ W.T`` for a stored ``[out, in]`` matrix; ``x`` is ``[T, in]``."""
        if self._fits(name):
            product: Array = x @ self.get(name).T
            return product
        rows, cols = self.shape(name)
        step, stored = max(1, _BLOCK_ELEMENTS // cols), self._stored[name]
        blocks = [x @ widened(stored[i : i + step]).T for i in range(0, rows, step)]
        return np.concatenate(blocks, axis=1)

    def expert(self, prefix: str) -> tuple[Array, Array, Array]:
        """Decoded ``w1`` (gate), ``w3`` (up) and ``w2`` (down) of the expert named by ``prefix``."""
        if prefix in self._experts:
            return self._experts[prefix]
        value = (self._mxfp4(f"{prefix}.w1"), self._mxfp4(f"{prefix}.w3"), self._mxfp4(f"{prefix}.w2"))
        if self._take(sum(w.nbytes for w in value)):
            self._experts[prefix] = value
        return value

    def _mxfp4(self, stem: str) -> Array:
        packed, scale = (np.asarray(self._stored[f"{stem}.{part}"]) for part in ("weight_packed", "weight_scale"))
        return mxfp4(packed, scale)

    def _fits(self, name: str) -> bool:
        return name in self._tensors or 8 * int(np.prod(self.shape(name))) <= self._room

    def _take(self, size: int) -> bool:
        if size > self._room:
            return False
        self._room -= size
        return True


def mxfp4(packed: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8]) -> Array:
    """Decodes MXFP4: two e2m1 values a byte, low nibble first; one e8m0 scale for 32 columns.

    Args:
        packed: ``[..., C / 2]``.
        scale: ``[..., C / 32]``.

    Returns:
        ``[..., C]`` float64, exact.
    """
    values = E2M1[np.stack([packed & 15, packed >> 4], axis=-1)].reshape(*packed.shape[:-1], -1, 32)
    out: Array = np.ldexp(values, scale[..., None].astype(np.int32) - 127).reshape(*packed.shape[:-1], -1)
    return out


def round_bf16(x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Nearest bf16 of each finite value, ties to even, as float32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
