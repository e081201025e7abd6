"""A flag that asks long work to end at the next safe point."""

from __future__ import annotations

import threading

from deltafin.errors import Interrupted


class StopFlag:
    """Set from a signal handler or another thread; polled between layers and while waiting for reads."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Asks the work to stop."""
        self._event.set()

    def clear(self) -> None:
        """Makes the flag usable for the next run."""
        self._event.clear()

    def is_set(self) -> bool:
        """Whether a stop was asked for."""
        return self._event.is_set()

    def check(self) -> None:
        """Raises ``Interrupted`` when a stop was asked for."""
        if self._event.is_set():
            raise Interrupted("stopped on request")
