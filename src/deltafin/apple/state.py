"""The state of one sequence on MLX; commit, rollback, snapshot and restore are one mechanism, as on PyTorch.

Arrays are values: a pass makes new ones beside the committed ones. Only the latent rows are written in place, past the
committed length. Committing n positions takes the new recurrent state (all of them) or replays the recurrence over the
first n rows from the old one, which reads no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from deltafin.apple.ops import start
from deltafin.checkpoint.config import K3Config
from deltafin.contract import Host, check_commit, check_room

_GROW = 256


class KdaRows(NamedTuple):
    """What a replay needs of each provisional row, fp32: k, v and decay [T, H, D], beta logits [T, H, 1]."""

    k: mx.array
    v: mx.array
    decay: mx.array
    beta: mx.array


Replay = Callable[[mx.array, KdaRows, int], mx.array]
"""(state before, rows, n) → state after the first n rows; the very operations of the pass."""


@dataclass(slots=True)
class KdaState:
    """One KDA layer.

    Attributes:
        recurrent: committed state, fp32 [heads, value, key].
        history: last K-1 committed rows before convolution, [K-1, 3·H·D] in the activations' dtype, oldest first.
        ahead: the state after the provisional rows, or None between passes.
        raw: the provisional rows before convolution, [T, 3·H·D]; after a long pass only its last K-1 rows.
        rows: inputs for a replay, or None when the pass cannot be partly committed.
    """

    recurrent: mx.array
    history: mx.array
    ahead: mx.array | None = None
    raw: mx.array | None = None
    rows: KdaRows | None = None


class LatentCache:
    """One MLA layer: latent rows [capacity, kv_lora + rope]; only the first ``position`` ones are committed.

    The array grows in steps. ``write`` hands the only reference to MLX, which then writes in place.
    """

    def __init__(self, width: int, dtype: mx.Dtype) -> None:
        self.rows = mx.zeros((0, width), dtype=dtype)

    def write(self, start: int, fresh: mx.array) -> None:
        """Puts ``fresh`` [T, width] at positions ``start`` …"""
        end = start + len(fresh)
        if end > len(self.rows):
            # By a quarter, so that a long context is copied a bounded number of times.
            room = -(-max(end, len(self.rows) * 5 // 4) // _GROW) * _GROW
            more = mx.zeros((room - len(self.rows), self.rows.shape[1]), dtype=self.rows.dtype)
            self.rows = mx.concatenate([self.rows, more])
        self.rows[start:end] = fresh


@dataclass(slots=True)
class MlxState:
    """Everything K3 carries from token to token; see ``contract.State``.

    Attributes:
        pending: provisional tokens of the last pass, 0 when it was committed or abandoned.
        partial: whether fewer than ``pending`` positions may be committed.
    """

    config: K3Config
    context: int
    kda: dict[int, KdaState]
    mla: dict[int, LatentCache]
    replay: Replay
    position: int = 0
    pending: int = 0
    partial: bool = False
    taps: list[Any] = field(default_factory=list)

    @classmethod
    def empty(cls, config: K3Config, context: int, activations: mx.Dtype, replay: Replay) -> MlxState:
        """A sequence of no tokens with room for ``context`` positions."""
        kda, mla = {}, {}
        heads, dim, width = config.kda_heads, config.kda_head_dim, config.kda_width
        for layer in range(config.layers):
            if config.is_mla(layer):
                mla[layer] = LatentCache(config.latent_row, activations)
            else:
                kda[layer] = KdaState(
                    mx.zeros((heads, dim, dim)), mx.zeros((config.conv_kernel - 1, 3 * width), dtype=activations)
                )
        made = cls(config, context, kda, mla, replay)
        # A session may be made in one thread and run in another, and MLX evaluates only where it wrote down.
        mx.eval([(held.recurrent, held.history) for held in kda.values()], [held.rows for held in mla.values()])
        return made

    def begin(self, rows: int, *, partial: bool) -> None:
        """Opens a pass of ``rows`` provisional positions; an uncommitted earlier pass is abandoned.

        Raises:
            InputError: the context is full.
        """
        check_room(self.position, rows, self.context)
        self.pending, self.partial = rows, partial
        self.taps = []

    def provisional(self) -> list[mx.array]:
        """The arrays of the last pass that a commit will keep."""
        return [array for layer in range(self.config.layers) for array in self.made(layer)]

    def made(self, layer: int) -> list[mx.array]:
        """The same of one layer."""
        if layer in self.mla:
            return [self.mla[layer].rows]
        kda = self.kda[layer]
        return [array for array in (kda.ahead, kda.raw, *(kda.rows or ())) if array is not None]

    def commit(self, count: int) -> None:
        """Keeps the first ``count`` provisional positions and forgets the rest; see ``contract.State``."""
        check_commit(count, self.pending, partial=self.partial)
        if count:
            for layer in self.kda.values():
                self._commit_kda(layer, count)
            # Submitted here, since the next pass may be another thread's.
            start([array for layer in self.kda.values() for array in (layer.recurrent, layer.history)])
        self.position += count
        if count < self.pending:
            self.taps = [tap[:count] for tap in self.taps]
        self.pending = 0

    def _commit_kda(self, layer: KdaState, count: int) -> None:
        assert layer.raw is not None
        if count == self.pending:
            assert layer.ahead is not None
            layer.recurrent, raw = layer.ahead, layer.raw
        else:
            assert layer.rows is not None
            layer.recurrent, raw = self.replay(layer.recurrent, layer.rows, count), layer.raw[:count]
        keep = self.config.conv_kernel - 1
        layer.history = raw[-keep:] if len(raw) >= keep else mx.concatenate([layer.history, raw])[-keep:]
        layer.ahead = layer.raw = layer.rows = None

    def tensors(self) -> Sequence[tuple[str, Host]]:
        """Committed state as (name, tensor) pairs, views where possible; bf16 as uint16 of the same bits."""
        found: list[tuple[str, mx.array]] = []
        for layer, kda in self.kda.items():
            found.append((f"kda.{layer}.recurrent", kda.recurrent))
            found.append((f"kda.{layer}.history", kda.history))
        for layer, mla in self.mla.items():
            found.append((f"mla.{layer}.rows", mla.rows[: self.position]))
        mx.eval([array for _, array in found])
        return [(name, host(array)) for name, array in found]

    def restore(self, position: int, tensors: Mapping[str, Host]) -> None:
        """Replaces the committed state; see ``contract.State``."""
        if not 0 <= position <= self.context:
            raise ValueError(f"a state of {position} positions does not fit a context of {self.context}")
        plan: dict[str, mx.array] = {}

        def take(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
            theirs = tensors[name]
            if theirs.shape != shape or theirs.dtype != _HOST[dtype]:
                raise ValueError(f"state tensor {theirs.dtype} {theirs.shape} where {dtype} {shape} is expected")
            plan[name] = mx.array(theirs).view(dtype)

        for layer, kda in self.kda.items():
            take(f"kda.{layer}.recurrent", tuple(kda.recurrent.shape), kda.recurrent.dtype)
            take(f"kda.{layer}.history", tuple(kda.history.shape), kda.history.dtype)
        for layer, mla in self.mla.items():
            take(f"mla.{layer}.rows", (position, mla.rows.shape[1]), mla.rows.dtype)
        for layer, kda in self.kda.items():
            kda.recurrent, kda.history = plan[f"kda.{layer}.recurrent"], plan[f"kda.{layer}.history"]
            kda.ahead = kda.raw = kda.rows = None
        for layer, mla in self.mla.items():
            mla.rows = plan[f"mla.{layer}.rows"]
        mx.eval(plan)
        self.position, self.pending, self.taps = position, 0, []


_HOST: dict[mx.Dtype, Any] = {mx.float32: np.float32, mx.bfloat16: np.uint16}


def host(array: mx.array) -> Host:
    """A view of an evaluated array; NumPy has no bf16, so its bits come as uint16."""
    shown = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(shown, copy=False)
