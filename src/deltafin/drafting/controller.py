"""One session's drafting: asks a source for guesses, lets the economics choose the width, and survives any failure.

Whatever goes wrong in a draft ends drafting for the session and nothing else; the reason is kept for the stats.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from deltafin.contract import Host, Native
from deltafin.drafting.economics import DraftReport, Economics, PassCost
from deltafin.drafting.proposal import Proposal


class DraftSource(Protocol):
    """Where guesses come from. Anything may be raised; it ends drafting and nothing else.

    Attributes:
        name: for stats, e.g. ``dspark``.
    """

    name: str

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """Guesses up to ``count`` tokens after ``tokens``, whose last one the target has not processed yet."""

    def commit(self, tokens: Sequence[int], taps: Sequence[Native]) -> None:
        """Told of newly committed ``tokens``.

        Args:
            taps: the target's accumulators at the tapped layers, native bf16 [n, hidden] each, of the last n of
                ``tokens`` (all of them except in long prompts).
        """

    def reset(self, position: int) -> None:
        """The next committed token is the one at ``position``; earlier ones are unknown or of no use."""

    def tensors(self) -> Sequence[tuple[str, Host]]:
        """What the source remembers of the committed tokens, as named views; empty when it needs nothing."""

    def restore(self, position: int, tensors: Mapping[str, Host]) -> None:
        """The sequence continues behind ``position`` tokens; ``tensors`` are those of ``tensors()`` then."""


class DraftController:
    """Stands between the generation loop and a source.

    Args:
        source: proposes.
        economics: decides.
        vocab_size: ids outside are cut off with everything behind them.

    Attributes:
        failure: why drafting ended, or None.
    """

    def __init__(self, source: DraftSource, economics: Economics, *, vocab_size: int) -> None:
        self._source = source
        self._economics = economics
        self._vocab_size = vocab_size
        self._last = Proposal((), ())
        self._draft_seconds = 0.0
        self.failure: str | None = None

    @property
    def name(self) -> str:
        """The source's name."""
        return self._source.name

    @property
    def report(self) -> DraftReport:
        """Figures so far."""
        return self._economics.report

    @property
    def economics(self) -> Economics:
        """The policy, for its estimates."""
        return self._economics

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Proposals worth verifying after ``tokens``; empty when there are none or they would not pay."""
        economics = self._economics
        limit = min(limit, economics.max_width)
        if self.failure is not None or limit <= 0 or not economics.wants_draft():
            return []
        started = time.perf_counter()
        try:
            proposal = self._valid(self._source.propose(tokens, limit), limit)
        except Exception as e:
            self._fail(e)
            return []
        self._draft_seconds = time.perf_counter() - started
        economics.observe_draft(self._draft_seconds)
        if proposal.confidence:
            width = economics.width(proposal.confidence)
        else:
            width = economics.choose(economics.probabilities_by_position(len(proposal.tokens)))
        self._last = Proposal(proposal.tokens[:width], proposal.confidence[:width])
        if not width:
            economics.decline()
        return list(self._last.tokens)

    def observe(self, cost: PassCost, accepted: int, committed: int) -> None:
        """Told after each decoding pass: its cost, the accepted proposals and the decided tokens."""
        offered = len(self._last.tokens)
        self._economics.observe_pass(cost)
        if offered:
            seconds = cost.seconds + self._draft_seconds
            self._economics.observe_step(offered, accepted, self._last.confidence, committed, seconds)
        self._last = Proposal((), ())

    def commit(self, tokens: Sequence[int], taps: Sequence[Native]) -> None:
        """Told of committed tokens, prefill included; see ``DraftSource.commit``."""
        if self.failure is not None or not tokens:
            return
        try:
            self._source.commit(tokens, taps)
        except Exception as e:
            self._fail(e)

    def reset(self, position: int = 0) -> None:
        """The sequence continues at ``position`` without what came before; a failed source gets another chance."""
        self.failure = None
        self._last = Proposal((), ())
        try:
            self._source.reset(position)
        except Exception as e:
            self._fail(e)

    def tensors(self) -> Sequence[tuple[str, Host]]:
        """What the source remembers, to be kept with K3's state; empty after a failure."""
        if self.failure is not None:
            return []
        try:
            return self._source.tensors()
        except Exception as e:
            self._fail(e)
            return []

    def restore(self, position: int, tensors: Mapping[str, Host]) -> None:
        """Continues behind ``position`` tokens with saved ``tensors``, or from there on when they are not usable."""
        self.reset(position)
        if tensors and self.failure is None:
            try:
                self._source.restore(position, tensors)
            except Exception:
                self.reset(position)

    def _valid(self, proposal: Proposal, limit: int) -> Proposal:
        """The usable beginning of what a source returned, whatever it is."""
        tokens: list[int] = []
        for token in itertools.islice(proposal.tokens, limit):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                break
            tokens.append(token)
        confidence = tuple(itertools.islice(proposal.confidence, len(tokens)))
        if len(confidence) < len(tokens) or not all(type(p) is float and 0.0 <= p <= 1.0 for p in confidence):
            confidence = ()
        return Proposal(tuple(tokens), confidence)

    def _fail(self, error: Exception) -> None:
        self.failure = f"{self._source.name} failed: {error}"
        self._last = Proposal((), ())
