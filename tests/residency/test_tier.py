"""The tier's policy: bounded, not flushed by a sweep, and keeping what is used most."""

from collections import OrderedDict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafin.residency.tier import ExpertTierPolicy
from deltafin.residency.usage import UseModel

LAYERS, EXPERTS, K = 3, 10, 3


def policy(capacity: int, layers: int = LAYERS, experts: int = EXPERTS, first: int = 1) -> ExpertTierPolicy:
    return ExpertTierPolicy(capacity, first=first, model=UseModel(layers, experts))


ROUTES = st.lists(
    st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=K, max_size=K), min_size=LAYERS, max_size=LAYERS),
    max_size=20,
)


@settings(deadline=None)
@given(st.integers(0, LAYERS * EXPERTS), ROUTES, st.randoms())
def test_it_never_keeps_more_than_its_capacity_and_names_its_victims(capacity: int, tokens: list, random) -> None:
    tier = policy(capacity)
    kept: set = set()
    for token in tokens:
        for layer, experts in enumerate(token, 1):
            tier.begin_layer(layer, sorted(experts))
            leased = {(layer, e) for e in experts if random.random() < 0.3}
            for expert in experts:
                key = (layer, expert)
                stays, victim = tier.admit(key, leased=leased)
                if victim is not None:
                    assert victim in kept
                    assert victim not in leased
                    kept.discard(victim)
                if stays:
                    kept.add(key)
                assert (key in tier) == stays
                assert len(tier) == len(kept) <= capacity
        tier.observe(np.array([[sorted(e) for e in token]]))
    for key in sorted(kept)[::2]:
        tier.drop(key)
        kept.discard(key)
    while (victim := tier.evict()) is not None:
        kept.remove(victim)
    assert not kept
    assert len(tier) == 0


def cyclic_hits(capacity: int, cycle: int = 16, tokens: int = 20) -> int:
    tier, hits = policy(capacity, layers=1, experts=cycle), 0
    for _ in range(tokens):
        tier.begin_layer(1, range(cycle))
        for expert in range(cycle):
            hits += (1, expert) in tier
        for expert in range(cycle):
            tier.admit((1, expert))
        tier.observe(np.arange(cycle)[None, None])
    return hits


def test_a_sweep_larger_than_the_tier_does_not_flush_it() -> None:
    lru: OrderedDict[int, None] = OrderedDict()
    lru_hits = 0
    for use in list(range(16)) * 20:
        lru_hits += use in lru
        lru[use] = lru.pop(use, None)
        if len(lru) > 8:
            lru.popitem(last=False)
    assert lru_hits == 0
    assert cyclic_hits(8) == 8 * 19


def test_a_popular_newcomer_replaces_one_that_is_not_used() -> None:
    tier = policy(2, layers=1)
    for token in range(30):
        experts = [0, 1] if token < 5 else [2, 3]
        tier.begin_layer(1, experts)
        for expert in experts:
            tier.admit((1, expert))
        tier.observe(np.array([[experts]]))
    assert (1, 2) in tier
    assert (1, 3) in tier


def test_an_entry_in_use_is_never_the_victim() -> None:
    tier = policy(1, layers=1)
    tier.begin_layer(1, [0])
    assert tier.admit((1, 0)) == (True, None)
    tier.observe(np.array([[[0]]]))
    for _ in range(5):
        tier.begin_layer(1, [1])
        tier.observe(np.array([[[1]]]))
    tier.begin_layer(1, [1])
    assert tier.admit((1, 1), leased={(1, 0)}) == (False, None)
    assert tier.admit((1, 1)) == (True, (1, 0))


def test_room_for_everything_needs_no_bookkeeping() -> None:
    tier = policy(LAYERS * EXPERTS)
    assert tier.holds_all
    tier.observe(np.zeros((1, LAYERS, K), int))
    assert not tier.model.long_share().any()


def test_a_known_histogram_counts_from_the_first_token() -> None:
    heat = np.zeros((1, 8))
    heat[0, 5] = 90
    model = UseModel(1, 8, heat=heat, heat_tokens=100)
    assert model.chances.argmax() == 5
    tier = ExpertTierPolicy(1, first=0, model=model)
    tier.begin_layer(0, [4, 5])
    tier.admit((0, 4))
    assert tier.admit((0, 5)) == (True, (0, 4))


@settings(deadline=None)
@given(st.integers(1, 80))
def test_a_long_commit_counts_like_its_tokens_one_by_one(count: int) -> None:
    rng = np.random.default_rng(count)
    routes = rng.permuted(np.tile(np.arange(EXPERTS), (count, LAYERS, 1)), axis=2)[..., :K]
    one, many = UseModel(LAYERS, EXPERTS), UseModel(LAYERS, EXPERTS)
    many.observe(routes)
    for row in routes:
        one.observe(row[None])
    np.testing.assert_allclose(one.long_share(), many.long_share(), rtol=2e-4, atol=1e-5)
