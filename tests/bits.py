"""Greedy runs whose every bit can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deltafin.contract import Rows
from deltafin.generation.engine import Engine


@dataclass(frozen=True)
class Trace:
    """Decided tokens and a hash over the logits of every position, prompt included."""

    tokens: tuple[int, ...]
    digest: str


def greedy(engine: Engine, prompt: Sequence[int], new: int, *, chunk: int | None = None, width: int = 1) -> Trace:
    """Processes ``prompt`` in chunks, then decides ``new`` tokens, verifying ``width`` positions at a time.

    With ``width`` > 1 the run first decides all tokens one by one and then recomputes them in blocks, so that what
    is hashed is what blocks of that size compute.
    """
    chunk = chunk or engine.prefill_rows
    state = engine.backend.state(engine.config, engine.plan.context)
    digest = hashlib.sha256()

    def step(tokens: Sequence[int], partial: bool = False) -> Rows:
        logits = engine.target.forward(tokens, state, partial=partial)
        digest.update(logits.tobytes())
        return logits

    for i in range(0, len(prompt), chunk):
        part = prompt[i : i + chunk]
        logits = step(part)
        state.commit(len(part))
    pending = int(np.argmax(logits[-1]))
    decided = [pending]
    if width == 1:
        while len(decided) < new:
            logits = step([decided[-1]])
            state.commit(1)
            decided.append(int(np.argmax(logits[-1])))
        return Trace(tuple(decided), digest.hexdigest())
    known = greedy(engine, prompt, new, chunk=chunk).tokens
    for i in range(0, new - 1, width):
        step(known[i : min(i + width, new - 1)], partial=True)
        state.commit(min(width, new - 1 - i))
    return Trace(known, digest.hexdigest())
