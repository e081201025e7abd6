"""LatentMoE: router, shared experts while the drives work, routed experts as they arrive, summed in router order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltafin import kernels
from deltafin.checkpoint.config import K3Config
from deltafin.contract import MoeTimes, Routes
from deltafin.expert_layout import ExpertLayout
from deltafin.model.weights import MlpWeights, MoeWeights
from deltafin.streaming.experts import ExpertStream, Lease

_COUNTS = torch.arange(1025, dtype=torch.int32)
_ZEROS = torch.zeros(1024, dtype=torch.int32)
_COUNT, _ZERO = _COUNTS.numpy(), _ZEROS.numpy()


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which rows each needed expert serves, and into which slot its result goes (row * k + rank in router order)."""

    experts: tuple[int, ...]
    index: dict[int, int]
    splits: np.ndarray
    rows: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(cls, ids: torch.Tensor) -> Assignment:
        """Groups router choices, int32 [T, k], by expert."""
        if len(ids) == 1:
            # One row needs no grouping, and grouping would cost as much as a small model's products.
            chosen = tuple(ids[0].tolist())
            return cls(chosen, {e: i for i, e in enumerate(chosen)}, _COUNT, _ZERO, _COUNT)
        flat = ids.numpy().reshape(-1)
        slots = np.argsort(flat, kind="stable").astype(np.int32)
        experts, starts = np.unique(flat[slots], return_index=True)
        splits = np.append(starts, len(flat)).astype(np.int32)
        names = tuple(experts.tolist())
        return cls(
            experts=names,
            index={e: i for i, e in enumerate(names)},
            splits=splits,
            rows=slots // ids.shape[1],
            slots=slots,
        )

    def select(self, leases: Sequence[Lease]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row splits [n+1], rows and slots (all int32) for the given experts, in their order."""
        if self.rows is _ZERO:
            n = len(leases)
            order = [self.index[lease.key[1]] for lease in leases]
            return _COUNTS[: n + 1], _ZEROS[:n], torch.tensor(order, dtype=torch.int32)
        which = np.array([self.index[lease.key[1]] for lease in leases])
        starts = self.splits[which]
        counts = self.splits[which + 1] - starts
        splits = np.zeros(len(leases) + 1, np.int32)
        np.cumsum(counts, out=splits[1:])
        # Entry i of the result is entry (i - where its expert begins in the result) of that expert's part.
        picked = np.arange(splits[-1]) + np.repeat(starts - splits[:-1], counts)
        return torch.from_numpy(splits), torch.from_numpy(self.rows[picked]), torch.from_numpy(self.slots[picked])


def gated(config: K3Config, w: MlpWeights, x: torch.Tensor) -> torch.Tensor:
    """down(SiTU(gate x, up x)), fp32 [T, hidden] → [T, hidden]."""
    return kernels.gated_mlp(x, w.gate, w.up, w.down, config.situ_beta, config.situ_linear_beta)


def forward(
    config: K3Config,
    w: MoeWeights,
    layout: ExpertLayout,
    layer: int,
    x: torch.Tensor,
    blocks: Sequence[slice],
    stream: ExpertStream,
    order: Sequence[int] | None,
    times: MoeTimes,
    look_ahead: Callable[[], None],
) -> tuple[torch.Tensor, Routes]:
    """One MoE sublayer over all rows of a chunk; each needed expert is leased once.

    Args:
        x: normalised input, fp32 [T, hidden].
        blocks: consecutive row ranges that cover ``x``; transients exist for one at a time.
        look_ahead: called once, when all reads of this layer have been given to the drives.
        order: the order in which experts lie on the drives (all of them), for a prefill; None reads in router order.

    Returns:
        (output fp32 [T, hidden], router choices int32 [T, k]).
    """
    rows, k = len(x), config.experts_per_token
    latent = torch.empty(rows, config.latent)
    ids = torch.empty(rows, k, dtype=torch.int32)
    weights = torch.empty(rows, k)
    for block in blocks:
        ids[block], weights[block] = kernels.router(
            kernels.linear(x[block], w.router),
            w.router_bias,
            k,
            renormalize=config.renormalize,
            scale=config.routed_scaling,
            sum_eps=config.numeric.router_sum_eps,
        )
    assignment = Assignment.of(ids)
    if order is not None:
        wanted = [e for e in order if e in assignment.index]
    elif rows == 1:
        wanted = ids[0].tolist()
    else:
        wanted = list(assignment.experts)
    slots = torch.empty(rows * k, config.latent)
    looked = False
    with stream.fetch(layer, wanted) as batches:
        if batches.submitted:
            looked = True
            look_ahead()
        # The reads have started; what needs no routed expert is computed while they are under way.
        out = torch.empty_like(x)
        for block in blocks:
            kernels.linear(x[block], w.latent_down, out=latent[block])
            out[block] = gated(config, w.shared, x[block])
        for batch in batches:
            started = time.perf_counter()
            splits, used, into = assignment.select(batch)
            kernels.expert_forward(
                latent,
                [lease.address for lease in batch],
                layout,
                splits,
                used,
                into,
                slots,
                beta=config.situ_beta,
                linear_beta=config.situ_linear_beta,
            )
            times.experts += time.perf_counter() - started
            stream.release(batch)
            if not looked and batches.submitted:
                looked = True
                look_ahead()
    per_row = slots.view(rows, k, config.latent)
    for block in blocks:
        routed = kernels.combine_norm(per_row[block], weights[block], w.latent_norm, config.rms_eps)
        out[block] += kernels.linear(routed, w.latent_up)
    return out, ids.numpy()
