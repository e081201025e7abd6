"""The tier against LRU, decayed LFU and Belady's optimum on real routes of three models, and the simulator's clocks."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafin.history.trace import read_trace
from deltafin.residency.replay import POLICIES, hit_rate
from deltafin.residency.simulate import Machine, simulate
from deltafin.residency.value import predicted_hit_rate, seconds_saved_per_gib

DATA = Path(__file__).parents[1] / "data"
# LRU, decayed LFU and Belady at 10, 25 and 50 % of all experts, computed by an independent program.
PUBLISHED = {
    "mini": ((0.00, 0.17, 0.43), (0.33, 0.36, 0.66), (0.63, 0.62, 0.85)),
    "kimi_linear": ((0.54, 0.51, 0.72), (0.73, 0.72, 0.85), (0.87, 0.88, 0.91)),
    "olmoe": ((0.00, 0.34, 0.54), (0.57, 0.56, 0.77), (0.78, 0.80, 0.91)),
}
SHARES = (0.10, 0.25, 0.50)


def recorded(name: str) -> tuple[np.ndarray, int]:
    """(routes [tokens, layers, k], experts per layer)."""
    if name == "mini":
        return np.load(DATA / "oracle/router_traces.npz")["experts"].astype(np.int64), 128
    trace = read_trace(DATA / f"traces/{name}.trace")
    return trace.routes.astype(np.int64), trace.shape.experts


@pytest.mark.parametrize(("name", "index"), list(product(PUBLISHED, range(3))))
def test_it_beats_both_classics_on_real_routes(name: str, index: int) -> None:
    routes, experts = recorded(name)
    capacity = int(SHARES[index] * routes.shape[1] * experts)
    rates = {policy: hit_rate(policy, routes, experts, capacity) for policy in POLICIES}
    lru, lfu, belady = PUBLISHED[name][index]
    assert rates["lru"] == pytest.approx(lru, abs=0.006)
    assert rates["lfu"] == pytest.approx(lfu, abs=0.006)
    assert rates["belady"] == pytest.approx(belady, abs=0.006)
    best = max(rates["lru"], rates["lfu"])
    assert rates["deltafin"] >= best - 0.005
    if SHARES[index] == 0.10:
        assert rates["deltafin"] > best + 0.01
    assert rates["deltafin"] < rates["belady"]


ROUTES = st.lists(st.lists(st.sets(st.integers(0, 5), min_size=2, max_size=2), min_size=2, max_size=2), min_size=1)


@settings(deadline=None, max_examples=50)
@given(ROUTES, st.integers(0, 12))
def test_nobody_beats_belady_and_room_for_all_misses_each_expert_once(tokens: list, capacity: int) -> None:
    routes = np.array([[sorted(layer) for layer in token] for token in tokens])
    best = hit_rate("belady", routes, 6, capacity)
    for policy in POLICIES:
        assert hit_rate(policy, routes, 6, capacity) <= best + 1e-9
        distinct = sum(len(np.unique(routes[:, layer])) for layer in range(2))
        assert hit_rate(policy, routes, 6, 12) == pytest.approx(1 - distinct / routes.size)


@pytest.fixture(scope="module")
def routes() -> np.ndarray:
    return recorded("mini")[0][:80]


def test_without_computing_a_token_takes_its_missed_bytes_over_the_summed_bandwidth(routes: np.ndarray) -> None:
    machine = Machine(bytes_per_s=(3e9, 1e9), expert_bytes=1 << 20)
    outcome = simulate(routes, 128, machine, capacity=0)
    assert outcome.hit_rate == 0
    assert outcome.seconds_per_token == pytest.approx(8 * 16 * (1 << 20) / 4e9)
    assert outcome.read_bytes_per_token == 8 * 16 << 20


def test_whole_experts_wait_for_the_fullest_drive(routes: np.ndarray) -> None:
    split = Machine(bytes_per_s=(1e9, 1e9, 1e9), expert_bytes=1 << 20)
    whole = Machine(bytes_per_s=(1e9, 1e9, 1e9), expert_bytes=1 << 20, split=False)
    fast, slow = (simulate(routes, 128, m, capacity=0).seconds_per_token for m in (split, whole))
    assert slow > 1.1 * fast


def test_reading_ahead_gains_in_idle_windows_in_the_order_of_knowledge(routes: np.ndarray) -> None:
    machine = Machine(
        bytes_per_s=(1e9,), expert_bytes=1 << 20, before_seconds=8e-3, beside_seconds=1e-3, expert_seconds=1e-4
    )
    seconds = {
        p: simulate(routes, 128, machine, capacity=100, predictor=p, recall=0.65).seconds_per_token
        for p in ("none", "history", "router", "perfect")
    }
    assert seconds["perfect"] < seconds["router"] < seconds["none"]
    assert seconds["history"] <= seconds["none"] * 1.001
    assert seconds["none"] - seconds["router"] > 0.4 * (seconds["none"] - seconds["perfect"])


def test_hopeless_guesses_cost_nothing_worth_mentioning(routes: np.ndarray) -> None:
    machine = Machine(bytes_per_s=(1e9,), expert_bytes=1 << 20, before_seconds=2e-3, expert_seconds=1e-4)
    plain, wrong = (
        simulate(routes, 128, machine, capacity=0, predictor=p, recall=0.02).seconds_per_token
        for p in ("none", "router")
    )
    assert wrong <= 1.01 * plain


def test_what_a_gib_is_worth() -> None:
    counts = np.array([8.0, 4.0, 2.0, 2.0])
    assert [predicted_hit_rate(counts, n) for n in (0, 1, 2, 9)] == [0.0, 0.5, 0.75, 1.0]
    half = (1 << 30) // 2
    saved = seconds_saved_per_gib(counts, 0, frame_bytes=half, uses_per_token=10, bytes_per_s=half)
    assert saved == pytest.approx(7.5)
