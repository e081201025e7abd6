"""Spine tensors by the names the maths uses, as windows of the bytes as stored.

Matrices are bf16 [out, in]. Vectors are kept in the dtype in which they are used; MLX would widen them at each use.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx

from deltafin.checkpoint.config import K3Config
from deltafin.errors import CheckpointError

Tensors = dict[str, mx.array]
PREFIX = "language_model.model."


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """``self_attn`` of a KDA layer.

    ``conv`` fp32 [K, 3 (q, k, v) · H·D], oldest tap first; ``rate`` = exp(A_log) repeated over the channels and
    ``bias`` fp32 [H·D]; ``out_norm`` fp32 [D].
    """

    q: mx.array
    k: mx.array
    v: mx.array
    gate: mx.array
    out: mx.array
    f_a: mx.array
    f_b: mx.array
    beta: mx.array
    conv: mx.array
    rate: mx.array
    bias: mx.array
    out_norm: mx.array


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """``self_attn`` of an MLA layer; ``key`` [H, nope, lora] and ``value`` [H, v, lora] are ``kv_b_proj``."""

    q_a: mx.array
    q_a_norm: mx.array
    q_b: mx.array
    kv_a: mx.array
    kv_a_norm: mx.array
    key: mx.array
    value: mx.array
    gate: mx.array
    out: mx.array


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP: gate and up [wide, hidden], down [hidden, wide]."""

    gate: mx.array
    up: mx.array
    down: mx.array


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """The resident part of a latent mixture of experts; ``router_bias`` fp32."""

    router: mx.array
    router_bias: mx.array
    latent_down: mx.array
    latent_norm: mx.array
    latent_up: mx.array
    shared: MlpWeights


@dataclass(frozen=True, slots=True)
class ResidualMix:
    """An attention residual: score vector fp32 [1, hidden], and the norm that follows the mixture."""

    score: mx.array
    norm: mx.array


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer of the spine."""

    attention_mix: ResidualMix
    mlp_mix: ResidualMix
    attention: KdaWeights | MlaWeights
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Final mixture and ``lm_head`` [vocab, hidden]."""

    mix: ResidualMix
    lm_head: mx.array


class Names:
    """Finds the tensors of a layer.

    Args:
        activations: dtype in which the model computes.
    """

    def __init__(self, config: K3Config, activations: mx.Dtype) -> None:
        self._config = config
        self._activations = activations

    def layer(self, layer: int, unit: Tensors) -> LayerWeights:
        """The weights of one layer.

        Raises:
            CheckpointError: ``A_log``'s padding is not zero, so its meaning is not the one this engine implements.
        """
        config, p = self._config, f"{PREFIX}layers.{layer}."
        return LayerWeights(
            attention_mix=self._mix(unit, f"{p}self_attention_res", f"{p}input_layernorm"),
            mlp_mix=self._mix(unit, f"{p}mlp_res", f"{p}post_attention_layernorm"),
            attention=(self._mla if config.is_mla(layer) else self._kda)(unit, f"{p}self_attn."),
            mlp=_mlp(unit, f"{p}mlp.") if layer < config.dense_layers else self._moe(unit, f"{p}block_sparse_moe."),
        )

    def head(self, unit: Tensors) -> HeadWeights:
        """The weights of the ``head`` unit."""
        mix = self._mix(unit, f"{PREFIX}output_attn_res", f"{PREFIX}norm")
        return HeadWeights(mix, unit["language_model.lm_head.weight"])

    def _mix(self, unit: Tensors, residual: str, norm: str) -> ResidualMix:
        score = unit[f"{residual}_norm.weight"].astype(mx.float32) * unit[f"{residual}_proj.weight"]
        return ResidualMix(score=score, norm=unit[f"{norm}.weight"].astype(self._activations))

    def _moe(self, unit: Tensors, p: str) -> MoeWeights:
        return MoeWeights(
            router=unit[f"{p}gate.weight"],
            router_bias=unit[f"{p}gate.e_score_correction_bias"],
            latent_down=unit[f"{p}routed_expert_down_proj.weight"],
            latent_norm=unit[f"{p}routed_expert_norm.weight"].astype(self._activations),
            latent_up=unit[f"{p}routed_expert_up_proj.weight"],
            shared=_mlp(unit, f"{p}shared_experts."),
        )

    def _kda(self, unit: Tensors, p: str) -> KdaWeights:
        heads, dim = self._config.kda_heads, self._config.kda_head_dim
        a_log = unit[f"{p}A_log"]
        # One value per head, then padding. Non-zero padding would mean one value per channel, which is another model.
        if len(a_log) > heads and mx.any(a_log[heads:] != 0).item():
            raise CheckpointError(
                f"{p}A_log has non-zero values after its {heads} heads",
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
            conv=mx.contiguous(mx.concatenate([unit[f"{p}{n}_conv1d.weight"][:, 0] for n in "qkv"]).T),
            rate=mx.repeat(mx.exp(a_log[:heads]), dim),
            bias=unit[f"{p}dt_bias"],
            out_norm=unit[f"{p}o_norm.weight"],
        )

    def _mla(self, unit: Tensors, p: str) -> MlaWeights:
        config = self._config
        kv_b = unit[f"{p}kv_b_proj.weight"].reshape(config.mla_heads, config.nope_dim + config.v_dim, config.kv_lora)
        return MlaWeights(
            q_a=unit[f"{p}q_a_proj.weight"],
            q_a_norm=unit[f"{p}q_a_layernorm.weight"].astype(self._activations),
            q_b=unit[f"{p}q_b_proj.weight"],
            kv_a=unit[f"{p}kv_a_proj_with_mqa.weight"],
            kv_a_norm=unit[f"{p}kv_a_layernorm.weight"].astype(self._activations),
            key=kv_b[:, : config.nope_dim],
            value=kv_b[:, config.nope_dim :],
            gate=unit[f"{p}g_proj.weight"],
            out=unit[f"{p}o_proj.weight"],
        )


def _mlp(unit: Tensors, p: str) -> MlpWeights:
    return MlpWeights(unit[f"{p}gate_proj.weight"], unit[f"{p}up_proj.weight"], unit[f"{p}down_proj.weight"])


def arrays_of(weights: Any) -> list[mx.array]:
    """Every array of some named weights."""
    if isinstance(weights, mx.array):
        return [weights]
    return [array for field in fields(weights) for array in arrays_of(getattr(weights, field.name))]
