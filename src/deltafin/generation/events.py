"""What a generation tells its consumers; printing, JSON lines and HTTP are consumers of the same stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt processing.

    Attributes:
        done: tokens of the prompt whose pass is complete, plus the finished share of the running chunk.
        total: tokens to process.
        reused: prompt tokens whose state was already there.
        read_bytes: bytes read from drives since the prefill began.
        seconds: since the prefill began.
        drive_bytes: bytes read from each drive since the prefill began.
    """

    done: float
    total: int
    reused: int
    read_bytes: int
    seconds: float
    drive_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities: the decided token's, and (id, logarithm) of the most probable ids."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenDecided:
    """K3 decided a token.

    Attributes:
        token: vocabulary id.
        index: 0-based among the new tokens.
        margin: difference of the two largest logits.
        seconds: since the generation began.
        drafted: whether a draft had proposed it.
        logprobs: when they were asked for.
    """

    token: int
    index: int
    margin: float
    seconds: float
    drafted: bool
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every generation.

    Attributes:
        reason: ``stop`` (a stop token, which is not among the decided tokens' text), ``length`` or ``interrupted``.
        new_tokens: decided tokens, the stop token included.
        stats: figures by phase.
    """

    reason: FinishReason
    new_tokens: int
    stats: GenerationStats


@dataclass(frozen=True, slots=True)
class DriveBytes:
    """One drive's share of a phase: bytes delivered, requests, seconds with at least one request in flight."""

    path: str
    read_bytes: int
    reads: int
    busy_seconds: float
    direct: bool


@dataclass(frozen=True, slots=True)
class PhaseStats:
    """Figures of one phase, prefill or decode.

    Attributes:
        tokens: positions processed (prefill) or tokens decided (decode).
        passes: K3 forward passes.
        seconds: wall time.
        attention_seconds, mlp_seconds, expert_seconds, head_seconds: computing; ``mlp`` excludes ``expert``.
        wait_seconds: waiting for expert reads and for streamed spine units.
        tier_hits, expert_reads: experts used from RAM and read from drives.
        tier_bytes, expert_bytes, spine_bytes: bytes used from RAM, and read from drives.
        drives: per drive.
    """

    tokens: int
    passes: int
    seconds: float
    attention_seconds: float
    mlp_seconds: float
    expert_seconds: float
    head_seconds: float
    wait_seconds: float
    tier_hits: int
    expert_reads: int
    tier_bytes: int
    expert_bytes: int
    spine_bytes: int
    drives: tuple[DriveBytes, ...]

    @property
    def tokens_per_second(self) -> float:
        """Tokens divided by wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of expert uses served from RAM."""
        uses = self.tier_hits + self.expert_reads
        return self.tier_hits / uses if uses else 0.0


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Both phases of one generation."""

    prefill: PhaseStats
    decode: PhaseStats


Event = PrefillProgress | TokenDecided | Finished
