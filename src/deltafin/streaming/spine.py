"""The spine: resident units, units streamed through two buffers, and single embedding rows.

A token uses the units in one fixed order, so while a streamed unit computes the next one is already being read into the
other buffer. Bytes are used where they land; tensors are views of the buffer.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from deltafin.store.reader import Ticket
from deltafin.store.store import Store
from deltafin.store.types import Extent, ReadPlan, SpineUnit
from deltafin.streaming.stop import StopFlag

_POLL_SECONDS = 0.1
_ALIGN = 4096

Array = TypeVar("Array")


class SpineMemory(Protocol[Array]):
    """How a backend holds spine bytes: memory that a read fills, and arrays that are views of it."""

    def allocate(self, nbytes: int) -> Any:
        """At least ``nbytes`` of page-aligned memory that lives as long as the returned handle or an array of it."""

    def view(self, memory: Any) -> memoryview:
        """The writable bytes of a handle."""

    def array(self, memory: Any, dtype: str, shape: tuple[int, ...], offset: int) -> Array:
        """The tensor (``BF16`` or ``F32``) whose bytes begin at ``offset``, in place."""

    def take(self, table: Array, ids: Sequence[int]) -> Array:
        """Rows of a bf16 table as activations, [len(ids), width]."""

    def stack(self, rows: Sequence[Array]) -> Array:
        """bf16 rows [width] as activations, [n, width]; a copy."""


@dataclass(slots=True)
class SpineStats:
    """Bytes read for streamed units and embedding rows, and the caller's waiting time in seconds."""

    read_bytes: int = 0
    wait_seconds: float = 0.0

    def copy(self) -> SpineStats:
        return SpineStats(self.read_bytes, self.wait_seconds)


@dataclass(slots=True)
class _Loading:
    key: str
    buffer: int
    done: queue.SimpleQueue[BaseException | None]
    ticket: Ticket


class Spine(Generic[Array]):
    """Spine tensors by unit.

    Args:
        store: where the bytes come from.
        memory: the backend's.
        resident: unit keys kept in memory from ``load`` on.
        buffers: (count, bytes) of the buffers for streamed units; ``embed`` needs none, its rows are read singly.
        stop: polled while waiting for reads.
    """

    def __init__(
        self,
        store: Store,
        memory: SpineMemory[Array],
        *,
        resident: frozenset[str],
        buffers: tuple[int, int],
        stop: StopFlag,
    ) -> None:
        self._store = store
        self._memory = memory
        self._stop = stop
        self._units = {key: store.spine_unit(key) for key in store.spine_keys}
        self._resident_keys = resident
        self._resident: dict[str, dict[str, Array]] = {}
        self._order = [k for k in store.spine_keys if k not in resident and k != "embed"]
        count, size = buffers
        self._buffers = [memory.allocate(size) for _ in range(count)]
        self._free = list(range(count))
        self._loading: deque[_Loading] = deque()
        self._next = 0
        self.stats = SpineStats()

    @property
    def resident_keys(self) -> frozenset[str]:
        """Units kept in memory."""
        return self._resident_keys

    def load(self) -> Iterator[tuple[str, int]]:
        """Reads the resident units, yielding (key, bytes) after each."""
        for key in self._store.spine_keys:
            if key in self._resident_keys and key not in self._resident:
                unit = self._units[key]
                memory = self._memory.allocate(unit.plan.buffer_bytes)
                self._await(self._start(key, unit.plan, memory, -1))
                self._resident[key] = self._arrays(unit, memory)
                yield key, unit.plan.nbytes

    @contextmanager
    def unit(self, key: str) -> Iterator[dict[str, Array]]:
        """The tensors of a unit, valid inside the context; those of a resident unit stay valid.

        Raises:
            SliceError: bytes missing, unreadable or corrupt.
            Interrupted: the stop flag was set while waiting.
        """
        tensors = self._resident.get(key)
        if tensors is not None:
            yield tensors
            return
        self._seek(key)
        loading = self._loading[0]
        self._await(loading)
        self._loading.popleft()
        self.stats.read_bytes += self._units[key].plan.nbytes
        try:
            yield self._arrays(self._units[key], self._buffers[loading.buffer])
        finally:
            self._free.append(loading.buffer)
            self._read_ahead()

    def embedding(self, ids: Sequence[int]) -> Array:
        """Embedding rows as activations, [len(ids), hidden]."""
        tensors = self._resident.get("embed")
        if tensors is not None:
            (table,) = tensors.values()
            return self._memory.take(table, ids)
        unit = self._units["embed"]
        (info,) = unit.tensors
        width = info.shape[1]
        row_bytes = 2 * width
        rows: dict[int, Array] = {}
        for token in sorted(set(ids)):
            first = info.offset + token * row_bytes
            plan = _sub_plan(unit.plan, first, row_bytes)
            memory = self._memory.allocate(plan.buffer_bytes)
            self._await(self._start("embed", plan, memory, -1))
            self.stats.read_bytes += row_bytes
            rows[token] = self._memory.array(memory, "BF16", (width,), plan.view_offset)
        return self._memory.stack([rows[token] for token in ids])

    def rewind(self) -> None:
        """Starts reading the first streamed units of the next pass, before it is asked for."""
        self._read_ahead()

    def close(self) -> None:
        """Cancels reads and waits until none can touch a buffer."""
        self._drop_loading()

    def _seek(self, key: str) -> None:
        if self._loading and self._loading[0].key == key:
            return
        self._drop_loading()
        self._next = self._order.index(key)
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._free and self._order and len(self._loading) < len(self._order):
            key = self._order[self._next]
            if any(entry.key == key for entry in self._loading):
                return
            buffer = self._free.pop()
            self._loading.append(self._start(key, self._units[key].plan, self._buffers[buffer], buffer))
            self._next = (self._next + 1) % len(self._order)

    def _start(self, key: str, plan: ReadPlan, memory: Any, buffer: int) -> _Loading:
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        return _Loading(key, buffer, done, self._store.reader.submit(plan, self._memory.view(memory), done.put))

    def _await(self, loading: _Loading) -> None:
        started = time.perf_counter()
        try:
            while True:
                try:
                    error = loading.done.get(timeout=_POLL_SECONDS)
                    break
                except queue.Empty:
                    self._stop.check()
        finally:
            self.stats.wait_seconds += time.perf_counter() - started
        if error is not None:
            if loading in self._loading:
                self._loading.remove(loading)
                self._free.append(loading.buffer)
                self._drop_loading()
            raise error

    def _drop_loading(self) -> None:
        while self._loading:
            entry = self._loading.popleft()
            entry.ticket.cancel()
            entry.done.get()
            self._free.append(entry.buffer)

    def _arrays(self, unit: SpineUnit, memory: Any) -> dict[str, Array]:
        return {t.name: self._memory.array(memory, t.dtype, t.shape, t.offset) for t in unit.tensors}


def _sub_plan(plan: ReadPlan, first: int, nbytes: int) -> ReadPlan:
    """The part of a unit's plan that covers bytes [first, first + nbytes) of its buffer, moved to a small buffer."""
    needed = [e for e in plan.extents if e.at < first + nbytes and first < e.at + e.length]
    low = min(e.at for e in needed) // _ALIGN * _ALIGN
    high = max(e.at + e.length for e in needed)
    extents = tuple(Extent(e.drive, e.file, e.offset, e.length, e.at - low, e.checksum) for e in needed)
    room = (high - low + 2 * _ALIGN - 1) // _ALIGN * _ALIGN
    return ReadPlan(extents=extents, view_offset=first - low, nbytes=nbytes, buffer_bytes=room)
