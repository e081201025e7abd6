"""The DSpark block draft: K3's hidden states as context, seven rows at once, a Markov head, a confidence head.

The draft follows the published description of ``Inferact/Kimi-K3-DSpark``: context rows are projected from the target's
accumulators once per committed token; a block of the pending token and six masks attends to them and, without
causality, to itself; row r predicts the token r + 1 places after the last committed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from deltafin import kernels
from deltafin.drafting.dspark_files import BLOCK, DSparkConfig, DSparkWeights

Embed = Callable[[Sequence[int]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted ids in order, and for each the estimated probability that it is accepted given the earlier ones are."""

    tokens: tuple[int, ...]
    confidence: tuple[float, ...]


class DSpark:
    """One draft with the context of one sequence.

    Args:
        weights: the draft's own tensors.
        embed: K3's embedding rows, ids → fp32 [n, hidden].
        lm_head: K3's head, bf16 [vocab, hidden]; shared, never copied.
        capacity: most context rows; beyond it the draft stands down.
    """

    def __init__(self, weights: DSparkWeights, embed: Embed, lm_head: torch.Tensor, *, capacity: int) -> None:
        self.config: DSparkConfig = weights.config
        self._w = weights.tensors
        self._embed = embed
        self._lm_head = lm_head
        c = self.config
        self.capacity = capacity
        self.length = 0
        width = c.kv_lora_rank + c.qk_rope_head_dim
        # Memory is touched only as the context fills.
        self._context = [torch.empty(capacity + BLOCK, width) for _ in range(c.num_hidden_layers)]
        self._frequencies, self._scale = _yarn(c)

    def reset(self) -> None:
        """Forgets all context."""
        self.length = 0

    def truncate(self, length: int) -> None:
        """Keeps the first ``length`` context rows."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} of {self.length} context rows")
        self.length = length

    def append(self, taps: Sequence[torch.Tensor]) -> None:
        """Adds context rows for newly committed tokens.

        Args:
            taps: the target's accumulators after each of ``target_layer_ids``, fp32 [n, hidden] each.

        Raises:
            ValueError: wrong number of taps, or more rows than the capacity.
        """
        if len(taps) != len(self.config.target_layer_ids):
            raise ValueError("one accumulator for each tapped layer is needed")
        rows = len(taps[0])
        if self.length + rows > self.capacity:
            raise ValueError("the draft's context is full")
        # Activations reach the draft as bf16, as in its training.
        joined = torch.cat([tap.bfloat16().float() for tap in taps], dim=1)
        shared = self._norm(kernels.linear(joined, self._w["context_proj.weight"]), "context_norm")
        positions = torch.arange(self.length, self.length + rows)
        for layer, cache in enumerate(self._context):
            cache[self.length : self.length + rows] = self._latents(layer, shared, positions)
        self.length += rows

    def propose(self, anchor: int, count: int) -> Proposal:
        """Drafts up to ``count`` tokens after ``anchor``, the decided token that the target has not processed.

        The whole block is always computed, since its rows attend to each other; ``count`` only limits the scoring.
        """
        count = min(count, BLOCK)
        hidden = self.block(anchor)[:count]
        logits = kernels.linear(hidden, self._lm_head)
        w1, w2 = self._w["markov_head.markov_w1.weight"], self._w["markov_head.markov_w2.weight"]
        confidence_w = self._w["confidence_head.proj.weight"][0].float()
        confidence_b = float(self._w["confidence_head.proj.bias"][0])
        tokens, confidence = [], []
        previous = anchor
        for row in range(count):
            markov = w1[previous].float()
            features = torch.cat([hidden[row], markov])
            confidence.append(1.0 / (1.0 + math.exp(-float(features @ confidence_w) - confidence_b)))
            scores = logits[row] + kernels.linear(markov[None], w2)[0]
            previous = int(torch.argmax(scores))
            tokens.append(previous)
        return Proposal(tuple(tokens), tuple(confidence))

    def block(self, anchor: int) -> torch.Tensor:
        """Final hidden states of the block, fp32 [7, hidden]."""
        c = self.config
        x = self._embed([anchor] + [c.mask_token_id] * (BLOCK - 1))
        positions = torch.arange(self.length, self.length + BLOCK)
        for layer in range(c.num_hidden_layers):
            p = f"layers.{layer}"
            x = x + self._attention(layer, self._norm(x, f"{p}.input_layernorm"), positions)
            h = self._norm(x, f"{p}.post_attention_layernorm")
            gate = functional.silu(kernels.linear(h, self._w[f"{p}.mlp.gate_proj.weight"]))
            up = kernels.linear(h, self._w[f"{p}.mlp.up_proj.weight"])
            x = x + kernels.linear(gate.mul_(up), self._w[f"{p}.mlp.down_proj.weight"])
        return self._norm(x, "final_norm")

    def _attention(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Latent attention over the context and the block itself, not causal. fp32 [7, hidden] → [7, hidden]."""
        c, p = self.config, f"layers.{layer}.self_attn"
        heads, nope, rope, lora = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
        q = self._norm(kernels.linear(x, self._w[f"{p}.q_a_proj.weight"]), f"{p}.q_a_layernorm")
        q = kernels.linear(q, self._w[f"{p}.q_b_proj.weight"]).view(BLOCK, heads, nope + rope)
        kv_b = self._w[f"{p}.kv_b_proj.weight"].view(heads, nope + c.v_head_dim, lora).float()
        key, value = kv_b.split([nope, c.v_head_dim], 1)
        absorbed = torch.cat(
            [
                torch.einsum("qhn,hnl->qhl", q[..., :nope], key),
                _rotate(q[..., nope:], positions, self._frequencies),
            ],
            dim=-1,
        )
        rows = self._context[layer]
        # The block's own rows stand behind the context for the length of this call; the next commit overwrites them.
        rows[self.length : self.length + BLOCK] = self._latents(layer, x, positions)
        keys = rows[: self.length + BLOCK]
        scores = torch.einsum("qhl,sl->hqs", absorbed, keys) * self._scale
        mixed = torch.einsum("hqs,sl->qhl", scores.softmax(-1), keys[:, :lora])
        out = torch.einsum("qhl,hvl->qhv", mixed, value).reshape(BLOCK, heads * c.v_head_dim)
        return kernels.linear(out, self._w[f"{p}.o_proj.weight"])

    def _latents(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compressed latent and rotated position part, fp32 [n, kv_lora + rope]."""
        p = f"layers.{layer}.self_attn"
        kv = kernels.linear(x, self._w[f"{p}.kv_a_proj_with_mqa.weight"])
        latent = self._norm(kv[:, : self.config.kv_lora_rank].contiguous(), f"{p}.kv_a_layernorm")
        return torch.cat([latent, _rotate(kv[:, self.config.kv_lora_rank :], positions, self._frequencies)], dim=1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return kernels.rmsnorm(x, self._w[f"{name}.weight"], self.config.rms_norm_eps)


def _rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotary position on interleaved pairs; x [n, …, rope], positions [n]."""
    angle = positions.float()[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def _yarn(c: DSparkConfig) -> tuple[torch.Tensor, float]:
    """YaRN inverse frequencies, fp32 [rope / 2], and the score scale (Peng et al., 2023, as DeepSeek applies it)."""
    r, dim = c.rope_parameters, c.qk_rope_head_dim
    index = torch.arange(0, dim, 2, dtype=torch.float64)
    base = r.rope_theta ** (-index / dim)

    def turn(rotations: float) -> float:
        wave = r.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(r.rope_theta))

    low = max(math.floor(turn(r.beta_fast)), 0)
    high = min(math.ceil(turn(r.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    frequencies = base * (1 - ramp) + base / r.factor * ramp
    mu = 0.1 * r.mscale_all_dim * math.log(r.factor) + 1
    return frequencies.float(), (c.qk_nope_head_dim + dim) ** -0.5 * mu * mu
