"""Whether to draft, and how wide: pure policy over measured quantities.

A step of width w (w proposals verified beside the pending token) yields 1 + Σᵢ Πⱼ≤ᵢ pⱼ tokens in expectation and
costs the draft plus a pass of w + 1 rows. Its gain is tokens per second relative to passes of one row. All
quantities are measured while
running: acceptance by position and by the draft's own confidence, the growth of the expert union with width,
computing and waiting time of passes. When the gain stays below one, the drafter stands down and is probed again
later, ever more rarely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_FADE = 0.9
_MIN_GAIN = 1.03
_PROBE_STEPS = 3
_FIRST_REST = 16
_LONGEST_REST = 512
_BINS = 10


@dataclass(frozen=True, slots=True)
class PassCost:
    """What one pass cost.

    Attributes:
        rows: positions computed.
        compute_seconds: everything but waiting.
        expert_wait_seconds: waiting for routed experts.
        spine_wait_seconds: waiting for streamed spine units, which does not grow with rows.
        union: distinct experts of the first 1, 2, … rows divided by the experts of one row, mean over layers.
    """

    rows: int
    compute_seconds: float
    expert_wait_seconds: float
    spine_wait_seconds: float
    union: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Wall time of the pass."""
        return self.compute_seconds + self.expert_wait_seconds + self.spine_wait_seconds


@dataclass(slots=True)
class _Mean:
    """A mean that forgets: recent observations weigh more."""

    value: float
    weight: float = 0.0

    def add(self, x: float) -> None:
        self.weight = self.weight * _FADE + 1.0
        self.value += (x - self.value) / self.weight


@dataclass(slots=True)
class DraftReport:
    """Figures for ``--stats``.

    Attributes:
        steps: drafted steps.
        proposed, accepted: tokens.
        committed: tokens committed by drafted steps.
        offered_at, accepted_at: by position in the draft.
        rests: times the drafter stood down.
        draft_seconds: spent drafting.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    committed: int = 0
    offered_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    rests: int = 0
    draft_seconds: float = 0.0


class Economics:
    """Decides for one session.

    Args:
        max_width: most proposals verified in one step.
        always: verify the full width whenever there are proposals, for experiments.
    """

    def __init__(self, max_width: int, *, always: bool = False) -> None:
        self.max_width = max_width
        self.report = DraftReport(offered_at=[0] * max_width, accepted_at=[0] * max_width)
        self._always = always
        # Priors: rows share weight reads, so the n-th row costs a fraction of the first; unions grow by about 0.7 a
        # row.
        self._compute = [_Mean(1.0 + 0.25 * n) for n in range(max_width + 1)]
        self._union = [_Mean(1.0 + 0.7 * n) for n in range(max_width + 1)]
        self._single_compute = _Mean(0.0)
        self._single_expert_wait = _Mean(0.0)
        self._spine_wait = _Mean(0.0)
        self._draft = _Mean(0.0)
        self._position = [_Mean(0.6) for _ in range(max_width)]
        self._calibrated = [_Mean((b + 0.5) / _BINS) for b in range(_BINS)]
        self._gain = _Mean(1.0)
        self._measured = 0
        self._rest = 0
        self._next_rest = _FIRST_REST
        self._trial = 0

    @property
    def estimated_gain(self) -> float:
        """Recent tokens per second of drafted steps relative to estimated undrafted ones."""
        return self._gain.value

    @property
    def union_growth(self) -> tuple[float, ...]:
        """Measured expert union of n rows relative to one, n = 1 …"""
        return tuple(m.value for m in self._union)

    @property
    def resting(self) -> bool:
        """Whether the drafter stands down."""
        return self._rest > 0

    def wants_draft(self) -> bool:
        """Whether to ask the drafter now. The first pass is undrafted: it measures what there is to gain."""
        if self._always:
            return True
        return self._measured > 0 and self._rest == 0

    def width(self, confidence: Sequence[float]) -> int:
        """How many of the proposals to verify.

        Args:
            confidence: the draft's estimate for each proposal, or an empty sequence from a draft without one; its
                length otherwise is the number of proposals.
        """
        return self.choose(self._probabilities(confidence))

    def choose(self, probabilities: Sequence[float]) -> int:
        """The width with the most expected tokens per second, given acceptance probabilities in order."""
        offered = min(len(probabilities), self.max_width)
        if self._always:
            return offered
        best, best_rate = 0, 1.0 / self._pass_seconds(1)
        expected, alive = 1.0, 1.0
        for n in range(1, offered + 1):
            alive *= probabilities[n - 1]
            expected += alive
            rate = expected / self._pass_seconds(n + 1)
            if rate > best_rate:
                best, best_rate = n, rate
        return best

    def probabilities_by_position(self, count: int) -> list[float]:
        """Acceptance by position, for drafts without confidences."""
        return [m.value for m in self._position[:count]]

    def observe_pass(self, cost: PassCost) -> None:
        """Learns from any committed pass, drafted or not."""
        rows = min(cost.rows, self.max_width + 1)
        self._spine_wait.add(cost.spine_wait_seconds)
        for n, growth in enumerate(cost.union[: self.max_width + 1]):
            self._union[n].add(growth)
        if rows == 1:
            self._single_compute.add(cost.compute_seconds)
            self._single_expert_wait.add(cost.expert_wait_seconds)
            self._measured += 1
        elif self._measured:
            base = self._single_compute.value
            if base > 0:
                self._compute[rows - 1].add(cost.compute_seconds / base)
        self._rest = max(0, self._rest - cost.rows)

    def observe_draft(self, seconds: float) -> None:
        """Learns what asking the drafter costs."""
        self._draft.add(seconds)
        self.report.draft_seconds += seconds

    def observe_step(
        self, offered: int, accepted: int, confidence: Sequence[float], committed: int, seconds: float
    ) -> None:
        """Learns from a drafted step.

        Args:
            offered: proposals verified.
            accepted: the longest prefix K3 agreed with.
            confidence: the draft's estimates, or empty.
            committed: tokens the step decided.
            seconds: draft and pass together.
        """
        report = self.report
        report.steps += 1
        report.proposed += offered
        report.accepted += accepted
        report.committed += committed
        for n in range(min(offered, self.max_width)):
            if n > accepted:
                break
            hit = n < accepted
            report.offered_at[n] += 1
            report.accepted_at[n] += hit
            self._position[n].add(float(hit))
            if n < len(confidence):
                self._calibrated[_bin(confidence[n])].add(float(hit))
        if seconds > 0:
            self._gain.add(committed * self._pass_seconds(1) / seconds)
        if self._always:
            return
        self._trial += 1
        if self._trial >= _PROBE_STEPS and self._gain.value < _MIN_GAIN:
            self.stand_down()
        elif self._gain.value >= _MIN_GAIN:
            self._next_rest = _FIRST_REST

    def stand_down(self) -> None:
        """Stops drafting for a while, longer each time in a row."""
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        self._trial = 0
        self._gain = _Mean(1.0)
        self.report.rests += 1

    def _probabilities(self, confidence: Sequence[float]) -> list[float]:
        # A bin that was seen speaks from experience; the draft's own number fills in where there is little.
        out = []
        for own in confidence:
            seen = self._calibrated[_bin(own)]
            trust = seen.weight / (seen.weight + 4.0)
            out.append(trust * seen.value + (1.0 - trust) * own)
        return out

    def _pass_seconds(self, rows: int) -> float:
        compute = self._single_compute.value * self._compute[rows - 1].value
        wait = self._single_expert_wait.value * self._union[rows - 1].value / self._union[0].value
        draft = self._draft.value if rows > 1 else 0.0
        return max(1e-9, compute + wait + self._spine_wait.value + draft)


def _bin(confidence: float) -> int:
    return min(_BINS - 1, max(0, int(confidence * _BINS)))
