"""The recorded continuations and the other backend, over the miniature."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import ORACLE
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.generation.events import Finished, TokenDecided
from deltafin.text.chat import ChatOptions, encode_chat
from deltafin.text.messages import parse_messages
from deltafin.text.tokenizer import K3Tokenizer

TIE = 1e-3
"""fp32 engines may differ where the reference's two best logits are closer."""
BF16_TIE = 0.75
"""bf16 activations may decide otherwise up to this margin of the fp32 reference (largest seen: 0.31)."""


@pytest.fixture(scope="module")
def torch(mini_store: Path) -> Iterator[Engine]:
    pytest.importorskip("torch")
    with Engine.open(mini_store, EngineOptions(backend="torch", context=2048, draft="off")) as opened:
        yield opened


def run(engine: Engine, ids: list[int], max_new: int, stop: list[int]) -> list[int]:
    events = list(engine.session().generate(ids, max_new=max_new, stop=stop))
    assert isinstance(events[-1], Finished)
    return [e.token for e in events if isinstance(e, TokenDecided)]


def ties(engine: Engine, prompts: list[dict[str, Any]], tie: float) -> list[tuple[int, int, float]]:
    """Where continuations part from the recorded ones; each must be at a margin below ``tie``."""
    found = []
    for prompt in prompts:
        wanted, margins = prompt["reference"]["ids"], prompt["reference"]["top2_margins"]
        got = run(engine, prompt["ids"], prompt["max_new"], prompt["stop"])
        if got != wanted:
            at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b)
            assert margins[at] < tie, f"prompt {prompt['id']} differs at {at}, margin {margins[at]}"
            found.append((prompt["id"], at, margins[at]))
    print(f"{len(prompts)} prompts, {len(found)} numerical ties: {found}")
    return found


def short(prompts: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [p for p in prompts if len(p["ids"]) < 200][::step]


def test_recorded_prompts_in_fp32(fp32: Engine, prompts: list[dict[str, Any]]) -> None:
    assert len(ties(fp32, short(prompts, 12), TIE)) <= 1


def test_recorded_prompts_in_bf16(bf16: Engine, prompts: list[dict[str, Any]]) -> None:
    found = ties(bf16, short(prompts, 12), BF16_TIE)
    assert len(found) <= 4


@pytest.mark.slow
def test_all_recorded_prompts(fp32: Engine, bf16: Engine, prompts: list[dict[str, Any]]) -> None:
    assert len(ties(fp32, prompts, TIE)) <= 2
    assert len(ties(bf16, prompts, BF16_TIE)) <= len(prompts) // 8


def test_facts(bf16: Engine) -> None:
    facts = json.loads((ORACLE / "facts.json").read_text())
    tokenizer = K3Tokenizer.load(bf16.store.metadata_dir, bf16.config)
    sample = facts["questions"][::40]
    right = 0
    for fact in sample:
        messages = parse_messages([{"role": "user", "content": fact["question"]}])
        ids = encode_chat(tokenizer, messages, ChatOptions(effort="none"))
        answer = tokenizer.decode(run(bf16, ids, 64, sorted(tokenizer.stop_ids)))
        right += (fact["must_contain"] in answer) == (fact["must_contain"] in fact["model_answer"])
    assert right == len(sample)


def test_both_backends_agree_layer_by_layer(
    torch: Engine, fp32: Engine, bf16: Engine, prompts: list[dict[str, Any]]
) -> None:
    layers = tuple(range(torch.config.layers))
    ids = max((p["ids"] for p in prompts if len(p["ids"]) < 120), key=len)

    def seen(engine: Engine) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
        target, before = engine.target, engine.target.taps
        target.taps = layers
        try:
            state = engine.backend.state(engine.config, 256)
            logits = target.forward(ids, state)
            state.commit(len(ids))
            if engine.backend.name == "torch":
                return [tap.float().numpy() for tap in state.taps], logits
            import mlx.core as mx

            return [np.array(tap.astype(mx.float32)) for tap in state.taps], logits
        finally:
            target.taps = before

    wanted, logits = seen(torch)
    # The largest bf16 differences are where a nearly tied router chose another expert.
    for engine, layer_bound, mean_bound, most in ((fp32, 5e-3, 1e-4, 2e-3), (bf16, 0.2, 0.4, 6.0)):
        got, other = seen(engine)
        # Taps are rounded to bf16 on both sides, which alone is 4e-3 of their size.
        errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, wanted, strict=True)]
        apart = np.abs(other - logits)
        print(engine.backend.describe(), [f"{e:.1e}" for e in errors], float(apart.mean()), float(apart.max()))
        assert max(errors) < layer_bound
        assert apart.mean() < mean_bound
        assert apart.max() < most
