"""Whether to draft, and how wide: pure policy over measured quantities.

A step of width w (w proposals verified beside the pending token) yields 1 + Σᵢ Πⱼ≤ᵢ pⱼ tokens in expectation and
costs the draft plus a pass of w + 1 rows. Its gain is tokens per second relative to passes of one row. All
quantities are measured while running: acceptance by the draft's own confidence or by position, the growth of the expert
union with width, computing and waiting time of passes. Costs and acceptance are learned for the engine
(``Experience``); a session has its own trust in them and its own ledger.

The ledger is what keeps a bad draft cheap. Every drafted step enters with what it gained or lost against passes of one
row. A session may lose what it was given at its start and ``ALLOWANCE`` of the time that passes; beyond that it does
not draft until the time that passes has paid for it. So however wrong estimates, confidences or a draft are, the loss
stays below that allowance plus one step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

ALLOWANCE = 0.01
"""Share of a run's time that may be spent on finding out whether a draft pays."""

_FADE = 0.9
_BINS = 10
_ROW_COMPUTE = 0.25
_OUTLIER = 2.0
# A drafted step tells nothing about a pass of one row, and machines change while a long reply is written.
_REFRESH_STEPS = 32
_LONGEST_REST = 256


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


class _Mean:
    """A mean that forgets: recent observations weigh more. One observation far above the mean counts as less."""

    __slots__ = ("value", "weight")

    def __init__(self, value: float, weight: float = 0.0) -> None:
        self.value, self.weight = value, weight

    def add(self, x: float) -> None:
        if self.weight > 2.0:
            x = min(x, _OUTLIER * self.value)
        self.weight = self.weight * _FADE + 1.0
        self.value += (x - self.value) / self.weight


@dataclass(slots=True)
class DraftReport:
    """Figures for ``--stats``.

    Attributes:
        steps: steps with at least one proposal verified.
        proposed, accepted: tokens.
        committed: tokens committed by these steps.
        offered_at, accepted_at: by position in the draft.
        declined: drafts of which nothing was worth verifying.
        rests: times the drafter stood down.
        draft_seconds: spent drafting.
        estimated_gain, realised_gain: sums over steps; tokens per second relative to undrafted passes.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    committed: int = 0
    offered_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    declined: int = 0
    rests: int = 0
    draft_seconds: float = 0.0
    estimated_gain: float = 0.0
    realised_gain: float = 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens committed by a drafted step."""
        return self.committed / self.steps if self.steps else 0.0


class Experience:
    """What an engine has learned about one source's costs and acceptance; shared by its sessions.

    Args:
        max_width: most proposals verified in one step.

    Attributes:
        fund: seconds that drafts have gained or lost so far, within limits.
    """

    def __init__(self, max_width: int) -> None:
        self.max_width = max_width
        # Priors: rows share weight reads, so another row costs a fraction of the first; unions grow by about 0.7 a row.
        # One number for all widths: what one width teaches must hold for those never tried.
        self.row_compute = _Mean(_ROW_COMPUTE, 3.0)
        self.union = [_Mean(1.0 + 0.7 * n) for n in range(max_width + 1)]
        self.single_compute = _Mean(0.0)
        self.union_wait = _Mean(0.0)
        self.spine_wait = _Mean(0.0)
        self.draft = _Mean(0.0)
        self.position = [_Mean(0.6, 1.0) for _ in range(max_width)]
        self.calibrated = [_Mean((b + 0.5) / _BINS) for b in range(_BINS)]
        self.fund = 0.0

    @property
    def measured(self) -> bool:
        """Whether the cost of a pass of one row is known."""
        return self.single_compute.weight > 0

    def observe_pass(self, cost: PassCost) -> None:
        """Learns from any committed pass, drafted or not."""
        rows = min(cost.rows, self.max_width + 1)
        self.spine_wait.add(cost.spine_wait_seconds)
        for n, growth in enumerate(cost.union[: self.max_width + 1]):
            self.union[n].add(growth)
        self.union_wait.add(cost.expert_wait_seconds / max(1.0, cost.union[-1] if cost.union else 1.0))
        if rows == 1:
            self.single_compute.add(cost.compute_seconds)
        elif self.single_compute.value > 0:
            growth = (cost.compute_seconds / self.single_compute.value - 1.0) / (rows - 1)
            self.row_compute.add(max(0.0, growth))

    def pass_seconds(self, rows: int) -> float:
        """Estimated wall time of a pass, without drafting."""
        compute = self.single_compute.value * (1.0 + self.row_compute.value * (rows - 1))
        wait = self.union_wait.value * self.union[rows - 1].value
        return max(1e-9, compute + wait + self.spine_wait.value)

    def forgive(self) -> None:
        """Old disappointments fade, or what was once misjudged would never be tried, and so never learned, again."""
        self.row_compute.value += (1.0 - _FADE) * (_ROW_COMPUTE - self.row_compute.value)
        for mean in self.calibrated:
            mean.weight *= _FADE


class Economics:
    """Decides for one session.

    Args:
        max_width: most proposals verified in one step.
        always: verify the full width whenever there are proposals, for experiments.
        experience: what earlier sessions of the engine learned about this source.
    """

    def __init__(self, max_width: int, *, always: bool = False, experience: Experience | None = None) -> None:
        self.experience = experience or Experience(max_width)
        self.max_width = min(max_width, self.experience.max_width)
        self.report = DraftReport(offered_at=[0] * max_width, accepted_at=[0] * max_width)
        self._always = always
        # Session's own evidence: proposals accepted, and how many the shared estimates had promised.
        self._hits = 0.0
        self._promised = 0.0
        self._balance: float | None = None
        self._rest = 0
        self._since_single = 0
        # Undrafted passes not yet in the ledger: most passes of a resting drafter must cost next to nothing.
        self._singles = 0
        self._estimate = 1.0

    @property
    def union_growth(self) -> tuple[float, ...]:
        """Measured expert union of n rows relative to one, n = 1 …"""
        return tuple(m.value for m in self.experience.union)

    @property
    def resting(self) -> bool:
        """Whether the drafter stands down."""
        return self._rest > 0

    def wants_draft(self) -> bool:
        """Whether to ask the drafter now. The engine's first pass is undrafted: it measures what there is to gain."""
        if self._always:
            return True
        if self._balance is None and self.experience.fund < 0:
            # Earlier sessions lost more than drafts were allowed to; this one waits for its own passes to pay.
            self._book(0.0)
            self._stand_down(-self.experience.fund)
        return self.experience.measured and self._rest == 0 and self._since_single < _REFRESH_STEPS

    def width(self, confidence: Sequence[float]) -> int:
        """How many of the proposals to verify.

        Args:
            confidence: the draft's own estimate for each proposal.
        """
        return self.choose(self._calibrate(confidence))

    def choose(self, probabilities: Sequence[float]) -> int:
        """The width with the most expected tokens per second, given acceptance probabilities in order."""
        offered = min(len(probabilities), self.max_width)
        e = self.experience
        single = e.pass_seconds(1)
        trust = self._trust
        best, best_gain = 0, 1.0
        expected, alive = 1.0, 1.0
        for n in range(1, offered + 1):
            alive *= trust * probabilities[n - 1]
            expected += alive
            gain = expected * single / (e.draft.value + e.pass_seconds(n + 1))
            if gain > best_gain or (self._always and n == offered):
                best, best_gain = n, gain
        self._estimate = best_gain
        return best

    def probabilities_by_position(self, count: int) -> list[float]:
        """Acceptance by position, for drafts without confidences."""
        return [m.value for m in self.experience.position[: min(count, self.max_width)]]

    def observe_pass(self, cost: PassCost) -> None:
        """Learns from any committed pass, drafted or not."""
        self.experience.observe_pass(cost)
        if cost.rows == 1:
            self._since_single = 0
            self._singles += 1
            self.experience.fund += ALLOWANCE * cost.seconds
            if self._rest:
                self._rest -= 1

    def observe_draft(self, seconds: float) -> None:
        """Learns what asking the drafter costs."""
        self.experience.draft.add(seconds)
        self.report.draft_seconds += seconds

    def decline(self) -> None:
        """Books a draft of which nothing was worth verifying; the next one waits until this one is paid for."""
        self.report.declined += 1
        self._hits, self._promised = self._hits * _FADE, self._promised * _FADE
        self.experience.forgive()
        cost = self.experience.draft.value
        self._book(-cost)
        if not self._always:
            self._stand_down(max(cost, -(self._balance or 0.0)))

    def observe_step(
        self, offered: int, accepted: int, confidence: Sequence[float], committed: int, seconds: float
    ) -> None:
        """Learns from a drafted step.

        Args:
            offered: proposals verified, at least one.
            accepted: the longest prefix K3 agreed with.
            confidence: the draft's estimates, or empty.
            committed: tokens the step decided.
            seconds: draft and pass together.
        """
        report, e = self.report, self.experience
        report.steps += 1
        report.proposed += offered
        report.accepted += accepted
        report.committed += committed
        promised = self._calibrate(confidence) if confidence else self.probabilities_by_position(offered)
        self._hits, self._promised = self._hits * _FADE, self._promised * _FADE
        for n in range(min(offered, self.max_width, accepted + 1)):
            hit = n < accepted
            report.offered_at[n] += 1
            report.accepted_at[n] += hit
            self._hits += hit
            self._promised += promised[n] if n < len(promised) else 0.0
            e.position[n].add(float(hit))
            if n < len(confidence):
                e.calibrated[_bin(confidence[n])].add(float(hit))
        self._since_single += 1
        # Booked at expected cost: that a machine was busy for a moment is no fault of the draft.
        gained = committed * e.pass_seconds(1) - e.draft.value - e.pass_seconds(offered + 1)
        report.estimated_gain += self._estimate
        report.realised_gain += committed * e.pass_seconds(1) / max(1e-9, seconds)
        self._book(gained + ALLOWANCE * committed * e.pass_seconds(1))
        if not self._always and self._balance is not None and self._balance < 0:
            self._stand_down(-self._balance)

    @property
    def _trust(self) -> float:
        """How much of what the estimates promise has come true in this session; one more hit than seen is assumed."""
        return min(1.0, (self._hits + 1.0) / (self._promised + 1.0))

    def _book(self, seconds: float) -> None:
        e = self.experience
        worst = max(0.0, e.draft.value + e.pass_seconds(self.max_width + 1) - e.pass_seconds(1))
        if self._balance is None:
            # Earlier sessions' gains pay for the first step of this one.
            self._balance = min(e.fund, worst)
        earned = ALLOWANCE * self._singles * e.pass_seconds(1)
        self._singles = 0
        self._balance = min(self._balance + earned + seconds, 2 * worst)
        e.fund = max(-4 * worst, min(e.fund + seconds, 4 * worst))

    def _stand_down(self, debt: float) -> None:
        """Rests for as many tokens as it takes to pay ``debt`` seconds out of the allowance."""
        tokens = math.ceil(debt / (ALLOWANCE * self.experience.pass_seconds(1)))
        self._rest = max(1, min(_LONGEST_REST, tokens))
        self.report.rests += 1

    def _calibrate(self, confidence: Sequence[float]) -> list[float]:
        # A bin that was seen speaks from experience; the draft's own number fills in where there is little.
        out = []
        for own in confidence:
            seen = self.experience.calibrated[_bin(own)]
            trust = seen.weight / (seen.weight + 4.0)
            out.append(trust * seen.value + (1.0 - trust) * own)
        return out


def _bin(confidence: float) -> int:
    return min(_BINS - 1, max(0, int(confidence * _BINS)))
