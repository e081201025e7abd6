"""Direct, verified, prioritised reads: one queue and a few worker threads per drive."""

from __future__ import annotations

from collections.abc import Callable

from deltafin.store.types import DriveStats, ReadPlan


class Ticket:
    """One submitted read."""

    def cancel(self) -> bool:
        """Takes the read back if none of it has started; its ``on_done`` is then called with
        ``ReadCancelled``."""
        raise NotImplementedError

    def promote(self) -> None:
        """Moves a prefetch to demand priority."""
        raise NotImplementedError


class Reader:
    """Reads plans into caller-provided buffers."""

    def submit(
        self,
        plan: ReadPlan,
        buffer: memoryview,
        on_done: Callable[[BaseException | None], None],
        *,
        prefetch: bool = False,
    ) -> Ticket:
        """Starts reading ``plan`` into ``buffer``.

        Args:
            plan: what to read.
            buffer: writable, page-aligned, at least ``plan.buffer_bytes`` long; not touched by the caller
                until ``on_done``.
            on_done: called exactly once, from a worker thread (or from ``cancel``/``close``), with None or
                the first error, after everything in flight into ``buffer`` has stopped.
            prefetch: queue behind all demand reads.
        """
        raise NotImplementedError

    def stats(self) -> list[DriveStats]:
        """Counters of every drive since opening."""
        raise NotImplementedError
