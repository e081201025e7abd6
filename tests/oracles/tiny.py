"""A tiny K3 and DSpark draft with hashed weights and published results, in released file layout.

Every weight is a function of its tensor's name and index, so the folder can be written anywhere and the constants below
(from an independent float64 implementation, reproduced by mlx-lm) hold for anyone. They hold for ``bf16=False``, where
the resident matrices are stored as float32; ``bf16=True`` gives the released dtypes, for which there are no published
numbers, only other oracles.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file

from .released import round_bf16

IDS = [5, 17, 90, 3, 3, 42, 8, 60, 1, 77, 23]

# Target, each to the digits given.
ARGMAX = [35, 11, 30, 52, 93, 58, 74, 30, 29, 60, 56]
LAST_LOGITS_0_6 = [-0.6625409, 0.3936617, 0.2775595, 1.1147017, -0.1355425, -1.894726]
FIRST_LOGITS_0_4 = [0.2373873, 1.2211867, 1.362906, -2.3095068]
LOGITS_SUM, LOGITS_ABS_SUM = -59.999018, 863.623359
KDA0_STATE_SUM, KDA0_STATE_ABS_SUM = 48.651020, 120.050687
KDA0_STATE_HEAD0_KEY0 = [0.0770358, 0.0005916, 0.0070511, -0.0220664]
MLA3_ROWS_SUM, MLA3_ROWS_ABS_SUM = -18.334692, 283.478001
GREEDY_12 = [56, 64, 25, 45, 26, 64, 79, 45, 26, 23, 16, 28]
SMALLEST_MARGIN = 0.050

# Draft: context = IDS, anchor 56 at position 11.
ANCHOR = 56
DRAFT_RAMP_BOUNDS = (1, 3)
DRAFT_INV_FREQ = [1, 0.066874, 0.0023059, 0.0000093]
DRAFT_SCORE_SCALE = 0.3701302
TAPS_SUM, TAPS_ABS_SUM = -147.855428, 2635.852478
CONTEXT_NORM_ROW0_0_4 = [-2.0099238, -0.6934255, -0.1872028, 0.3461484]
CONTEXT0_LATENT_ABS_SUM, CONTEXT0_ROTATED_ABS_SUM = 213.801205, 64.830563
CONTEXT0_ROTATED_ROW10_0_4 = [-0.8519664, 0.9863377, 1.8219085, 0.8776793]
FINAL_NORM_ROW0_0_4 = [1.4052184, -1.0604169, 1.0371541, 0.0998765]
FINAL_NORM_ROW6_0_4 = [-0.9091593, -0.4686752, 0.5976371, 0.3818341]
BASE_LOGITS_SUM, BASE_LOGITS_ABS_SUM = -33.335039, 561.773883
BASE_ARGMAX = [27, 2, 2, 2, 2, 2, 2]
DRAFTED = [27, 2, 2, 66, 2, 2, 2]
CONFIDENCES = [0.227007, 0.79628, 0.769881, 0.71299, 0.720823, 0.771032, 0.797958]

_H, _VOCAB, _LAYERS, _MLA = 64, 96, 8, (3, 6, 7)
_HEADS, _DIM, _EXPERTS, _INTER = 4, 32, 12, 32
_NOPE, _ROPE, _V, _Q_LORA, _KV_LORA = 16, 8, 16, 20, 24


def target_config() -> dict[str, Any]:
    """``config.json`` of the tiny target, nested as released."""
    ids = {"bos_token_id": 93, "eos_token_id": 94, "pad_token_id": 95}
    linear = {
        "num_heads": _HEADS,
        "head_dim": _DIM,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "full_attn_layers": [n + 1 for n in _MLA],
        "kda_layers": [n + 1 for n in range(_LAYERS) if n not in _MLA],
    }
    weights = {
        "num_bits": 4,
        "group_size": 32,
        "type": "float",
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    text = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "num_hidden_layers": _LAYERS,
        "hidden_size": _H,
        "vocab_size": _VOCAB,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-05,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": _Q_LORA,
        "kv_lora_rank": _KV_LORA,
        "qk_nope_head_dim": _NOPE,
        "qk_rope_head_dim": _ROPE,
        "v_head_dim": _V,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "intermediate_size": 80,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": _EXPERTS,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": _INTER,
        "routed_expert_hidden_size": _H,
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
        "attn_res_block_size": 3,
        "linear_attn_config": linear,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": weights,
                }
            },
        },
        **ids,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
        **ids,
    }


def draft_config() -> dict[str, Any]:
    """``config.json`` of the tiny draft."""
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": _H,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": _Q_LORA,
        "kv_lora_rank": _KV_LORA,
        "qk_nope_head_dim": _NOPE,
        "qk_rope_head_dim": _ROPE,
        "v_head_dim": _V,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "vocab_size": _VOCAB,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 1048576,
        "rope_theta": 50000.0,
        "num_target_layers": 3,
        "target_hidden_size": _H,
        "target_num_hidden_layers": _LAYERS,
        "target_layer_ids": [0, 2, 5],
        "mask_token_id": 95,
        "bos_token_id": 93,
        "eos_token_id": 94,
        "pad_token_id": 95,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "draft_vocab_size": _VOCAB,
        "torch_dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_theta": 50000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


def write_tiny_target(folder: Path, *, bf16: bool = False) -> Path:
    """Writes the target: config, one shard a layer, one for the globals, index. Returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    base = "language_model.model."
    globals_ = {
        f"{base}embed_tokens.weight": (_VOCAB, _H),
        "language_model.lm_head.weight": (_VOCAB, _H),
        f"{base}norm.weight": (_H,),
        f"{base}output_attn_res_norm.weight": (_H,),
        f"{base}output_attn_res_proj.weight": (1, _H),
    }
    shards = [_layer_shapes(f"{base}layers.{n}.", n) for n in range(_LAYERS)] + [globals_]
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):06}.safetensors"
        _write_file(folder / name, shapes, bf16)
        weight_map |= dict.fromkeys(shapes, name)
    total = sum((folder / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(target_config(), indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"max_length": 1048576, "eos_token_id": 94}))
    return folder


def write_tiny_draft(folder: Path, *, bf16: bool = False) -> Path:
    """Writes the draft: config and one file. Returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (_H, 3 * _H),
        "context_norm.weight": (_H,),
        "embed_tokens.weight": (_VOCAB, _H),
        "final_norm.weight": (_H,),
        "markov_head.markov_w1.weight": (_VOCAB, 8),
        "markov_head.markov_w2.weight": (_VOCAB, 8),
        "confidence_head.proj.weight": (1, _H + 8),
        "confidence_head.proj.bias": (1,),
    }
    for n in range(2):
        p = f"layers.{n}."
        shapes |= {
            f"{p}input_layernorm.weight": (_H,),
            f"{p}post_attention_layernorm.weight": (_H,),
            **_latent_shapes(f"{p}self_attn."),
            **_mlp_shapes(f"{p}mlp.", 96),
        }
    _write_file(folder / "model.safetensors", shapes, bf16)
    (folder / "config.json").write_text(json.dumps(draft_config(), indent=2))
    return folder


def value(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32] | npt.NDArray[np.uint8]:
    """The hashed tensor called ``name``."""
    x = np.arange(int(np.prod(shape)), dtype=np.uint32) * np.uint32(0x9E3779B1)
    x += np.uint32(zlib.crc32(name.encode("ascii")))
    x ^= x >> 16
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> 13
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> 16
    if name.endswith("weight_packed"):
        return (x >> 24).astype(np.uint8).reshape(shape)
    if name.endswith("weight_scale"):
        return (121 + x % 3).astype(np.uint8).reshape(shape)
    base, amp = 0.0, 3.4 / shape[-1] ** 0.5
    for ending, b, a in (
        ("A_log", 0.0, 3.0),
        ("norm.weight", 1.0, 0.4),
        ("dt_bias", 0.0, 4.0),
        ("conv1d.weight", 0.0, 2.0),
        ("e_score_correction_bias", 0.0, 0.4),
        ("embed_tokens.weight", 0.0, 4.0),
        ("res_proj.weight", 0.0, 1.0),
        ("proj.bias", 0.0, 1.0),
    ):
        if name.endswith(ending):
            base, amp = b, a
            break
    out: npt.NDArray[np.float32] = (base + (x / 2.0**32 - 0.5) * amp).astype(np.float32).reshape(shape)
    if name.endswith("A_log"):
        out[_HEADS:] = 0
    return out


def _latent_shapes(p: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{p}q_a_proj.weight": (_Q_LORA, _H),
        f"{p}q_a_layernorm.weight": (_Q_LORA,),
        f"{p}q_b_proj.weight": (4 * (_NOPE + _ROPE), _Q_LORA),
        f"{p}kv_a_proj_with_mqa.weight": (_KV_LORA + _ROPE, _H),
        f"{p}kv_a_layernorm.weight": (_KV_LORA,),
        f"{p}kv_b_proj.weight": (4 * (_NOPE + _V), _KV_LORA),
        f"{p}o_proj.weight": (_H, 4 * _V),
    }


def _mlp_shapes(p: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{p}gate_proj.weight": (width, _H),
        f"{p}up_proj.weight": (width, _H),
        f"{p}down_proj.weight": (_H, width),
    }


def _layer_shapes(p: str, layer: int) -> dict[str, tuple[int, ...]]:
    a, m, wide = f"{p}self_attn.", f"{p}block_sparse_moe.", _HEADS * _DIM
    norms = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
    shapes: dict[str, tuple[int, ...]] = {f"{p}{n}.weight": (_H,) for n in norms}
    shapes |= {f"{p}{n}_res_proj.weight": (1, _H) for n in ("self_attention", "mlp")}
    if layer in _MLA:
        shapes |= _latent_shapes(a) | {f"{a}g_proj.weight": (4 * _V, _H)}
    else:
        shapes |= {f"{a}{n}_proj.weight": (wide, _H) for n in "qkvg"}
        shapes |= {f"{a}{n}_conv1d.weight": (wide, 1, 4) for n in "qkv"}
        shapes |= {
            f"{a}o_proj.weight": (_H, wide),
            f"{a}f_a_proj.weight": (_DIM, _H),
            f"{a}f_b_proj.weight": (wide, _DIM),
            f"{a}b_proj.weight": (_HEADS, _H),
            f"{a}A_log": (_DIM,),
            f"{a}dt_bias": (wide,),
            f"{a}o_norm.weight": (_DIM,),
        }
    if layer == 0:
        return shapes | _mlp_shapes(f"{p}mlp.", 80)
    shapes |= {
        f"{m}gate.weight": (_EXPERTS, _H),
        f"{m}gate.e_score_correction_bias": (_EXPERTS,),
        f"{m}routed_expert_down_proj.weight": (_H, _H),
        f"{m}routed_expert_norm.weight": (_H,),
        f"{m}routed_expert_up_proj.weight": (_H, _H),
        **_mlp_shapes(f"{m}shared_experts.", 2 * _INTER),
    }
    # safetensors orders by dtype, then name: an expert's six tensors lie together, experts by their decimal strings.
    for e in range(_EXPERTS):
        for w, (rows, cols) in {"w1": (_INTER, _H), "w2": (_H, _INTER), "w3": (_INTER, _H)}.items():
            shapes[f"{m}experts.{e}.{w}.weight_packed"] = (rows, cols // 2)
            shapes[f"{m}experts.{e}.{w}.weight_scale"] = (rows, cols // 32)
    return shapes


_ALWAYS_F32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def _write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], bf16: bool) -> None:
    specs, alive = {}, []  # serialize_file takes addresses: the arrays must outlive the call
    for name, shape in shapes.items():
        array: npt.NDArray[Any] = value(name, shape)
        dtype = "uint8" if array.dtype == np.uint8 else "float32"
        if bf16 and dtype == "float32" and not name.endswith(_ALWAYS_F32):
            array, dtype = (round_bf16(array).view(np.uint32) >> 16).astype(np.uint16), "bfloat16"
        alive.append(array)
        specs[name] = TensorSpec(dtype=dtype, shape=list(shape), data_ptr=array.ctypes.data, data_len=array.nbytes)
    serialize_file(specs, path)
