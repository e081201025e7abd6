"""The float64 draft against recorded acceptance and confidences; its published numbers are in test_tiny."""

from __future__ import annotations

import numpy as np
import pytest

from . import recorded
from .dspark_float64 import Float64DSpark, extend
from .float64 import Float64K3, Trace


def agrees(draft: Float64DSpark, prompt: recorded.Prompt) -> None:
    """Replays the recorded speculative run: each cycle's accepted count and seven confidences."""
    full, trace = [*prompt.ids, *prompt.expected], Trace()
    draft.target.forward(full[:-1], trace=trace)
    context = draft.context(draft.tapped(trace))
    accepted, confidences, done = [], [], 1  # the first token comes from the target's prefill
    while done < len(prompt.expected):
        proposal = draft.propose(context, len(prompt.ids) + done - 1, prompt.expected[done - 1])
        rest = prompt.expected[done:]
        hits = next((k for k, (d, t) in enumerate(zip(proposal.ids, rest, strict=False)) if d != t), None)
        accepted.append(min(7, len(rest)) if hits is None else hits)
        confidences.append(proposal.confidences)
        done += accepted[-1] + 1
    assert accepted == prompt.accepted, prompt.id
    # Recorded to three digits from a float32 run.
    np.testing.assert_allclose(confidences, prompt.confidences, rtol=0, atol=6e-4, err_msg=str(prompt.id))


@pytest.mark.parametrize("number", recorded.DOZEN)
def test_recorded_acceptance(mini_draft: Float64DSpark, number: int) -> None:
    agrees(mini_draft, recorded.prompts()[number])


@pytest.mark.slow
def test_all_recorded_acceptance(mini_draft: Float64DSpark) -> None:
    for prompt in recorded.prompts():
        agrees(mini_draft, prompt)


def test_context_grows_by_committed_rows(mini: Float64K3, mini_draft: Float64DSpark) -> None:
    ids, trace = recorded.prompts()[0].ids, Trace()
    mini.forward(ids, trace=trace)
    taps = mini_draft.tapped(trace)
    whole = mini_draft.context(taps)
    parts = extend(mini_draft.context(taps[:9]), mini_draft.context(taps[9:], start=9))
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(b.latent, a.latent, rtol=0, atol=1e-11)
        np.testing.assert_allclose(b.rotated, a.rotated, rtol=0, atol=1e-11)
    # Rows beyond the given length are rejected positions that must not be seen.
    short = mini_draft.propose([type(c)(c.latent[:9], c.rotated[:9]) for c in whole], 9, ids[9])
    assert np.array_equal(mini_draft.propose(whole, 9, ids[9]).logits, short.logits)
