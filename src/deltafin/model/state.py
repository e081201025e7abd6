"""The state of one sequence, designed so that commit, rollback, snapshot and restore are one mechanism.

A pass over T provisional positions never changes what was committed: the KDA state after the pass is written beside the
state before it, latent rows are written past the committed length, and the un-convolved rows of the pass are kept.
Committing n positions then means: take the new state (n = T), or replay the recurrence over the first n rows from
the old one (n < T; no weights are read), and move the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from deltafin import kernels
from deltafin.checkpoint.config import K3Config
from deltafin.contract import Host, check_commit, check_room


@dataclass(slots=True)
class KdaRows:
    """What a pass keeps of each provisional row to replay the recurrence: fp32 k, v, decay [T, H*D] and beta [T, H]."""

    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


@dataclass(slots=True)
class KdaState:
    """One KDA layer.

    Attributes:
        recurrent: committed state, fp32 [heads, key, value].
        ahead: the state after the provisional rows; meaningless between passes.
        history: last K-1 committed rows before convolution, fp32 [K-1, 3, H*D], oldest first.
        raw: the provisional rows before convolution, fp32 [T, 3, H*D]; after a long pass only its last K-1 rows.
        rows: inputs for a replay, or None when the pass cannot be partly committed.
    """

    recurrent: torch.Tensor
    ahead: torch.Tensor
    history: torch.Tensor
    raw: torch.Tensor | None = None
    rows: KdaRows | None = None


@dataclass(slots=True)
class LatentCache:
    """One MLA layer: fp32 [context, kv_lora + rope]; only the first ``SequenceState.position`` rows are committed."""

    rows: torch.Tensor


@dataclass(slots=True)
class SequenceState:
    """Everything K3 carries from token to token.

    Attributes:
        position: committed tokens.
        pending: provisional tokens of the last pass, 0 when it was committed or abandoned.
        partial: whether fewer than ``pending`` positions may be committed.
        taps: for a draft, bf16 accumulators [n, hidden] of the last n provisional (after ``commit``: committed) rows.
    """

    config: K3Config
    context: int
    kda: dict[int, KdaState]
    mla: dict[int, LatentCache]
    position: int = 0
    pending: int = 0
    partial: bool = False
    taps: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def empty(cls, config: K3Config, context: int) -> SequenceState:
        """A sequence of no tokens with room for ``context`` positions (memory is touched only as it is used)."""
        kda, mla = {}, {}
        heads, dim, width = config.kda_heads, config.kda_head_dim, config.kda_width
        for layer in range(config.layers):
            if config.is_mla(layer):
                mla[layer] = LatentCache(torch.empty(context, config.latent_row))
            else:
                kda[layer] = KdaState(
                    recurrent=torch.zeros(heads, dim, dim),
                    ahead=torch.empty(heads, dim, dim),
                    history=torch.zeros(config.conv_kernel - 1, 3, width),
                )
        return cls(config, context, kda, mla)

    def begin(self, rows: int, *, partial: bool) -> None:
        """Opens a pass of ``rows`` provisional positions; an uncommitted earlier pass is abandoned.

        Raises:
            InputError: the context is full.
        """
        check_room(self.position, rows, self.context)
        self.pending, self.partial = rows, partial
        self.taps = []

    def commit(self, count: int) -> None:
        """Keeps the first ``count`` provisional positions and forgets the rest.

        Raises:
            ValueError: more than the pass computed, or fewer although the pass kept nothing to replay.
        """
        check_commit(count, self.pending, partial=self.partial)
        if count:
            for layer in self.kda.values():
                self._commit_kda(layer, count)
        self.position += count
        if count < self.pending:
            self.taps = [tap[:count] for tap in self.taps]
        self.pending = 0

    def _commit_kda(self, layer: KdaState, count: int) -> None:
        if count == self.pending:
            layer.recurrent, layer.ahead = layer.ahead, layer.recurrent
        else:
            rows = layer.rows
            assert rows is not None
            kernels.kda_recurrence(
                None,
                rows.k[:count],
                rows.v[:count],
                rows.decay[:count],
                rows.beta[:count],
                layer.recurrent,
                layer.recurrent,
                None,
            )
        assert layer.raw is not None
        keep = self.config.conv_kernel - 1
        raw = layer.raw[:count] if count < self.pending else layer.raw
        layer.history = torch.cat([layer.history, raw])[-keep:].clone() if len(raw) < keep else raw[-keep:].clone()
        layer.raw, layer.rows = None, None

    def tensors(self) -> Sequence[tuple[str, Host]]:
        """Committed state as (name, tensor) pairs, views; the inverse of ``restore``."""
        out: list[tuple[str, Host]] = []
        for layer, kda in self.kda.items():
            out.append((f"kda.{layer}.recurrent", kda.recurrent.numpy()))
            out.append((f"kda.{layer}.history", kda.history.numpy()))
        for layer, mla in self.mla.items():
            out.append((f"mla.{layer}.rows", mla.rows[: self.position].numpy()))
        return out

    def restore(self, position: int, tensors: Mapping[str, Host]) -> None:
        """Replaces the committed state.

        Raises:
            KeyError: a tensor is missing; the state is unchanged then.
            ValueError: a tensor has another shape or dtype; the state is unchanged then.
        """
        if not 0 <= position <= self.context:
            raise ValueError(f"a state of {position} positions does not fit a context of {self.context}")
        plan: list[tuple[Host, Host]] = []
        for layer, kda in self.kda.items():
            plan.append((kda.recurrent.numpy(), tensors[f"kda.{layer}.recurrent"]))
            plan.append((kda.history.numpy(), tensors[f"kda.{layer}.history"]))
        for layer, mla in self.mla.items():
            plan.append((mla.rows[:position].numpy(), tensors[f"mla.{layer}.rows"]))
        for mine, theirs in plan:
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise ValueError(f"state tensor of shape {tuple(theirs.shape)} where {tuple(mine.shape)} is expected")
        for mine, theirs in plan:
            np.copyto(mine, theirs)
        self.position, self.pending, self.taps = position, 0, []
