"""A Qwen3 base model as published, read-only: checked configuration and tensors before anything is loaded.

``transformers`` would follow a configuration into other classes, remote code or pickles. So only the values listed here
reach it, and only safetensors of exactly the expected names and shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from deltafin.checkpoint.tensorfile import SINGLE_NAME, TensorInfo, read_header
from deltafin.drafting.draft_files import check_inventory, read_values
from deltafin.errors import DraftError

MAX_HEADER_BYTES = 4 << 20
MAX_TOKENIZER_BYTES = 64 << 20
CACHE_POSITIONS = 8192
"""Longest text that is drafted for, in Qwen tokens."""
_REFETCH = "fetch the Qwen draft again; until then K3 runs without it"


class QwenConfig(BaseModel):
    """``config.json`` of a Qwen3 base model; names as released. What would change the computation is refused."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    model_type: Literal["qwen3"]
    hidden_size: int = Field(ge=1, le=1 << 14)
    intermediate_size: int = Field(ge=1, le=1 << 16)
    num_hidden_layers: int = Field(ge=1, le=128)
    num_attention_heads: int = Field(ge=1, le=256)
    num_key_value_heads: int = Field(ge=1, le=256)
    head_dim: int = Field(ge=2, le=1024, multiple_of=2)
    vocab_size: int = Field(ge=1, le=1 << 20)
    max_position_embeddings: int = Field(ge=64, le=1 << 20)
    rms_norm_eps: float = Field(gt=0, lt=1)
    rope_theta: float = Field(gt=1, strict=False)
    hidden_act: Literal["silu"]
    attention_bias: Literal[False] = False
    tie_word_embeddings: Literal[True]
    rope_scaling: None = None
    use_sliding_window: Literal[False] = False
    eos_token_id: int = Field(ge=0)


@dataclass(frozen=True, slots=True)
class QwenFiles:
    """Checked files of one model."""

    folder: Path
    config: QwenConfig
    tensors: dict[str, TensorInfo]


def check(folder: Path) -> QwenFiles:
    """Checks configuration, tensor names, shapes and dtypes, and that there is a tokenizer.

    Raises:
        DraftError: missing or malformed, or not a Qwen3 base model.
        TensorFileError: the safetensors file itself is malformed.
    """
    path = folder / "config.json"
    config = read_values(path, QwenConfig, _REFETCH)
    if config.num_attention_heads % config.num_key_value_heads:
        raise DraftError(f"{path}: query heads are not a multiple of key heads", remedy=_REFETCH)
    weights = folder / SINGLE_NAME
    found = read_header(weights, max_header_bytes=MAX_HEADER_BYTES)
    # A tied head is sometimes stored a second time.
    found.pop("lm_head.weight", None)
    check_inventory(weights, found, inventory(config), _REFETCH)
    if not (folder / "tokenizer.json").is_file():
        raise DraftError(f"{folder / 'tokenizer.json'} does not exist", remedy=_REFETCH)
    return QwenFiles(folder, config, found)


def inventory(c: QwenConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor."""
    h, wide, dim = c.hidden_size, c.intermediate_size, c.head_dim
    q, kv = c.num_attention_heads * dim, c.num_key_value_heads * dim
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, h), "model.norm.weight": (h,)}
    for layer in range(c.num_hidden_layers):
        p = f"model.layers.{layer}."
        out |= {
            f"{p}input_layernorm.weight": (h,),
            f"{p}post_attention_layernorm.weight": (h,),
            f"{p}self_attn.q_proj.weight": (q, h),
            f"{p}self_attn.k_proj.weight": (kv, h),
            f"{p}self_attn.v_proj.weight": (kv, h),
            f"{p}self_attn.o_proj.weight": (h, q),
            f"{p}self_attn.q_norm.weight": (dim,),
            f"{p}self_attn.k_norm.weight": (dim,),
            f"{p}mlp.gate_proj.weight": (wide, h),
            f"{p}mlp.up_proj.weight": (wide, h),
            f"{p}mlp.down_proj.weight": (h, wide),
        }
    return out


def model_folders(folder: Path) -> list[Path]:
    """``folder`` itself, or its subfolders ``probe`` (small) and ``wide`` (larger)."""
    if (folder / "config.json").is_file():
        return [folder]
    return [folder / name for name in ("probe", "wide") if (folder / name / "config.json").is_file()]


def memory_bytes(files: QwenFiles) -> int:
    """Bytes of weights and of a full fp32 cache."""
    c = files.config
    weights = sum(2 * math.prod(shape) for shape in inventory(c).values())
    return weights + 8 * CACHE_POSITIONS * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
