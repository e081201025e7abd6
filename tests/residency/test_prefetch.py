"""What is read ahead, and the rule for giving memory back."""

from hypothesis import given
from hypothesis import strategies as st

from deltafin.residency.prefetch import PrefetchPolicy
from deltafin.residency.pressure import tier_under_pressure

K = 4


def taught(used: set[int], tokens: int = 150, guesses: tuple[int, ...] = tuple(range(8))) -> PrefetchPolicy:
    policy = PrefetchPolicy(1, K)
    for _ in range(tokens):
        policy.plan(0, {"router": guesses}, window=1, read=1)
        policy.plan(0, {"late router": guesses}, window=1, read=1, again=True)
        policy.learn(0, used)
    return policy


def test_no_window_no_reads() -> None:
    assert PrefetchPolicy(1, K).plan(0, {"router": [1, 2, 3]}, window=0.0, read=0.1) == []


def test_good_guesses_fill_the_window_in_rank_order_and_not_more() -> None:
    policy = taught({0, 1, 2, 3})
    assert policy.plan(0, {"router": [7, 5, 6, 4]}, window=0.21, read=0.1) == [7, 5, 6]
    assert policy.plan(0, {"router": [7, 5, 6, 4]}, window=1.0, read=0.1) == [7, 5, 6, 4]


def test_bad_guesses_are_read_only_while_they_cannot_delay_anything() -> None:
    policy = taught({99})
    assert policy.plan(0, {"router": [7, 5, 6, 4]}, window=0.05, read=0.1) == []
    assert not policy.worth_predicting(0, window=0.05, read=0.1, cost=1e-6)


def test_a_ranks_own_precision_decides() -> None:
    policy = taught({0, 3})
    assert policy.plan(0, {"router": [10, 11, 12, 13]}, window=0.15, read=0.1)[0] == 10
    # Half of the second read would be late: too much for ranks that are nearly always wrong, not for the last.
    assert policy.plan(0, {"router": [10, 11, 12, 13]}, window=0.15, read=0.1) == [10, 13]


def test_the_better_predictor_is_used() -> None:
    policy = PrefetchPolicy(1, K)
    for _ in range(60):
        policy.plan(0, {"router": [0, 1], "history": [2, 3]}, window=1, read=0.1)
        policy.learn(0, {2, 3})
    assert policy.plan(0, {"router": [4, 5], "history": [6, 7]}, window=0.25, read=0.1)[0] == 6
    policy.learn(0, {6, 7})
    figures = policy.report()[0]
    assert figures["history"].recall == 1.0
    assert figures["router"].recall == 0.0


def test_the_figures_of_both_looks_are_kept_apart() -> None:
    policy = PrefetchPolicy(1, K)
    for _ in range(60):
        policy.plan(0, {"router": [0, 1, 4, 5]}, window=1, read=0.1)
        policy.plan(0, {"late router": [0, 1, 2, 3]}, window=1, read=0.1, again=True)
        policy.learn(0, {0, 1, 2, 3})
    figures = policy.report()[0]
    assert (figures["router"].recall, figures["late router"].recall) == (0.5, 1.0)
    policy.plan(0, {"router": [0, 1, 4, 5]}, window=1, read=0.1)
    policy.learn(0, {0, 1, 2, 3})  # nobody looked again: the late guesses of the token before do not count
    assert policy.report()[0]["late router"].guesses == 60 * K


def test_what_is_in_memory_is_not_read_and_keeps_its_rank() -> None:
    policy = taught({0, 3})
    assert policy.plan(0, {"router": [10, 11, 12, 13]}, {10}, window=0.05, read=0.1) == [13]


def test_a_hopeless_predictor_is_probed_again() -> None:
    policy = taught({99}, tokens=300)
    asked = [policy.worth_predicting(0, window=0.1, read=0.1, cost=1.0) for _ in range(100)]
    assert 1 <= sum(asked) <= 10


@given(
    st.integers(0, 100), st.integers(0, 100), st.integers(1, 1 << 30), st.integers(0, 1 << 40), st.integers(0, 1 << 35)
)
def test_pressure_shrinks_by_what_is_missing_and_growth_stays_within_what_is_free(
    now: int, planned: int, frame: int, available: int, reserve: int
) -> None:
    frames = tier_under_pressure(now, planned, frame_bytes=frame, available=available, reserve=reserve)
    assert 0 <= frames <= max(now, planned)
    if available < reserve and frames:
        assert available + (now - frames) * frame >= reserve
    if frames > now:
        assert available - (frames - now) * frame >= 2 * reserve
