"""K3's ``config.json``: every field that changes the computation is honoured here or refused here.

The names of the released file are kept inside the parsing models; the rest of the package sees ``K3Config``, whose
attributes use the names of the model description. Choices that the released files leave open (where published sources
disagree) are the constants of ``NumericChoices`` and nowhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deltafin.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20

_Dim = Field(ge=1, le=1 << 20)
_Count = Field(ge=1, le=1 << 16)


@dataclass(frozen=True, slots=True)
class NumericChoices:
    """Readings of K3 on which published implementations differ, each with the one we take.

    Attributes:
        latent_norm_eps: epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``. The official code passes none to these two
            norms, so its class default 1e-6 applies; some engines use the config's 1e-5.
        qk_norm_eps: added to the sum of squares when KDA's q and k are normalised, as in the reference kernels.
        a_log_per_head: ``A_log`` holds one value per head followed by zero padding, not one per channel.
        conv_history_rows: rows of un-convolved q/k/v kept between tokens is kernel size - 1; a fourth has no effect.
        router_sum_eps: guards the renormalisation of router weights.
    """

    latent_norm_eps: float = 1e-6
    qk_norm_eps: float = 1e-6
    a_log_per_head: Literal[True] = True
    router_sum_eps: float = 1e-20


@dataclass(frozen=True, slots=True)
class K3Config:
    """The text model's geometry and constants. All layer numbers are 0-based; all sizes are element counts."""

    vocab_size: int
    hidden: int
    layers: int
    mla_layers: frozenset[int]
    rms_eps: float
    attn_res_block: int
    dense_layers: int
    dense_intermediate: int
    kda_heads: int
    kda_head_dim: int
    conv_kernel: int
    gate_lower_bound: float
    mla_heads: int
    q_lora: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    experts: int
    experts_per_token: int
    latent: int
    expert_intermediate: int
    shared_intermediate: int
    renormalize: bool
    routed_scaling: float
    situ_beta: float
    situ_linear_beta: float
    bos_id: int
    eos_id: int
    pad_id: int
    max_positions: int
    numeric: NumericChoices = NumericChoices()

    @property
    def kda_width(self) -> int:
        """Columns of q, k, v and the output gate of a KDA layer."""
        return self.kda_heads * self.kda_head_dim

    @property
    def latent_row(self) -> int:
        """Numbers in one row of the MLA latent cache: compressed latent, then the shared position part."""
        return self.kv_lora + self.rope_dim

    @property
    def moe_layers(self) -> range:
        """Layers with routed experts."""
        return range(self.dense_layers, self.layers)

    def is_mla(self, layer: int) -> bool:
        """Whether ``layer`` (0-based) is latent attention; the others are KDA."""
        return layer in self.mla_layers

    @classmethod
    def load(cls, folder: Path) -> K3Config:
        """Reads ``folder/config.json``.

        Raises:
            ConfigError: missing, too large, not JSON, or a value this engine does not run.
        """
        path = folder / "config.json"
        try:
            if path.stat().st_size > MAX_CONFIG_BYTES:
                raise ConfigError(
                    f"{path} is larger than {MAX_CONFIG_BYTES} bytes",
                    remedy="fetch the released config.json again",
                )
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{path} does not exist", remedy="point --model at a folder with the released Kimi K3 files"
            ) from None
        except (OSError, ValueError, RecursionError) as e:
            raise ConfigError(f"{path} cannot be read: {e}", remedy="fetch the released config.json again") from None
        return cls.parse(raw, source=str(path))

    @classmethod
    def parse(cls, raw: Any, *, source: str = "config.json") -> K3Config:
        """Validates a decoded ``config.json``.

        Raises:
            ConfigError: naming the first offending key.
        """
        try:
            root = _Root.model_validate(raw)
        except ValidationError as e:
            first = e.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ConfigError(
                f"{source}: {where}: {first['msg']} (found {str(first.get('input'))[:80]!r})",
                remedy="this engine runs the released Kimi K3 text model only; check that the file is the released one",
            ) from None
        t, la = root.text_config, root.text_config.linear_attn_config
        return cls(
            vocab_size=t.vocab_size,
            hidden=t.hidden_size,
            layers=t.num_hidden_layers,
            mla_layers=frozenset(n - 1 for n in la.full_attn_layers),
            rms_eps=t.rms_norm_eps,
            attn_res_block=t.attn_res_block_size,
            dense_layers=t.first_k_dense_replace,
            dense_intermediate=t.intermediate_size,
            kda_heads=la.num_heads,
            kda_head_dim=la.head_dim,
            conv_kernel=la.short_conv_kernel_size,
            gate_lower_bound=la.gate_lower_bound,
            mla_heads=t.num_attention_heads,
            q_lora=t.q_lora_rank,
            kv_lora=t.kv_lora_rank,
            nope_dim=t.qk_nope_head_dim,
            rope_dim=t.qk_rope_head_dim,
            v_dim=t.v_head_dim,
            experts=t.num_experts,
            experts_per_token=t.num_experts_per_token,
            latent=t.routed_expert_hidden_size,
            expert_intermediate=t.moe_intermediate_size,
            shared_intermediate=t.num_shared_experts * t.moe_intermediate_size,
            renormalize=t.moe_renormalize,
            routed_scaling=t.routed_scaling_factor,
            situ_beta=t.activation_situ_beta,
            situ_linear_beta=t.activation_situ_linear_beta,
            bos_id=root.bos_token_id,
            eos_id=root.eos_token_id,
            pad_id=root.pad_token_id,
            max_positions=t.max_position_embeddings,
        )


class _Strict(BaseModel):
    # Keys that change nothing are ignored; those that could change the computation are all declared below.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class _LinearAttention(_Strict):
    num_heads: int = _Count
    head_dim: int = _Count
    short_conv_kernel_size: int = Field(ge=2, le=16)
    gate_lower_bound: float = Field(lt=0, ge=-1000)
    use_full_rank_gate: Literal[True]
    full_attn_layers: list[int] = Field(max_length=4096)
    kda_layers: list[int] = Field(max_length=4096)


class _Weights(_Strict):
    num_bits: Literal[4]
    group_size: Literal[32]
    type: Literal["float"]
    strategy: Literal["group"]
    symmetric: Literal[True]
    dynamic: Literal[False] = False
    actorder: None = None
    block_structure: None = None
    zp_dtype: None = None
    scale_dtype: Literal["torch.uint8"] = "torch.uint8"


class _Group(_Strict):
    format: Literal["mxfp4-pack-quantized"] = "mxfp4-pack-quantized"
    input_activations: None = None
    output_activations: None = None
    weights: _Weights


class _Quantization(_Strict):
    quant_method: Literal["compressed-tensors"]
    format: Literal["mxfp4-pack-quantized"]
    quantization_status: Literal["compressed"] = "compressed"
    kv_cache_scheme: None = None
    config_groups: dict[str, _Group] = Field(min_length=1, max_length=1)


class _Text(_Strict):
    model_type: Literal["kimi_linear"]
    num_hidden_layers: int = Field(ge=1, le=4096)
    hidden_size: int = _Dim
    vocab_size: int = Field(ge=1, le=1 << 22)
    max_position_embeddings: int = Field(ge=1)
    rms_norm_eps: float = Field(gt=0, lt=1)
    num_attention_heads: int = _Count
    num_key_value_heads: int = _Count
    q_lora_rank: int = _Dim
    kv_lora_rank: int = _Dim
    qk_nope_head_dim: int = _Count
    qk_rope_head_dim: int = Field(ge=0, le=1 << 16)
    v_head_dim: int = _Count
    mla_use_nope: Literal[True]
    mla_use_output_gate: Literal[True]
    intermediate_size: int = _Dim
    first_k_dense_replace: int = Field(ge=0)
    moe_layer_freq: Literal[1]
    num_experts: int = Field(ge=1, le=1 << 16)
    num_experts_per_token: int = Field(ge=1, le=1024)
    num_shared_experts: int = Field(ge=1, le=1024)
    moe_intermediate_size: int = _Dim
    routed_expert_hidden_size: int = _Dim
    latent_moe_use_norm: Literal[True]
    moe_router_activation_func: Literal["sigmoid"]
    moe_renormalize: bool
    routed_scaling_factor: float
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    num_expert_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    hidden_act: Literal["situ"]
    activation_situ_beta: float = Field(gt=0)
    activation_situ_linear_beta: float = Field(gt=0)
    attn_res_block_size: int = Field(ge=1, le=4096)
    linear_attn_config: _LinearAttention
    num_nextn_predict_layers: Literal[0] = 0
    quantization_config: _Quantization
    tie_word_embeddings: Literal[False] = False
    pruned_heads: dict[str, Any] = Field(default_factory=dict, max_length=0)

    @model_validator(mode="after")
    def _consistent(self) -> _Text:
        n, la = self.num_hidden_layers, self.linear_attn_config
        full, kda = set(la.full_attn_layers), set(la.kda_layers)
        if full & kda or full | kda != set(range(1, n + 1)):
            raise ValueError(f"full_attn_layers and kda_layers must together name each layer 1..{n} once")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError("num_key_value_heads must equal num_attention_heads")
        if self.num_experts_per_token > self.num_experts:
            raise ValueError("num_experts_per_token exceeds num_experts")
        if self.first_k_dense_replace > n:
            raise ValueError("first_k_dense_replace exceeds num_hidden_layers")
        if self.routed_expert_hidden_size % 32 or self.moe_intermediate_size % 32:
            raise ValueError("expert widths must be multiples of the MXFP4 group of 32")
        if la.num_heads > la.head_dim:
            raise ValueError("A_log has head_dim entries and must cover num_heads")
        return self


class _Root(_Strict):
    model_type: Literal["kimi_k3"]
    bos_token_id: int = Field(ge=0)
    eos_token_id: int = Field(ge=0)
    pad_token_id: int = Field(ge=0)
    tie_word_embeddings: Literal[False] = False
    text_config: _Text

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if isinstance(value, dict) and not isinstance(value.get("text_config"), dict):
            raise ValueError("text_config is missing: this is not a Kimi K3 configuration")
        return value

    @model_validator(mode="after")
    def _ids_in_vocabulary(self) -> _Root:
        if max(self.bos_token_id, self.eos_token_id, self.pad_token_id) >= self.text_config.vocab_size:
            raise ValueError("a special token id lies outside the vocabulary")
        return self
