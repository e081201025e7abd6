"""The DSpark block draft in float64 NumPy, from the published description. Knows its target only as a ``Float64K3``.

Context rows come from the target's accumulator after the tapped layers; the block of an anchor and six masks attends to
all of them and to itself in both directions; a Markov head then picks seven tokens one after the other.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .float64 import Float64K3, Trace, rms, sigmoid, softmax
from .released import Array, Released, one_blas_thread, round_bf16

BLOCK = 7


class Latents(NamedTuple):
    """One draft layer's context: ``latent`` [L, kv_lora] and ``rotated`` [L, rope]."""

    latent: Array
    rotated: Array


Context = list[Latents]


class Proposal(NamedTuple):
    """Seven drafts. ``hidden`` [7, hidden] are final-normed rows, ``logits`` [7, vocab] without the Markov bias."""

    ids: list[int]
    confidences: list[float]
    hidden: Array
    logits: Array


class Float64DSpark:
    """The draft of ``folder`` beside its target.

    Args:
        folder: ``config.json`` and ``model.safetensors``.
        target: supplies embedding and output matrix; the draft's own copy of the embedding is not used.
    """

    def __init__(self, folder: Path | str, target: Float64K3) -> None:
        self.w = Released(folder)
        self.config = c = self.w.config
        self.target = target
        self.eps: float = c["rms_norm_eps"]
        self.taps: list[int] = c["target_layer_ids"]
        rope, dim = c["rope_parameters"], c["qk_rope_head_dim"]
        self.inv_freq = yarn_inv_freq(rope, dim)
        mu = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        self.scale: float = (c["qk_nope_head_dim"] + dim) ** -0.5 * mu * mu

    def tapped(self, trace: Trace) -> Array:
        """Rows ``[T, taps * hidden]`` of a traced target pass, not yet rounded to bf16."""
        return np.concatenate([trace.layers[n] for n in self.taps], axis=1)

    @one_blas_thread
    def context(self, taps: Array, start: int = 0, *, bf16_taps: bool = True) -> Context:
        """Draft cache rows of committed tokens ``start, start + 1, ...``; see ``extend``.

        Args:
            taps: ``[T, taps * hidden]`` from ``tapped``.
            start: position of the first row.
            bf16_taps: round the rows to bf16 first, as the format prescribes.
        """
        e = self.context_rows(taps, bf16_taps=bf16_taps)
        positions = np.arange(start, start + len(taps))
        return [self._latents(n, e, positions) for n in range(self.config["num_hidden_layers"])]

    def context_rows(self, taps: Array, *, bf16_taps: bool = True) -> Array:
        """Projected and normed context ``[T, hidden]``, shared by all draft layers."""
        rows = round_bf16(taps).astype(np.float64) if bf16_taps else taps
        return rms(self.w.linear(rows, "context_proj.weight"), self.w.get("context_norm.weight"), self.eps)

    @one_blas_thread
    def propose(self, context: Context, length: int, anchor: int) -> Proposal:
        """Seven tokens after ``anchor``, which sits at position ``length``; context rows beyond it are ignored."""
        c, w, eps = self.config, self.w, self.eps
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        value = c["v_head_dim"]
        positions = np.arange(length, length + BLOCK)
        x = self.target.embed([anchor] + [c["mask_token_id"]] * (BLOCK - 1))
        for n in range(c["num_hidden_layers"]):
            a = f"layers.{n}.self_attn"
            h = rms(x, w.get(f"layers.{n}.input_layernorm.weight"), eps)
            q = rms(w.linear(h, f"{a}.q_a_proj.weight"), w.get(f"{a}.q_a_layernorm.weight"), eps)
            q = w.linear(q, f"{a}.q_b_proj.weight").reshape(BLOCK, heads, nope + rope).swapaxes(0, 1)
            own = self._latents(n, h, positions)
            latent = np.concatenate([context[n].latent[:length], own.latent])
            rotated = np.concatenate([context[n].rotated[:length], own.rotated])
            kv = (latent @ w.get(f"{a}.kv_b_proj.weight").T).reshape(-1, heads, nope + value).swapaxes(0, 1)
            scores = q[..., :nope] @ kv[..., :nope].swapaxes(1, 2)
            scores = scores + self._rotate(q[..., nope:], positions) @ rotated.T
            o = (softmax(scores * self.scale) @ kv[..., nope:]).swapaxes(0, 1).reshape(BLOCK, -1)
            x = x + w.linear(o, f"{a}.o_proj.weight")
            h = rms(x, w.get(f"layers.{n}.post_attention_layernorm.weight"), eps)
            gate, up = (w.linear(h, f"layers.{n}.mlp.{m}_proj.weight") for m in ("gate", "up"))
            x = x + w.linear(gate * sigmoid(gate) * up, f"layers.{n}.mlp.down_proj.weight")
        hidden = rms(x, w.get("final_norm.weight"), eps)
        logits = self.target.head(hidden)
        ids: list[int] = []
        confidences: list[float] = []
        previous = anchor
        for row in range(BLOCK):
            markov = w.rows("markov_head.markov_w1.weight", [previous])
            seen = np.concatenate([hidden[row : row + 1], markov], axis=1)
            raw = w.linear(seen, "confidence_head.proj.weight") + w.get("confidence_head.proj.bias")
            confidences.append(float(sigmoid(raw)[0, 0]))
            bias = w.linear(markov, "markov_head.markov_w2.weight")
            previous = int((logits[row : row + 1] + bias).argmax())
            ids.append(previous)
        return Proposal(ids, confidences, hidden, logits)

    def _latents(self, layer: int, x: Array, positions: npt.NDArray[np.int_]) -> Latents:
        a, lora = f"layers.{layer}.self_attn", self.config["kv_lora_rank"]
        kv = self.w.linear(x, f"{a}.kv_a_proj_with_mqa.weight")
        latent = rms(kv[:, :lora], self.w.get(f"{a}.kv_a_layernorm.weight"), self.eps)
        return Latents(latent, self._rotate(kv[:, lora:], positions))

    def _rotate(self, x: Array, positions: npt.NDArray[np.int_]) -> Array:
        # Interleaved pairs: columns 2i and 2i + 1 turn by position * inv_freq[i].
        angle = positions[:, None] * self.inv_freq
        cos, sin = np.cos(angle), np.sin(angle)
        even, odd = x[..., 0::2], x[..., 1::2]
        out: Array = np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)
        return out


def yarn_bounds(rope: dict[str, Any], dim: int) -> tuple[int, int]:
    """First and last rotary pair of the ramp between kept and slowed frequencies."""
    low, high = (
        dim
        * math.log(rope["original_max_position_embeddings"] / (2 * math.pi * turns))
        / (2 * math.log(rope["rope_theta"]))
        for turns in (rope["beta_fast"], rope["beta_slow"])
    )
    return max(math.floor(low), 0), min(math.ceil(high), dim - 1)


def yarn_inv_freq(rope: dict[str, Any], dim: int) -> Array:
    """Radians per position of each of the ``dim / 2`` rotary pairs: slow pairs are divided by ``factor``."""
    pair = np.arange(dim // 2)
    low, high = yarn_bounds(rope, dim)
    ramp = np.clip((pair - low) / max(high - low, 1e-3), 0, 1)
    plain = rope["rope_theta"] ** (-2.0 * pair / dim)
    out: Array = plain * (1 - ramp) + plain / rope["factor"] * ramp
    return out


def extend(context: Context, more: Context) -> Context:
    """The context with newly committed rows appended."""
    return [
        Latents(*(np.concatenate(pair) for pair in zip(a, b, strict=True))) for a, b in zip(context, more, strict=True)
    ]
