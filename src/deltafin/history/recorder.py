"""Collects the routes of committed tokens during a run and hands them on at intervals: to the heat file and a trace."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deltafin.history import heat
from deltafin.history.trace import TraceWriter

FLUSH_TOKENS = 256
FLUSH_SECONDS = 20.0
"""Most that a kill may lose."""

_log = logging.getLogger(__name__)


class RouteRecorder:
    """Keeps committed routes until an interval is over.

    Attributes:
        problem: why an existing heat file was not used; empty otherwise.

    Args:
        seen: an empty histogram of the right shape.
        heat_file: where heat is merged into; None keeps none.
        trace: receives every route; None records none.
    """

    def __init__(self, seen: heat.Heat, heat_file: Path | None, trace: TraceWriter | None) -> None:
        self.problem = ""
        self._seen = seen
        self._heat_file = heat_file
        self._trace = trace
        self._held: list[npt.NDArray[np.int32]] = []
        self._tokens = 0
        self._new_sequence = True
        self._flushed = time.monotonic()

    def observe(self, routes: npt.NDArray[np.int32]) -> None:
        """Takes committed tokens' routes [tokens, layers, k]; keeps the array."""
        if self._heat_file is None and self._trace is None:
            return
        self._held.append(routes)
        self._tokens += len(routes)
        if self._tokens >= FLUSH_TOKENS or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def new_sequence(self) -> None:
        """The next token begins a conversation that does not continue the last one."""
        if self._held:
            self.flush()
        self._new_sequence = True

    def flush(self, *, last: bool = False) -> None:
        """Hands on what is held; ``last`` waits for other writers of the heat file."""
        self._flushed = time.monotonic()
        if self._held:
            routes = np.concatenate(self._held)
            self._held, self._tokens = [], 0
            self._seen.add(routes)
            if self._trace is not None:
                try:
                    self._trace.write(routes, new_sequence=self._new_sequence)
                except OSError as e:
                    # The text matters more than its trace.
                    _log.warning("the router trace ends here: %s", e)
                    self._trace.close()
                    self._trace = None
            self._new_sequence = False
        if self._heat_file is None or not self._seen.total_tokens:
            return
        if heat.merge(self._heat_file, self._seen, wait=last):
            shape = self._seen.counts.shape
            self._seen = heat.Heat.empty(self._seen.model, *shape)

    def close(self) -> None:
        """Flushes and closes the trace."""
        self.flush(last=True)
        if self._trace is not None:
            self._trace.close()
