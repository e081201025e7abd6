"""Compares every kernel with the plain reference on small inputs: does this build compute on this machine?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deltafin import kernels
from deltafin.errors import MachineError
from deltafin.expert_layout import ExpertLayout
from deltafin.kernels import reference

_TOLERANCE = 2e-5
"""Largest difference allowed, relative to the largest number of the expected result (fp32 against fp64)."""


def check() -> None:
    """Compares each kernel, with the instruction set and threads in use, with its reference; takes milliseconds.

    Raises:
        MachineError: naming the kernel that is wrong.
    """
    for name, native, expected in _cases():
        for got, want in zip(native(), expected(), strict=True):
            error = (got.double() - want.double()).abs().max() / want.double().abs().max()
            if not error <= _TOLERANCE:
                raise MachineError(
                    f"kernel {name} computes wrong numbers on {kernels.isa()} (error {float(error):.1e})",
                    remedy="rebuild with `pip install --no-deps --force-reinstall .`, or try K3_ISA=portable",
                )


_Run = Callable[[], tuple[Tensor, ...]]


def _cases() -> Iterator[tuple[str, _Run, _Run]]:
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def wide(*tensors: Tensor) -> list[Tensor]:
        return [t.double() for t in tensors]

    t, h, d, rope, lora = 3, 4, 32, 16, 48
    width = h * d
    x, y, norm_w = rand(t, width), rand(t, width), rand(width)
    w, w_up, w_down = (rand(width, width).bfloat16() for _ in range(3))
    yield "linear", lambda: (kernels.linear(x, w),), lambda: (reference.linear(x.double(), w),)
    yield "rmsnorm", lambda: (kernels.rmsnorm(x, norm_w, 1e-5),), lambda: (reference.rmsnorm(x.double(), norm_w, 1e-5),)
    yield (
        "attnres_mix_norm",
        lambda: (kernels.attnres_mix_norm([x, y], norm_w, norm_w, 1e-5),),
        lambda: (reference.attnres_mix_norm(wide(x, y), norm_w, norm_w, 1e-5),),
    )
    yield "situ", lambda: (kernels.situ(x, y, 4, 25),), lambda: (reference.situ(x.double(), y, 4, 25),)
    yield (
        "gated_mlp",
        lambda: (kernels.gated_mlp(x, w, w_up, w_down, 4, 25),),
        lambda: (reference.gated_mlp(x.double(), w, w_up, w_down, 4, 25),),
    )

    qkv, history, conv_w = rand(t, 3, width), rand(3, 3, width), rand(3, width, 4)
    gates = (rand(t, width), rand(width), rand(h), rand(t, h))
    yield (
        "kda_prepare",
        lambda: kernels.kda_prepare(qkv, history, conv_w, *gates, heads=h, head_dim=d, lower_bound=-5, qk_eps=1e-6),
        lambda: reference.kda_prepare(
            qkv.double(), history, conv_w, *gates, heads=h, head_dim=d, lower_bound=-5, qk_eps=1e-6
        ),
    )
    rows = (x, y / d, rand(t, width), torch.rand(t, width, generator=generator), rand(t, h))
    state = rand(h, d, d)

    def recurrence() -> tuple[Tensor, Tensor]:
        out, after = torch.empty(t, width), torch.empty_like(state)
        kernels.kda_recurrence(*rows, state, after, out)
        return out, after

    yield "kda_recurrence", recurrence, lambda: reference.kda_recurrence(*wide(*rows, state))
    yield (
        "kda_output",
        lambda: (kernels.kda_output(x, y, norm_w[:d], 1e-5, heads=h, head_dim=d),),
        lambda: (reference.kda_output(x.double(), y, norm_w[:d], 1e-5, heads=h, head_dim=d),),
    )

    q, kv_b, cache = rand(t, h * (d + rope)), rand(h * 2 * d, lora).bfloat16() / 8, rand(70, lora + rope)

    sizes: dict[str, Any] = {"heads": h, "nope": d, "rope": rope, "v_dim": d, "kv_lora": lora}
    yield (
        "mla_attention",
        lambda: (kernels.mla_attention(q, kv_b, cache, 66, y, scale=0.1, **sizes),),
        lambda: (reference.mla_attention(q.double(), kv_b, cache, 66, y, scale=0.1, **sizes),),
    )
    yield (
        "router",
        lambda: kernels.router(x, norm_w, 4, renormalize=True, scale=1, sum_eps=1e-20),
        lambda: reference.router(x.double(), norm_w, 4, renormalize=True, scale=1, sum_eps=1e-20),
    )

    layout = ExpertLayout.released(width, 64)
    blob = torch.randint(118, 122, (layout.nbytes,), dtype=torch.uint8, generator=generator)
    index = torch.arange(t, dtype=torch.int32)

    def experts() -> tuple[Tensor]:
        out, splits = torch.empty(t, width), torch.tensor([0, t], dtype=torch.int32)
        kernels.expert_forward(x, [blob.data_ptr()], layout, splits, index, index, out, beta=4, linear_beta=25)
        return (out,)

    yield "expert_forward", experts, lambda: (reference.expert(x.double(), blob, layout, 4, 25),)
    slots, shares = rand(t, 4, width), rand(t, 4)
    yield (
        "combine_norm",
        lambda: (kernels.combine_norm(slots, shares, norm_w, 1e-5),),
        lambda: (reference.combine_norm(slots.double(), shares, norm_w, 1e-5),),
    )
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    scale = torch.arange(110, 126, dtype=torch.uint8).reshape(16, 1)
    yield (
        "mxfp4_dequantize",
        lambda: (kernels.mxfp4_dequantize(packed, scale),),
        lambda: (reference.mxfp4_dequantize(packed, scale),),
    )
