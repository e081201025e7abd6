"""Inputs for every kernel, as calls that can be run natively (whatever rows, threads, ISA) and by the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import deltafin.kernels as kernels
from deltafin.kernels import ExpertLayout, reference

Result = tuple[Tensor, ...]


def rand(*shape: int, seed: int, amp: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * amp


def rand_bf16(*shape: int, seed: int, amp: float = 1.0) -> Tensor:
    return rand(*shape, seed=seed, amp=amp).bfloat16()


def rand_blob(layout: ExpertLayout, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    blob = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8, generator=g)
    for begin in (layout.w1_scale, layout.w2_scale, layout.w3_scale):
        n = layout.scale_nbytes
        blob[begin : begin + n] = torch.randint(119, 123, (n,), dtype=torch.uint8, generator=g)
    return blob


@dataclass(frozen=True)
class Case:
    """``native(lo, hi)`` computes rows lo..hi of ``rows``, with whatever state rows before lo leave behind."""

    name: str
    rows: int
    native: Callable[[int, int], Result]
    reference: Callable[[], Result]
    bound: float = 2e-6


def linear_case(rows: int, k: int, n: int, seed: int = 0) -> Case:
    x, w = rand(rows, k, seed=seed), rand_bf16(n, k, seed=seed + 1, amp=k**-0.5)
    return Case(
        f"linear-{rows}x{k}x{n}",
        rows,
        lambda lo, hi: (kernels.linear(x[lo:hi], w),),
        lambda: (reference.linear(x.double(), w),),
    )


def rmsnorm_case(rows: int, d: int, bf16: bool) -> Case:
    x = rand(rows, d, seed=2)
    w = rand_bf16(d, seed=3) if bf16 else rand(d, seed=3)
    return Case(
        f"rmsnorm-{rows}x{d}-{'bf16' if bf16 else 'f32'}",
        rows,
        lambda lo, hi: (kernels.rmsnorm(x[lo:hi], w, 1e-5),),
        lambda: (reference.rmsnorm(x.double(), w, 1e-5),),
    )


def attnres_case(rows: int, d: int, m: int) -> Case:
    sources = [rand(rows, d, seed=10 + i, amp=1 + i) for i in range(m)]
    score_w, w = rand(d, seed=30, amp=2 * d**-0.5), rand_bf16(d, seed=31)
    return Case(
        f"attnres-{rows}x{d}x{m}",
        rows,
        lambda lo, hi: (kernels.attnres_mix_norm([s[lo:hi] for s in sources], score_w, w, 1e-5),),
        lambda: (reference.attnres_mix_norm([s.double() for s in sources], score_w, w, 1e-5),),
        bound=5e-6,
    )


def situ_case(rows: int, n: int) -> Case:
    g, u = rand(rows, n, seed=4, amp=4), rand(rows, n, seed=5, amp=30)
    return Case(
        f"situ-{rows}x{n}",
        rows,
        lambda lo, hi: (kernels.situ(g[lo:hi], u[lo:hi], 4.0, 25.0),),
        lambda: (reference.situ(g.double(), u.double(), 4.0, 25.0),),
    )


def gated_mlp_case(rows: int, k: int, hidden: int, n: int) -> Case:
    x = rand(rows, k, seed=6)
    gate, up = rand_bf16(hidden, k, seed=7, amp=k**-0.5), rand_bf16(hidden, k, seed=8, amp=k**-0.5)
    down = rand_bf16(n, hidden, seed=9, amp=hidden**-0.5)
    return Case(
        f"gated_mlp-{rows}x{k}x{hidden}x{n}",
        rows,
        lambda lo, hi: (kernels.gated_mlp(x[lo:hi], gate, up, down, 4.0, 25.0),),
        lambda: (reference.gated_mlp(x.double(), gate, up, down, 4.0, 25.0),),
        bound=5e-6,
    )


def kda_prepare_case(rows: int, heads: int, d: int, taps: int = 4) -> Case:
    width = heads * d
    qkv, history = rand(rows, 3, width, seed=40), rand(taps - 1, 3, width, seed=41)
    conv_w, r = rand(3, width, taps, seed=42), rand(rows, width, seed=43, amp=3)
    dt_bias, a_log, b = rand(width, seed=44), rand(heads + 3, seed=45), rand(rows, heads, seed=46, amp=2)
    options = {"heads": heads, "head_dim": d, "lower_bound": -5.0, "qk_eps": 1e-6}

    def native(lo: int, hi: int) -> Result:
        past = torch.cat([history, qkv])[lo : lo + taps - 1].contiguous()
        return kernels.kda_prepare(qkv[lo:hi], past, conv_w, r[lo:hi], dt_bias, a_log, b[lo:hi], **options)

    return Case(
        f"kda_prepare-{rows}x{heads}x{d}x{taps}",
        rows,
        native,
        lambda: reference.kda_prepare(qkv.double(), history, conv_w, r, dt_bias, a_log, b, **options),
        bound=4e-6,
    )


def kda_inputs(rows: int, heads: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def unit(t: Tensor) -> Tensor:
        return torch.nn.functional.normalize(t.reshape(rows, heads, d), dim=-1).reshape(rows, heads * d)

    q, k = unit(rand(rows, heads * d, seed=50)) * d**-0.5, unit(rand(rows, heads * d, seed=51))
    v = rand(rows, heads * d, seed=52)
    decay = torch.exp(-5 * torch.sigmoid(rand(rows, heads * d, seed=53, amp=3)))
    beta = torch.sigmoid(rand(rows, heads, seed=54))
    return q, k, v, decay, beta, rand(heads, d, d, seed=55, amp=0.3)


def kda_recurrence_case(rows: int, heads: int, d: int) -> Case:
    q, k, v, decay, beta, state = kda_inputs(rows, heads, d)

    def native(lo: int, hi: int) -> Result:
        s = state.clone()
        if lo:  # replay, state only
            kernels.kda_recurrence(None, k[:lo], v[:lo], decay[:lo], beta[:lo], s, s, None)
        out = torch.empty(hi - lo, heads * d)
        kernels.kda_recurrence(q[lo:hi], k[lo:hi], v[lo:hi], decay[lo:hi], beta[lo:hi], s, s, out)
        return (out,) if hi < rows else (out, s)

    return Case(
        f"kda_recurrence-{rows}x{heads}x{d}",
        rows,
        native,
        lambda: reference.kda_recurrence(*(t.double() for t in (q, k, v, decay, beta, state))),
        bound=4e-6,
    )


def kda_output_case(rows: int, heads: int, d: int) -> Case:
    o, gate, w = rand(rows, heads * d, seed=60), rand(rows, heads * d, seed=61, amp=2), rand(d, seed=62)
    return Case(
        f"kda_output-{rows}x{heads}x{d}",
        rows,
        lambda lo, hi: (kernels.kda_output(o[lo:hi], gate[lo:hi], w, 1e-5, heads=heads, head_dim=d),),
        lambda: (reference.kda_output(o.double(), gate, w, 1e-5, heads=heads, head_dim=d),),
        bound=4e-6,
    )


def mla_case(
    rows: int, start: int, heads: int, nope: int, rope: int, v_dim: int, lora: int, gated: bool = True
) -> Case:
    q = rand(rows, heads * (nope + rope), seed=70)
    kv_b = rand_bf16(heads * (nope + v_dim), lora, seed=71, amp=2 * lora**-0.5)
    cache = rand(start + rows + 5, lora + rope, seed=72)
    cache[start + rows :] = torch.nan  # rows never to be looked at
    gate = rand(rows, heads * v_dim, seed=73) if gated else None
    options = {
        "heads": heads,
        "nope": nope,
        "rope": rope,
        "v_dim": v_dim,
        "kv_lora": lora,
        "scale": (nope + rope) ** -0.5,
    }

    def native(lo: int, hi: int) -> Result:
        seen = cache.clone()
        seen[start + hi :] = torch.nan
        g = None if gate is None else gate[lo:hi]
        return (kernels.mla_attention(q[lo:hi], kv_b, seen, start + lo, g, **options),)

    return Case(
        f"mla-{rows}@{start}x{heads}x{nope}x{rope}x{v_dim}x{lora}",
        rows,
        native,
        lambda: (reference.mla_attention(q.double(), kv_b, cache, start, gate, **options),),
        bound=1e-5,
    )


def router_case(rows: int, experts: int, k: int, renormalize: bool = True) -> Case:
    logits, bias = rand(rows, experts, seed=80, amp=2), rand(experts, seed=81, amp=0.1)
    options = {"renormalize": renormalize, "scale": 1.5, "sum_eps": 1e-20}
    return Case(
        f"router-{rows}x{experts}x{k}",
        rows,
        lambda lo, hi: kernels.router(logits[lo:hi], bias, k, **options),
        lambda: reference.router(logits.double(), bias, k, **options),
    )


def run_experts(
    x: Tensor, blobs: list[Tensor], layout: ExpertLayout, routes: list[list[int]], out: Tensor, lo: int, hi: int
) -> None:
    """``routes[e]`` are the rows of expert e; output of its i-th route goes to slot ``row * len(blobs) + e``."""
    splits, rows, slots = [0], [], []
    for e, wanted in enumerate(routes):
        for row in wanted:
            if lo <= row < hi:
                rows.append(row)
                slots.append(row * len(blobs) + e)
        splits.append(len(rows))
    kernels.expert_forward(
        x,
        [b.data_ptr() for b in blobs],
        layout,
        *(torch.tensor(v, dtype=torch.int32) for v in (splits, rows, slots)),
        out,
        beta=4.0,
        linear_beta=25.0,
    )


def expert_case(rows: int, latent: int, intermediate: int, experts: int) -> Case:
    layout = ExpertLayout.released(latent, intermediate)
    x = rand(rows, latent, seed=90)
    blobs = [rand_blob(layout, seed=91 + e) for e in range(experts)]
    routes = [[t for t in range(rows) if (t * 7 + e * 3) % 4 != 3] for e in range(experts)]

    def native(lo: int, hi: int) -> Result:
        out = torch.zeros(rows * experts, latent)
        run_experts(x, blobs, layout, routes, out, lo, hi)
        return (out.reshape(rows, experts, latent)[lo:hi],)

    def expected() -> Result:
        out = torch.zeros(rows, experts, latent, dtype=torch.float64)
        for e, wanted in enumerate(routes):
            out[wanted, e] = reference.expert(x[wanted].double(), blobs[e], layout, 4.0, 25.0)
        return (out,)

    return Case(f"expert-{rows}x{latent}x{intermediate}x{experts}", rows, native, expected, bound=5e-6)


def combine_case(rows: int, k: int, n: int) -> Case:
    y, weights, w = rand(rows, k, n, seed=95), rand(rows, k, seed=96).abs(), rand_bf16(n, seed=97)
    return Case(
        f"combine-{rows}x{k}x{n}",
        rows,
        lambda lo, hi: (kernels.combine_norm(y[lo:hi].contiguous(), weights[lo:hi].contiguous(), w, 1e-5),),
        lambda: (reference.combine_norm(y.double(), weights, w, 1e-5),),
        bound=4e-6,
    )


def all_cases() -> list[Case]:
    linear = [linear_case(t, k, n) for t in (1, 2, 3, 5, 8, 9, 17) for k, n in ((20, 33), (64, 96), (80, 24), (100, 7))]
    linear += [linear_case(t, 256, 130) for t in (1, 4, 6, 7, 64)] + [
        linear_case(70, 1056, 65),
        linear_case(1, 1056, 65),
    ]
    return [
        *linear,
        *(rmsnorm_case(t, d, bf16) for t, d in ((1, 20), (3, 24), (2, 96), (9, 256)) for bf16 in (True, False)),
        *(attnres_case(t, d, m) for t, d, m in ((1, 64, 1), (3, 64, 3), (2, 80, 9), (5, 200, 20))),
        *(situ_case(t, n) for t, n in ((1, 5), (3, 80), (2, 5000))),
        *(gated_mlp_case(*s) for s in ((1, 64, 80, 64), (3, 20, 24, 33), (9, 96, 100, 40), (64, 64, 96, 64))),
        *(kda_prepare_case(*s) for s in ((1, 4, 32), (3, 2, 20), (9, 3, 64), (7, 2, 128), (5, 2, 32, 2))),
        *(kda_recurrence_case(*s) for s in ((1, 4, 32), (5, 2, 20), (9, 3, 64), (17, 2, 128), (4, 1, 80))),
        *(kda_output_case(*s) for s in ((1, 4, 32), (3, 2, 20), (9, 3, 64))),
        mla_case(1, 0, 4, 16, 8, 16, 24),
        mla_case(11, 0, 4, 16, 8, 16, 24),
        mla_case(9, 60, 3, 20, 12, 20, 80),
        mla_case(3, 200, 7, 64, 32, 64, 64),
        mla_case(1, 300, 6, 128, 64, 128, 512),
        mla_case(5, 126, 34, 16, 0, 16, 32, gated=False),
        *(router_case(*s) for s in ((1, 12, 4), (9, 128, 16), (3, 896, 16), (2, 5, 5, False))),
        *(expert_case(*s) for s in ((1, 64, 32, 4), (2, 32, 96, 3), (9, 128, 96, 5), (17, 96, 64, 2), (70, 64, 32, 2))),
        *(combine_case(*s) for s in ((1, 4, 64), (9, 16, 128), (3, 2, 20))),
    ]
