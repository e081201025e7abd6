"""The hot CPU operations of K3 as native code, each with a fixed order of operations per output element.

May import: torch, ``deltafin.errors``. Must not know: checkpoints, drives, layers, tokens. It is given numbers, shapes
and the addresses of expert bytes; who read them, and why, is not its business.

``cpu`` holds the functions, ``layout`` says where an expert's tensors lie in its bytes, ``reference`` repeats every
function in plain PyTorch, ``selftest`` compares the two on this machine. ``native/`` is the C++ source.
"""

from deltafin.kernels.cpu import (
    attnres_mix_norm,
    available_isas,
    combine_norm,
    expert_forward,
    gated_mlp,
    isa,
    kda_output,
    kda_prepare,
    kda_recurrence,
    linear,
    mla_attention,
    mxfp4_dequantize,
    rmsnorm,
    router,
    select_isa,
    set_threads,
    situ,
    threads,
)
from deltafin.kernels.layout import ExpertLayout

__all__ = [
    "ExpertLayout",
    "attnres_mix_norm",
    "available_isas",
    "combine_norm",
    "expert_forward",
    "gated_mlp",
    "isa",
    "kda_output",
    "kda_prepare",
    "kda_recurrence",
    "linear",
    "mla_attention",
    "mxfp4_dequantize",
    "rmsnorm",
    "router",
    "select_isa",
    "set_threads",
    "situ",
    "threads",
]
