"""A DSpark draft as released, read-only: configuration, tensor inventory and geometry. Knows no tensor library."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltafin.checkpoint.config import K3Config
from deltafin.checkpoint.tensorfile import SINGLE_NAME, TensorInfo, read_header
from deltafin.drafting.draft_files import check_inventory, read_values
from deltafin.errors import DraftError

BLOCK = 7
"""Rows of a draft block: the anchor and six masks. A convention of the published draft, not in its files."""

PENDING_ROWS = 256
"""Accumulator rows kept until they are projected together (71,680 bytes each on the released model)."""

MAX_HEADER_BYTES = 1 << 20
EMBEDDING = "embed_tokens.weight"
REFETCH = "fetch the draft again; until then K3 runs without it"


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
    config = read_values(path, DSparkConfig, REFETCH)
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
    check_inventory(path, found, inventory(config), REFETCH)
    return found


def read_at(file: int, into: memoryview, offset: int, path: Path) -> None:
    """Fills ``into`` from ``offset`` of the open file ``path``.

    Raises:
        DraftError: the file ends before.
        OSError: it cannot be read.
    """
    done = 0
    while done < len(into):
        got = os.preadv(file, [into[done:]], offset + done)
        if got == 0:
            raise DraftError(f"{path} shrank while it was read", remedy=REFETCH)
        done += got


def yarn(c: DSparkConfig) -> tuple[list[float], float]:
    """YaRN inverse frequencies [rope / 2] and the score scale (Peng et al., 2023, as DeepSeek applies it)."""
    r, dim = c.rope_parameters, c.qk_rope_head_dim

    def turn(rotations: float) -> float:
        wave = r.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(r.rope_theta))

    low = max(math.floor(turn(r.beta_fast)), 0)
    high = min(math.ceil(turn(r.beta_slow)), dim - 1)
    frequencies = []
    for i in range(dim // 2):
        base = r.rope_theta ** (-2 * i / dim)
        ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
        frequencies.append(base * (1 - ramp) + base / r.factor * ramp)
    mu = 0.1 * r.mscale_all_dim * math.log(r.factor) + 1
    return frequencies, (c.qk_nope_head_dim + dim) ** -0.5 * mu * mu
