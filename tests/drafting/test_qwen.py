"""Qwen drafts: translation between two vocabularies, the pair's combination, the cache, and hostile files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import MINI
from deltafin.checkpoint.config import K3Config
from deltafin.drafting import qwen_files
from deltafin.drafting.qwen_files import check, model_folders
from deltafin.drafting.qwen_text import NOTHING, Guess, QwenSource, combine, guess
from deltafin.errors import CheckpointError, DraftError
from deltafin.text.tokenizer import K3Tokenizer

FOLDER = MINI / "qwen"


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    return K3Tokenizer.load(MINI / "target", K3Config.load(MINI / "target"))


class Parrot:
    """A completer whose tokens are characters and who continues a fixed text."""

    def __init__(self, text: str, probability: Sequence[float] = ()) -> None:
        self.text, self.probability = text, probability
        self.asked: list[int] = []

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def complete(self, ids: Sequence[int], count: int) -> list[tuple[int, float]]:
        self.asked.append(count)
        rest = self.text[len(ids) : len(ids) + count]
        return [(ord(c), self.probability[i] if i < len(self.probability) else 1.0) for i, c in enumerate(rest)]


TEXT = "The capital of France is Paris. The capital of Japan is Tokyo."


def test_a_guess_is_k3s_own_encoding_of_the_text(tokenizer: K3Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    got = guess(Parrot(TEXT), tokenizer, ids[:4], 1)
    assert got.ids == (ids[4],)
    assert not got.stopped


def test_a_short_guess_is_tried_again_with_a_larger_budget(tokenizer: K3Tokenizer) -> None:
    parrot = Parrot(TEXT)
    ids = tokenizer.encode(TEXT)
    got = guess(parrot, tokenizer, ids[:4], 6)
    assert parrot.asked == [8, 20]
    # The text may end in the middle of a word; what comes before it is right.
    assert got.ids[:4] == tuple(ids[4:8])


def test_unsure_tokens_end_a_long_guess_but_not_a_short_one(tokenizer: K3Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    doubtful = [1.0] * 7 + [0.2] * 20
    got = guess(Parrot(TEXT, doubtful), tokenizer, ids[:4], 6)
    assert got.stopped
    assert len(got.ids) < len(got.raw)
    assert got.least == 0.2
    assert not guess(Parrot(TEXT, doubtful), tokenizer, ids[:4], 2).stopped


def test_a_history_that_does_not_survive_the_round_trip_gets_no_guess(tokenizer: K3Tokenizer) -> None:
    split = [*tokenizer.encode("The capital"), *(tokenizer.encode(c)[0] for c in " of")]
    assert tokenizer.encode(tokenizer.decode(split), allow_special=True) != split
    assert guess(Parrot(TEXT), tokenizer, split, 4) == NOTHING
    half_character = tokenizer.encode("é")[:1] if len(tokenizer.encode("é")) > 1 else [128]
    assert guess(Parrot(TEXT), tokenizer, half_character, 4) == NOTHING
    assert guess(Parrot(TEXT), tokenizer, [], 4) == NOTHING


def test_text_that_grows_into_the_history_gets_no_guess(tokenizer: K3Tokenizer) -> None:
    # " Par" + "is" re-encodes to another last token of the history, so nothing can be proposed.
    whole = tokenizer.encode("is Paris")
    history = tokenizer.encode("is Par")
    assert whole[: len(history)] != history
    assert guess(Parrot("is Paris"), tokenizer, history, 4).ids == ()


FULL, OTHER = (1, 2, 3, 4), (5, 6, 7, 8)


@pytest.mark.parametrize(
    ("probe", "wide", "result"),
    [
        (Guess(FULL, FULL, 0.9, False), None, FULL),
        (Guess(FULL[:3], FULL, 0.1, True), None, FULL),
        (Guess(FULL[:2], FULL, 0.1, True), Guess((), FULL, 0.1, True), FULL),
        (Guess(FULL[:2], FULL, 0.10, True), Guess(OTHER, OTHER, 0.20, False), OTHER),
        (Guess(FULL[:2], FULL, 0.19, True), Guess(OTHER, OTHER, 0.20, False), FULL[:2]),
        (NOTHING, NOTHING, ()),
    ],
    ids=["probe full", "raw override", "both raw agree", "wide clearly surer", "wide not surer", "nothing"],
)
def test_the_pair(probe: Guess, wide: Guess | None, result: tuple[int, ...]) -> None:
    def ask() -> Guess:
        assert wide is not None, "the larger model was asked without need"
        return wide

    assert combine(4, probe, ask) == result


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    pytest.importorskip("transformers")
    from deltafin.drafting.qwen import load_models

    (loaded,) = load_models(FOLDER)
    return loaded


def test_the_kept_cache_changes_nothing(model: Any) -> None:
    def cold(ids: list[int], count: int) -> list[tuple[int, float]]:
        model._cache, model._cached = model._new_cache(), []
        out: list[tuple[int, float]] = model.complete(ids, count)
        return out

    a = model.encode("The capital of France is Paris. The capital of Norway")
    b = model.encode("The capital of France is Paris. Elements are")
    wanted = [cold(ids, 9) for ids in (a, b, a[:3])]
    model._cache, model._cached = model._new_cache(), []
    for ids, expected in [(a, wanted[0]), (b, wanted[1]), (a, wanted[0]), (a[:3], wanted[2]), (b, wanted[1])]:
        got = model.complete(ids, 9)
        assert [t for t, _ in got] == [t for t, _ in expected]
        assert [p for _, p in got] == pytest.approx([p for _, p in expected], abs=1e-3)


def test_it_guesses_raw_text_as_recorded(model: Any, tokenizer: K3Tokenizer, prompts: list[dict[str, Any]]) -> None:
    source = QwenSource([model], tokenizer)
    kept = offered = 0
    for prompt in [p for p in prompts if p["kind"] in ("raw", "raw-stdlib")][::4]:
        reply = prompt["reference"]["ids"]
        done = 1
        while done < len(reply):
            guesses = source.propose(prompt["ids"] + reply[:done], 7).tokens
            hits = next(
                (i for i, (g, t) in enumerate(zip(guesses, reply[done:], strict=False)) if g != t), len(guesses)
            )
            hits = min(hits, len(reply) - done)
            kept, offered, done = kept + hits, offered + 1, done + hits + 1
    assert kept / offered > 4  # 6.1 to 6.4 were recorded over all prompts


def test_a_text_longer_than_its_cache_gets_no_guess(model: Any) -> None:
    assert model.complete([5] * qwen_files.CACHE_POSITIONS, 3) == []


def test_it_prints_nothing(tokenizer: K3Tokenizer, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from deltafin.drafting.qwen import load_models

    QwenSource(load_models(FOLDER), tokenizer).propose(tokenizer.encode("The capital of"), 3)
    assert capfd.readouterr() == ("", "")


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A writable copy of the miniature model."""
    folder = tmp_path / "qwen"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    return folder


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "llama"},
        {"hidden_size": 191},
        {"hidden_size": 1 << 40},
        {"num_hidden_layers": 5},
        {"num_hidden_layers": 3},
        {"num_key_value_heads": 3},
        {"rope_scaling": {"type": "yarn"}},
        {"attention_bias": True},
        {"use_sliding_window": True},
        {"tie_word_embeddings": False},
        {"hidden_act": "gelu"},
        {"vocab_size": True},
        {"rms_norm_eps": None},
    ],
)
def test_another_model_is_refused(values: dict[str, Any], copy: Path) -> None:
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | values))
    with pytest.raises((DraftError, CheckpointError)):
        check(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_refused(name: str, copy: Path) -> None:
    (copy / name).unlink()
    with pytest.raises((DraftError, CheckpointError)):
        check(copy)


@pytest.mark.parametrize("text", ["", "{}", "[" * 5000, '{"version":"1.0","model":{"type":"BPE"}}'])
def test_a_tokenizer_that_is_none_is_refused(text: str, copy: Path) -> None:
    pytest.importorskip("transformers")
    from deltafin.drafting.qwen import load_models

    (copy / "tokenizer.json").write_text(text)
    with pytest.raises((DraftError, CheckpointError)):
        load_models(copy)


def test_nothing_else_in_the_folder_is_looked_at(copy: Path, tmp_path: Path) -> None:
    """Files that the library would follow into code or pickles have no effect."""
    pytest.importorskip("transformers")
    from deltafin.drafting.qwen import load_models

    mark = tmp_path / "executed"
    (copy / "modeling_evil.py").write_text(f"open({str(mark)!r}, 'w')")
    (copy / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "evil"}')
    (copy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    raw = json.loads((copy / "config.json").read_text())
    raw |= {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}, "quantization_config": {"quant_method": "x"}}
    (copy / "config.json").write_text(json.dumps(raw))
    load_models(copy)
    assert not mark.exists()


def test_one_model_or_a_pair(copy: Path) -> None:
    assert model_folders(copy) == [copy]
    pair = copy.parent / "pair"
    for name in ("probe", "wide"):
        (pair / name).mkdir(parents=True)
        (pair / name / "config.json").write_text("{}")
    assert model_folders(pair) == [pair / "probe", pair / "wide"]
    assert model_folders(copy.parent / "absent") == []
