"""The DSpark draft on MLX: against the float64 computation of the same files, and against the draft in PyTorch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from conftest import MINI
from deltafin.apple import dspark
from deltafin.apple.dspark import DSpark, DSparkSource, Weights, load
from deltafin.checkpoint.config import K3Config
from deltafin.drafting.dspark_files import BLOCK, EMBEDDING, PENDING_ROWS, memory_bytes, read_config
from deltafin.errors import CheckpointError, DraftError
from oracles.dspark_float64 import Float64DSpark
from oracles.float64 import Float64K3, Trace

FOLDER = MINI / "dspark"
CONFIG = K3Config.load(MINI / "target")
LENGTHS = (0, 43, 67, 100)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load(FOLDER, read_config(FOLDER, CONFIG))


@pytest.fixture(scope="module")
def shared() -> tuple[mx.array, mx.array]:
    """K3's embedding and head, bf16."""
    table = head = mx.array(0)
    for file in sorted((MINI / "target").glob("*.safetensors")):
        tensors: Any = mx.load(str(file))
        table = tensors.get("language_model.model.embed_tokens.weight", table)
        head = tensors.get("language_model.lm_head.weight", head)
    return table, head


Maker = Callable[..., DSpark]


@pytest.fixture(scope="module")
def draft(weights: Weights, shared: tuple[mx.array, mx.array]) -> Maker:
    """Makes an empty draft with a given context capacity and precision; nothing is hopeless to it."""
    table, head = shared

    def make(capacity: int, dtype: mx.Dtype = mx.float32) -> DSpark:
        made = DSpark(weights, lambda ids: table[mx.array(list(ids))], head, capacity=capacity, dtype=dtype)
        made.hopeless = 0.0
        return made

    return make


@pytest.fixture(scope="module")
def reference() -> Float64DSpark:
    return Float64DSpark(FOLDER, Float64K3(MINI / "target"))


def random_taps(rows: int, seed: int = 0) -> list[mx.array]:
    values = np.random.default_rng(seed).standard_normal((5, rows, CONFIG.hidden), dtype=np.float32)
    return [mx.array(v).astype(mx.bfloat16) for v in values]


@pytest.mark.parametrize("number", LENGTHS)
def test_agrees_with_the_float64_reference(
    number: int, draft: Maker, reference: Float64DSpark, prompts: list[dict[str, Any]]
) -> None:
    ids = prompts[number]["ids"][:120]
    trace = Trace()
    reference.target.forward(ids, trace=trace)
    taps = reference.tapped(trace)
    wanted = reference.propose(reference.context(taps), len(ids), ids[-1])
    parts = [mx.array(part) for part in np.split(taps.astype(np.float32), 5, axis=1)]
    exact, fast = draft(256), draft(256, mx.bfloat16)
    for mine in (exact, fast):
        mine.append(parts)
        assert mine.position == len(ids)
    np.testing.assert_allclose(np.array(exact.block(ids[-1])), wanted.hidden, rtol=0, atol=2e-3)
    np.testing.assert_allclose(np.array(fast.block(ids[-1])), wanted.hidden, rtol=0, atol=0.5)
    proposal = exact.propose(ids[-1], BLOCK)
    assert list(proposal.tokens) == wanted.ids
    np.testing.assert_allclose(proposal.confidence, wanted.confidences, rtol=0, atol=1e-3)
    assert sum(a == b for a, b in zip(fast.propose(ids[-1], BLOCK).tokens, wanted.ids, strict=True)) >= 4


def test_proposes_what_the_draft_in_pytorch_proposes(
    draft: Maker, shared: tuple[mx.array, mx.array], reference: Float64DSpark, prompts: list[dict[str, Any]]
) -> None:
    """Token by token over recorded replies: the same guesses at nearly all positions, so the same acceptance."""
    torch = pytest.importorskip("torch")
    from deltafin.drafting import dspark as pytorch
    from deltafin.drafting import dspark_weights

    table, head = (torch.tensor(np.array(t.view(mx.uint16)).view(np.int16)).view(torch.bfloat16) for t in shared)
    other_weights = dspark_weights.load(FOLDER, read_config(FOLDER, CONFIG))
    same = {mx.float32: 0, mx.bfloat16: 0}
    positions = 0
    for prompt in prompts[::30]:
        begin = prompt["ids"][-60:]
        ids = [*begin, *prompt["reference"]["ids"][:12]]
        trace = Trace()
        reference.target.forward(ids, trace=trace)
        taps = np.split(reference.tapped(trace).astype(np.float32), 5, axis=1)
        other = pytorch.DSpark(other_weights, lambda i: table[torch.tensor(i)].float(), head, capacity=256)
        mine = {dtype: draft(256, dtype) for dtype in same}
        done = 0
        for end in range(len(begin), len(ids)):
            for made in mine.values():
                made.hopeless = other.hopeless
                made.append([mx.array(t[done:end]) for t in taps])
            other.append([torch.tensor(t[done:end]) for t in taps])
            done = end
            wanted = other.propose(ids[end], BLOCK).tokens
            positions += 1
            for dtype, made in mine.items():
                same[dtype] += made.propose(ids[end], BLOCK).tokens[:3] == wanted[:3]
    assert positions >= 40
    assert same[mx.float32] >= 0.9 * positions
    assert same[mx.bfloat16] >= 0.8 * positions


def test_fewer_proposals_are_a_prefix(draft: Maker) -> None:
    mine = draft(64)
    mine.append(random_taps(20))
    full = mine.propose(17, BLOCK)
    assert len(full.tokens) == BLOCK
    for count in range(1, BLOCK):
        assert mine.propose(17, count).tokens == full.tokens[:count]


def test_hopeless_tokens_are_left_out(draft: Maker) -> None:
    mine = draft(64)
    mine.append(random_taps(20))
    full = mine.propose(17, BLOCK)
    alive, expected = 1.0, 0
    for sure in full.confidence:
        alive *= sure
        if expected and alive < 0.3:
            break
        expected += 1
    mine.hopeless = 0.3
    short = mine.propose(17, BLOCK)
    assert (short.tokens, short.confidence) == (full.tokens[:expected], full.confidence[:expected])
    assert expected < BLOCK


@pytest.mark.parametrize("parts", [[1] * 30, [7, 23], [30]])
def test_the_context_does_not_depend_on_how_it_arrived(parts: list[int], draft: Maker) -> None:
    taps = random_taps(30)
    eager, lazy, whole = draft(64), draft(64), draft(64)
    whole.append(taps)
    at = 0
    for n in parts:
        piece = [t[at : at + n] for t in taps]
        lazy.append(piece)
        eager.append(piece)
        eager.rows()  # projects at once
        at += n
    for mine in (lazy, eager):
        np.testing.assert_allclose(mine.rows(), whole.rows(), rtol=0, atol=1e-4)


def test_resting_rows_are_bounded(draft: Maker) -> None:
    mine = draft(4 * PENDING_ROWS)
    for seed in range(5):
        mine.append(random_taps(PENDING_ROWS // 2 + 1, seed))
        assert mine._pending_rows <= PENDING_ROWS
    assert mine.position == 5 * (PENDING_ROWS // 2 + 1)


def test_beyond_its_capacity_it_remembers_the_latest_rows(draft: Maker) -> None:
    taps = random_taps(100)
    small, late, long = draft(40), draft(64), draft(40)
    for start in range(0, 100, 9):
        small.append([t[start : start + 9] for t in taps])
        small.block(3)
    late.reset(60)
    late.append([t[60:] for t in taps])
    long.append([t[50:] for t in taps], 100)  # a long prompt hands over its last rows only
    assert long.position == small.position == late.position == 100
    for mine in (small, long):
        np.testing.assert_allclose(np.array(mine.block(5)), np.array(late.block(5)), rtol=0, atol=1e-3)


def test_saved_rows_bring_the_context_back(draft: Maker) -> None:
    first, second = DSparkSource(draft(64)), DSparkSource(draft(64))
    first.commit(list(range(33)), random_taps(33))
    second.restore(33, dict(first.tensors()))
    more = random_taps(4, 9)
    for source in (first, second):
        source.commit([1] * 4, more)
    history = [*range(33), 1, 1, 1, 1, 17]
    assert first.propose(history, BLOCK) == second.propose(history, BLOCK)
    with pytest.raises(ValueError):
        first.propose(history[1:], BLOCK)
    bad: tuple[Any, ...] = (
        np.zeros((2, 5, 80), np.float32),
        np.zeros((3, 5, 81), np.float32),
        np.zeros((3, 99, 80), np.float32),
        np.zeros((3, 5, 80)),
        np.zeros((5, 80), np.float32),
    )
    for rows in bad:
        with pytest.raises(ValueError):
            second.restore(40, {"context": rows})


@pytest.mark.parametrize(
    "taps",
    [random_taps(3)[:4], [t[:, :-1] for t in random_taps(3)], [*random_taps(3)[:4], random_taps(2)[0]]],
    ids=["a layer too few", "too narrow", "unequal rows"],
)
def test_wrong_accumulators_are_refused(taps: list[mx.array], draft: Maker) -> None:
    with pytest.raises(ValueError):
        draft(64).append(taps)


# ---- files and memory ------------------------------------------------------------------------------------------------


def test_the_embedding_copy_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(FOLDER, CONFIG)
    kept: list[Any] = []
    original = mx.load

    def watched(path: str) -> Any:
        tensors: Any = original(path)
        assert EMBEDDING in tensors

        class Watched(dict[str, mx.array]):
            def __getitem__(self, name: str) -> mx.array:
                kept.append(name)
                return super().__getitem__(name)

        return Watched(tensors)

    monkeypatch.setattr(dspark.mx, "load", watched)
    loaded = load(FOLDER, config)
    assert EMBEDDING not in kept
    arrays = [*loaded.tensors.values(), *(getattr(layer, n) for layer in loaded.layers for n in layer.__slots__)]
    assert sum(a.nbytes for a in arrays) <= memory_bytes(config)


def test_files_that_change_under_it_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = read_config(FOLDER, CONFIG)

    def gone(path: str) -> Any:
        raise RuntimeError("[load] no such file")

    monkeypatch.setattr(dspark.mx, "load", gone)
    with pytest.raises(DraftError, match="cannot be read"):
        load(FOLDER, config)
    (tmp_path / "model.safetensors").write_bytes((FOLDER / "model.safetensors").read_bytes()[:-1])
    with pytest.raises((DraftError, CheckpointError)):
        load(tmp_path, config)


def test_no_pytorch_is_imported(tmp_path: Path) -> None:
    code = """
import sys
import deltafin.apple.dspark, deltafin.apple.qwen, deltafin.drafting.drafts
bad = [m for m in ("torch", "transformers", "mlx_lm") if m in sys.modules]
assert not bad, bad
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
