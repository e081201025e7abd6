"""Turns tensors into the addresses the native kernels take, refusing what they cannot read.

A wrong shape or dtype is a defect of the caller: ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

F32, BF16, U8, I32 = torch.float32, torch.bfloat16, torch.uint8, torch.int32


def failure(name: str, t: Tensor, wanted: str) -> ValueError:
    return ValueError(f"{name} is {t.dtype} {list(t.shape)} stride {list(t.stride())} on {t.device}, not {wanted}")


def rows_of(name: str, t: Tensor, cols: int) -> int:
    """Address of an fp32 [rows, cols] tensor with adjacent columns."""
    if t.dtype is not F32 or t.dim() != 2 or t.shape[1] != cols or t.stride(1) != 1 or not t.is_cpu:
        raise failure(name, t, f"fp32 [rows, {cols}] with adjacent columns")
    return t.data_ptr()


def contiguous(name: str, t: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Address of a contiguous tensor of exactly this dtype and shape."""
    if t.dtype is not dtype or t.shape != shape or not t.is_contiguous() or not t.is_cpu:
        raise failure(name, t, f"contiguous {dtype} {list(shape)}")
    return t.data_ptr()


def norm_weight(t: Tensor, width: int) -> tuple[int, bool]:
    is_bf16 = t.dtype is BF16
    return contiguous("norm weight", t, BF16 if is_bf16 else F32, width), is_bf16


def output(out: Tensor | None, rows: int, cols: int) -> Tensor:
    if out is None:
        return torch.empty(rows, cols)
    if out.shape[0] != rows:
        raise failure("out", out, f"fp32 [{rows}, {cols}]")
    rows_of("out", out, cols)
    return out


def matrix(name: str, w: Tensor, cols: int) -> int:
    if w.dtype is not BF16 or w.dim() != 2 or w.shape[1] != cols or not w.is_contiguous() or not w.is_cpu:
        raise failure(name, w, f"contiguous bf16 [outputs, {cols}]")
    return w.data_ptr()
