from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize

from deltafin.bench.synthetic import TINY, released_config, tensor_values, write_synthetic_checkpoint
from deltafin.checkpoint import Checkpoint, K3Config
from deltafin.checkpoint.inventory import TensorSpec
from deltafin.errors import ConfigError


def test_it_is_a_released_checkpoint(tmp_path: Path) -> None:
    config = write_synthetic_checkpoint(tmp_path, layers=3, experts=12, vocab_size=512, text_overrides=TINY)
    checkpoint = Checkpoint.open(tmp_path)  # checks names, dtypes, shapes and the index
    assert checkpoint.config == config
    assert len(checkpoint.files) == 4
    runs = [checkpoint.expert_runs(1, expert) for expert in range(12)]
    assert all(len(run) == 1 for run in runs)
    # Back to back, ordered by the decimal string of the expert's number.
    order = sorted(range(12), key=str)
    for before, after in pairwise(order):
        assert runs[before][0].offset + runs[before][0].nbytes == runs[after][0].offset


def test_values_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    for folder, layers, seed in (("a", 3, 1), ("b", 5, 1), ("c", 3, 2)):
        write_synthetic_checkpoint(
            tmp_path / folder, layers=layers, experts=2, vocab_size=512, text_overrides=TINY, seed=seed
        )
    a, b, c = (dict(deserialize(next((tmp_path / f).glob("model-00001*")).read_bytes())) for f in "abc")
    assert a == b
    assert a.keys() == c.keys()
    assert a != c


def test_weights_keep_activations_of_order_one() -> None:
    config = K3Config.parse(released_config(layers=2, experts=16))

    def values(name: str, spec: TensorSpec) -> np.ndarray:
        chunks = np.concatenate([c.reshape(-1) for c in tensor_values(name, spec, config, 0)])
        if spec.dtype == "BF16":
            chunks = (chunks.astype(np.uint32) << 16).view(np.float32)
        return chunks.reshape(spec.shape)

    matrix = values("q_proj.weight", TensorSpec("BF16", (256, 7168)))
    assert matrix.std() * 7168**0.5 == pytest.approx(1, rel=0.01)
    packed = values("w1.weight_packed", TensorSpec("U8", (256, 1792)))
    scale = values("w1.weight_scale", TensorSpec("U8", (256, 112)))
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate([table, -table])
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(256, 3584)
    weights = table[nibbles] * np.repeat(2.0 ** (scale.astype(float) - 127), 32, axis=1)
    assert weights.std() * 3584**0.5 == pytest.approx(1, rel=0.02)
    assert len(np.unique(scale)) == 2  # within the sixteen consecutive exponents that released matrices keep to
    norm = values("norm.weight", TensorSpec("BF16", (7168,)))
    assert norm.mean() == pytest.approx(1, abs=0.01)
    a_log = values("A_log", TensorSpec("F32", (128,)))
    assert (a_log[:96] > 0).all()
    assert not a_log[96:].any()


def test_the_configuration_is_the_released_one() -> None:
    config = K3Config.parse(released_config())
    assert (config.layers, config.experts, config.hidden, config.vocab_size) == (93, 896, 7168, 163840)
    assert config.mla_layers == {*range(3, 92, 4), 92}
    assert (config.bos_id, config.eos_id, config.pad_id) == (163584, 163586, 163839)
    with pytest.raises(ConfigError):
        K3Config.parse(released_config(layers=2, experts=8))  # fewer than the sixteen used per token
