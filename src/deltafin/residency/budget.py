"""One function splits the memory budget among spine, state, prefill, reads in flight and the expert tier.

Everything optional can be refused here, silently for the user's text and visibly in ``deltafin info`` and the stats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltafin.checkpoint.config import K3Config
from deltafin.errors import MemoryBudgetError

MIB = 1 << 20
MAX_PREFILL_ROWS = 8192
WANTED_PREFILL_ROWS = 512
GOOD_CONTEXT = 4096
# Rows whose attention transients exist at one time; a longer prefill chunk walks through the layer in blocks of this.
MAX_BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class ExpertFrames:
    """Page-aligned buffers of one expert each."""

    in_flight: int
    tier: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The split of a budget, all sizes in bytes.

    Attributes:
        budget: what the user (or the machine) allows for the whole process.
        runtime: what the interpreter and its libraries already use, plus slack for small allocations.
        resident_units: spine units kept in memory; the others are streamed, double-buffered.
        stream_buffers: number and size of the buffers that streamed spine units pass through (0 when all are resident).
        prefill_rows: longest chunk of a prompt processed at once.
        block_rows: rows of a chunk whose attention transients exist at one time.
        context: positions of the latent cache that fit (and were asked for).
        frames: expert buffers.
    """

    budget: int
    runtime: int
    resident_units: frozenset[str]
    resident_bytes: int
    streamed_bytes: int
    stream_buffers: tuple[int, int]
    state_bytes: int
    prefill_bytes: int
    prefill_rows: int
    block_rows: int
    context: int
    frame_bytes: int
    frames: ExpertFrames

    @property
    def planned(self) -> int:
        """Bytes the plan expects the process to use at its peak."""
        return (
            self.runtime
            + self.resident_bytes
            + self.stream_buffers[0] * self.stream_buffers[1]
            + self.state_bytes
            + self.prefill_bytes
            + self.frame_bytes * (self.frames.in_flight + self.frames.tier)
        )


def recurrent_bytes(config: K3Config) -> int:
    """KDA state of one sequence, twice: the state a pass starts from is kept until the pass is committed."""
    kda = config.layers - len(config.mla_layers)
    one = config.kda_heads * config.kda_head_dim**2 + (config.conv_kernel - 1) * 3 * config.kda_width
    return 2 * 4 * one * kda


def latent_bytes(config: K3Config, positions: int) -> int:
    """fp32 latent cache rows of all MLA layers."""
    return 4 * config.latent_row * len(config.mla_layers) * positions


def chunk_row_bytes(config: K3Config) -> int:
    """fp32 bytes one row needs for as long as its chunk is in the layer loop: accumulator, snapshots, expert slots."""
    snapshots = -(-config.layers // config.attn_res_block)
    streams = config.hidden * (snapshots + 3)
    slots = config.latent * (config.experts_per_token + 3)
    return 4 * (streams + slots + config.experts) + 12 * config.experts_per_token


def block_row_bytes(config: K3Config) -> int:
    """fp32 bytes one row needs inside a sublayer: normalised input and the widest set of projections alive together."""
    kda = 11 * config.kda_width
    mla = config.mla_heads * (2 * (config.nope_dim + config.rope_dim) + 3 * config.v_dim) + 2 * config.q_lora
    mlp = 3 * max(config.dense_intermediate if config.dense_layers else 0, config.shared_intermediate)
    return 4 * (max(kda, mla, mlp) + 3 * config.hidden)


def plan_memory(
    config: K3Config,
    units: Mapping[str, int],
    *,
    budget: int,
    runtime: int,
    frame_bytes: int,
    context: int,
    must_hold: int = 512,
    drives: int = 1,
    draft_bytes: int = 0,
    draft_row_bytes: int = 0,
    pinned: frozenset[str] = frozenset(),
) -> MemoryPlan:
    """Splits ``budget`` bytes.

    Priority: what a single position needs; then a useful prefill chunk, context and enough reads in flight, since
    together they cost less than one layer and a short chunk reads the whole bank again and again; then the spine; then
    the asked-for context; then a longer prefill chunk; then experts.

    Args:
        config: the model.
        units: spine unit key → buffer bytes, in the order a token uses them.
        budget: bytes for the whole process.
        runtime: bytes already in use by the process.
        frame_bytes: one expert buffer.
        context: positions wanted for prompt and reply together.
        must_hold: positions without which the plan is refused (at most ``context`` counts).
        drives: drives read at once, for the number of reads kept in flight.
        draft_bytes: bytes already promised to a draft.
        draft_row_bytes: what a draft needs of each row of a prefill chunk.
        pinned: units that must be resident (a draft shares K3's head).

    Raises:
        MemoryBudgetError: when even the smallest arrangement does not fit; states the smallest budget that does.
    """
    # Small objects, tokenizer tables and allocator rounding grow with use; a share of what is planned covers them.
    runtime = runtime + draft_bytes + 24 * MIB
    per_row, per_block = chunk_row_bytes(config) + draft_row_bytes, block_row_bytes(config)
    logits = 4 * config.vocab_size
    k = config.experts_per_token
    total_experts = len(config.moe_layers) * config.experts
    min_rows, min_frames, min_context = 8, max(2, min(k, 4)), min(context, must_hold)
    state = recurrent_bytes(config) + latent_bytes(config, min_context)
    left = budget - runtime - state - min_rows * (per_row + per_block + logits) - min_frames * frame_bytes

    good_rows, good_frames = WANTED_PREFILL_ROWS, max(min_frames, min(2 * k, total_experts))
    good_context = max(min_context, min(context, GOOD_CONTEXT))
    comfort = (
        (good_rows - min_rows) * per_row
        + (MAX_BLOCK_ROWS - min_rows) * per_block
        + (good_frames - min_frames) * frame_bytes
        + latent_bytes(config, good_context - min_context)
    )

    pinned_bytes = sum(units[key] for key in pinned)
    free = {key: size for key, size in units.items() if key not in pinned}
    # Where it would take a larger share, or cost a spine that fits whole, it has to wait its turn.
    comfortable = comfort <= left // 4 and sum(free.values()) > left - pinned_bytes
    resident, streams, spine_bytes = _split_spine(free, left - pinned_bytes - comfort * comfortable)
    if resident is None and comfortable:
        comfortable = False
        resident, streams, spine_bytes = _split_spine(free, left - pinned_bytes)
    spine_bytes += pinned_bytes
    if resident is None:
        smallest = budget - left + spine_bytes
        raise MemoryBudgetError(
            f"{budget / MIB:,.0f} MiB of memory cannot hold what K3 needs here",
            remedy=f"allow at least {smallest / MIB:,.0f} MiB with --ram, or close other programs",
        )
    left -= spine_bytes
    resident += pinned

    rows, block, frames, positions = min_rows, min_rows, min_frames, min_context
    if comfortable:
        rows, block, frames, positions = good_rows, MAX_BLOCK_ROWS, good_frames, good_context
        left -= comfort

    def grow_rows(want: int, spend: int) -> None:
        nonlocal rows, block, left
        got = rows
        while got < want:
            step = min(got * 2, want)
            cost = (step - rows) * per_row + (min(step, MAX_BLOCK_ROWS) - block) * per_block
            if cost > spend:
                break
            got = step
        left -= (got - rows) * per_row + (min(got, MAX_BLOCK_ROWS) - block) * per_block
        rows, block = got, min(got, MAX_BLOCK_ROWS)

    def grow_frames(want: int, spend: int) -> None:
        nonlocal frames, left
        more = max(0, min(want - frames, spend // frame_bytes))
        frames += more
        left -= more * frame_bytes

    grow_frames(min(k, total_experts), left)
    grow_rows(64, left // 2)
    grow_frames(min(2 * k * max(1, drives), 4 * k, total_experts), left // 4)
    grow_rows(WANTED_PREFILL_ROWS, left // 2)
    row_cost = latent_bytes(config, 1)
    if row_cost:
        more = min(context - positions, (left // 2) // row_cost)
        positions += more
        left -= more * row_cost
    else:
        positions = context
    grow_rows(min(MAX_PREFILL_ROWS, positions), left // 4)
    tier = max(0, min(total_experts, left // frame_bytes))
    return MemoryPlan(
        budget=budget,
        runtime=runtime,
        resident_units=frozenset(resident),
        resident_bytes=sum(units[u] for u in resident),
        streamed_bytes=sum(size for u, size in units.items() if u not in resident),
        stream_buffers=streams,
        state_bytes=recurrent_bytes(config) + latent_bytes(config, positions),
        prefill_bytes=rows * per_row + block * per_block + min_rows * logits,
        prefill_rows=rows,
        block_rows=block,
        context=positions,
        frame_bytes=frame_bytes,
        frames=ExpertFrames(in_flight=frames, tier=tier),
    )


def _split_spine(units: Mapping[str, int], left: int) -> tuple[list[str] | None, tuple[int, int], int]:
    """Which units stay: all, or as many as fit beside two buffers of the largest streamed one.

    The largest units are pinned first, since one large streamed unit makes both buffers large. Among equals the
    streamed ones are spread evenly over the token, so that the drives always have a next unit to fetch while a
    resident one computes.

    Returns:
        (resident keys or None when nothing fits, (buffers, bytes of each), bytes used or needed).
    """
    total = sum(units.values())
    if total <= left:
        return list(units), (0, 0), total
    order = sorted(_spread(list(units)), key=lambda u: -units[u])
    best: tuple[list[str], tuple[int, int], int] | None = None
    smallest = 0
    pinned = 0
    for count in range(len(order) + 1):
        streamed = order[count:]
        buffer = units[streamed[0]] if streamed else 0
        need = pinned + 2 * buffer
        smallest = need if count == 0 else min(smallest, need)
        if need <= left:
            best = (order[:count], (2 if streamed else 0, buffer), need)
        if streamed:
            pinned += units[streamed[0]]
    if best is None:
        return None, (0, 0), smallest
    return best


def _spread(keys: Sequence[str]) -> list[str]:
    """Bit-reversed order: any prefix of the result is spread evenly over the input, and so is the rest."""
    bits = max(1, (len(keys) - 1).bit_length())
    rank = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(len(keys))]
    return [key for _, key in sorted(zip(rank, keys, strict=True))]
