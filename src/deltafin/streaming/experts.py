"""Expert leases: from the RAM tier at once, from the drives in arrival order, given back as soon as they are used.

An expert's bytes live in a *frame*, one page-aligned buffer out of an arena that is mapped once. A frame is free,
being read into, leased to the caller, or kept by the tier. The policy that decides who is kept is pure and lives in
``residency``.
"""

from __future__ import annotations

import ctypes
import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deltafin.residency.tier import ExpertTierPolicy, Key
from deltafin.store.buffers import aligned_memory
from deltafin.store.reader import Ticket
from deltafin.store.store import Store
from deltafin.store.types import ReadPlan
from deltafin.streaming.stop import StopFlag

_POLL_SECONDS = 0.1


@dataclass(slots=True)
class Lease:
    """The verified bytes of one expert, valid until ``ExpertStream.release``.

    Attributes:
        key: (layer, expert).
        address: of the blob's first byte.
    """

    key: Key
    address: int
    frame: int


@dataclass(slots=True)
class StreamStats:
    """Counters since the engine started; bytes are blob bytes, seconds are the caller's waiting time."""

    tier_hits: int = 0
    reads: int = 0
    tier_bytes: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0
    evictions: int = 0

    def copy(self) -> StreamStats:
        return StreamStats(
            self.tier_hits, self.reads, self.tier_bytes, self.read_bytes, self.wait_seconds, self.evictions
        )


@dataclass(slots=True)
class _Arrival:
    key: Key
    frame: int
    plan: ReadPlan
    error: BaseException | None


@dataclass(slots=True)
class _Arena:
    """Frames of one expert each in one anonymous mapping; untouched frames cost no memory."""

    count: int
    frame_bytes: int
    memory: memoryview = field(init=False)
    base: int = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = aligned_memory(self.count * self.frame_bytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.free = list(range(self.count - 1, -1, -1))

    def view(self, frame: int) -> memoryview:
        return self.memory[frame * self.frame_bytes : (frame + 1) * self.frame_bytes]


class ExpertStream:
    """Fetches experts for one layer at a time.

    Args:
        store: where the bytes come from.
        in_flight: frames that reads and leases may use at one time.
        tier: frames that may keep experts after use.
        stop: polled while waiting for reads.
    """

    def __init__(self, store: Store, *, in_flight: int, tier: int, stop: StopFlag) -> None:
        if in_flight < 1:
            raise ValueError("at least one frame must be free for reads")
        self._store = store
        self._stop = stop
        self._arena = _Arena(in_flight + tier, store.expert_buffer_bytes)
        self._policy = ExpertTierPolicy(tier)
        self._kept: dict[Key, Lease] = {}
        self._leased: dict[Key, Lease] = {}
        self.blob_bytes = store.expert_layout.nbytes
        self.stats = StreamStats()

    @property
    def tier_capacity(self) -> int:
        """Experts the tier may keep."""
        return self._policy.capacity

    @property
    def tier_used(self) -> int:
        """Experts the tier keeps now."""
        return len(self._kept)

    def next_token(self, count: int = 1) -> None:
        """Tells the tier that ``count`` tokens have passed."""
        for _ in range(count):
            self._policy.next_token()

    def fetch(self, layer: int, experts: Sequence[int]) -> Fetch:
        """Leases ``experts`` of ``layer``; use as a context and iterate over batches of leases.

        Entering starts the reads, in the order of ``experts`` and as many at a time as there are free frames.
        Batches hold first the experts already in memory, then those read, as they arrive. The caller must
        ``release`` each batch once its products are computed. Leaving the context cancels what has not started and
        waits for what has.
        """
        return Fetch(self, layer, experts)

    def release(self, leases: Sequence[Lease]) -> None:
        """Gives leases back; the tier keeps what its policy admits, other frames become free at once."""
        for lease in leases:
            key = lease.key
            del self._leased[key]
            if key in self._kept:
                continue
            stays, victim = self._policy.admit(key, leased=self._leased)
            if victim is not None:
                self._arena.free.append(self._kept.pop(victim).frame)
                self.stats.evictions += 1
            if stays:
                self._kept[key] = lease
            else:
                self._arena.free.append(lease.frame)

    def _evict_one(self) -> None:
        for key in self._kept:
            if key not in self._leased:
                break
        else:
            raise RuntimeError("every expert frame is leased; the caller must release before asking for more")
        self._policy.drop(key)
        self._arena.free.append(self._kept.pop(key).frame)
        self.stats.evictions += 1


class Fetch:
    """The leases of one layer on their way; see ``ExpertStream.fetch``."""

    def __init__(self, stream: ExpertStream, layer: int, experts: Sequence[int]) -> None:
        self._stream = stream
        self._layer = layer
        self._experts = experts
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._tickets: dict[Key, Ticket] = {}
        self._waiting: deque[int] = deque()
        self._resident: list[Lease] = []

    def __enter__(self) -> Iterator[list[Lease]]:
        stream, layer = self._stream, self._layer
        for expert in self._experts:
            key = (layer, expert)
            stream._policy.use(key)
            lease = stream._kept.get(key)
            if lease is None:
                self._waiting.append(expert)
            else:
                self._resident.append(lease)
                stream._leased[key] = lease
        stream.stats.tier_hits += len(self._resident)
        stream.stats.tier_bytes += len(self._resident) * stream.blob_bytes
        try:
            self._submit()
        except BaseException:
            self.__exit__()
            raise
        return self._batches()

    def __exit__(self, *_: object) -> None:
        stream = self._stream
        for ticket in self._tickets.values():
            ticket.cancel()
        while self._tickets:
            # A frame is reusable only when no read can still write into it, so even a stop waits here.
            arrival = self._arrivals.get()
            del self._tickets[arrival.key]
            stream._arena.free.append(arrival.frame)
        for key, lease in list(stream._leased.items()):
            # Only after an error or a stop are there leases that the caller never gave back.
            del stream._leased[key]
            if key not in stream._kept:
                stream._arena.free.append(lease.frame)

    def _submit(self) -> None:
        stream, waiting = self._stream, self._waiting
        arena, store, arrivals = stream._arena, stream._store, self._arrivals
        while waiting and arena.free:
            key = (self._layer, waiting[0])
            plan = store.expert_plan(*key)
            waiting.popleft()
            frame = arena.free.pop()

            def done(error: BaseException | None, key: Key = key, frame: int = frame, plan: ReadPlan = plan) -> None:
                arrivals.put(_Arrival(key, frame, plan, error))

            self._tickets[key] = store.reader.submit(plan, arena.view(frame), done)

    def _batches(self) -> Iterator[list[Lease]]:
        """Yields batches; raises SliceError for bytes missing, unreadable or corrupt, Interrupted on a stop."""
        stream = self._stream
        if self._resident:
            yield self._resident
        while self._waiting or self._tickets:
            self._submit()
            if self._tickets:
                yield self._arrived()
            else:
                # Every frame is kept: make room, since a read must always be able to proceed.
                stream._evict_one()

    def _arrived(self) -> list[Lease]:
        stream, arena, batch = self._stream, self._stream._arena, []
        arrival: _Arrival | None = self._wait()
        while arrival is not None:
            del self._tickets[arrival.key]
            if arrival.error is not None:
                arena.free.append(arrival.frame)
                raise arrival.error
            address = arena.base + arrival.frame * arena.frame_bytes + arrival.plan.view_offset
            lease = Lease(arrival.key, address, arrival.frame)
            batch.append(lease)
            stream._leased[arrival.key] = lease
            try:
                arrival = self._arrivals.get_nowait()
            except queue.Empty:
                arrival = None
        stream.stats.reads += len(batch)
        stream.stats.read_bytes += len(batch) * stream.blob_bytes
        return batch

    def _wait(self) -> _Arrival:
        started = time.perf_counter()
        try:
            while True:
                try:
                    return self._arrivals.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    self._stream._stop.check()
        finally:
            self._stream.stats.wait_seconds += time.perf_counter() - started
