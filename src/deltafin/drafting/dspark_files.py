"""A DSpark draft as released, read-only: configuration, tensor inventory, and weights without the embedding copy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltafin.checkpoint.config import K3Config
from deltafin.checkpoint.tensorfile import SINGLE_NAME, TensorInfo, open_regular, read_header
from deltafin.drafting.draft_files import check_inventory, read_values
from deltafin.errors import DraftError

BLOCK = 7
"""Rows of a draft block: the anchor and six masks. A convention of the published draft, not in its files."""

PENDING_ROWS = 256
"""Accumulator rows kept until they are projected together (71,680 bytes each on the released model)."""

MAX_HEADER_BYTES = 1 << 20
EMBEDDING = "embed_tokens.weight"
_REFETCH = "fetch the draft again; until then K3 runs without it"
_BF16 = torch.bfloat16


class _Strict(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class _Rope(_Strict):
    rope_type: Literal["yarn"]
    factor: float = Field(ge=1)
    original_max_position_embeddings: int = Field(ge=1)
    rope_theta: float = Field(gt=1)
    beta_fast: float = Field(gt=0)
    beta_slow: float = Field(gt=0)
    mscale: float
    mscale_all_dim: float = Field(gt=0)


class DSparkConfig(_Strict):
    """``config.json`` of a DSpark draft; names as released. Values that would change the computation are refused."""

    model_type: Literal["k3_dspark"]
    hidden_size: int = Field(ge=1, le=1 << 20)
    intermediate_size: int = Field(ge=1, le=1 << 20)
    num_hidden_layers: int = Field(ge=1, le=256)
    num_attention_heads: int = Field(ge=1, le=1 << 16)
    q_lora_rank: int = Field(ge=1, le=1 << 20)
    kv_lora_rank: int = Field(ge=1, le=1 << 20)
    qk_nope_head_dim: int = Field(ge=1, le=1 << 16)
    qk_rope_head_dim: int = Field(ge=2, le=1 << 16, multiple_of=2)
    v_head_dim: int = Field(ge=1, le=1 << 16)
    mla_use_nope: Literal[False] = False
    mla_use_output_gate: Literal[False] = False
    vocab_size: int = Field(ge=1, le=1 << 22)
    draft_vocab_size: int = Field(ge=1, le=1 << 22)
    rms_norm_eps: float = Field(gt=0, lt=1)
    target_hidden_size: int = Field(ge=1, le=1 << 20)
    target_num_hidden_layers: int = Field(ge=1, le=4096)
    target_layer_ids: tuple[int, ...] = Field(min_length=1, max_length=64, strict=False)
    mask_token_id: int = Field(ge=0)
    markov_rank: int = Field(ge=1, le=1 << 16)
    markov_head_type: Literal["vanilla"]
    enable_confidence_head: Literal[True]
    confidence_head_with_markov: Literal[True]
    tie_word_embeddings: Literal[False] = False
    rope_parameters: _Rope

    @model_validator(mode="after")
    def _consistent(self) -> DSparkConfig:
        ids = self.target_layer_ids
        if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.target_num_hidden_layers:
            raise ValueError("target_layer_ids must be ascending layers of the target")
        if self.mask_token_id >= self.vocab_size or self.draft_vocab_size != self.vocab_size:
            raise ValueError("the draft's vocabulary must be the target's")
        return self


@dataclass(frozen=True, slots=True)
class DSparkLayer:
    """One layer by the names the maths uses; matrices bf16 [out, in].

    ``qkv_a`` stacks ``q_a_proj`` and ``kv_a_proj_with_mqa``, ``gate_up`` the two MLP inputs; ``kv_a`` is a view.
    ``key`` [heads, nope, kv_lora] and ``value`` [heads, kv_lora, v] are ``kv_b_proj`` in fp32: widening it at every
    step took longer than using it.
    """

    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv_a: torch.Tensor
    kv_a: torch.Tensor
    q_a_norm: torch.Tensor
    kv_a_norm: torch.Tensor
    q_b: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class DSparkWeights:
    """Every tensor of the draft but the redundant embedding.

    Attributes:
        tensors: those outside the layers, bf16 as stored, by released name.
        layers: in order.
    """

    config: DSparkConfig
    tensors: dict[str, torch.Tensor]
    layers: tuple[DSparkLayer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return memory_bytes(self.config)


def memory_bytes(c: DSparkConfig) -> int:
    """Bytes of a loaded draft: all used tensors in bf16, ``kv_b_proj`` in fp32 instead."""
    total = 0
    for name, shape in inventory(c).items():
        total += math.prod(shape) * (4 if name.endswith("kv_b_proj.weight") else 2)
    return total


def read_config(folder: Path, target: K3Config) -> DSparkConfig:
    """Reads and checks ``config.json`` against the target it must serve.

    Raises:
        DraftError: missing, malformed, or a draft for another model.
    """
    path = folder / "config.json"
    config = read_values(path, DSparkConfig, _REFETCH)
    mine = (config.hidden_size, config.target_hidden_size, config.target_num_hidden_layers, config.vocab_size)
    if mine != (target.hidden, target.hidden, target.layers, target.vocab_size):
        raise DraftError(
            f"{path} is a draft for a model of other dimensions", remedy="use the draft that belongs to this model"
        )
    return config


def inventory(c: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every bf16 tensor that is used."""
    h, heads = c.hidden_size, c.num_attention_heads
    out: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (h, c.target_hidden_size * len(c.target_layer_ids)),
        "context_norm.weight": (h,),
        "final_norm.weight": (h,),
        "markov_head.markov_w1.weight": (c.vocab_size, c.markov_rank),
        "markov_head.markov_w2.weight": (c.vocab_size, c.markov_rank),
        "confidence_head.proj.weight": (1, h + c.markov_rank),
        "confidence_head.proj.bias": (1,),
    }
    for layer in range(c.num_hidden_layers):
        p = f"layers.{layer}."
        out |= {
            f"{p}input_layernorm.weight": (h,),
            f"{p}post_attention_layernorm.weight": (h,),
            f"{p}self_attn.q_a_proj.weight": (c.q_lora_rank, h),
            f"{p}self_attn.q_a_layernorm.weight": (c.q_lora_rank,),
            f"{p}self_attn.q_b_proj.weight": (heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank),
            f"{p}self_attn.kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, h),
            f"{p}self_attn.kv_a_layernorm.weight": (c.kv_lora_rank,),
            f"{p}self_attn.kv_b_proj.weight": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
            f"{p}self_attn.o_proj.weight": (h, heads * c.v_head_dim),
            f"{p}mlp.gate_proj.weight": (c.intermediate_size, h),
            f"{p}mlp.up_proj.weight": (c.intermediate_size, h),
            f"{p}mlp.down_proj.weight": (h, c.intermediate_size),
        }
    return out


def check_files(folder: Path, config: DSparkConfig) -> dict[str, TensorInfo]:
    """Reads the header and checks the inventory; the tensors that will be loaded, without the embedding copy.

    Raises:
        DraftError: a tensor is missing, unknown, or of another dtype or shape.
        TensorFileError: the file itself is malformed.
    """
    path = folder / SINGLE_NAME
    found = read_header(path, max_header_bytes=MAX_HEADER_BYTES)
    found.pop(EMBEDDING, None)
    check_inventory(path, found, inventory(config), _REFETCH)
    return found


def load(folder: Path, config: DSparkConfig) -> DSparkWeights:
    """Reads the weights; K3's embedding is shared, so the file's copy of it is skipped, not read and dropped.

    Raises:
        DraftError, TensorFileError: the files cannot be used.
    """
    infos = check_files(folder, config)
    path = folder / SINGLE_NAME
    try:
        with open_regular(path) as file:

            def read(*names: str) -> torch.Tensor:
                stacked = torch.empty(sum(infos[n].shape[0] for n in names), *infos[names[0]].shape[1:], dtype=_BF16)
                view = memoryview(stacked.view(torch.uint8).numpy().reshape(-1))  # type: ignore[arg-type]
                for n in names:
                    _read_at(file.fileno(), view[: infos[n].nbytes], infos[n].offset, path)
                    view = view[infos[n].nbytes :]
                return stacked

            layers = tuple(_layer(config, f"layers.{i}.", read) for i in range(config.num_hidden_layers))
            tensors = {name: read(name) for name in infos if not name.startswith("layers.")}
    except OSError as e:
        raise DraftError(f"{path} cannot be read: {e.strerror}", remedy=_REFETCH) from None
    return DSparkWeights(config, tensors, layers)


def _read_at(file: int, into: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(into):
        got = os.preadv(file, [into[done:]], offset + done)
        if got == 0:
            raise DraftError(f"{path} shrank while it was read", remedy=_REFETCH)
        done += got


def _layer(c: DSparkConfig, p: str, read: Callable[..., torch.Tensor]) -> DSparkLayer:
    heads, nope, v, lora = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
    qkv_a = read(f"{p}self_attn.q_a_proj.weight", f"{p}self_attn.kv_a_proj_with_mqa.weight")
    kv_b = read(f"{p}self_attn.kv_b_proj.weight").view(heads, nope + v, lora)
    return DSparkLayer(
        input_norm=read(f"{p}input_layernorm.weight"),
        mlp_norm=read(f"{p}post_attention_layernorm.weight"),
        qkv_a=qkv_a,
        kv_a=qkv_a[c.q_lora_rank :],
        q_a_norm=read(f"{p}self_attn.q_a_layernorm.weight"),
        kv_a_norm=read(f"{p}self_attn.kv_a_layernorm.weight"),
        q_b=read(f"{p}self_attn.q_b_proj.weight"),
        key=kv_b[:, :nope].float().contiguous(),
        value=kv_b[:, nope:].float().transpose(1, 2).contiguous(),
        out=read(f"{p}self_attn.o_proj.weight"),
        gate_up=read(f"{p}mlp.gate_proj.weight", f"{p}mlp.up_proj.weight"),
        down=read(f"{p}mlp.down_proj.weight"),
    )
