"""MLX arrays as the memory that reads fill: no byte is copied between the drive and the product.

An array's buffer is shared by CPU and GPU. Python's buffer protocol gives a writable view of it, and slices, views of
another dtype and strided windows of an array share its buffer; so weights are windows of the array the read went into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from deltafin.store.types import PAGE

DTYPES = {"BF16": mx.bfloat16, "F32": mx.float32}
_UNITS = (mx.uint8, mx.uint16, mx.uint32, mx.uint64)
_MOST_NUMBERS = (1 << 31) - 1
"""MLX counts the numbers along an axis in 32 bits; the released embedding and head have more bytes than that."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Page-aligned bytes inside an MLX array.

    Attributes:
        base: array that owns the memory; a little larger, since MLX aligns small arrays to 16 bytes only. Of bytes, or
            of wider numbers where there are so many bytes that MLX could not count them.
        start: byte offset of the first page boundary in it.
        nbytes: usable from there.
        address: of the byte at ``start``.
    """

    base: mx.array
    start: int
    nbytes: int
    address: int

    @classmethod
    def of(cls, nbytes: int) -> Landing:
        """``nbytes``, rounded up to pages.

        Raises:
            MemoryError: there is no such memory.
        """
        size = max(1, -(-nbytes // PAGE)) * PAGE
        try:
            unit = next(u for u in _UNITS if (size + PAGE) // u.size <= _MOST_NUMBERS)
            base = mx.zeros(((size + PAGE) // unit.size,), dtype=unit)
            mx.eval(base)
        except (RuntimeError, ValueError, StopIteration) as e:
            raise MemoryError(f"MLX cannot hold {size} bytes: {e}") from None
        address = np.asarray(memoryview(base)).ctypes.data  # type: ignore[arg-type]
        start = -address % PAGE
        return cls(base, start, size, address + start)

    @property
    def bytes(self) -> memoryview:
        """The memory, writable; whoever writes must know that no pending GPU work reads it."""
        whole = memoryview(self.base).cast("B")  # type: ignore[arg-type]
        return whole[self.start : self.start + self.nbytes]

    def array(self, dtype: mx.Dtype, shape: Sequence[int], offset: int) -> mx.array:
        """The array whose bytes begin at ``offset``; it shares the memory.

        An address that MLX cannot use for ``dtype`` (a file whose tensors are not aligned to their own size) costs a
        copy, which the released files never need.
        """
        nbytes, unit = math.prod(shape) * dtype.size, self.base.dtype.size
        if (self.address + offset) % dtype.size or offset % unit or nbytes % unit:
            kind = np.uint16 if dtype.size == 2 else np.uint32
            flat = mx.array(np.frombuffer(self.bytes[offset : offset + nbytes], dtype=kind).copy())
        else:
            begin = (self.start + offset) // unit
            flat = self.base[begin : begin + nbytes // unit]
        made = flat.view(dtype).reshape(shape)
        mx.eval(made)  # MLX evaluates an array only in the thread that wrote it down
        return made


class MlxSpineMemory:
    """Spine bytes in MLX arrays.

    Args:
        activations: dtype of embedding rows handed to the model.
    """

    def __init__(self, activations: mx.Dtype) -> None:
        self._activations = activations

    def allocate(self, nbytes: int) -> Landing:
        """See ``SpineMemory``."""
        return Landing.of(nbytes)

    def view(self, memory: Landing) -> memoryview:
        """See ``SpineMemory``."""
        return memory.bytes

    def array(self, memory: Landing, dtype: str, shape: tuple[int, ...], offset: int) -> mx.array:
        """See ``SpineMemory``."""
        return memory.array(DTYPES[dtype], shape, offset)

    def take(self, table: mx.array, ids: Sequence[int]) -> mx.array:
        """Rows in the activations' dtype, which holds bf16 exactly."""
        return table[mx.array(list(ids))].astype(self._activations)

    def stack(self, rows: Sequence[mx.array]) -> mx.array:
        """Rows in the activations' dtype, which holds bf16 exactly."""
        return mx.stack(list(rows)).astype(self._activations)
