"""The compiled kernels: addresses and sizes in, results written in place. Not for direct use."""

from collections.abc import Sequence

def threads() -> int: ...
def set_threads(n: int) -> None: ...
def isa() -> str: ...
def available_isas() -> tuple[str, ...]: ...
def select_isa(name: str) -> bool: ...
def linear(x: int, ldx: int, w: int, out: int, ldo: int, rows: int, width: int, outs: int, /) -> None: ...
def rmsnorm(
    x: int, ldx: int, w: int, w_is_bf16: bool, out: int, ldo: int, rows: int, width: int, eps: float, /
) -> None: ...
def attnres_mix_norm(
    sources: Sequence[int],
    ld: Sequence[int],
    score_w: int,
    w: int,
    w_is_bf16: bool,
    out: int,
    ldo: int,
    rows: int,
    width: int,
    eps: float,
    /,
) -> None: ...
def situ(
    gate: int,
    ldg: int,
    up: int,
    ldu: int,
    out: int,
    ldo: int,
    rows: int,
    width: int,
    beta: float,
    linear_beta: float,
    /,
) -> None: ...
def gated_mlp(
    x: int,
    ldx: int,
    gate: int,
    up: int,
    down: int,
    out: int,
    ldo: int,
    rows: int,
    width: int,
    hidden: int,
    outs: int,
    beta: float,
    linear_beta: float,
    /,
) -> None: ...
def kda_prepare(
    qkv: int,
    ld: int,
    history: int,
    conv_w: int,
    r: int,
    ldr: int,
    dt_bias: int,
    a_log: int,
    b: int,
    ldb: int,
    q: int,
    k: int,
    v: int,
    decay: int,
    beta: int,
    rows: int,
    heads: int,
    head_dim: int,
    taps: int,
    lower_bound: float,
    qk_eps: float,
    /,
) -> None: ...
def kda_recurrence(
    q: int,
    k: int,
    v: int,
    decay: int,
    beta: int,
    state_in: int,
    state_out: int,
    out: int,
    rows: int,
    heads: int,
    head_dim: int,
    /,
) -> None: ...
def kda_output(
    o: int,
    ldo_in: int,
    gate: int,
    ldg: int,
    w: int,
    out: int,
    ldo: int,
    rows: int,
    heads: int,
    head_dim: int,
    eps: float,
    /,
) -> None: ...
def mla_attention(
    q: int,
    ldq: int,
    kv_b: int,
    cache: int,
    ldc: int,
    gate: int,
    ldg: int,
    out: int,
    ldo: int,
    rows: int,
    start: int,
    heads: int,
    nope: int,
    rope: int,
    v_dim: int,
    lora: int,
    scale: float,
    /,
) -> None: ...
def router(
    logits: int,
    ld: int,
    bias: int,
    ids: int,
    weights: int,
    rows: int,
    experts: int,
    k: int,
    renormalize: bool,
    scale: float,
    sum_eps: float,
    /,
) -> None: ...
def expert_forward(
    x: int,
    ldx: int,
    x_rows: int,
    blobs: Sequence[int],
    latent: int,
    intermediate: int,
    w1_packed: int,
    w1_scale: int,
    w2_packed: int,
    w2_scale: int,
    w3_packed: int,
    w3_scale: int,
    splits: int,
    rows: int,
    slots: int,
    out: int,
    ldo: int,
    out_rows: int,
    beta: float,
    linear_beta: float,
    /,
) -> None: ...
def combine_norm(
    y: int,
    weights: int,
    k: int,
    w: int,
    w_is_bf16: bool,
    out: int,
    ldo: int,
    rows: int,
    width: int,
    eps: float,
    /,
) -> None: ...
def mxfp4_dequantize(packed: int, scale: int, out: int, rows: int, cols: int, /) -> None: ...
def unary(x: int, out: int, n: int, op: int, /) -> None: ...
def read_seconds(p: int, nbytes: int, /) -> float: ...
def fma_per_second(steps: int, /) -> float: ...
