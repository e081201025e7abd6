"""Direct, verified, prioritised reads: one queue and a few worker threads per drive.

A plan's extents become requests on their drives' queues. Workers take demand before prefetch, read straight
into the caller's buffer, and check each extent's xxh3_64 before the plan counts as done. Both the read and
the checksum run without the interpreter lock. A request whose bytes also lie on another drive stands in that drive's
queue too, behind everything the drive must read itself: whoever is free first reads it, so a drive that is slow or busy
is helped for as long as it is, and no speed has to be guessed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import xxhash

from deltafin.errors import ReadError, SliceCorruptError, SliceError
from deltafin.macos.priority import raise_thread
from deltafin.store.direct import DirectFile
from deltafin.store.types import PAGE, DriveInfo, DriveStats, Extent, ReadCancelled, ReadPlan

PREFETCH_DEPTH = 2
"""Requests of prefetches in flight per drive: what a demand read may have to wait for at most."""
if TYPE_CHECKING:
    from deltafin.store.recovery import Recovery

DEFAULT_DEPTH = 4
"""Requests in flight per drive: enough to keep a consumer NVMe drive at its sequential limit with megabyte
reads."""

PIECE_BYTES = 4 << 20
"""Longer extents are read as several requests, so that a lone expert still uses the drive's depth."""

SWITCH_SECONDS = 0.0005
"""How long a thread that computes in Python may keep a drive's worker waiting."""

RETRIES = 2
"""Times a failed or corrupt read is repeated: cables and hubs fail once; a bad cell fails every time."""

REPAIR = "list all damage with deltafin store verify HOME; mend it with deltafin store repair HOME --model DIR"
_log = logging.getLogger(__name__)

OnDone = Callable[[BaseException | None], None]


class Ticket:
    """One submitted read."""

    __slots__ = (
        "_buffer",
        "_error",
        "_lock",
        "_on_done",
        "_pieces",
        "_plan",
        "_prefetch",
        "_reader",
        "_remaining",
        "_started",
        "unwanted",
    )

    def __init__(self, reader: Reader, plan: ReadPlan, buffer: memoryview, on_done: OnDone, prefetch: bool) -> None:
        self._reader = reader
        self._plan = plan
        self._buffer: memoryview | None = buffer
        self._on_done = on_done
        self._lock = threading.Lock()
        self._pieces = [] if plan.absent else _pieces(self, plan)
        self._remaining = len(self._pieces) or 1
        self._started = plan.absent
        self._prefetch = prefetch
        self._error: BaseException | None = None
        self.unwanted = False  # cancelled too late: if its drive is away, nobody waits for it

    def cancel(self) -> bool:
        """Takes the read back if none of it has started.

        Returns:
            True when nothing of it will run; ``on_done(ReadCancelled())`` has then been called, in this thread. False
            when it is under way or over; it then completes as usual.
        """
        with self._lock:
            self.unwanted = True
            if self._started or self._remaining == 0:
                return False
            self._remaining = 0
            self._buffer = None
        self._deliver(ReadCancelled(self._plan.name))
        return True

    def abandon(self) -> None:
        """Takes back whatever has not started: nobody wants the bytes any more.

        ``on_done`` is called with ``ReadCancelled`` as soon as nothing is in flight into the buffer, in this thread or
        in a worker's; a read of which everything has started completes as usual.
        """
        with self._lock:
            self.unwanted = True
            if self._remaining == 0 or self._plan.absent:
                return
            waiting = [piece for piece in self._pieces if not piece.claimed]
            if not waiting:
                return
            for piece in waiting:
                piece.claimed = True
            self._started = True
            self._error = self._error or ReadCancelled(self._plan.name)
            self._remaining -= len(waiting)
            if self._remaining:
                return
            self._buffer = None
        self._deliver(self._error)

    def promote(self) -> None:
        """Moves what has not started of a prefetch to demand priority; harmless otherwise."""
        with self._lock:
            self._prefetch = False
            waiting = [piece for piece in self._pieces if not piece.claimed] if self._remaining else []
        # A piece may now stand in both queues; whoever takes it second finds it claimed.
        for piece in waiting:
            self._reader._put(piece, prefetch=False)

    def _claim(self, piece: _Piece) -> memoryview | None:
        """The buffer to read into; None when the piece is taken, or nothing is left to do for it."""
        with self._lock:
            if piece.claimed or self._buffer is None:
                return None
            piece.claimed = True
            self._started = True
            if self._error is None:
                return self._buffer
        self._settle(None)
        return None

    def _last_of(self, group: list[int]) -> bool:
        """Accounts for one read piece of an extent; True for the last, whose reader verifies the extent."""
        with self._lock:
            group[0] -= 1
            return group[0] == 0

    def _settle(self, error: BaseException | None) -> None:
        """Accounts for one claimed piece."""
        with self._lock:
            if error is not None and self._error is None:
                self._error = error
            self._remaining -= 1
            if self._remaining:
                return
            buffer, self._buffer = self._buffer, None
        recovery = self._reader.recovery
        # A failed prefetch is nobody's loss: if the bytes are needed, a demand read meets the same failure.
        if self._error is not None and recovery is not None and not (self._prefetch or self.unwanted):  # noqa: SIM102
            if buffer is not None and recovery.take(self, buffer, self._error):
                return
        del buffer
        self._deliver(self._error)

    @property
    def plan(self) -> ReadPlan:
        """What is read."""
        return self._plan

    def finish(self, error: BaseException | None) -> None:
        """Ends a read that a recovery had taken over."""
        self._deliver(error)

    def _deliver(self, error: BaseException | None) -> None:
        try:
            self._on_done(error)
        except Exception:
            _log.exception("the completion callback for %s failed", self._plan.name)


class _Piece:
    """One request: a range of one extent."""

    __slots__ = ("begin", "claimed", "extent", "group", "length", "queued", "ticket")

    def __init__(self, ticket: Ticket, extent: Extent, begin: int, length: int, group: list[int]) -> None:
        self.ticket = ticket
        self.extent = extent
        self.begin = begin  # relative to the extent
        self.length = length
        self.group = group  # [unread pieces of the same extent], shared by them
        self.claimed = False
        self.queued = 0.0


def _pieces(ticket: Ticket, plan: ReadPlan) -> list[_Piece]:
    pieces = []
    for extent in plan.extents:
        if extent.length <= PIECE_BYTES:
            pieces.append(_Piece(ticket, extent, 0, extent.length, [1]))
            continue
        lead = extent.offset % PAGE  # cut on page boundaries of the file
        ends = [*range(PIECE_BYTES - lead, extent.length, PIECE_BYTES), extent.length]
        group = [len(ends)]
        begin = 0
        for end in ends:
            pieces.append(_Piece(ticket, extent, begin, end - begin, group))
            begin = end
    return pieces


class _Queue:
    """Requests of one drive in two priorities, its limits and its counters."""

    def __init__(self, drive: DriveInfo, max_bytes_per_s: float | None) -> None:
        self.drive = drive
        self.demand: deque[_Piece] = deque()
        self.prefetch: deque[_Piece] = deque()
        self.helping: deque[_Piece] = deque()  # demand of other drives, of which this one holds a replica
        self.tokens: SimpleQueue[bool] = SimpleQueue()  # one True per queued piece; False stops a worker
        self.limit = RateLimit(max_bytes_per_s) if max_bytes_per_s else None
        self.lock = threading.Lock()
        self.bytes = self.reads = self.retries = self.active = self.prefetching = self.helped = 0
        self.busy = self.waited = self.busy_since = 0.0

    def put(self, piece: _Piece, *, prefetch: bool) -> None:
        piece.queued = time.perf_counter()
        (self.prefetch if prefetch else self.demand).append(piece)
        self.tokens.put(True)

    def help(self, piece: _Piece) -> None:
        """Offers a piece of another drive."""
        self.helping.append(piece)
        self.tokens.put(True)

    def take(self) -> tuple[_Piece, bool] | None:
        """The next piece and whether it is a prefetch (then ``prefetch_over`` must follow)."""
        # A token stands for every piece, and deques pop atomically: no lock is needed here.
        for pieces in (self.demand, self.helping):
            try:
                return pieces.popleft(), False
            except IndexError:
                pass
        with self.lock:
            if self.prefetching >= PREFETCH_DEPTH or not self.prefetch:
                return None
            self.prefetching += 1
            return self.prefetch.popleft(), True

    def prefetch_over(self) -> None:
        """A piece taken from the prefetches is done: one that had to wait for it may be taken now."""
        with self.lock:
            self.prefetching -= 1
        self.tokens.put(True)

    def begin(self, queued: float) -> None:
        now = time.perf_counter()
        with self.lock:
            self.waited += now - queued
            if not self.active:
                self.busy_since = now
            self.active += 1

    def end(self, nbytes: int, retries: int, *, helped: bool) -> None:
        with self.lock:
            self.bytes += nbytes
            self.helped += nbytes * helped
            self.reads += 1 + retries
            self.retries += retries
            self.active -= 1
            if not self.active:
                self.busy += time.perf_counter() - self.busy_since

    def busy_seconds(self) -> float:
        with self.lock:
            return self.busy + (time.perf_counter() - self.busy_since if self.active else 0.0)


class RateLimit:
    """Makes the threads that share it look like a drive of a given bandwidth.

    Each transfer occupies the virtual drive for ``nbytes / rate`` seconds after the previous one. A late caller may
    catch up ``CREDIT`` seconds, which absorbs the scheduler's oversleeping without letting the average exceed the rate.
    """

    CREDIT = 0.005

    def __init__(self, bytes_per_s: float) -> None:
        self._seconds_per_byte = 1.0 / bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def book(self, nbytes: int) -> float:
        """Reserves the next turn; returns the ``perf_counter`` time at which it ends."""
        with self._lock:
            start = max(self._free_at, time.perf_counter() - self.CREDIT)
            self._free_at = start + nbytes * self._seconds_per_byte
            return self._free_at

    @staticmethod
    def wait(until: float) -> None:
        """Sleeps until a booked turn is over."""
        while (left := until - time.perf_counter()) > 0:
            time.sleep(left)


class Reader:
    """Reads plans into caller-provided buffers.

    Args:
        drives: in index order.
        files: (drive, path) in index order; opened on first use.
        depth: requests in flight per drive.
        max_bytes_per_s: limit by drive index, for simulating slow drives.
    """

    def __init__(
        self,
        drives: Sequence[DriveInfo],
        files: Sequence[tuple[int, Path]],
        *,
        depth: int | None = None,
        max_bytes_per_s: Mapping[int, float] | None = None,
    ) -> None:
        limits = max_bytes_per_s or {}
        self._queues = [_Queue(drive, limits.get(drive.index)) for drive in drives]
        self._paths = list(files)
        self._files: list[DirectFile | None] = [None] * len(files)
        self._open_lock = threading.Lock()
        self._closed = False
        # Between reads a worker needs the interpreter for microseconds. By default it would wait five milliseconds
        # for it whenever another thread computes in Python: 64 small reads took 138 ms instead of 13.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._dead: list[DirectFile] = []
        self.recovery: Recovery | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"drive-{queue.drive.index}", daemon=True)
            for queue in self._queues
            for _ in range(depth or DEFAULT_DEPTH)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, plan: ReadPlan, buffer: memoryview, on_done: OnDone, *, prefetch: bool = False) -> Ticket:
        """Starts reading ``plan`` into ``buffer``.

        Args:
            plan: what to read.
            buffer: writable bytes, page-aligned, at least ``plan.buffer_bytes`` long; not touched by the caller until
                ``on_done``.
            on_done: called exactly once, from a worker thread (or from the thread that calls ``Ticket.cancel`` or
                ``close``), with None or the first error, after everything in flight into ``buffer`` has stopped. It
                must be quick and must not raise.
            prefetch: queue behind all demand reads.

        Errors reach ``on_done``: ``ReadError`` (the system could not read), ``SliceCorruptError`` (bytes differ from
        the manifest), ``ReadCancelled``.

        Raises:
            ValueError: the buffer is too small or not aligned.
            RuntimeError: the reader is closed.
        """
        if buffer.nbytes < plan.buffer_bytes:
            raise ValueError(f"the buffer has {buffer.nbytes} bytes, {plan.name} needs {plan.buffer_bytes}")
        if ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % PAGE:
            raise ValueError("the buffer is not page-aligned")
        if self._closed:
            raise RuntimeError("the reader is closed")
        ticket = Ticket(self, plan, buffer, on_done, prefetch)
        if plan.absent and (prefetch or self.recovery is None or not self.recovery.take(ticket, buffer, None)):
            ticket.finish(ReadCancelled(plan.name))  # guesses are not worth a fetch
        for piece in ticket._pieces:
            self._put(piece, prefetch=prefetch)
        return ticket

    def _put(self, piece: _Piece, *, prefetch: bool) -> None:
        self._queues[piece.extent.drive].put(piece, prefetch=prefetch)
        # Guesses fill idle time only, of which a drive that helps has none to spare.
        if piece.extent.replica is not None and not prefetch:
            self._queues[piece.extent.replica.drive].help(piece)

    def path(self, file: int) -> Path:
        """The file with this index."""
        return self._paths[file][1]

    def stats(self) -> list[DriveStats]:
        """Counters of every drive since opening."""
        stats = []
        for queue in self._queues:
            files = zip(self._files, self._paths, strict=True)
            opened = [file for file, (drive, _) in files if file and drive == queue.drive.index]
            stats.append(
                DriveStats(
                    drive=queue.drive.index,
                    path=queue.drive.path,
                    bytes=queue.bytes,
                    reads=queue.reads,
                    busy_seconds=queue.busy_seconds(),
                    wait_seconds=queue.waited,
                    retries=queue.retries,
                    direct=all(f.direct for f in opened),
                    fallback=next((f.fallback for f in opened if f.fallback), ""),
                    helped_bytes=queue.helped,
                )
            )
        return stats

    def close(self) -> None:
        """Cancels what has not started, waits for what has, stops the threads and closes the files.
        Idempotent."""
        if self._closed:
            return
        self._closed = True
        for queue in self._queues:
            for pieces in (queue.demand, queue.helping, queue.prefetch):
                while pieces:
                    try:
                        piece = pieces.popleft()
                    except IndexError:  # a worker was quicker
                        break
                    if piece.ticket._claim(piece) is not None:
                        piece.ticket._settle(ReadCancelled(piece.ticket._plan.name))
        for queue in self._queues:
            for _ in self._threads:
                queue.tokens.put(False)
        for thread in self._threads:
            thread.join()
        for file in (*self._files, *self._dead):
            if file is not None:
                file.close()

    def reopen(self, drive: int, place: Path) -> None:
        """Lets later reads open the files of ``drive`` anew below ``place``: descriptors from before it went away stay
        dead."""
        with self._open_lock:
            queue = self._queues[drive]
            before, queue.drive = queue.drive.path, replace(queue.drive, path=place)
            for index, (owner, path) in enumerate(self._paths):
                if owner != drive:
                    continue
                self._paths[index] = (owner, place / path.relative_to(before))
                file = self._files[index]
                if file is not None:
                    self._dead.append(file)  # other threads may still be in it
                    self._files[index] = None

    def _work(self, queue: _Queue) -> None:
        raise_thread()
        while queue.tokens.get():
            taken = queue.take()
            if taken is None:
                continue
            self._serve(queue, taken[0])
            if taken[1]:
                queue.prefetch_over()
            del taken  # it would pin the caller's memory while this thread waits for its next request

    def _serve(self, queue: _Queue, piece: _Piece) -> None:
        ticket = piece.ticket
        buffer = ticket._claim(piece)
        if buffer is None:
            return
        queue.begin(piece.queued)
        error: BaseException | None = None
        retries = 0
        helping = queue.drive.index != piece.extent.drive
        try:
            retries = self._perform(piece, buffer, queue.limit, helping=helping)
        except SliceError as e:
            error = e.with_traceback(None)  # the frames in it would pin the buffer
            error.__context__ = None
        except BaseException as e:
            error = e
        queue.end(0 if error else piece.length, retries, helped=helping)
        del buffer  # nothing of ours may pin the memory once the owner is told
        ticket._settle(error)

    def _perform(self, piece: _Piece, buffer: memoryview, limit: RateLimit | None, *, helping: bool) -> int:
        """Reads one piece and, when it is the last of its extent, verifies the extent. Returns the retries it took."""
        extent = piece.extent
        both = [extent] if extent.replica is None else [extent, extent.replica]
        turn = limit.book(piece.length) if limit else 0.0
        retries = self._read_any(both[::-1] if helping else both, piece.begin, piece.length, buffer)
        if limit:
            limit.wait(turn)
        if not piece.ticket._last_of(piece.group):
            return retries
        while xxhash.xxh3_64_intdigest(buffer[extent.at : extent.at + extent.length]) != extent.checksum:
            if retries >= RETRIES:
                raise SliceCorruptError(
                    f"{self._where(extent)}: the bytes of {piece.ticket._plan.name} differ from the recorded checksum",
                    remedy=REPAIR,
                )
            retries += 1
            # Pieces may have come from both copies: from here on all bytes come from one, the first copy first.
            self._read_any(both if retries % 2 else both[::-1], 0, extent.length, buffer)
        return retries

    def _read_any(self, copies: Sequence[Extent], begin: int, length: int, buffer: memoryview) -> int:
        """Reads a range of an extent from the first of its copies that can be read. Returns the retries it took."""
        for copy in copies[:-1]:
            try:
                return self._read(copy, begin, length, buffer)
            except ReadError as e:
                _log.warning("%s; reading its replica", e.message)
        return self._read(copies[-1], begin, length, buffer)

    def _read(self, extent: Extent, begin: int, length: int, buffer: memoryview) -> int:
        """Reads a range of an extent into its place. Returns the retries it took."""
        offset = extent.offset + begin
        lead = offset % PAGE
        low = extent.at + begin - lead
        high = low + -(-(lead + length) // PAGE) * PAGE
        for attempt in range(RETRIES + 1):
            try:
                self._file(extent.file).read(buffer[low:high], offset - lead, lead + length)
                return attempt
            except EOFError as e:
                raise ReadError(f"{self._where(extent)}: {e}, before the slice's end", remedy=REPAIR) from None
            except OSError as e:
                if attempt == RETRIES:
                    raise ReadError(f"{self._where(extent)}: {e.strerror or e}", remedy=REPAIR) from None
        raise AssertionError("unreachable")

    def _file(self, index: int) -> DirectFile:
        file = self._files[index]
        if file is None:
            with self._open_lock:
                file = self._files[index]
                if file is None:
                    file = self._files[index] = DirectFile(self._paths[index][1])
        return file

    def _where(self, extent: Extent) -> str:
        path = self._paths[extent.file][1]
        return f"drive {extent.drive}, {path}, bytes {extent.offset} to {extent.offset + extent.length}"


def raise_file_limit(files: int) -> None:
    """Lets this process hold ``files`` more open files where the system allows it (macOS starts at 256)."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError):
            _log.debug("the limit of open files stays at %d (pid %d)", soft, os.getpid())
