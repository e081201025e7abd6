"""One generation at a time: a bounded queue, followers of the same reply, and a memo of finished ones.

All bookkeeping happens on the event loop; the worker thread only runs the generation and appends pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from deltafin.server.errors import ApiError
from deltafin.server.pieces import Done, Failed, Piece, Text
from deltafin.text.grammar import ReplyForm


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that determines a reply.

    Attributes:
        key: a name for all of it.
        prompt: ids.
        max_new: most tokens to decide.
        stops: texts that end the content.
        thinking: whether the reply begins inside the thinking part; None: raw text.
        logprobs: how many rivals to report; None: no report.
        form: what the reply must look like.
        before: the ids that will stand before the reply when the client sends it back.
        resume_key: the client's idempotency key, when a cut reply is to be continued.
    """

    key: str
    prompt: tuple[int, ...]
    max_new: int
    stops: tuple[str, ...]
    thinking: bool | None
    logprobs: int | None
    form: ReplyForm | None
    before: tuple[int, ...] = ()
    resume_key: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt processing: tokens done and to do (behind those reused), and seconds left when known."""

    done: float
    total: int
    reused: int
    seconds_left: float | None


class Job:
    """One reply, being made or finished, with any number of followers."""

    def __init__(self, work: Work, loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.pieces: list[Piece] = []
        self.progress: Progress | None = None
        self.followers = 0
        self.cancelled = False
        self.created = int(time.time())
        self.started: float | None = None
        self._loop = loop
        self._wake: set[asyncio.Event] = set()

    @property
    def finished(self) -> bool:
        """Whether the last piece is there."""
        return bool(self.pieces) and isinstance(self.pieces[-1], Done | Failed)

    def publish(self, piece: Piece) -> None:
        """Appends a piece; from any thread."""
        self.pieces.append(piece)
        self._call_soon()

    def report(self, progress: Progress) -> None:
        """Replaces the progress; from any thread."""
        self.progress = progress
        self._call_soon()

    def _call_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone: the server is shutting down
            self._loop.call_soon_threadsafe(self.notify)

    def notify(self) -> None:
        """Wakes all followers; on the loop."""
        for event in self._wake:
            event.set()

    async def changed(self, event: asyncio.Event, timeout: float | None) -> bool:
        """Waits for news since ``event`` was cleared; False when ``timeout`` seconds passed without any."""
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            return False
        event.clear()
        return True

    def watch(self) -> asyncio.Event:
        """An event that is set whenever there is news."""
        event = asyncio.Event()
        event.set()
        self._wake.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        """Ends ``watch``."""
        self._wake.discard(event)

    @property
    def nbytes(self) -> int:
        """About how much memory the pieces take."""
        size = 200 * len(self.pieces) + 4 * len(self.work.prompt)
        for piece in self.pieces:
            if isinstance(piece, Text):
                size += 4 * len(piece.text) + sum(100 + 100 * len(r.top) for r in piece.logprobs)
        return size


class Memo:
    """Finished replies of identical requests, bounded in number and bytes."""

    def __init__(self, entries: int, limit: int) -> None:
        self._entries = entries
        self._limit = limit
        self._jobs: OrderedDict[str, tuple[Job, int]] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, key: str) -> Job | None:
        """The finished reply, marked as used."""
        if key not in self._jobs:
            return None
        self._jobs.move_to_end(key)
        return self._jobs[key][0]

    def put(self, job: Job) -> None:
        """Keeps a finished reply."""
        size = job.nbytes
        if self._entries <= 0 or size > self._limit:
            return
        self.nbytes += size - self._jobs.pop(job.work.key, (job, 0))[1]
        self._jobs[job.work.key] = (job, size)
        while len(self._jobs) > self._entries or self.nbytes > self._limit:
            self.nbytes -= self._jobs.popitem(last=False)[1][1]


class Scheduler:
    """Runs jobs one after another in a worker thread.

    Args:
        run: makes a job's reply, publishing pieces up to ``Done`` or ``Failed``; in the worker thread.
        stop: makes ``run`` return within one layer; from any thread.
        waiting: most jobs that wait while one runs.
        memo: finished replies.
    """

    def __init__(self, run: Callable[[Job], None], stop: Callable[[], None], *, waiting: int, memo: Memo) -> None:
        self._run = run
        self._stop = stop
        self._most_waiting = waiting
        self._memo = memo
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._by_key: dict[str, Job] = {}
        self._typical = 5.0  # seconds of a recent generation, for Retry-After
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="generation", daemon=True)
        self._thread.start()
        self.memo_hits = 0
        self.attached = 0

    @property
    def busy(self) -> bool:
        """Whether a generation runs."""
        return self._running is not None

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    def position(self, job: Job) -> int:
        """0 when running or finished, else the place in the queue from 1."""
        return self._waiting.index(job) + 1 if job in self._waiting else 0

    def submit(self, work: Work) -> Job:
        """A job for ``work``: finished already, running already, or new. The caller must ``leave`` it.

        Raises:
            ApiError: 429 when the queue is full.
        """
        job = self._memo.get(work.key)
        if job is not None:
            self.memo_hits += 1
        elif (job := self._by_key.get(work.key)) is not None:
            self.attached += 1
        else:
            # A job that is told to stop, or whose last piece a client has seen already, is about to make room.
            leaving = self._running is not None and (self._running.cancelled or self._running.finished)
            if self._running is not None and len(self._waiting) >= self._most_waiting + leaving:
                raise ApiError(
                    429,
                    "K3 is busy with another generation; try again later, or start the server with a longer --queue",
                    code="engine_busy",
                    headers={"Retry-After": str(self._retry_after())},
                )
            job = Job(work, self._loop)
            self._by_key[work.key] = job
            self._waiting.append(job)
            self._next()
        job.followers += 1
        return job

    def leave(self, job: Job) -> None:
        """A follower is done; the last one to leave an unfinished job ends it."""
        job.followers -= 1
        if job.followers > 0 or job.finished or job.cancelled:
            return
        job.cancelled = True
        self._forget(job)
        if job is self._running:
            self._stop()
        elif job in self._waiting:
            self._waiting.remove(job)
            self._renumbered()

    def close(self) -> None:
        """Ends what runs and waits for the worker."""
        for job in (*self._waiting, self._running):
            if job is not None:
                job.cancelled = True
        self._waiting.clear()
        self._stop()
        self._jobs.put(None)
        # The stop may fall between two passes of a job that has not looked yet.
        while self._thread.is_alive():
            self._stop()
            self._thread.join(0.05)

    def _next(self) -> None:
        if self._running is None and self._waiting:
            self._running = self._waiting.popleft()
            self._running.started = time.monotonic()
            self._jobs.put(self._running)
            self._running.notify()
            self._renumbered()

    def _renumbered(self) -> None:
        for job in self._waiting:
            job.notify()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not job.cancelled:
                    self._run(job)
            finally:
                if not job.finished:
                    job.publish(Failed(ApiError(500, "the generation ended without a result", code="engine_error")))
                try:
                    self._loop.call_soon_threadsafe(self._ended, job)
                except RuntimeError:  # the loop is gone: the server is shutting down
                    return

    def _ended(self, job: Job) -> None:
        self._running = None
        self._forget(job)
        if job.started is not None:
            self._typical += 0.3 * (time.monotonic() - job.started - self._typical)
        if isinstance(job.pieces[-1], Done) and not job.cancelled:
            self._memo.put(job)
        self._next()

    def _forget(self, job: Job) -> None:
        if self._by_key.get(job.work.key) is job:
            del self._by_key[job.work.key]

    def _retry_after(self) -> int:
        running = self._running
        left = self._typical
        if running is not None and running.started is not None:
            left = max(self._typical - (time.monotonic() - running.started), 1.0)
            progress = running.progress
            if progress is not None and progress.seconds_left is not None and progress.done < progress.total:
                left = max(left, progress.seconds_left)
        return min(600, max(1, math.ceil(left + self._typical * len(self._waiting))))
