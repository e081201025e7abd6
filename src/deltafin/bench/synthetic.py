"""Checkpoints in the released format with random weights: K3's true dimensions, fewer layers, experts and tokens.

For measuring reads and kernels at real sizes and for comparing implementations; the text such a model produces means
nothing. Weights keep activations of order one: matrices ~ N(0, 1/K), norms near one, MXFP4 nibbles uniform with scales
that give w·x the same variance. Every tensor's values depend only on the seed, its name and its shape.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafin.checkpoint.config import K3Config
from deltafin.checkpoint.inventory import (
    TensorSpec,
    expert_inventory,
    expert_prefix,
    spine_inventory,
)
from deltafin.checkpoint.tensorfile import INDEX_NAME

_CHUNK = 4 << 20  # elements generated at a time
_E2M1_MEAN_SQUARE = 8.5625  # of {0, 0.5, 1, 1.5, 2, 3, 4, 6}
_SCALE_BIAS = 127

SMALL_SPINE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
"""Overrides that keep K3's experts (17,547,264 bytes each) and shrink the spine to almost nothing: for drive tests."""

TINY: Mapping[str, Any] = {
    **SMALL_SPINE,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 96,
    "routed_expert_hidden_size": 64,
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
}
"""Overrides for a model of a few hundred kilobytes: for tests of formats and faults."""


def released_config(
    *,
    layers: int = 93,
    experts: int = 896,
    vocab_size: int = 163840,
    mla_layers: Sequence[int] | None = None,
    text_overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """K3's ``config.json`` (the values of the release), with reduced counts.

    Args:
        layers: decoder layers; layer 0 keeps its dense MLP.
        experts: routed experts per layer; at least 16, or override ``num_experts_per_token`` too.
        vocab_size: tokens; the special ones move to its end as in the release.
        mla_layers: 0-based layers with latent attention; None for the released pattern (3, 7, 11, … and the last).
        text_overrides: replaces values of ``text_config``, for other dimensions; within ``linear_attn_config``, too.
    """
    if mla_layers is None:
        mla_layers = [layer for layer in range(layers) if layer % 4 == 3 or layer == layers - 1]
    special = {"bos_token_id": vocab_size - 256, "eos_token_id": vocab_size - 254, "pad_token_id": vocab_size - 1}
    quantization: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "scale_dtype": "torch.uint8",
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                    "zp_dtype": None,
                },
            }
        },
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": 7168,
        "vocab_size": vocab_size,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-05,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "intermediate_size": 33792,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": experts,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": [layer + 1 for layer in mla_layers],
            "kda_layers": [layer + 1 for layer in range(layers) if layer not in mla_layers],
        },
        "num_nextn_predict_layers": 0,
        "quantization_config": quantization,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **special,
    }
    overrides = dict(text_overrides or {})
    attention = text["linear_attn_config"] | overrides.pop("linear_attn_config", {})
    text |= overrides | {"linear_attn_config": attention}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "tie_word_embeddings": False,
        "text_config": text,
        **special,
    }


def write_synthetic_checkpoint(
    folder: Path,
    *,
    layers: int = 4,
    experts: int = 32,
    vocab_size: int = 6144,
    mla_layers: Sequence[int] | None = None,
    text_overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> K3Config:
    """Writes a checkpoint as released: one layer per shard, tensors by name, experts contiguous by decimal string.

    Args:
        folder: created if missing; existing shards are overwritten.
        layers, experts, vocab_size, mla_layers, text_overrides: see ``released_config``.
        seed: of all values.
        progress: called with (bytes written, total bytes).

    Returns:
        The configuration as the engine sees it.

    Raises:
        ConfigError: the overrides do not describe a K3.
        OSError: the folder cannot be written.
    """
    raw = released_config(
        layers=layers, experts=experts, vocab_size=vocab_size, mla_layers=mla_layers, text_overrides=text_overrides
    )
    config = K3Config.parse(raw)
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(config))
    total = sum(spec.nbytes for shard in shards for spec in shard.values())
    written = 0
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        with open(folder / name, "wb") as file:
            file.write(_header(tensors))
            for tensor, spec in tensors.items():
                for chunk in tensor_values(tensor, spec, config, seed):
                    file.write(chunk.data)
                    written += chunk.nbytes
                    if progress:
                        progress(written, total)
            file.flush()
            # Dirty pages would make the first "cold" read of a benchmark write first.
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    generation = {"max_length": 1048576, "eos_token_id": config.eos_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True))
    return config


def _shards(config: K3Config) -> Iterator[dict[str, TensorSpec]]:
    units = spine_inventory(config)
    parts = expert_inventory(config)
    for layer in range(config.layers):
        tensors = dict(units[f"layer.{layer}"])
        if layer in config.moe_layers:
            for expert in range(config.experts):
                prefix = expert_prefix(layer, expert)
                tensors |= {prefix + part: spec for part, spec in parts.items()}
        # Sorted by name, experts come back to back in the order of their decimal strings, as in the release.
        yield dict(sorted(tensors.items()))
    yield dict(sorted((units["embed"] | units["head"]).items()))


def _header(tensors: Mapping[str, TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in tensors.items():
        entries[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_values(
    name: str, spec: TensorSpec, config: K3Config, seed: int
) -> Iterator[npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.float32]]:
    """The values of one tensor as they lie in the file (BF16 as uint16), in flat chunks."""
    bits = np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    count = math.prod(spec.shape)
    if spec.dtype == "F32":
        yield _fp32(name, spec, config, np.random.Generator(bits))
        return
    for begin in range(0, count, _CHUNK):
        size = min(_CHUNK, count - begin)
        if name.endswith(".weight_packed"):
            yield bits.random_raw(-(-size // 8)).view(np.uint8)[:size]
            continue
        noise = bits.random_raw(-(-size // 4)).view(np.uint16)[:size]
        if name.endswith(".weight_scale"):
            yield _scales(noise, columns=spec.shape[1] * 32)
        else:
            yield _bf16_table(*_mean_and_deviation(name, spec, config))[noise]


def _mean_and_deviation(name: str, spec: TensorSpec, config: K3Config) -> tuple[float, float]:
    if len(spec.shape) == 1:
        return 1.0, 0.1  # every one-dimensional BF16 tensor is a norm
    if name.endswith("embed_tokens.weight"):
        return 0.0, 1.0
    return 0.0, 1 / math.sqrt(spec.shape[-1])


def _fp32(name: str, spec: TensorSpec, config: K3Config, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    if name.endswith("A_log"):
        values = np.zeros(spec.shape)
        values[: config.kda_heads] = np.log(rng.uniform(1, 4, config.kda_heads))  # then padding, as released
    elif name.endswith("dt_bias"):
        values = rng.uniform(-5, -1, spec.shape)
    elif name.endswith("o_norm.weight"):
        values = rng.normal(1, 0.1, spec.shape)
    elif name.endswith("e_score_correction_bias"):
        values = rng.normal(0, 0.02, spec.shape)
    else:  # short convolutions
        values = rng.normal(0, 1 / math.sqrt(config.conv_kernel), spec.shape)
    return values.astype(np.float32)


def _scales(noise: npt.NDArray[np.uint16], columns: int) -> npt.NDArray[np.uint8]:
    """Scale bytes 2^n or 2^(n+1), mixed so that E[(nibble · scale)²] = 1 / columns."""
    wanted = 1 / (_E2M1_MEAN_SQUARE * columns)
    low = math.floor(math.log2(wanted) / 2)
    upper_share = (wanted / 4.0**low - 1) / 3
    return (_SCALE_BIAS + low + (noise < upper_share * 65536)).astype(np.uint8)


@cache
def _bf16_table(mean: float, deviation: float) -> npt.NDArray[np.uint16]:
    """[65536] equally likely values of a normal distribution as BF16: one random 16-bit number picks one."""
    values = (mean + deviation * _normal_quantiles()).astype(np.float32)
    pattern = values.view(np.uint32)
    rounded = pattern + 0x7FFF + ((pattern >> 16) & 1)
    return (rounded >> 16).astype(np.uint16)


@cache
def _normal_quantiles() -> npt.NDArray[np.float64]:
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / 65536) for i in range(65536)])
