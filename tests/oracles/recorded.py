"""The miniature checkpoint and its recorded continuations, as typed values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
TARGET = _ROOT / "src/deltafin/mini_k3/target"
DSPARK = _ROOT / "src/deltafin/mini_k3/dspark"
ORACLE = _ROOT / "tests/data/oracle"

# Every kind of prompt; 14 meets a router tie (3e-10), 27, 62, 64 and 102 have the closest top-two logits, 106 is 713
# tokens long, 76 and 82 stop after three.
DOZEN = (0, 14, 27, 43, 58, 62, 64, 68, 76, 82, 102, 106)


@dataclass(frozen=True)
class Prompt:
    """One recorded prompt: ``ids`` in, ``expected`` out (greedy, float32, latent-norm epsilon 1e-5).

    ``margins`` are top-two logit differences per expected token; ``accepted`` drafts and their ``confidences`` are per
    DSpark cycle, the first cycle starting once ``expected[0]`` is known.
    """

    id: int
    kind: str
    ids: list[int]
    expected: list[int]
    margins: list[float]
    max_new: int
    stop: frozenset[int]
    accepted: list[int]
    confidences: list[list[float]]


@cache
def prompts() -> tuple[Prompt, ...]:
    """All recorded prompts; the index is the id."""
    raw = json.loads((ORACLE / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    return tuple(
        Prompt(
            id=p["id"],
            kind=p["kind"],
            ids=p["ids"],
            expected=p["reference"]["ids"],
            margins=p["reference"]["top2_margins"],
            max_new=p["max_new"],
            stop=frozenset(p["stop"]),
            accepted=p["dspark_accepted"],
            confidences=p["dspark_confidence"],
        )
        for p in raw
    )
