"""Every text tensor that a K3 checkpoint must hold, derived from its configuration: name, dtype, shape, and
unit.

Source: the inventory of the released checkpoint (497,220 tensors; the vision tower's 168 are not ours). The
*spine* is everything but the routed experts; its *units* are the pieces that are read and dropped together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from deltafin.checkpoint.config import K3Config

ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
"""Bytes per element of the dtypes that occur in a released checkpoint."""

VISION_PREFIXES = ("vision_tower.", "mm_projector.")

MXFP4_GROUP = 32

_MODEL = "language_model.model."


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor must look like."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the row-major payload."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision tower, which a text engine never reads."""
    return name.startswith(VISION_PREFIXES)


def spine_inventory(config: K3Config) -> dict[str, dict[str, TensorSpec]]:
    """Spine units in reading order: ``embed``, ``layer.0`` … ``layer.<L-1>``, ``head``; each maps names to
    specs."""
    c = config
    units = {"embed": {f"{_MODEL}embed_tokens.weight": _bf16(c.vocab_size, c.hidden)}}
    for layer in range(c.layers):
        prefix = layer_prefix(layer)
        units[f"layer.{layer}"] = {prefix + name: spec for name, spec in _layer(c, layer).items()}
    units["head"] = {
        f"{_MODEL}output_attn_res_norm.weight": _bf16(c.hidden),
        f"{_MODEL}output_attn_res_proj.weight": _bf16(1, c.hidden),
        f"{_MODEL}norm.weight": _bf16(c.hidden),
        "language_model.lm_head.weight": _bf16(c.vocab_size, c.hidden),
    }
    return units


def layer_prefix(layer: int) -> str:
    """Common beginning of the names of a layer's tensors."""
    return f"{_MODEL}layers.{layer}."


def expert_inventory(config: K3Config) -> dict[str, TensorSpec]:
    """The six tensors of one routed expert in the released order, by name without the expert's prefix."""
    latent, wide = config.latent, config.expert_intermediate
    parts: dict[str, TensorSpec] = {}
    for name, rows, columns in (("w1", wide, latent), ("w2", latent, wide), ("w3", wide, latent)):
        parts[f"{name}.weight_packed"] = TensorSpec("U8", (rows, columns // 2))
        parts[f"{name}.weight_scale"] = TensorSpec("U8", (rows, columns // MXFP4_GROUP))
    return parts


def expert_prefix(layer: int, expert: int) -> str:
    """Common beginning of the names of an expert's six tensors."""
    return f"{layer_prefix(layer)}block_sparse_moe.experts.{expert}."


def text_tensor_count(config: K3Config) -> int:
    """How many text tensors a checkpoint of this configuration holds."""
    spine = sum(len(unit) for unit in spine_inventory(config).values())
    return spine + len(config.moe_layers) * config.experts * 6


def _layer(c: K3Config, layer: int) -> dict[str, TensorSpec]:
    tensors = {
        "input_layernorm.weight": _bf16(c.hidden),
        "post_attention_layernorm.weight": _bf16(c.hidden),
        "self_attention_res_norm.weight": _bf16(c.hidden),
        "self_attention_res_proj.weight": _bf16(1, c.hidden),
        "mlp_res_norm.weight": _bf16(c.hidden),
        "mlp_res_proj.weight": _bf16(1, c.hidden),
    }
    attention = _mla(c) if c.is_mla(layer) else _kda(c)
    tensors |= {f"self_attn.{name}": spec for name, spec in attention.items()}
    if layer in c.moe_layers:
        tensors |= {f"block_sparse_moe.{name}": spec for name, spec in _moe(c).items()}
    else:
        tensors |= {f"mlp.{name}": spec for name, spec in _gated_mlp(c.hidden, c.dense_intermediate).items()}
    return tensors


def _kda(c: K3Config) -> dict[str, TensorSpec]:
    conv = _f32(c.kda_width, 1, c.conv_kernel)
    return {
        "q_proj.weight": _bf16(c.kda_width, c.hidden),
        "k_proj.weight": _bf16(c.kda_width, c.hidden),
        "v_proj.weight": _bf16(c.kda_width, c.hidden),
        "q_conv1d.weight": conv,
        "k_conv1d.weight": conv,
        "v_conv1d.weight": conv,
        "f_a_proj.weight": _bf16(c.kda_head_dim, c.hidden),
        "f_b_proj.weight": _bf16(c.kda_width, c.kda_head_dim),
        "A_log": _f32(c.kda_head_dim),
        "dt_bias": _f32(c.kda_width),
        "b_proj.weight": _bf16(c.kda_heads, c.hidden),
        "g_proj.weight": _bf16(c.kda_width, c.hidden),
        "o_norm.weight": _f32(c.kda_head_dim),
        "o_proj.weight": _bf16(c.hidden, c.kda_width),
    }


def _mla(c: K3Config) -> dict[str, TensorSpec]:
    out = c.mla_heads * c.v_dim
    return {
        "q_a_proj.weight": _bf16(c.q_lora, c.hidden),
        "q_a_layernorm.weight": _bf16(c.q_lora),
        "q_b_proj.weight": _bf16(c.mla_heads * (c.nope_dim + c.rope_dim), c.q_lora),
        "kv_a_proj_with_mqa.weight": _bf16(c.latent_row, c.hidden),
        "kv_a_layernorm.weight": _bf16(c.kv_lora),
        "kv_b_proj.weight": _bf16(c.mla_heads * (c.nope_dim + c.v_dim), c.kv_lora),
        "g_proj.weight": _bf16(out, c.hidden),
        "o_proj.weight": _bf16(c.hidden, out),
    }


def _moe(c: K3Config) -> dict[str, TensorSpec]:
    shared = _gated_mlp(c.hidden, c.shared_intermediate)
    return {
        "gate.weight": _bf16(c.experts, c.hidden),
        "gate.e_score_correction_bias": _f32(c.experts),
        "routed_expert_down_proj.weight": _bf16(c.latent, c.hidden),
        "routed_expert_norm.weight": _bf16(c.latent),
        "routed_expert_up_proj.weight": _bf16(c.hidden, c.latent),
    } | {f"shared_experts.{name}": spec for name, spec in shared.items()}


def _gated_mlp(hidden: int, wide: int) -> dict[str, TensorSpec]:
    return {
        "gate_proj.weight": _bf16(wide, hidden),
        "up_proj.weight": _bf16(wide, hidden),
        "down_proj.weight": _bf16(hidden, wide),
    }


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec("BF16", shape)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec("F32", shape)
