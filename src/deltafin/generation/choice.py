"""K3's choice at a position: the largest logit among the allowed ids; and how probable it and its rivals were."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from deltafin.contract import Rows
from deltafin.generation.events import TokenLogprobs

Row = npt.NDArray[np.float32]


class Constraint(Protocol):
    """What the reply must look like. It is told of each decided token, in order, and of no other."""

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """Which ids may come next, bool [vocab] with at least one True; None: every one."""

    def accept(self, token: int) -> None:
        """``token`` was decided."""


class Decided(NamedTuple):
    """A decided token; see ``TokenDecided``."""

    token: int
    margin: float
    drafted: bool
    logprobs: TokenLogprobs | None


class Chooser:
    """Decides rows in order.

    Args:
        constraint: what is allowed; None: everything.
        logprobs: how many of the most probable ids to report with every token; None: report nothing.
    """

    def __init__(self, constraint: Constraint | None = None, logprobs: int | None = None) -> None:
        self._constraint = constraint
        self._logprobs = logprobs

    def choose(self, logits: Row, proposal: int | None = None) -> Decided:
        """K3's choice: the largest allowed logit, the smallest id among equals; and its distance to the runner-up.

        Args:
            logits: fp32 [vocab].
            proposal: what a draft expected here.
        """
        values = logits
        if self._constraint is not None and (allowed := self._constraint.allowed()) is not None:
            values = np.where(allowed, logits, np.float32(-np.inf))
        token = int(np.argmax(values))
        best, second = values[token], np.float32(-np.inf)
        if len(values) > 1:
            second = max(values[:token].max(initial=-np.inf), values[token + 1 :].max(initial=-np.inf))
        if self._constraint is not None:
            self._constraint.accept(token)
        report = None if self._logprobs is None else logprobs_of(logits, token, self._logprobs)
        return Decided(token, float(best - second), token == proposal, report)

    def verify(self, logits: Rows, proposals: Sequence[int], stop: Collection[int]) -> list[Decided]:
        """K3's own choices for as long as the proposals agree with them, ending after the first stop token.

        Args:
            logits: row i belongs to the position after which ``proposals[i]`` was proposed, [len(proposals) + 1,
                vocab].

        Returns:
            At least one.
        """
        decided = []
        for i, row in enumerate(logits):
            decided.append(self.choose(row, proposals[i] if i < len(proposals) else None))
            if not decided[-1].drafted or decided[-1].token in stop:
                break
        return decided


def logprobs_of(logits: Row, token: int, count: int) -> TokenLogprobs:
    """Natural logarithms of probabilities under K3's own distribution, whatever was allowed.

    Args:
        logits: fp32 [vocab].
        count: how many of the most probable ids; the smaller id first among equals.
    """
    values = logits.astype(np.float64)
    peak = values.max()
    total = peak + np.log(np.exp(values - peak).sum())
    top = np.argpartition(-values, min(count, len(values) - 1))[:count] if count else np.empty(0, np.int64)
    if count:
        # Of several ids that share the last place, the partition keeps any; take them by id.
        least = values[top].min()
        candidates = np.flatnonzero(values >= least)
        top = candidates[np.lexsort((candidates, -values[candidates]))][:count]
    return TokenLogprobs(float(values[token] - total), tuple((int(i), float(values[i] - total)) for i in top))
