"""One conversation: its tokens, its state, and the loop that extends them.

``generate`` is a plain generator of events. Each step runs K3 over the pending token and whatever a draft proposed
after it, keeps the longest prefix that K3 would have said itself, and takes K3's own choice as the next pending token.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from deltafin.drafting.controller import DraftController
from deltafin.drafting.economics import PassCost
from deltafin.errors import InputError, Interrupted
from deltafin.generation.events import (
    DriveBytes,
    Event,
    Finished,
    FinishReason,
    GenerationStats,
    PhaseStats,
    PrefillProgress,
    TokenDecided,
)
from deltafin.model.state import SequenceState

if TYPE_CHECKING:
    from deltafin.generation.engine import Engine


class Session:
    """Tokens and state of one sequence.

    Attributes:
        tokens: every token of the sequence; the state covers the first ``state.position`` of them.
        state: K3's state.
        drafter: proposes tokens for this conversation, or None.
    """

    def __init__(self, engine: Engine, drafter: DraftController | None = None) -> None:
        self._engine = engine
        self.drafter = drafter
        self.tokens: list[int] = []
        self.state = SequenceState.empty(engine.config, engine.plan.context)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new: int,
        stop: Collection[int],
    ) -> Iterator[Event]:
        """Extends the sequence greedily from ``prompt``.

        ``prompt`` is the whole sequence so far; where it begins with tokens whose state is here, only the rest is
        processed. The stop flag of the engine ends the run at the next safe point with reason ``interrupted``; the
        session stays usable.

        Args:
            prompt: vocabulary ids, at least one.
            max_new: most tokens to decide, at least 1.
            stop: ids after which the generation ends.

        Yields:
            ``PrefillProgress``, then ``TokenDecided``, then exactly one ``Finished``.

        Raises:
            InputError: empty prompt, id outside the vocabulary, or no room in the context.
            SliceError: bytes missing, unreadable or corrupt; the session stays at its last committed position.
        """
        engine = self._engine
        meter = _Meter(engine)
        self._adopt(prompt)
        prefill: PhaseStats | None = None
        reason: FinishReason = "length"
        new = 0
        try:
            logits = yield from self._prefill(meter)
            prefill = meter.phase(len(self.tokens) - self._reused)
            decided = [(*_choose(logits[-1]), False)]
            while True:
                # The session must know every committed token even if the consumer stops listening in the middle of a
                # batch.
                self.tokens += [token for token, _, _ in decided]
                for token, margin, drafted in decided:
                    yield TokenDecided(token, new, margin, meter.elapsed, drafted)
                    new += 1
                if self.tokens[-1] in stop:
                    reason = "stop"
                    break
                if new >= max_new or self.state.position + 1 > self.state.context:
                    break
                proposals = self._proposals(max_new - new - 1)
                meter.start_pass()
                logits = engine.target.forward([self.tokens[-1], *proposals], self.state, partial=bool(proposals))
                cost = meter.pass_cost(1 + len(proposals))
                decided = _verify(logits, proposals, stop)[: max_new - new]
                self._commit([self.tokens[-1], *(token for token, _, _ in decided[:-1])])
                if self.drafter is not None:
                    self.drafter.observe(cost, sum(drafted for _, _, drafted in decided), len(decided))
        except Interrupted:
            reason = "interrupted"
            engine.stop.clear()
        last = meter.phase(new)
        if prefill is None:
            prefill, last = last, meter.phase(0)
        yield Finished(reason, new, GenerationStats(prefill, last))

    def _adopt(self, prompt: Sequence[int]) -> None:
        """Makes ``prompt`` the session's tokens, keeping the state when it covers a proper prefix of them."""
        if not prompt:
            raise InputError("the prompt is empty", remedy="give at least one token of text")
        if not all(0 <= t < self._engine.config.vocab_size for t in prompt):
            raise InputError(
                "the prompt holds a token id outside the vocabulary", remedy="use the install's own tokenizer"
            )
        if len(prompt) > self.state.context:
            raise InputError(
                f"the prompt has {len(prompt)} tokens and this memory plan holds {self.state.context}",
                remedy="shorten the prompt, raise --context, or allow more memory with --ram",
            )
        position = self.state.position
        if not (position < len(prompt) and list(prompt[:position]) == self.tokens[:position]):
            self.state = SequenceState.empty(self._engine.config, self.state.context)
            if self.drafter is not None:
                self.drafter.reset()
        self.tokens = list(prompt)
        self._reused = self.state.position

    def _prefill(self, meter: _Meter) -> Generator[Event, None, torch.Tensor]:
        engine, layers = self._engine, self._engine.config.layers
        total = len(self.tokens) - self._reused
        yield PrefillProgress(0.0, total, self._reused, 0, 0.0)
        while True:
            position = self.state.position
            chunk = self.tokens[position : position + engine.prefill_rows]
            steps = engine.target.run(chunk, self.state, logits="last")
            while True:
                try:
                    layer = next(steps)
                except StopIteration as done:
                    logits: torch.Tensor = done.value
                    break
                finished = position - self._reused + len(chunk) * layer / layers
                yield PrefillProgress(finished, total, self._reused, meter.read_bytes, meter.elapsed)
            meter.passes += 1
            self._commit(chunk)
            if self.state.position == len(self.tokens):
                return logits

    def _proposals(self, limit: int) -> list[int]:
        room = self.state.context - self.state.position - 1
        if self.drafter is None or min(limit, room) <= 0:
            return []
        return self.drafter.propose(self.tokens, min(limit, room))

    def _commit(self, tokens: Sequence[int]) -> None:
        self.state.commit(len(tokens))
        self._engine.experts.next_token(len(tokens))
        if self.drafter is not None:
            self.drafter.commit(tokens, self.state.taps)


def _choose(row: torch.Tensor) -> tuple[int, float]:
    """K3's choice: the largest logit, the smallest id among equals; and its distance to the runner-up."""
    values = row.numpy()
    token = int(np.argmax(values))
    best, second = values[token], np.float32(-np.inf)
    if len(values) > 1:
        second = max(values[:token].max(initial=-np.inf), values[token + 1 :].max(initial=-np.inf))
    return token, float(best - second)


def _verify(logits: torch.Tensor, proposals: Sequence[int], stop: Collection[int]) -> list[tuple[int, float, bool]]:
    """K3's own choices for as long as the proposals agree with them, ending after the first stop token.

    Args:
        logits: row i belongs to the position after which ``proposals[i]`` was proposed, [len(proposals) + 1, vocab].

    Returns:
        (token, margin, whether a draft had proposed it), at least one.
    """
    decided = []
    for i, row in enumerate(logits):
        token, margin = _choose(row)
        agreed = i < len(proposals) and proposals[i] == token
        decided.append((token, margin, agreed))
        if not agreed or token in stop:
            break
    return decided


def _union(routes: Sequence[torch.Tensor], rows: int) -> tuple[float, ...]:
    """Distinct experts of the first 1, 2, … rows relative to one row's, mean over layers."""
    if rows == 1 or not routes:
        return (1.0,)
    totals = [0] * rows
    for ids in routes:
        seen: set[int] = set()
        for row, chosen in enumerate(ids.tolist()):
            seen.update(chosen)
            totals[row] += len(seen)
    return tuple(total / totals[0] for total in totals)


class _Meter:
    """Differences of the engine's counters since the current phase began."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begin = time.perf_counter()
        self.passes = 0
        self._pass = self._clocks()
        self._mark()

    def start_pass(self) -> None:
        """Marks the beginning of one decoding pass."""
        self._pass = self._clocks()

    def pass_cost(self, rows: int) -> PassCost:
        """What the pass since ``start_pass`` cost."""
        self.passes += 1
        seconds, expert, spine = (now - then for now, then in zip(self._clocks(), self._pass, strict=True))
        union = _union(self._engine.target.routes, rows)
        return PassCost(rows, max(0.0, seconds - expert - spine), expert, spine, union)

    def _clocks(self) -> tuple[float, float, float]:
        engine = self._engine
        return time.perf_counter(), engine.experts.stats.wait_seconds, engine.spine.stats.wait_seconds

    def _mark(self) -> None:
        engine, times = self._engine, self._engine.target.times
        self._started = time.perf_counter()
        self.passes = 0
        self._experts, self._spine = engine.experts.stats.copy(), engine.spine.stats.copy()
        self._times = (times.attention, times.mlp, times.moe.experts, times.head)
        self._drives = engine.store.reader.stats()

    @property
    def elapsed(self) -> float:
        """Seconds since the generation began."""
        return time.perf_counter() - self._begin

    @property
    def read_bytes(self) -> int:
        """Bytes read from drives since the phase began."""
        engine = self._engine
        return (
            engine.experts.stats.read_bytes
            - self._experts.read_bytes
            + engine.spine.stats.read_bytes
            - self._spine.read_bytes
        )

    def phase(self, tokens: int) -> PhaseStats:
        """Closes the current phase and begins the next."""
        engine, times = self._engine, self._engine.target.times
        experts, spine, before = engine.experts.stats, engine.spine.stats, self._experts
        attention, mlp, expert, head = (
            now - then
            for now, then in zip((times.attention, times.mlp, times.moe.experts, times.head), self._times, strict=True)
        )
        wait = experts.wait_seconds - before.wait_seconds
        stats = PhaseStats(
            tokens=tokens,
            passes=self.passes,
            seconds=time.perf_counter() - self._started,
            attention_seconds=attention,
            # The layer's MLP time spans the expert loop: computing routed experts and waiting for them.
            mlp_seconds=max(0.0, mlp - expert - wait),
            expert_seconds=expert,
            head_seconds=head,
            wait_seconds=wait + spine.wait_seconds - self._spine.wait_seconds,
            tier_hits=experts.tier_hits - before.tier_hits,
            expert_reads=experts.reads - before.reads,
            tier_bytes=experts.tier_bytes - before.tier_bytes,
            expert_bytes=experts.read_bytes - before.read_bytes,
            spine_bytes=spine.read_bytes - self._spine.read_bytes,
            drives=tuple(
                DriveBytes(
                    path=str(now.path),
                    read_bytes=now.bytes - then.bytes,
                    reads=now.reads - then.reads,
                    busy_seconds=now.busy_seconds - then.busy_seconds,
                    direct=now.direct,
                )
                for now, then in zip(engine.store.reader.stats(), self._drives, strict=True)
            ),
        )
        self._mark()
        return stats
