"""The memory plan: fits its budget, keeps its priorities, and says what it needs when it cannot."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.bench.synthetic import released_config
from deltafin.checkpoint.config import K3Config
from deltafin.checkpoint.inventory import spine_inventory
from deltafin.errors import MemoryBudgetError
from deltafin.residency.budget import MIB, plan_memory

MINI = K3Config.load(Path(__file__).parents[2] / "src/deltafin/mini_k3/target")
UNITS = {**{f"layer.{i}": 1_200_000 for i in range(9)}, "layer.0": 2_400_000, "embed": 3_200_000, "head": 3_300_000}
UNITS = {k: -(-v // 4096) * 4096 for k, v in UNITS.items()}
FRAME = 32768


def plan(budget: int, context: int = 4096):
    return plan_memory(MINI, UNITS, budget=budget, runtime=200 * MIB, frame_bytes=FRAME, context=context)


@given(st.integers(min_value=200, max_value=600), st.integers(min_value=16, max_value=100_000))
def test_a_plan_stays_within_its_budget_and_holds_what_a_token_needs(mib: int, context: int) -> None:
    try:
        p = plan(mib * MIB, context)
    except MemoryBudgetError:
        return
    assert p.planned <= p.budget
    assert p.frames.in_flight >= 2
    assert p.prefill_rows >= 8
    assert p.block_rows <= p.prefill_rows
    assert 1 <= p.context <= context
    assert p.resident_bytes + p.streamed_bytes == sum(UNITS.values())
    streamed = [size for key, size in UNITS.items() if key not in p.resident_units]
    if streamed:
        assert p.stream_buffers[0] == 2
        assert p.stream_buffers[1] >= max(streamed)
    else:
        assert p.stream_buffers == (0, 0)


def test_the_smallest_budget_it_names_is_really_enough() -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        plan(210 * MIB)
    needed = int(re.search(r"at least ([\d,]+) MiB", refused.value.remedy)[1].replace(",", ""))
    assert plan((needed + 1) * MIB).planned <= (needed + 1) * MIB
    with pytest.raises(MemoryBudgetError):
        plan((needed - 1) * MIB)


def test_spine_comes_before_experts_and_more_memory_never_streams_more() -> None:
    last = None
    for mib in range(230, 400, 2):
        try:
            p = plan(mib * MIB)
        except MemoryBudgetError:
            continue
        if p.streamed_bytes:
            assert p.frames.tier * FRAME < min(UNITS.values()) + p.stream_buffers[1]
        if last is not None:
            assert p.streamed_bytes <= last
        last = p.streamed_bytes
    assert last == 0


def test_everything_fits_when_there_is_room() -> None:
    p = plan(2000 * MIB)
    assert p.resident_units == frozenset(UNITS)
    assert p.frames.tier == 8 * 128
    assert p.context == 4096


def test_streamed_layers_are_spread_over_the_token() -> None:
    units = {f"layer.{i}": 4 * MIB for i in range(16)}
    seen = set()
    for mib in range(250, 400):
        try:
            p = plan_memory(MINI, units, budget=mib * MIB, runtime=200 * MIB, frame_bytes=FRAME, context=64)
        except MemoryBudgetError:
            continue
        streamed = sorted(int(k.split(".")[1]) for k in units if k not in p.resident_units)
        if 2 <= len(streamed) <= 8:
            seen.add(len(streamed))
            gaps = [b - a for a, b in zip(streamed, [*streamed[1:], streamed[0] + 16], strict=True)]
            assert max(gaps) <= 2 * 16 / len(streamed)
    assert len(seen) >= 2


@pytest.mark.parametrize("gib", [8, 32, 64])
def test_the_full_model_keeps_a_useful_chunk_and_context_while_its_spine_is_streamed(gib: int) -> None:
    """A chunk of a few rows would read the whole bank for each of them."""
    config = K3Config.parse(released_config())
    units = {k: sum(t.nbytes for t in u.values()) for k, u in spine_inventory(config).items()}
    p = plan_memory(config, units, budget=gib << 30, runtime=400 * MIB, frame_bytes=17551360, context=16384, drives=4)
    assert p.streamed_bytes > 0
    assert p.prefill_rows >= 512
    assert p.context >= 4096
    assert p.frames.in_flight >= 32
    assert p.planned <= p.budget
