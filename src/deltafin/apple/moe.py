"""LatentMoE: router, shared experts while the drives work, routed experts as they arrive, summed in router order."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from deltafin.apple.frames import MlxFrames
from deltafin.apple.ops import on_gpu, situ, start, total
from deltafin.checkpoint.config import K3Config
from deltafin.contract import Routes
from deltafin.expert_layout import ExpertLayout
from deltafin.streaming.experts import Fetch, Lease

Ids = npt.NDArray[np.int32]
_MOST_PAIRS = 1024
"""(row, expert) pairs whose transients exist at one time; at the released widths 60 kB each."""
_BLOCK = 64
"""Rows whose experts' outputs are weighted at one time."""
_GATE_UP = np.array([0, 1], np.uint32)
_SINGLE = tuple(np.array([i], np.int32) for i in range(1024))


def choose(config: K3Config, scores: npt.NDArray[np.float32], bias: npt.NDArray[np.float32]) -> tuple[Routes, Any]:
    """The router's choice on the host (spec 3.7, step 1): larger score first, the smaller id among equals.

    Args:
        scores: sigmoid of the router's logits, fp32 [T, experts].
        bias: fp32 [experts].

    Returns:
        (ids int32 [T, k], weights fp32 [T, k]).
    """
    k = config.experts_per_token
    ids = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :k].astype(np.int32)
    chosen = scores[np.arange(len(ids))[:, None], ids]
    if config.renormalize:
        # Summed one after the other, so that one row and many are summed alike.
        chosen = chosen / (np.cumsum(chosen, axis=1)[:, -1:] + np.float32(config.numeric.router_sum_eps))
    return ids, (chosen * np.float32(config.routed_scaling)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which rows each needed expert serves; entries are (row, rank in router order).

    Attributes:
        experts: distinct, ascending for several rows, in router order for one.
        rows: of each expert; None for a single row.
        slots: of each expert, row * k + rank.
    """

    experts: tuple[int, ...]
    rows: dict[int, Ids] | None
    slots: dict[int, Ids]

    @classmethod
    def of(cls, ids: Routes) -> Assignment:
        """Groups router choices, int32 [T, k], by expert."""
        count, k = ids.shape
        if count == 1:
            chosen = tuple(ids[0].tolist())
            return cls(chosen, None, dict(zip(chosen, _SINGLE, strict=False)))
        flat = ids.reshape(-1)
        order = np.argsort(flat, kind="stable").astype(np.int32)
        experts, starts = np.unique(flat[order], return_index=True)
        parts = np.split(order, starts[1:])
        names = tuple(experts.tolist())
        slots = dict(zip(names, parts, strict=True))
        return cls(names, {e: part // k for e, part in slots.items()}, slots)


class Products:
    """The routed experts' outputs of one layer, gathered as batches arrive.

    Args:
        latent: the experts' input [T, latent].
    """

    def __init__(
        self, config: K3Config, layout: ExpertLayout, frames: MlxFrames, latent: mx.array, assignment: Assignment
    ) -> None:
        self._config = config
        self._layout = layout
        self._frames = frames
        self._dtype = latent.dtype
        # MLX's CPU product of packed weights is six times faster with fp32 rows, and they are widened exactly; the
        # experts then compute in fp32 up to their sum. A GPU takes the rows as they are.
        self._latent = (latent if on_gpu() else latent.astype(mx.float32))[:, None]
        self._assignment = assignment
        self._parts: list[mx.array] = []
        self._slots: list[Ids] = []

    @property
    def small(self) -> bool:
        """Whether many experts are multiplied by one call."""
        return self._frames.per_slab > 1

    def add(self, leases: Sequence[Lease]) -> list[mx.array]:
        """Submits the products of a batch; what it returns must be computed before the leases are given back."""
        frames, assignment = self._frames, self._assignment
        per_slab = frames.per_slab
        groups: dict[tuple[int, int], list[Lease]] = defaultdict(list)
        for lease in leases:
            groups[lease.frame // per_slab, lease.address - frames.address(lease.frame)].append(lease)
        made = []
        for (slab, offset), members in groups.items():
            slots = [assignment.slots[lease.key[1]] for lease in members]
            index = np.array([lease.frame % per_slab for lease in members], np.uint32)
            if assignment.rows is None:
                made.append(self._product(slab, offset, None, index))
            else:
                rows = np.concatenate([assignment.rows[lease.key[1]] for lease in members])
                index = np.repeat(index, [len(s) for s in slots])
                for i in range(0, len(rows), _MOST_PAIRS):
                    part = slice(i, i + _MOST_PAIRS)
                    made.append(self._product(slab, offset, rows[part], index[part]))
                    if part.stop < len(rows):
                        start(made[-1:])  # one piece after the other, so that only one piece's transients exist
            self._slots += slots
        self._parts += made
        return made

    def _product(self, slab: int, offset: int, rows: Ids | None, index: npt.NDArray[np.uint32]) -> mx.array:
        """w2 · SiTU(w1 · x, w3 · x) for each (row, expert) pair alone, [pairs, latent]; rows None: all of row 0."""
        config, w = self._config, self._frames.windows(slab, offset, self._layout)
        how: dict[str, Any] = {"transpose": True, "group_size": 32, "bits": 4, "mode": "mxfp4"}
        pair = np.empty((2, len(index), 2), np.uint32)
        pair[0] = 0 if rows is None else rows[:, None]
        pair[1] = index[:, None] * 2 + _GATE_UP
        lhs, rhs = mx.array(pair)
        gate_up = mx.gather_qmm(self._latent, w.gate_up, w.gate_up_scales, None, lhs, rhs, **how)
        hidden = situ(gate_up[:, 0], gate_up[:, 1], config.situ_beta, config.situ_linear_beta)
        return mx.gather_qmm(hidden, w.down, w.down_scales, None, None, mx.array(index), **how)[:, 0]

    def combined(self, weights: npt.NDArray[np.float32]) -> mx.array:
        """Σ weight · output in router order, fp32 inside, [T, latent]."""
        count, k = weights.shape
        order = np.empty(count * k, np.uint32)
        slots = np.concatenate(self._slots)
        order[slots] = np.arange(len(slots), dtype=np.uint32)
        together = total(self._parts)
        self._parts = []
        shuffled = bool((order[1:] < order[:-1]).any())
        sums = []
        for i in range(0, count, _BLOCK):
            rows = slice(i * k, min(i + _BLOCK, count) * k)
            part = together[mx.array(order[rows])] if shuffled else together[rows]
            per_row = part.astype(mx.float32).reshape(-1, k, together.shape[1])
            weighted = per_row * mx.array(weights[i : i + _BLOCK])[..., None]
            sums.append(weighted.sum(axis=1).astype(self._dtype))
        return total(sums)


def compute(
    products: Products,
    batches: Fetch,
    release: Callable[[Sequence[Lease]], None],
    held: list[Lease],
    looked: Callable[[], None],
    evaluate: Callable[[list[mx.array]], None],
) -> float:
    """Submits every batch as it arrives.

    The leases stay in ``held``, to be given back when the next synchronisation has shown that the device is done with
    them. Only when reads wait for frames are the products waited for at once.

    Args:
        looked: called once, when all reads of this layer have been given to the drives.

    Returns:
        Seconds of the host's own work.
    """
    seconds = 0.0
    told = batches.submitted
    if told:
        looked()
    waiting: list[Lease] = []
    first = True
    for batch in batches:
        started = time.perf_counter()
        waiting += batch
        if products.small and batches.reading and batches.submitted and not first:
            # A call for each arrival would take longer than computing what has arrived; large experts start at once.
            continue
        first = False
        made = products.add(waiting)
        held += waiting
        waiting = []
        if batches.submitted:
            start(made)
        else:
            seconds += time.perf_counter() - started
            evaluate(made)
            release(held)
            held.clear()
            started = time.perf_counter()
        seconds += time.perf_counter() - started
        if not told and batches.submitted:
            told = True
            looked()
    return seconds
