"""Qwen drafts between two vocabularies: what one or two small models say, as tokens of K3.

The vocabularies meet only in text. The whole history is decoded, encoded for Qwen, continued greedily, decoded and
encoded for K3 again; where the result does not begin with the very history, there is no proposal. Which library
computes the small model is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from deltafin.contract import Host, Native
from deltafin.drafting.proposal import Proposal
from deltafin.text.tokenizer import K3Tokenizer

MAX_BUDGET = 20
SURE = 0.3
"""A Qwen token less likely than this ends a longer proposal."""
CLEARLY_BETTER = 0.02


@dataclass(frozen=True, slots=True)
class Guess:
    """One model's proposal.

    Attributes:
        ids: K3 tokens after the history, up to the first unsure Qwen token.
        raw: the same without that cut.
        least: smallest probability among all generated Qwen tokens; 0 when none were generated.
        stopped: whether unsure tokens were cut off.
    """

    ids: tuple[int, ...]
    raw: tuple[int, ...]
    least: float
    stopped: bool


NOTHING = Guess((), (), 0.0, False)


class Completer(Protocol):
    """A small language model with its own tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Its ids of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of its ids."""

    def complete(self, ids: Sequence[int], count: int) -> list[tuple[int, float]]:
        """Up to ``count`` greedy (id, probability) after ``ids``."""


def guess(model: Completer, tokenizer: K3Tokenizer, history: Sequence[int], count: int) -> Guess:
    """One model's proposal of up to ``count`` K3 tokens after ``history``."""
    text = tokenizer.decode(history)
    if tokenizer.encode(text, allow_special=True) != list(history):
        return NOTHING
    prefix = model.encode(text)
    if not prefix:
        return NOTHING
    budget = min(max(count + 2, 3), MAX_BUDGET)
    while True:
        drawn = model.complete(prefix, budget)
        sure = len(drawn)
        if count > 2:
            sure = next((i for i, (_, p) in enumerate(drawn) if p < SURE), len(drawn))

        def translate(kept: int, drawn: list[tuple[int, float]] = drawn) -> tuple[int, ...]:
            whole = model.decode([*prefix, *(token for token, _ in drawn[:kept])])
            ids = tokenizer.encode(whole, allow_special=True)
            if ids[: len(history)] != list(history):
                return ()
            return tuple(ids[len(history) : len(history) + count])

        ids, stopped = translate(sure), sure < len(drawn)
        if len(ids) < count and not stopped and len(drawn) == budget < MAX_BUDGET:
            budget = MAX_BUDGET
            continue
        raw = translate(len(drawn)) if stopped else ids
        return Guess(ids, raw, min((p for _, p in drawn), default=0.0), stopped)


def combine(count: int, probe: Guess, wide: Callable[[], Guess]) -> tuple[int, ...]:
    """The proposal of a small and a larger model; the larger one is asked only when the small one falls short."""
    if len(probe.ids) == count:
        return probe.ids
    if len(probe.raw) == count and len(probe.ids) >= min(3, count):
        return probe.raw
    other = wide()
    if len(probe.raw) == count and probe.raw == other.raw:
        return probe.raw
    return other.ids if other.least > probe.least + CLEARLY_BETTER else probe.ids


class QwenSource:
    """One or two Qwen models as a session's source; needs nothing from K3 but its tokens.

    Args:
        models: the small one, and perhaps a larger one.
        tokenizer: K3's.
    """

    name = "qwen"

    def __init__(self, models: Sequence[Completer], tokenizer: K3Tokenizer) -> None:
        self._models = models
        self._tokenizer = tokenizer

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """Guesses after ``tokens``; without confidences of its own, since probabilities belong to Qwen's tokens."""
        probe, *wide = (partial(guess, model, self._tokenizer, tokens, count) for model in self._models)
        first = probe()
        return Proposal(combine(count, first, wide[0]) if wide else first.ids, ())

    def commit(self, tokens: Sequence[int], taps: Sequence[Native]) -> None:
        """Nothing to note: the history comes with every proposal."""

    def reset(self, position: int) -> None:
        """Nothing to forget: the cache keeps what the next text shares with the last one."""

    def tensors(self) -> Sequence[tuple[str, Host]]:
        """Nothing to save."""
        return []

    def restore(self, position: int, tensors: Mapping[str, Host]) -> None:
        """Nothing to take back."""
