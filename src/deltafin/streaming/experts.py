"""Expert leases: from the RAM tier at once, from the drives in arrival order, given back as soon as they are used.

An expert's bytes live in a *frame*. A frame is free, being read into, ready (read ahead of its layer), leased to the
caller, or kept by the tier. Which experts are kept and which are read ahead is decided by pure policies in
``residency``; here bytes move. Reads ahead queue behind all demand reads, and one that turns out useless is cancelled
before it starts, or its frame is freed when it ends.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deltafin.residency.prefetch import PrefetchPolicy
from deltafin.residency.tier import ExpertTierPolicy, Key
from deltafin.residency.usage import UseModel
from deltafin.store.reader import Ticket
from deltafin.store.store import Store
from deltafin.store.types import ReadCancelled, ReadPlan
from deltafin.streaming.arena import Arena, Frames
from deltafin.streaming.stop import StopFlag

_POLL_SECONDS = 0.1
_LONGEST_WINDOW = 1.0  # seconds
_BATCH = 32  # experts computed at one time while more are to come
_SMOOTH = 0.1  # weight of the newest measurement of windows and read times

Predict = Callable[[int], "Sequence[int] | None"]
"""layer → all its experts, likeliest first, judged by its router; None when the router is not at hand."""


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
    """Counters since the engine started; bytes are blob bytes, seconds are the caller's waiting time.

    ``reads`` are experts that were read and used; ``ahead_used`` of them were started before their router had spoken.
    ``ahead_wasted`` were started so and not used.
    """

    tier_hits: int = 0
    reads: int = 0
    tier_bytes: int = 0
    read_bytes: int = 0
    wait_seconds: float = 0.0
    evictions: int = 0
    ahead_used: int = 0
    ahead_cancelled: int = 0
    ahead_wasted: int = 0

    def copy(self) -> StreamStats:
        return replace(self)


@dataclass(slots=True)
class _Flight:
    """A read under way."""

    frame: int
    plan: ReadPlan
    ahead: bool
    wanted: bool
    ticket: Ticket | None = None


@dataclass(slots=True)
class _Arrival:
    key: Key
    error: BaseException | None
    when: float


class ExpertStream:
    """Fetches experts for one layer at a time, and reads ahead for the next.

    Args:
        store: where the bytes come from.
        in_flight: frames that reads and leases may use at one time.
        tier: frames that may keep experts after use.
        stop: polled while waiting for reads.
        model: chances of use, with the heat of earlier runs in it; None begins without.
        ahead: whether reads ahead are made at all.
        frames: makes the memory, (count, bytes of each) → frames.
    """

    def __init__(
        self,
        store: Store,
        *,
        in_flight: int,
        tier: int,
        stop: StopFlag,
        model: UseModel | None = None,
        ahead: bool = True,
        frames: Callable[[int, int], Frames] = Arena,
    ) -> None:
        if in_flight < 1:
            raise ValueError("at least one frame must be free for reads")
        config = store.config
        self._store = store
        self._stop = stop
        self._first = config.dense_layers
        self._layers, self._experts = len(config.moe_layers), config.experts
        self._arena = frames(in_flight + tier, store.expert_buffer_bytes)
        self._model = model or UseModel(self._layers, config.experts)
        self._policy = ExpertTierPolicy(tier, first=self._first, model=self._model)
        self._prefetch = PrefetchPolicy(self._layers, config.experts_per_token)
        self._ahead = ahead
        self._kept: dict[Key, Lease] = {}
        self._leased: dict[Key, Lease] = {}
        self._flights: dict[Key, _Flight] = {}
        self._ready: dict[Key, Lease] = {}
        self._wishes: deque[Key] = deque()
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._quiet_since = time.perf_counter()
        self._long = False
        self._windows = [0.0] * self._layers
        self._late_windows = [0.0] * self._layers
        self._lent = 0  # frames of the tier, see ``_lend``
        self._rejected: npt.NDArray[np.integer] | None = None
        self._looked: int | None = None  # the layer that was looked ahead for
        self._looked_again = 0.0  # when
        self._missed = [True] * self._layers
        self._read_seconds = 0.0
        self._predict_seconds = 0.0
        self.blob_bytes = store.expert_layout.nbytes
        self.stats = StreamStats()

    @property
    def frames(self) -> Frames:
        """The memory of all leases."""
        return self._arena

    @property
    def tier_capacity(self) -> int:
        """Experts the tier may keep; during a long pass it lends some of their frames to reads ahead."""
        return self._policy.capacity + self._lent

    @property
    def tier_used(self) -> int:
        """Experts the tier keeps now."""
        return len(self._kept)

    @property
    def prefetch_policy(self) -> PrefetchPolicy:
        """For its figures."""
        return self._prefetch

    def observe(self, routes: npt.NDArray[np.integer], rejected: npt.NDArray[np.integer] | None = None) -> None:
        """Tokens were committed with these routes.

        Args:
            routes: [tokens, layers, k].
            rejected: routes of the position behind them under the token a draft expected there, [layers, k]: K3 will
                say another token, and may well use many of the same experts for it.
        """
        self._policy.capacity += self._lent
        self._lent = 0
        self._policy.observe(routes)
        self._rejected = rejected

    def resize_tier(self, frames: int) -> None:
        """Lets the tier keep ``frames`` experts from now on; what it must give up returns to the system at once.

        Call it between passes.
        """
        change = frames - self.tier_capacity
        self._policy.capacity, self._lent = frames, 0
        if change > 0:
            self._arena.revive(change)
            return
        self._abandon_ahead(())
        while len(self._policy) > frames:
            victim = self._policy.evict(self._leased)
            if victim is None:
                break
            self._arena.retire(self._kept.pop(victim).frame)
            self.stats.evictions += 1
            change += 1
        for _ in range(min(-change, len(self._arena.free) - 1)):
            self._arena.retire(self._arena.free.pop(0))

    def clear_tier(self) -> None:
        """Forgets every kept expert and everything read ahead, for cold measurements; between passes only."""
        self._abandon_ahead(())
        for key, lease in self._kept.items():
            self._policy.drop(key)
            self._arena.free.append(lease.frame)
        self._kept.clear()
        self._missed = [True] * self._layers

    def fetch(self, layer: int, experts: Sequence[int]) -> Fetch:
        """Leases ``experts`` of ``layer``; use as a context and iterate over batches of leases.

        Entering starts the reads, in the order of ``experts`` and as many at a time as there are free frames.
        Batches hold first the experts already in memory, then those read, as they arrive. The caller must
        ``release`` each batch once its products are computed, at the latest before the next ``fetch``; leases that an
        error left behind are taken back here. Leaving the context cancels what has not started and waits for what has.
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
        if self._wishes:
            self._grant_wishes()

    # ---- reading ahead ----------------------------------------------------------------------------------------------

    def look_ahead(self, layer: int, predict: Predict, *, long: bool = False) -> None:
        """Starts reading experts that ``layer`` will probably use; to be called when all demand reads are submitted.

        Args:
            layer: the next layer with routed experts.
            predict: asked only when the answer can pay for itself.
            long: many rows are on their way, so that all predicted experts are needed: read in the given order for as
                long as there are frames, of which the tier lends some.
        """
        if not self._ahead or len(self._kept) == self._layers * self._experts:
            return
        index = layer - self._first
        self._long = long
        if long:
            ranked = predict(layer) or ()
            self._wishes = deque((layer, e) for e in ranked if not self._known((layer, e)))
            self._lend(len(self._wishes))
            self._grant_wishes()
            return
        if not self._missed[index]:
            return  # the last token had to read nothing here: asking would cost more than it could gain
        window, read = self._windows[index], self._read_seconds
        rejected = self._rejected is not None
        if not self._prefetch.worth_predicting(
            index, window=window, read=read, cost=self._predict_seconds, rejected=rejected
        ):
            return
        started = time.perf_counter()
        present = self._policy.kept_in(layer)
        guesses = self._guesses("router", layer, predict)
        chosen = self._prefetch.plan(index, guesses, present, window=window, read=read)
        self._wishes = deque((layer, e) for e in chosen)
        self._grant_wishes()
        self._looked = layer
        self._predict_seconds += _SMOOTH * (time.perf_counter() - started - self._predict_seconds)

    def may_look_ahead(self, layer: int) -> bool:
        """Whether ``look_ahead`` may ask for predictions, for callers to whom these are cheaper beforehand."""
        return self._ahead and len(self._kept) < self._layers * self._experts and self._missed[layer - self._first]

    def _lend(self, wanted: int) -> None:
        """Gives up to half of the tier's frames to the reads ahead of a long pass, until its tokens are committed.

        Between two layers of a long pass lies the attention of all its rows, in which the drives could bring more
        experts than are otherwise in flight. What leaves the tier is what will be used last.
        """
        policy = self._policy
        if policy.holds_all:
            return
        more = min(wanted - len(self._arena.free), policy.capacity // 2 - self._lent)
        if more <= 0:
            return
        self._lent += more
        policy.capacity -= more
        while len(policy) > policy.capacity:
            victim = policy.evict(self._leased)
            if victim is None:
                break
            self._arena.free.append(self._kept.pop(victim).frame)
            self.stats.evictions += 1

    def look_again(self, layer: int, predict: Predict) -> None:
        """Looks ahead once more when all of the layer before ``layer`` is known: only an attention is missing now.

        Guesses that the better knowledge leaves out are taken back where their reads have not begun. Nothing happens
        unless ``look_ahead`` found this layer worth predicting.
        """
        if self._looked != layer:
            return
        index = layer - self._first
        started = self._looked_again = time.perf_counter()
        self._collect()
        present = {*self._policy.kept_in(layer), *(e for of, e in self._ready if of == layer)}
        window, read = self._late_windows[index] or self._windows[index], self._read_seconds
        guesses = self._guesses("late router", layer, predict)
        chosen = self._prefetch.plan(index, guesses, present, window=window, read=read, again=True)
        if chosen:
            self._take_back({(layer, e) for e in chosen})
            self._wishes = deque((layer, e) for e in chosen)
            self._grant_wishes()
        self._predict_seconds += _SMOOTH * (time.perf_counter() - started - self._predict_seconds)

    def _guesses(self, name: str, layer: int, predict: Predict) -> dict[str, Sequence[int]]:
        guesses: dict[str, Sequence[int]] = {}
        by_router = predict(layer)
        if by_router is not None:
            guesses[name] = by_router
        if self._rejected is not None:
            guesses["rejected draft"] = self._rejected[layer - self._first].tolist()
        if not self._policy.holds_all:  # otherwise nothing was learned about use
            guesses["history"] = self._model.likeliest(layer - self._first, self._prefetch.ranks)
        return guesses

    def _take_back(self, wanted: Collection[Key]) -> None:
        """Cancels reads ahead of what is not in ``wanted``, where nothing of them has begun."""
        for key, flight in self._flights.items():
            if flight.ahead and flight.wanted and key not in wanted:
                assert flight.ticket is not None
                flight.wanted = not flight.ticket.cancel()
        self._collect()

    def _measure_windows(self, index: int, entered: float) -> None:
        """Learns how long the drives have been idle before this layer's router spoke."""
        again = self._looked == index + self._first and self._looked_again > self._quiet_since
        self._looked = None
        if self._long:  # a prefill's windows say nothing about decoding
            self._long = False
            return
        for windows, seconds in (
            (self._windows, entered - self._quiet_since),
            (self._late_windows, entered - self._looked_again if again else None),
        ):
            if seconds is not None:
                seconds = min(seconds, _LONGEST_WINDOW)  # between two prompts the drives are idle for minutes
                known = windows[index]
                windows[index] = known + _SMOOTH * (seconds - known) if known else seconds

    def _known(self, key: Key) -> bool:
        return key in self._kept or key in self._ready or key in self._flights

    def _grant_wishes(self) -> None:
        wishes, free = self._wishes, self._arena.free
        while wishes and free:
            key = wishes.popleft()
            # A guess never goes to the network for an expert that a stream install lacks.
            if not self._known(key) and self._store.has_expert(*key):
                try:
                    self._start(key, ahead=True)
                except Exception:
                    # Whatever is wrong with it, the demand read will say so if it is really needed.
                    wishes.clear()

    def _abandon_ahead(self, wanted: Collection[Key]) -> None:
        """Gives up everything read ahead that is not in ``wanted``."""
        self._wishes.clear()
        for key in [k for k in self._ready if k not in wanted]:
            self._arena.free.append(self._ready.pop(key).frame)
            self.stats.ahead_wasted += 1
        for key, flight in self._flights.items():
            if flight.ahead and flight.wanted and key not in wanted:
                flight.wanted = False
                assert flight.ticket is not None
                flight.ticket.abandon()

    # ---- reads ------------------------------------------------------------------------------------------------------

    def _start(self, key: Key, *, ahead: bool) -> None:
        plan = self._store.expert_plan(*key)
        frame = self._arena.free.pop()
        flight = self._flights[key] = _Flight(frame, plan, ahead, wanted=True)
        arrivals = self._arrivals

        def done(error: BaseException | None) -> None:
            arrivals.put(_Arrival(key, error, time.perf_counter()))

        try:
            # In a long pass guesses are nearly certain and no demand is waiting: they get the drives' full depth.
            prefetch = ahead and not self._long
            flight.ticket = self._store.reader.submit(plan, self._arena.view(frame), done, prefetch=prefetch)
        except BaseException:
            del self._flights[key]
            self._arena.free.append(frame)
            raise

    def _land(self, arrival: _Arrival) -> Lease | None:
        """Accounts for a finished read: a lease to hand out, or None when it failed or nobody wants it any more."""
        flight = self._flights.pop(arrival.key)
        if arrival.error is not None or not flight.wanted:
            self._arena.free.append(flight.frame)
            if flight.ahead and not flight.wanted:
                if arrival.error is None:
                    self.stats.ahead_wasted += 1
                else:
                    self.stats.ahead_cancelled += 1
            return None
        return Lease(arrival.key, self._arena.address(flight.frame) + flight.plan.view_offset, flight.frame)

    def _collect(self) -> None:
        """Accounts for what has arrived outside a fetch: reads ahead."""
        while True:
            try:
                arrival = self._arrivals.get_nowait()
            except queue.Empty:
                return
            lease = self._land(arrival)
            if lease is not None:
                self._ready[arrival.key] = lease

    def _evict_one(self) -> None:
        victim = self._policy.evict(self._leased)
        if victim is None:
            raise RuntimeError("every expert frame is leased; the caller must release before asking for more")
        self._arena.free.append(self._kept.pop(victim).frame)
        self.stats.evictions += 1


class Fetch:
    """The leases of one layer on their way; see ``ExpertStream.fetch``."""

    def __init__(self, stream: ExpertStream, layer: int, experts: Sequence[int]) -> None:
        self._stream = stream
        self._layer = layer
        self._experts = experts
        self._pending: set[Key] = set()
        self._waiting: deque[Key] = deque()
        self._resident: list[Lease] = []
        self._early: list[Lease] = []

    @property
    def submitted(self) -> bool:
        """Whether all reads of this layer have been given to the drives."""
        return not self._waiting

    @property
    def reading(self) -> bool:
        """Whether anything is still on its way."""
        return bool(self._waiting or self._pending)

    def __enter__(self) -> Fetch:
        stream, layer = self._stream, self._layer
        kept, leased, resident = stream._kept, stream._leased, self._resident
        stream._policy.begin_layer(layer, self._experts)
        waiting = self._waiting
        for expert in self._experts:
            key = (layer, expert)
            lease = kept.get(key)
            if lease is None:
                waiting.append(key)
            else:
                resident.append(lease)
                leased[key] = lease
        stream._missed[layer - stream._first] = bool(waiting)
        stats = stream.stats
        stats.tier_hits += len(resident)
        stats.tier_bytes += len(resident) * stream.blob_bytes
        self._entered = time.perf_counter()
        self._last_arrival = self._entered
        self._demanded = 0
        if waiting or stream._flights or stream._ready:
            self._begin_reads()
        return self

    def __exit__(self, failed: object = None, *_: object) -> None:
        stream = self._stream
        for key in self._pending:
            flight = stream._flights[key]
            assert flight.ticket is not None
            flight.ticket.cancel()
        while self._pending:
            # A frame is reusable only when no read can still write into it, so even a stop waits here.
            arrival = stream._arrivals.get()
            lease = stream._land(arrival)
            if arrival.key in self._pending:
                self._pending.discard(arrival.key)
                if lease is not None:
                    stream._arena.free.append(lease.frame)
            elif lease is not None:
                stream._ready[arrival.key] = lease
        for lease in self._early:
            stream._arena.free.append(lease.frame)
        if failed:
            # After an error or a stop nobody will give back what is leased.
            for key, lease in stream._leased.items():
                if key not in stream._kept:
                    stream._arena.free.append(lease.frame)
            stream._leased.clear()
        stream._quiet_since = self._last_arrival
        if self._demanded >= 4:
            seconds = (self._last_arrival - self._entered) / self._demanded
            stream._read_seconds += _SMOOTH * (seconds - stream._read_seconds) if stream._read_seconds else seconds

    def __iter__(self) -> Iterator[list[Lease]]:
        """Yields batches; raises SliceError for bytes missing, unreadable or corrupt, Interrupted on a stop."""
        stream = self._stream
        first = self._resident + self._early
        self._early = []
        for lease in first:
            stream._leased[lease.key] = lease
        # While reads wait for frames, a batch must not hold many of them until it is computed.
        size = _BATCH if self._waiting else max(1, len(first))
        for start in range(0, len(first), size):
            yield first[start : start + size]
            self._submit()
        while self._waiting or self._pending:
            self._submit()
            if self._pending or stream._flights:
                batch = self._arrived()
                if batch:
                    yield batch
            else:
                # Every frame is kept: make room, since a read must always be able to proceed.
                stream._evict_one()

    def _begin_reads(self) -> None:
        """Takes over what was read ahead, gives up the rest of it, and starts the other reads."""
        stream = self._stream
        index = self._layer - stream._first
        stream._measure_windows(index, self._entered)
        stream._prefetch.learn(index, set(self._experts))
        try:
            stream._collect()
            wanted = set(self._waiting)
            stream._abandon_ahead(wanted)
            stream._collect()
            missing: deque[Key] = deque()
            for key in self._waiting:
                lease = stream._ready.pop(key, None)
                flight = stream._flights.get(key)
                if lease is not None:
                    self._early.append(lease)
                elif flight is not None:
                    flight.wanted = True
                    self._pending.add(key)
                    assert flight.ticket is not None
                    flight.ticket.promote()
                else:
                    missing.append(key)
            self._count(len(self._early), ahead=len(self._early))
            self._waiting = missing
            self._submit()
        except BaseException:
            self.__exit__(True)
            raise

    def _submit(self) -> None:
        stream, waiting = self._stream, self._waiting
        while waiting and stream._arena.free:
            stream._start(waiting[0], ahead=False)
            self._pending.add(waiting.popleft())
            self._demanded += 1

    def _arrived(self) -> list[Lease]:
        stream, batch, ahead = self._stream, [], 0
        arrival: _Arrival | None = self._wait()
        while arrival is not None:
            mine = arrival.key in self._pending
            was_ahead = stream._flights[arrival.key].ahead
            lease = stream._land(arrival)
            if mine:
                self._pending.discard(arrival.key)
                self._last_arrival = max(self._last_arrival, arrival.when)
                if isinstance(arrival.error, ReadCancelled):
                    self._waiting.append(arrival.key)  # abandoned as a guess before it turned out to be right
                elif arrival.error is not None:
                    raise arrival.error
                else:
                    assert lease is not None
                    batch.append(lease)
                    stream._leased[arrival.key] = lease
                    ahead += was_ahead
            elif lease is not None:
                stream._ready[arrival.key] = lease
            try:
                arrival = stream._arrivals.get_nowait() if len(batch) < _BATCH else None
            except queue.Empty:
                arrival = None
        self._count(len(batch), ahead=ahead)
        return batch

    def _count(self, reads: int, *, ahead: int) -> None:
        stats = self._stream.stats
        stats.reads += reads
        stats.read_bytes += reads * self._stream.blob_bytes
        stats.ahead_used += ahead

    def _wait(self) -> _Arrival:
        started = time.perf_counter()
        try:
            while True:
                try:
                    return self._stream._arrivals.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    self._stream._stop.check()
        finally:
            self._stream.stats.wait_seconds += time.perf_counter() - started
