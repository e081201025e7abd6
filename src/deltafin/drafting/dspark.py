"""The DSpark block draft: K3's hidden states as context, seven rows at once, a Markov head, a confidence head.

The draft follows the published description of ``Inferact/Kimi-K3-DSpark``: context rows are projected from the target's
accumulators once per committed token; a block of the pending token and six masks attends to them and, without
causality, to itself; row r predicts the token r + 1 places after the last committed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from deltafin import kernels
from deltafin.contract import Host
from deltafin.drafting.controller import DraftSource
from deltafin.drafting.dspark_files import BLOCK, PENDING_ROWS, DSparkConfig, yarn
from deltafin.drafting.dspark_weights import DSparkLayer, DSparkWeights, load
from deltafin.drafting.proposal import Proposal

Embed = Callable[[Sequence[int]], torch.Tensor]
Taps = Sequence[torch.Tensor]


class DSpark:
    """One draft with the context of one sequence.

    Context rows are kept in a ring: attention over a set of rotated keys does not depend on their order, so beyond
    ``capacity`` the oldest rows are simply overwritten and the draft goes on with the latest ones. Rows of committed
    tokens are projected only when a proposal needs them or when ``PENDING_ROWS`` have gathered, so that a draft that
    rests costs next to nothing.

    Args:
        weights: the draft's own tensors.
        embed: K3's embedding rows, ids → fp32 [n, hidden].
        lm_head: K3's head, bf16 [vocab, hidden]; shared, never copied.
        capacity: most context rows.

    Attributes:
        position: committed tokens of the sequence.
        hopeless: estimated probability of acceptance below which no further token is scored.
    """

    def __init__(self, weights: DSparkWeights, embed: Embed, lm_head: torch.Tensor, *, capacity: int) -> None:
        self.config: DSparkConfig = weights.config
        self._w = weights.tensors
        self._layers = weights.layers
        self._embed = embed
        self._lm_head = lm_head
        self._mask_rows: torch.Tensor | None = None
        self._confidence = self._w["confidence_head.proj.weight"][0].float()
        self._confidence_bias = float(self._w["confidence_head.proj.bias"][0])
        self.hopeless = 0.02
        c = self.config
        self.capacity = capacity
        self.position = 0
        self._stored = 0
        self._pending: list[tuple[int, Taps]] = []
        self._pending_rows = 0
        # Memory is touched only as the context fills.
        self._context = torch.empty(c.num_hidden_layers, capacity + BLOCK, c.kv_lora_rank + c.qk_rope_head_dim)
        frequencies, self._scale = yarn(c)
        self._frequencies = torch.tensor(frequencies, dtype=torch.float32)

    def reset(self, position: int = 0) -> None:
        """Forgets all context; the next rows belong to ``position`` (a resumed sequence may lack earlier ones)."""
        self.position, self._stored = position, 0
        self._pending, self._pending_rows = [], 0

    def append(self, taps: Taps, count: int | None = None) -> None:
        """Notes ``count`` newly committed tokens.

        Args:
            taps: the target's accumulators after each of ``target_layer_ids``, bf16 or fp32 [n, hidden] each, of the
                last n of the tokens; earlier ones get no context row.
            count: tokens, by default n.

        Raises:
            ValueError: wrong number or shape of taps.
        """
        c = self.config
        if len(taps) != len(c.target_layer_ids):
            raise ValueError("one accumulator for each tapped layer is needed")
        rows = len(taps[0])
        count = rows if count is None else count
        shape = (rows, c.target_hidden_size)
        if rows > count or [tap.shape for tap in taps] != [shape] * len(taps):
            raise ValueError("accumulators must have one row for each of the last committed tokens")
        self.position += count
        # Activations reach the draft as bf16, as in its training.
        first = self.position - rows
        for start in range(max(0, rows - self.capacity), rows, PENDING_ROWS):
            part = tuple(tap[start : start + PENDING_ROWS].bfloat16() for tap in taps)
            self._pending.append((first + start, part))
            self._pending_rows += len(part[0])
            if self._pending_rows > PENDING_ROWS:
                self._project()

    def rows(self) -> torch.Tensor:
        """A copy of the context, fp32 [layers, n, kv_lora + rope], to be given to ``restore`` later."""
        self._project()
        return self._context[:, : min(self._stored, self.capacity)].clone()

    def restore(self, position: int, rows: torch.Tensor) -> None:
        """Continues at ``position`` with a context that ``rows`` returned.

        Raises:
            ValueError: another shape.
        """
        layers, _, width = self._context.shape
        if (
            rows.dtype != torch.float32
            or rows.ndim != 3
            or rows.shape[0] != layers
            or rows.shape[2] != width
            or rows.shape[1] > position
        ):
            raise ValueError("these are not context rows of this draft")
        self.reset(position)
        kept = rows[:, -self.capacity :]
        self._context[:, : kept.shape[1]] = kept
        self._stored = kept.shape[1]

    def propose(self, anchor: int, count: int) -> Proposal:
        """Drafts up to ``count`` tokens after ``anchor``, the decided token that the target has not processed.

        The whole block is always computed, since its rows attend to each other; ``count`` only limits the scoring,
        which also ends where acceptance has become hopeless.
        """
        count = min(count, BLOCK)
        hidden = self.block(anchor)[:count]
        logits = kernels.linear(hidden, self._lm_head)
        w1, w2 = self._w["markov_head.markov_w1.weight"], self._w["markov_head.markov_w2.weight"]
        width = hidden.shape[1]
        own = (hidden @ self._confidence[:width] + self._confidence_bias).tolist()
        tokens: list[int] = []
        confidence: list[float] = []
        previous, alive = anchor, 1.0
        for row in range(count):
            # Row k's confidence looks at the token before it, which its Markov row stands for.
            markov = w1[previous].float()
            sure = 1.0 / (1.0 + math.exp(-own[row] - float(markov @ self._confidence[width:])))
            alive *= sure
            if tokens and alive < self.hopeless:
                break
            scores = kernels.linear(markov[None], w2)[0].add_(logits[row])
            previous = int(torch.argmax(scores))
            tokens.append(previous)
            confidence.append(sure)
        return Proposal(tuple(tokens), tuple(confidence))

    def block(self, anchor: int) -> torch.Tensor:
        """Final hidden states of the block, fp32 [7, hidden]."""
        self._project()
        c = self.config
        if self._mask_rows is None:
            self._mask_rows = self._embed([c.mask_token_id]).expand(BLOCK - 1, -1)
        x = torch.cat([self._embed([anchor]), self._mask_rows])
        turn = self._turn(self.position, BLOCK)
        for layer, w in enumerate(self._layers):
            x = x + self._attention(layer, w, self._norm(x, w.input_norm), turn)
            wide = kernels.linear(self._norm(x, w.mlp_norm), w.gate_up)
            gate, up = wide[:, : c.intermediate_size], wide[:, c.intermediate_size :]
            x = x + kernels.linear(functional.silu(gate).mul_(up), w.down)
        return self._norm(x, self._w["final_norm.weight"])

    def _project(self) -> None:
        """Makes context rows of the pending accumulators."""
        for first, taps in _joined(self._pending):
            joined = torch.cat(tuple(taps), dim=1).float()
            shared = kernels.linear(joined, self._w["context_proj.weight"])
            shared = self._norm(shared, self._w["context_norm.weight"])
            turn = self._turn(first, len(joined))
            places = torch.arange(self._stored, self._stored + len(joined)) % self.capacity
            for layer, w in enumerate(self._layers):
                self._context[layer, places] = self._latents(w, kernels.linear(shared, w.kv_a), turn)
            self._stored += len(joined)
        self._pending, self._pending_rows = [], 0

    def _attention(self, layer: int, w: DSparkLayer, x: torch.Tensor, turn: _Turn) -> torch.Tensor:
        """Latent attention over the context and the block itself, not causal. fp32 [7, hidden] → [7, hidden]."""
        c = self.config
        heads, nope, rope, lora = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
        qkv_a = kernels.linear(x, w.qkv_a)
        q_a, kv_a = qkv_a[:, : c.q_lora_rank], qkv_a[:, c.q_lora_rank :]
        q = kernels.linear(self._norm(q_a.contiguous(), w.q_a_norm), w.q_b).view(BLOCK, heads, nope + rope)
        absorbed = torch.empty(heads, BLOCK, lora + rope)
        torch.bmm(q[..., :nope].transpose(0, 1), w.key, out=absorbed[..., :lora])
        absorbed[..., lora:] = turn.apply(q[..., nope:]).transpose(0, 1)
        rows, filled = self._context[layer], min(self._stored, self.capacity)
        # The block's own rows stand behind the context for the length of this call; the next block overwrites them.
        rows[filled : filled + BLOCK] = self._latents(w, kv_a, turn)
        keys = rows[: filled + BLOCK]
        flat = absorbed.view(heads * BLOCK, lora + rope)
        weights = torch.mm(flat, keys.T).mul_(self._scale).softmax(-1)
        mixed = torch.mm(weights, keys[:, :lora]).view(heads, BLOCK, lora)
        out = torch.bmm(mixed, w.value).transpose(0, 1).reshape(BLOCK, heads * c.v_head_dim)
        return kernels.linear(out, w.out)

    def _latents(self, w: DSparkLayer, kv: torch.Tensor, turn: _Turn) -> torch.Tensor:
        """Compressed latent and rotated position part, fp32 [n, kv_lora + rope]."""
        lora = self.config.kv_lora_rank
        return torch.cat([self._norm(kv[:, :lora].contiguous(), w.kv_a_norm), turn.apply(kv[:, lora:])], dim=1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.rmsnorm(x, weight, self.config.rms_norm_eps)

    def _turn(self, first: int, count: int) -> _Turn:
        angle = torch.arange(first, first + count, dtype=torch.float32)[:, None] * self._frequencies
        return _Turn(angle.cos(), angle.sin())


@dataclass(frozen=True, slots=True)
class _Turn:
    """Rotary position on interleaved pairs; cos and sin fp32 [n, rope / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates x [n, …, rope]."""
        cos, sin = (self.cos[:, None], self.sin[:, None]) if x.ndim == 3 else (self.cos, self.sin)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def _joined(pending: Sequence[tuple[int, Taps]]) -> list[tuple[int, Taps]]:
    """Consecutive pieces put together, so that a long rest ends with one wide product."""
    out: list[tuple[int, list[Taps]]] = []
    end = -1
    for first, taps in pending:
        if first == end:
            out[-1][1].append(taps)
        else:
            out.append((first, [taps]))
        end = first + len(taps[0])
    return [(first, tuple(torch.cat(column) for column in zip(*parts, strict=True))) for first, parts in out]


class DSparkSource:
    """A DSpark draft as a session's source."""

    name = "dspark"

    def __init__(self, draft: DSpark) -> None:
        self._draft = draft

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """Guesses after the last of ``tokens``; all before it have been committed."""
        if self._draft.position != len(tokens) - 1:
            raise ValueError(f"the draft knows {self._draft.position} tokens and K3 {len(tokens) - 1}")
        return self._draft.propose(tokens[-1], count)

    def commit(self, tokens: Sequence[int], taps: Taps) -> None:
        """Notes committed tokens."""
        self._draft.append(taps, len(tokens))

    def reset(self, position: int) -> None:
        """Forgets all context."""
        self._draft.reset(position)

    def tensors(self) -> Sequence[tuple[str, Host]]:
        """The context, for a saved session."""
        return [("context", self._draft.rows().numpy())]

    def restore(self, position: int, tensors: Mapping[str, Host]) -> None:
        """Takes back a saved context."""
        self._draft.restore(position, torch.tensor(tensors["context"]))


def dspark_source(
    folder: Path, config: DSparkConfig, embed: Embed, lm_head: torch.Tensor, capacity: int
) -> Callable[[], DraftSource]:
    """Reads the weights; what is returned makes a source for each session.

    Raises:
        DraftError, TensorFileError: the files cannot be used.
    """
    weights = load(folder, config)
    return lambda: DSparkSource(DSpark(weights, embed, lm_head, capacity=capacity))
