"""Spine tensors by the names the maths uses, as views of the bytes as stored.

The only numbers made here are the element-wise products of each attention residual's norm and projection weights,
which the mixing formula needs as one vector (fp32); the three short convolutions are put side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltafin.checkpoint.config import K3Config
from deltafin.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
PREFIX = "language_model.model."


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """``self_attn`` of a KDA layer; matrices bf16 [out, in], the rest fp32; ``conv`` [3 (q, k, v), H*D, K]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    out: torch.Tensor
    f_a: torch.Tensor
    f_b: torch.Tensor
    beta: torch.Tensor
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    out_norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """``self_attn`` of a latent attention layer; all bf16."""

    q_a: torch.Tensor
    q_a_norm: torch.Tensor
    q_b: torch.Tensor
    kv_a: torch.Tensor
    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor
    gate: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP: gate and up [wide, hidden], down [hidden, wide], bf16."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """The resident part of a latent mixture of experts."""

    router: torch.Tensor
    router_bias: torch.Tensor
    latent_down: torch.Tensor
    latent_norm: torch.Tensor
    latent_up: torch.Tensor
    shared: MlpWeights


@dataclass(frozen=True, slots=True)
class ResidualMix:
    """An attention residual: score vector fp32 [hidden], and the norm that follows the mixture, bf16 [hidden]."""

    score: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer of the spine."""

    attention_mix: ResidualMix
    mlp_mix: ResidualMix
    attention: KdaWeights | MlaWeights
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Final mixture and ``lm_head`` [vocab, hidden] bf16."""

    mix: ResidualMix
    lm_head: torch.Tensor


def layer_weights(config: K3Config, layer: int, unit: Tensors) -> LayerWeights:
    """Names the tensors of one layer's spine unit.

    Raises:
        CheckpointError: ``A_log``'s padding is not zero, so its meaning is not the one this engine implements.
    """
    p = f"{PREFIX}layers.{layer}."
    return LayerWeights(
        attention_mix=_mix(unit, f"{p}self_attention_res", f"{p}input_layernorm"),
        mlp_mix=_mix(unit, f"{p}mlp_res", f"{p}post_attention_layernorm"),
        attention=_mla(unit, f"{p}self_attn.") if config.is_mla(layer) else _kda(config, unit, f"{p}self_attn."),
        mlp=_mlp(unit, f"{p}mlp.") if layer < config.dense_layers else _moe(unit, f"{p}block_sparse_moe."),
    )


def head_weights(unit: Tensors) -> HeadWeights:
    """Names the tensors of the ``head`` unit."""
    return HeadWeights(
        mix=_mix(unit, f"{PREFIX}output_attn_res", f"{PREFIX}norm"),
        lm_head=unit["language_model.lm_head.weight"],
    )


def _mix(unit: Tensors, residual: str, norm: str) -> ResidualMix:
    score = unit[f"{residual}_norm.weight"].float() * unit[f"{residual}_proj.weight"][0].float()
    return ResidualMix(score=score, norm=unit[f"{norm}.weight"])


def _mlp(unit: Tensors, p: str) -> MlpWeights:
    return MlpWeights(unit[f"{p}gate_proj.weight"], unit[f"{p}up_proj.weight"], unit[f"{p}down_proj.weight"])


def _moe(unit: Tensors, p: str) -> MoeWeights:
    return MoeWeights(
        router=unit[f"{p}gate.weight"],
        router_bias=unit[f"{p}gate.e_score_correction_bias"],
        latent_down=unit[f"{p}routed_expert_down_proj.weight"],
        latent_norm=unit[f"{p}routed_expert_norm.weight"],
        latent_up=unit[f"{p}routed_expert_up_proj.weight"],
        shared=_mlp(unit, f"{p}shared_experts."),
    )


def _kda(config: K3Config, unit: Tensors, p: str) -> KdaWeights:
    a_log = unit[f"{p}A_log"]
    # One value per head, then padding. Non-zero padding would mean one value per channel, which is another model.
    if bool(torch.any(a_log[config.kda_heads :] != 0)):
        raise CheckpointError(
            f"{p}A_log has non-zero values after its {config.kda_heads} heads",
            remedy="this checkpoint is not in the released Kimi K3 format; fetch the released files",
        )
    return KdaWeights(
        q=unit[f"{p}q_proj.weight"],
        k=unit[f"{p}k_proj.weight"],
        v=unit[f"{p}v_proj.weight"],
        gate=unit[f"{p}g_proj.weight"],
        out=unit[f"{p}o_proj.weight"],
        f_a=unit[f"{p}f_a_proj.weight"],
        f_b=unit[f"{p}f_b_proj.weight"],
        beta=unit[f"{p}b_proj.weight"],
        conv=torch.stack([unit[f"{p}{n}_conv1d.weight"][:, 0] for n in "qkv"]),
        a_log=a_log,
        dt_bias=unit[f"{p}dt_bias"],
        out_norm=unit[f"{p}o_norm.weight"],
    )


def _mla(unit: Tensors, p: str) -> MlaWeights:
    return MlaWeights(
        q_a=unit[f"{p}q_a_proj.weight"],
        q_a_norm=unit[f"{p}q_a_layernorm.weight"],
        q_b=unit[f"{p}q_b_proj.weight"],
        kv_a=unit[f"{p}kv_a_proj_with_mqa.weight"],
        kv_a_norm=unit[f"{p}kv_a_layernorm.weight"],
        kv_b=unit[f"{p}kv_b_proj.weight"],
        gate=unit[f"{p}g_proj.weight"],
        out=unit[f"{p}o_proj.weight"],
    )
