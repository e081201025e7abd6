"""The tier's policy: bounded, not flushed by a sweep, and keeping what is used most."""

from hypothesis import given
from hypothesis import strategies as st

from deltafin.residency.tier import ExpertTierPolicy

KEYS = st.tuples(st.integers(0, 3), st.integers(0, 9))


@given(st.integers(0, 8), st.lists(st.lists(KEYS, max_size=12), max_size=30))
def test_it_never_keeps_more_than_its_capacity_and_names_its_victims(capacity: int, tokens: list) -> None:
    policy = ExpertTierPolicy(capacity)
    kept: set = set()
    for token in tokens:
        for key in token:
            policy.use(key)
            stays, victim = policy.admit(key)
            if victim is not None:
                assert victim in kept
                kept.discard(victim)
            if stays:
                kept.add(key)
            assert len(kept) <= capacity
            assert (key in policy) == stays
            assert kept == {k for k in kept if k in policy}
            assert len(policy) == len(kept)
        policy.next_token()


def test_a_sweep_larger_than_the_tier_does_not_flush_it() -> None:
    policy = ExpertTierPolicy(8)
    hits = 0
    for _ in range(20):
        for expert in range(16):
            key = (0, expert)
            hits += key in policy
            policy.use(key)
            policy.admit(key)
        policy.next_token()
    # A plain LRU of 8 would never hit on this cycle of 16.
    assert hits == 8 * 19


def test_a_hot_newcomer_replaces_the_coldest() -> None:
    policy = ExpertTierPolicy(2)
    for key in ((0, 0), (0, 1)):
        policy.use(key)
        policy.admit(key)
    policy.use((0, 1))
    policy.use((0, 2))
    assert policy.admit((0, 2)) == (False, None)
    policy.use((0, 2))
    assert policy.admit((0, 2)) == (True, (0, 0))


def test_an_entry_in_use_is_never_the_victim() -> None:
    policy = ExpertTierPolicy(1)
    policy.use((0, 0))
    policy.admit((0, 0))
    policy.use((0, 1))
    policy.use((0, 1))
    assert policy.admit((0, 1), leased={(0, 0): None}) == (False, None)
    assert policy.admit((0, 1)) == (True, (0, 0))


def test_old_heat_fades() -> None:
    policy = ExpertTierPolicy(1, half_life=4)
    for _ in range(10):
        policy.use((0, 0))
    policy.admit((0, 0))
    for _ in range(400):
        policy.next_token()
    policy.use((0, 1))
    assert policy.admit((0, 1)) == (True, (0, 0))
