"""The hot CPU operations of K3 as native code, each with a fixed order of operations per output element.

May import: torch, ``expert_layout``, ``errors``. Must not know: checkpoints, drives, layers, tokens. It is given
numbers, shapes and the addresses of expert bytes; who read them, and why, is not its business.

``dense``, ``attention`` and ``experts`` hold the functions, ``machine`` threads and instruction sets. ``reference``
repeats every function in plain PyTorch; ``selftest`` compares the two on this machine. ``native/`` is the C++ source,
``arguments`` stands between it and tensors.
"""

from deltafin.expert_layout import ExpertLayout
from deltafin.kernels.attention import kda_output, kda_prepare, kda_recurrence, mla_attention
from deltafin.kernels.dense import attnres_mix_norm, gated_mlp, linear, rmsnorm, situ
from deltafin.kernels.experts import combine_norm, expert_forward, mxfp4_dequantize, router
from deltafin.kernels.machine import available_isas, isa, select_isa, set_threads, threads

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
