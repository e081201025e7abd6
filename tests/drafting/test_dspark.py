"""The DSpark draft against an independent float64 computation of the same files; its context, memory and files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import MINI
from deltafin.checkpoint.config import K3Config
from deltafin.drafting import dspark_files
from deltafin.drafting.dspark import DSpark
from deltafin.drafting.dspark_files import (
    BLOCK,
    PENDING_ROWS,
    check_files,
    memory_bytes,
    read_config,
)
from deltafin.drafting.dspark_weights import DSparkWeights, load
from deltafin.errors import CheckpointError, DraftError
from deltafin.generation.engine import Engine, EngineOptions
from oracles.dspark_float64 import Float64DSpark
from oracles.float64 import Float64K3, Trace

FOLDER = MINI / "dspark"
CONFIG = K3Config.load(MINI / "target")


@pytest.fixture(scope="module")
def engine(mini_store: Path) -> Iterator[Engine]:
    with Engine.open(mini_store, EngineOptions(context=1024, draft="dspark", draft_folders=(MINI,))) as opened:
        yield opened


@pytest.fixture(scope="module")
def weights() -> DSparkWeights:
    return load(FOLDER, read_config(FOLDER, CONFIG))


@pytest.fixture
def draft(engine: Engine, weights: DSparkWeights) -> Callable[[int], DSpark]:
    """Makes an empty draft with a given context capacity."""
    with engine.spine.unit("head") as unit:
        head = unit["language_model.lm_head.weight"]
    return lambda capacity: DSpark(weights, engine.spine.embedding, head, capacity=capacity)


def random_taps(rows: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, CONFIG.hidden, generator=generator).bfloat16() for _ in range(5)]


@pytest.fixture(scope="module")
def reference() -> Float64DSpark:
    return Float64DSpark(FOLDER, Float64K3(MINI / "target"))


@pytest.mark.parametrize("number", [0, 43, 67, 100])
def test_agrees_with_the_float64_reference(
    number: int, draft: Callable[[int], DSpark], reference: Float64DSpark, prompts: list[dict[str, Any]]
) -> None:
    ids = prompts[number]["ids"][:120]
    trace = Trace()
    reference.target.forward(ids, trace=trace)
    taps = reference.tapped(trace)
    wanted = reference.propose(reference.context(taps), len(ids), ids[-1])
    mine = draft(256)
    parts = torch.from_numpy(taps).float().split(CONFIG.hidden, 1)
    mine.append([part.bfloat16() for part in parts])
    assert mine.position == len(ids)
    mine.hopeless = 0.0
    hidden = mine.block(ids[-1]).numpy()
    np.testing.assert_allclose(hidden, wanted.hidden, rtol=0, atol=2e-3)
    proposal = mine.propose(ids[-1], BLOCK)
    assert list(proposal.tokens) == wanted.ids
    np.testing.assert_allclose(proposal.confidence, wanted.confidences, rtol=0, atol=1e-3)


def test_k3_hands_over_what_the_float64_target_computes(
    engine: Engine, reference: Float64DSpark, prompts: list[dict[str, Any]]
) -> None:
    ids = prompts[0]["ids"]
    trace = Trace()
    reference.target.forward(ids, trace=trace)
    session = engine.session()
    next(iter(session.generate(ids, max_new=1, stop=[])))
    engine.target.forward(ids, session.state)
    got = torch.cat(session.state.taps, 1)
    assert got.dtype == torch.bfloat16
    wanted = reference.tapped(trace)
    error = np.abs(got.float().numpy() - wanted)
    assert error.max() <= 0.005 * np.abs(wanted).max()
    session.state.pending = 0


def test_fewer_proposals_are_a_prefix(draft: Callable[[int], DSpark]) -> None:
    mine = draft(64)
    mine.append(random_taps(20))
    mine.hopeless = 0.0
    full = mine.propose(17, BLOCK)
    assert len(full.tokens) == BLOCK
    for count in range(1, BLOCK):
        assert mine.propose(17, count).tokens == full.tokens[:count]


def test_hopeless_tokens_are_not_scored(draft: Callable[[int], DSpark]) -> None:
    mine = draft(64)
    mine.append(random_taps(20))
    mine.hopeless = 0.0
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
def test_the_context_does_not_depend_on_how_it_arrived(parts: list[int], draft: Callable[[int], DSpark]) -> None:
    taps = random_taps(30)
    eager, lazy = draft(64), draft(64)
    at = 0
    for n in parts:
        piece = [t[at : at + n] for t in taps]
        lazy.append(piece)
        eager.append(piece)
        eager.rows()  # projects at once
        at += n
    assert torch.equal(lazy.block(5), eager.block(5))


def test_resting_rows_are_bounded(draft: Callable[[int], DSpark]) -> None:
    mine = draft(4 * PENDING_ROWS)
    for seed in range(3 * PENDING_ROWS):
        mine.append(random_taps(1, seed))
        assert mine._pending_rows <= PENDING_ROWS
    assert mine.position == 3 * PENDING_ROWS


def test_beyond_its_capacity_it_remembers_the_latest_rows(draft: Callable[[int], DSpark]) -> None:
    taps = random_taps(100)
    small, late = draft(40), draft(64)
    for start in range(0, 100, 9):
        small.append([t[start : start + 9] for t in taps])
        small.block(3)
    late.reset(60)
    late.append([t[60:] for t in taps])
    torch.testing.assert_close(small.block(5), late.block(5), rtol=0, atol=1e-4)
    long = draft(40)
    long.append([t[50:] for t in taps], 100)  # a long prompt hands over its last rows only
    assert long.position == 100
    torch.testing.assert_close(long.block(5), late.block(5), rtol=0, atol=1e-4)


def test_saved_rows_bring_the_context_back(draft: Callable[[int], DSpark]) -> None:
    first, second = draft(64), draft(64)
    first.append(random_taps(33))
    second.restore(33, first.rows())
    more = random_taps(4, 9)
    first.append(more)
    second.append(more)
    assert torch.equal(first.block(5), second.block(5))
    for bad in (torch.zeros(2, 5, 80), torch.zeros(3, 5, 81), torch.zeros(3, 99, 80), torch.zeros(3, 5, 80).double()):
        with pytest.raises(ValueError):
            second.restore(40, bad)


@pytest.mark.parametrize(
    "taps",
    [random_taps(3)[:4], [t[:, :-1] for t in random_taps(3)], [*random_taps(3)[:4], random_taps(2)[0]]],
    ids=["a layer too few", "too narrow", "unequal rows"],
)
def test_wrong_accumulators_are_refused(taps: list[torch.Tensor], draft: Callable[[int], DSpark]) -> None:
    with pytest.raises(ValueError):
        draft(64).append(taps)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_the_embedding_copy_is_never_read_and_k3s_head_is_shared(
    weights: DSparkWeights, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (FOLDER / "model.safetensors").stat().st_size
    embedding = 2 * CONFIG.vocab_size * CONFIG.hidden
    read: list[int] = []
    original = dspark_files.os.preadv

    def counting(fd: int, buffers: Any, offset: int) -> int:
        got = original(fd, buffers, offset)
        read.append(got)
        return got

    monkeypatch.setattr(dspark_files.os, "preadv", counting)
    load(FOLDER, weights.config)
    assert sum(read) <= size - embedding
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(weights)}
    assert sum(storages.values()) == weights.nbytes == memory_bytes(weights.config)
    assert weights.nbytes <= size - embedding + 2 * 3 * 4 * 64 * 64
    assert engine.drafts is not None
    source: Any = engine.drafts.controller()._source
    with engine.spine.unit("head") as unit:
        assert source._draft._lm_head.data_ptr() == unit["language_model.lm_head.weight"].data_ptr()


def test_the_released_draft_needs_four_and_a_half_gib() -> None:
    raw = json.loads((FOLDER / "config.json").read_text())
    raw |= {
        "hidden_size": 7168, "intermediate_size": 14336, "num_hidden_layers": 5, "num_attention_heads": 64,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 163840, "draft_vocab_size": 163840, "target_hidden_size": 7168, "target_num_hidden_layers": 93,
        "target_layer_ids": [2, 23, 47, 71, 89], "mask_token_id": 163837, "markov_rank": 256,
    }  # fmt: skip
    config = dspark_files.DSparkConfig.model_validate(raw)
    owned = sum(2 * int(np.prod(shape)) for shape in dspark_files.inventory(config).values())
    assert owned == 4_775_815_682
    # kv_b is kept in fp32, 16.8 MB more a layer.
    assert memory_bytes(config) == owned + 5 * 2 * 16384 * 512


def _tensors(weights: DSparkWeights) -> Iterator[torch.Tensor]:
    yield from weights.tensors.values()
    for layer in weights.layers:
        yield from (getattr(layer, name) for name in layer.__slots__)


# ---- damaged files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A writable copy of the miniature draft."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    return tmp_path


def edit_config(folder: Path, **values: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | values))


def edit_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def use(folder: Path) -> None:
    config = read_config(folder, CONFIG)
    check_files(folder, config)
    load(folder, config)


def test_the_copy_is_usable(copy: Path) -> None:
    use(copy)


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "qwen3"},
        {"hidden_size": 128},
        {"hidden_size": "256"},
        {"hidden_size": 1 << 60},
        {"target_num_hidden_layers": 8},
        {"target_layer_ids": [0, 2, 4, 6, 9]},
        {"target_layer_ids": [2, 0]},
        {"target_layer_ids": []},
        {"vocab_size": 6145},
        {"mask_token_id": 6144},
        {"mla_use_output_gate": True},
        {"markov_head_type": "gated"},
        {"rms_norm_eps": -1},
        {"rope_parameters": {}},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 4},
        {"q_lora_rank": 65},
    ],
)
def test_a_config_for_something_else_is_refused(values: dict[str, Any], copy: Path) -> None:
    edit_config(copy, **values)
    with pytest.raises((DraftError, CheckpointError)):
        use(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "nul", "{}"])
def test_a_config_that_is_no_config_is_refused(text: str, copy: Path) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises((DraftError, CheckpointError)):
        use(copy)


def _rename(header: dict[str, Any]) -> None:
    header["final.weight"] = header.pop("final_norm.weight")


def _extra(header: dict[str, Any]) -> None:
    header["lm_head.weight"] = header["embed_tokens.weight"]


def _dtype(header: dict[str, Any]) -> None:
    header["final_norm.weight"]["dtype"] = "F16"


def _shape(header: dict[str, Any]) -> None:
    header["context_proj.weight"]["shape"].reverse()


def _beyond(header: dict[str, Any]) -> None:
    header["final_norm.weight"]["data_offsets"] = [1 << 40, (1 << 40) + 512]


def _negative(header: dict[str, Any]) -> None:
    header["final_norm.weight"]["data_offsets"] = [-512, 0]


@pytest.mark.parametrize("change", [_rename, _extra, _dtype, _shape, _beyond, _negative])
def test_a_damaged_header_is_refused(change: Callable[[dict[str, Any]], None], copy: Path) -> None:
    edit_header(copy, change)
    with pytest.raises((DraftError, CheckpointError)):
        use(copy)


@pytest.mark.parametrize("keep", [0, 7, 100, 100_000, -1])
def test_a_truncated_file_is_refused(keep: int, copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises((DraftError, CheckpointError)):
        use(copy)


def test_a_missing_file_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises((DraftError, CheckpointError)):
        use(copy)
    (copy / "config.json").unlink()
    with pytest.raises((DraftError, CheckpointError)):
        use(copy)
