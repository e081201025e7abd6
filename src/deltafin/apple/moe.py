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
from deltafin.apple.ops import situ, start
from deltafin.checkpoint.config import K3Config
from deltafin.contract import Routes
from deltafin.expert_layout import ExpertLayout
from deltafin.streaming.experts import Fetch, Lease

Ids = npt.NDArray[np.int32]


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
    chosen = np.take_along_axis(scores, ids, axis=-1)
    if config.renormalize:
        # Added one by one: the same order for one row and for many.
        sums = chosen[:, :1].copy()
        for i in range(1, k):
            sums += chosen[:, i : i + 1]
        chosen = chosen / (sums + np.float32(config.numeric.router_sum_eps))
    return ids, (chosen * np.float32(config.routed_scaling)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which rows each needed expert serves; entries are (row, rank in router order).

    Attributes:
        experts: distinct, ascending for several rows, in router order for one.
    """

    experts: tuple[int, ...]
    rows: dict[int, Ids]
    slots: dict[int, Ids]

    @classmethod
    def of(cls, ids: Routes) -> Assignment:
        """Groups router choices, int32 [T, k], by expert; slot = row * k + rank."""
        count, k = ids.shape
        if count == 1:
            chosen = ids[0].tolist()
            zero = np.zeros(1, np.int32)
            return cls(
                tuple(chosen),
                dict.fromkeys(chosen, zero),
                {e: np.array([i], np.int32) for i, e in enumerate(chosen)},
            )
        flat = ids.reshape(-1)
        order = np.argsort(flat, kind="stable").astype(np.int32)
        experts, starts = np.unique(flat[order], return_index=True)
        parts = np.split(order, starts[1:])
        names = tuple(experts.tolist())
        return cls(
            names,
            {e: part // k for e, part in zip(names, parts, strict=True)},
            dict(zip(names, parts, strict=True)),
        )


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
        # MLX's CPU product of packed weights is six times faster with fp32 rows; they are widened exactly, and its
        # result is rounded as a bf16 product's would be. A GPU takes them as they are.
        on_gpu = mx.default_device() == mx.Device(mx.gpu)
        self._latent = (latent if on_gpu else latent.astype(mx.float32))[:, None]
        self._assignment = assignment
        self._parts: list[mx.array] = []
        self._slots: list[Ids] = []

    def add(self, leases: Sequence[Lease]) -> list[mx.array]:
        """Submits the products of a batch; what it returns must be computed before the leases are given back."""
        frames, assignment = self._frames, self._assignment
        groups: dict[tuple[int, int], list[Lease]] = defaultdict(list)
        for lease in leases:
            groups[lease.frame // frames.per_slab, lease.address - frames.address(lease.frame)].append(lease)
        made = []
        for (slab, offset), members in groups.items():
            rows = [assignment.rows[lease.key[1]] for lease in members]
            index = np.repeat([lease.frame % frames.per_slab for lease in members], [len(r) for r in rows])
            part = self._product(slab, offset, np.concatenate(rows), index)
            made.append(part)
            self._slots += [assignment.slots[lease.key[1]] for lease in members]
        self._parts += made
        return made

    def _product(self, slab: int, offset: int, rows: Ids, index: npt.NDArray[np.int64]) -> mx.array:
        """w2 · SiTU(w1 · x, w3 · x) for each (row, expert) pair alone, [pairs, latent]."""
        config, w = self._config, self._frames.windows(slab, offset, self._layout)
        how: dict[str, Any] = {"transpose": True, "group_size": 32, "bits": 4, "mode": "mxfp4"}
        lhs = mx.array(np.stack([rows, rows], axis=1).astype(np.uint32))
        rhs = mx.array(np.stack([2 * index, 2 * index + 1], axis=1).astype(np.uint32))
        gate_up = mx.gather_qmm(self._latent, w.gate_up, w.gate_up_scales, None, lhs, rhs, **how).astype(self._dtype)
        hidden = situ(gate_up[:, 0], gate_up[:, 1], config.situ_beta, config.situ_linear_beta)
        hidden = hidden.astype(self._latent.dtype)
        down = mx.array(index.astype(np.uint32))
        return mx.gather_qmm(hidden, w.down, w.down_scales, None, None, down, **how)[:, 0].astype(self._dtype)

    def combined(self, weights: npt.NDArray[np.float32]) -> mx.array:
        """Σ weight · output in router order, fp32 inside, [T, latent]."""
        count, k = weights.shape
        order = np.empty(count * k, np.uint32)
        slots = np.concatenate(self._slots)
        order[slots] = np.arange(len(slots), dtype=np.uint32)
        together = self._parts[0] if len(self._parts) == 1 else mx.concatenate(self._parts)
        per_row = together[mx.array(order)].astype(mx.float32).reshape(count, k, -1)
        return (per_row * mx.array(weights)[..., None]).sum(axis=1).astype(self._dtype)


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
    for batch in batches:
        started = time.perf_counter()
        made = products.add(batch)
        held += batch
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
