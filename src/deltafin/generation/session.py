"""One conversation: its tokens, its state, and the loop that extends them.

``generate`` is a plain generator of events. Each step runs K3 over the pending token and whatever a draft proposed
after it, keeps the longest prefix that K3 would have said itself, and takes K3's own choice as the next pending token.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deltafin.contract import Host, Routes, Rows, State
from deltafin.drafting.controller import DraftController
from deltafin.drafting.economics import PassCost
from deltafin.errors import InputError, Interrupted
from deltafin.generation.choice import Chooser, Constraint
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
from deltafin.macos.priority import raise_thread

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
        self.state: State = engine.backend.state(engine.config, engine.plan.context)
        # Logits of the last committed position, kept at the end of a prompt: the same prompt again needs no pass.
        self._logits: Host | None = None

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new: int,
        stop: Collection[int],
        constraint: Constraint | None = None,
        logprobs: int | None = None,
    ) -> Iterator[Event]:
        """Extends the sequence greedily from ``prompt``.

        ``prompt`` is the whole sequence so far; where it begins with tokens whose state is here, only the rest is
        processed. The stop flag of the engine ends the run at the next safe point with reason ``interrupted``; the
        session stays usable.

        Args:
            prompt: vocabulary ids, at least one.
            max_new: most tokens to decide, at least 1.
            stop: ids after which the generation ends.
            constraint: which ids may come next; K3 chooses among them.
            logprobs: report log probabilities of every token and of so many of the most probable ids.

        Yields:
            ``PrefillProgress``, then ``TokenDecided``, then exactly one ``Finished``.

        Raises:
            InputError: empty prompt, id outside the vocabulary, or no room in the context.
            SliceError: bytes missing, unreadable or corrupt; the session stays at its last committed position.
        """
        engine = self._engine
        # A stop that came too late for the previous generation must not end this one.
        engine.stop.clear()
        raise_thread()
        meter = _Meter(engine)
        chooser = Chooser(constraint, logprobs)
        self._adopt(prompt)
        prefill: PhaseStats | None = None
        reason: FinishReason = "length"
        new = 0
        try:
            logits = yield from self._prefill(meter)
            prefill = meter.phase(len(self.tokens) - self._reused)
            decided = [chooser.choose(logits[-1])]
            while True:
                # The session must know every committed token even if the consumer stops listening in the middle of a
                # batch.
                self.tokens += [d.token for d in decided]
                for d in decided:
                    yield TokenDecided(d.token, new, d.margin, meter.elapsed, d.drafted, d.logprobs)
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
                decided = chooser.verify(logits, proposals, stop)[: max_new - new]
                self._commit([self.tokens[-1], *(d.token for d in decided[:-1])])
                if self.drafter is not None:
                    self.drafter.observe(cost, sum(d.drafted for d in decided), len(decided))
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
        if not self.reusable(prompt):
            self._clear()
        self.tokens = list(prompt)
        self._reused = self.state.position

    def reusable(self, prompt: Sequence[int]) -> int:
        """How many of the first tokens of ``prompt`` need no pass because their state is here: all of it or none."""
        position = self.state.position
        enough = position < len(prompt) or (position == len(prompt) and self._logits is not None)
        return position if enough and list(prompt[:position]) == self.tokens[:position] else 0

    def tensors(self) -> list[tuple[str, Host]]:
        """The state at the committed position as (name, tensor) pairs, views; names that end in ``.rows`` hold one row
        for each position, names that begin with ``draft.`` are the draft's."""
        out = list(self.state.tensors())
        if self._logits is not None:
            out.append(("logits", self._logits))
        if self.drafter is not None:
            out += [(f"draft.{name}", tensor) for name, tensor in self.drafter.tensors()]
        return out

    def restore(self, tokens: Sequence[int], tensors: Mapping[str, Host]) -> bool:
        """Puts the session behind ``tokens``; the inverse of ``tensors``. What does not fit leaves it empty.

        Returns:
            Whether the state was taken. The draft's part may be absent: it then knows nothing of these tokens.
        """
        self._clear()
        logits = tensors.get("logits")
        try:
            if logits is not None and (logits.shape != (self._engine.config.vocab_size,) or logits.dtype != np.float32):
                raise ValueError("logits of another model")
            self.state.restore(len(tokens), tensors)
        except (KeyError, ValueError):
            self._clear()
            return False
        self.tokens, self._logits = list(tokens), logits
        if self.drafter is not None:
            prefix = "draft."
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            self.drafter.restore(len(tokens), own)
        return True

    def _clear(self) -> None:
        self.tokens, self._logits = [], None
        self.state = self._engine.backend.state(self._engine.config, self.state.context)
        self._engine.recorder.new_sequence()
        if self.drafter is not None:
            self.drafter.reset()

    def _prefill(self, meter: _Meter) -> Generator[Event, None, Rows]:
        engine, layers = self._engine, self._engine.config.layers
        total = len(self.tokens) - self._reused
        yield PrefillProgress(0.0, total, self._reused, 0, 0.0)
        if self._logits is not None and not total:
            return self._logits[None]
        while True:
            position = self.state.position
            chunk = self.tokens[position : position + engine.prefill_rows]
            steps = engine.target.run(chunk, self.state, logits="last")
            while True:
                try:
                    layer = next(steps)
                except StopIteration as done:
                    logits: Rows = done.value
                    break
                finished = position - self._reused + len(chunk) * layer / layers
                yield PrefillProgress(finished, total, self._reused, meter.read_bytes, meter.elapsed, meter.drive_bytes)
            meter.passes += 1
            self._commit(chunk)
            if self.state.position == len(self.tokens):
                self._logits = logits[-1]
                return logits

    def _proposals(self, limit: int) -> list[int]:
        room = self.state.context - self.state.position - 1
        if self.drafter is None or min(limit, room) <= 0:
            return []
        return self.drafter.propose(self.tokens, min(limit, room))

    def _commit(self, tokens: Sequence[int]) -> None:
        self.state.commit(len(tokens))
        self._logits = None
        self._engine.observe(len(tokens))
        if self.drafter is not None:
            self.drafter.commit(tokens, self.state.taps)


def _union(routes: Sequence[Routes], rows: int) -> tuple[float, ...]:
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

    @property
    def drive_bytes(self) -> tuple[int, ...]:
        """Bytes read from each drive since the phase began."""
        now = self._engine.store.reader.stats()
        return tuple(a.bytes - b.bytes for a, b in zip(now, self._drives, strict=True))

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
