"""A DSpark draft's weights in PyTorch, as its maths uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from deltafin.checkpoint.tensorfile import SINGLE_NAME, open_regular
from deltafin.drafting.dspark_files import REFETCH, DSparkConfig, check_files, memory_bytes, read_at
from deltafin.errors import DraftError


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
                stacked = torch.empty(
                    sum(infos[n].shape[0] for n in names), *infos[names[0]].shape[1:], dtype=torch.bfloat16
                )
                view = memoryview(stacked.view(torch.uint8).numpy().reshape(-1))  # type: ignore[arg-type]
                for n in names:
                    read_at(file.fileno(), view[: infos[n].nbytes], infos[n].offset, path)
                    view = view[infos[n].nbytes :]
                return stacked

            layers = tuple(_layer(config, f"layers.{i}.", read) for i in range(config.num_hidden_layers))
            tensors = {name: read(name) for name in infos if not name.startswith("layers.")}
    except OSError as e:
        raise DraftError(f"{path} cannot be read: {e.strerror}", remedy=REFETCH) from None
    return DSparkWeights(config, tensors, layers)


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
