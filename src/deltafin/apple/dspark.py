"""The DSpark block draft on MLX; ``drafting.dspark`` describes the maths and computes the same in PyTorch.

Products take bf16 activations, as in the draft's training and whatever the target does: fp32 ones would make MLX widen
whole matrices for every product. Sums, norms, rotations and attention are fp32. A proposal is one graph with one wait
at its end: the Markov head's choices stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from deltafin.checkpoint.tensorfile import SINGLE_NAME
from deltafin.drafting.controller import DraftSource
from deltafin.drafting.dspark_files import BLOCK, PENDING_ROWS, REFETCH, DSparkConfig, check_files, yarn
from deltafin.drafting.proposal import Proposal
from deltafin.errors import DraftError

Embed = Callable[[Sequence[int]], mx.array]
Taps = Sequence[mx.array]
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer by the names the maths uses; matrices bf16 [out, in], norms fp32.

    ``qkv_a`` stacks ``q_a_proj`` and ``kv_a_proj_with_mqa``, ``gate_up`` the two MLP inputs. ``key`` [heads, nope,
    kv_lora] and ``value`` [heads, kv_lora, v] are the parts of ``kv_b_proj``.
    """

    input_norm: mx.array
    mlp_norm: mx.array
    qkv_a: mx.array
    q_a_norm: mx.array
    kv_a_norm: mx.array
    q_b: mx.array
    key: mx.array
    value: mx.array
    out: mx.array
    gate_up: mx.array
    down: mx.array


@dataclass(frozen=True, slots=True)
class Weights:
    """Every tensor of the draft but the redundant embedding: those outside the layers by released name."""

    config: DSparkConfig
    tensors: dict[str, mx.array]
    layers: tuple[Layer, ...]


def load(folder: Path, config: DSparkConfig) -> Weights:
    """Reads the weights, layer by layer; K3's embedding is shared, and the file's copy of it is never read.

    Raises:
        DraftError, TensorFileError: the files cannot be used.
    """
    infos = check_files(folder, config)
    path = folder / SINGLE_NAME
    try:
        # Nothing is read until an array is evaluated.
        lazy: Any = mx.load(str(path))
        tensors = {name: lazy[name] for name in infos if not name.startswith("layers.")}
        mx.eval(tensors)
        layers = tuple(_layer(config, f"layers.{i}.", lazy) for i in range(config.num_hidden_layers))
    except (KeyError, OSError, RuntimeError, ValueError) as e:
        raise DraftError(f"{path} cannot be read: {e}", remedy=REFETCH) from None
    return Weights(config, tensors, layers)


def _layer(c: DSparkConfig, prefix: str, lazy: Mapping[str, mx.array]) -> Layer:
    heads, nope, v, lora = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank

    def matrix(*names: str) -> mx.array:
        return mx.concatenate([lazy[f"{prefix}{name}.weight"] for name in names])

    def norm(name: str) -> mx.array:
        return lazy[f"{prefix}{name}.weight"].astype(mx.float32)

    kv_b = matrix("self_attn.kv_b_proj").reshape(heads, nope + v, lora)
    layer = Layer(
        input_norm=norm("input_layernorm"),
        mlp_norm=norm("post_attention_layernorm"),
        qkv_a=matrix("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        q_a_norm=norm("self_attn.q_a_layernorm"),
        kv_a_norm=norm("self_attn.kv_a_layernorm"),
        q_b=matrix("self_attn.q_b_proj"),
        key=mx.contiguous(kv_b[:, :nope]),
        value=mx.contiguous(kv_b[:, nope:].transpose(0, 2, 1)),
        out=matrix("self_attn.o_proj"),
        gate_up=matrix("mlp.gate_proj", "mlp.up_proj"),
        down=matrix("mlp.down_proj"),
    )
    mx.eval([getattr(layer, name) for name in layer.__slots__])
    return layer


class DSpark:
    """One draft with the context of one sequence, of the latest ``capacity`` committed tokens.

    Args:
        weights: the draft's own tensors.
        embed: K3's embedding rows, ids → [n, hidden].
        lm_head: K3's head, bf16 [vocab, hidden]; shared, never copied.
        capacity: most context rows.
        dtype: of activations in products; fp32 to check the maths.

    Attributes:
        position: committed tokens of the sequence.
        hopeless: estimated probability of acceptance below which no further token is proposed.
    """

    def __init__(
        self, weights: Weights, embed: Embed, lm_head: mx.array, *, capacity: int, dtype: mx.Dtype = mx.bfloat16
    ) -> None:
        self._dtype = dtype
        c = self.config = weights.config
        self._w, self._layers = weights.tensors, weights.layers
        self._embed, self._lm_head = embed, lm_head
        self._shared_norm = self._w["context_norm.weight"].astype(mx.float32)
        self._final_norm = self._w["final_norm.weight"].astype(mx.float32)
        self._confidence = self._w["confidence_head.proj.weight"][0].astype(mx.float32)
        self._confidence_bias = self._w["confidence_head.proj.bias"][0].astype(mx.float32)
        frequencies, self._scale = yarn(c)
        self._frequencies = mx.array(frequencies, dtype=mx.float32)
        self.hopeless = 0.02
        self.capacity = capacity
        self._empty = mx.zeros((c.num_hidden_layers, 0, c.kv_lora_rank + c.qk_rope_head_dim), dtype=mx.float32)
        # A session may be made in one thread and run in another, and MLX evaluates only where it wrote down.
        mx.eval(self._shared_norm, self._final_norm, self._confidence, self._confidence_bias, self._empty)
        self.reset()

    def reset(self, position: int = 0) -> None:
        """Forgets all context; the next rows belong to ``position`` (a resumed sequence may lack earlier ones)."""
        self.position = position
        self._context = self._empty
        self._pending: list[tuple[int, Taps]] = []
        self._pending_rows = 0

    def append(self, taps: Taps, count: int | None = None) -> None:
        """Notes ``count`` newly committed tokens.

        Args:
            taps: the target's accumulators after each of ``target_layer_ids``, [n, hidden] each, of the last n of the
                tokens; earlier ones get no context row.
            count: tokens, by default n.

        Raises:
            ValueError: wrong number or shape of taps.
        """
        c = self.config
        if len(taps) != len(c.target_layer_ids):
            raise ValueError("one accumulator for each tapped layer is needed")
        rows = len(taps[0])
        count = rows if count is None else count
        if rows > count or any(tap.shape != (rows, c.target_hidden_size) for tap in taps):
            raise ValueError("accumulators must have one row for each of the last committed tokens")
        self.position += count
        first = self.position - rows
        for start in range(max(0, rows - self.capacity), rows, PENDING_ROWS):
            # Activations reach the draft as bf16, as in its training.
            part = [tap[start : start + PENDING_ROWS].astype(mx.bfloat16) for tap in taps]
            self._pending.append((first + start, part))
            self._pending_rows += len(part[0])
            if self._pending_rows > PENDING_ROWS:
                self._project()
                mx.eval(self._context)

    def rows(self) -> Rows:
        """A copy of the context, fp32 [layers, n, kv_lora + rope], to be given to ``restore`` later."""
        self._project()
        return np.array(self._context)

    def restore(self, position: int, rows: npt.NDArray[Any]) -> None:
        """Continues at ``position`` with a context that ``rows`` returned, here or of the draft in PyTorch.

        Raises:
            ValueError: another shape or dtype.
        """
        layers, _, width = self._empty.shape
        if rows.dtype != np.float32 or rows.ndim != 3 or rows.shape[::2] != (layers, width) or rows.shape[1] > position:
            raise ValueError("these are not context rows of this draft")
        self.reset(position)
        self._context = mx.array(rows[:, -self.capacity :])

    def propose(self, anchor: int, count: int) -> Proposal:
        """Drafts up to ``count`` tokens after ``anchor``, the decided token that the target has not processed.

        The whole block is always computed, since its rows attend to each other; ``count`` only limits the scoring, and
        what follows where acceptance has become hopeless is left out.
        """
        count = min(count, BLOCK)
        hidden = self.block(anchor)[:count]
        logits = self._product(hidden, self._lm_head)
        w1, w2 = self._w["markov_head.markov_w1.weight"], self._w["markov_head.markov_w2.weight"]
        width = hidden.shape[1]
        own = hidden @ self._confidence[:width] + self._confidence_bias
        previous = mx.array(anchor)
        drawn, sure = [], []
        for row in range(count):
            # Row k's confidence looks at the token before it, which its Markov row stands for.
            markov = w1[previous]
            sure.append(mx.sigmoid(own[row] + markov.astype(mx.float32) @ self._confidence[width:]))
            previous = mx.argmax(self._product(markov[None], w2)[0] + logits[row])
            drawn.append(previous)
        tokens = np.array(mx.stack(drawn)).tolist()
        confidence = np.array(mx.stack(sure)).tolist()
        alive, kept = 1.0, 0
        for p in confidence:
            alive *= p
            if kept and not alive >= self.hopeless:
                break
            kept += 1
        return Proposal(tuple(map(int, tokens[:kept])), tuple(confidence[:kept]))

    def block(self, anchor: int) -> mx.array:
        """Final hidden states of the block, fp32 [7, hidden]."""
        self._project()
        c = self.config
        masks = mx.broadcast_to(self._mask, (BLOCK - 1, c.hidden_size))
        x = mx.concatenate([self._embed([anchor]), masks]).astype(mx.float32)
        turn = self._turn(np.arange(self.position, self.position + BLOCK))
        for layer, w in enumerate(self._layers):
            x = x + self._attention(self._context[layer], w, self._norm(x, w.input_norm), turn)
            gate, up = mx.split(self._product(self._norm(x, w.mlp_norm), w.gate_up), 2, axis=1)
            x = x + self._product(gate * mx.sigmoid(gate) * up, w.down)
        return self._norm(x, self._final_norm)

    @cached_property
    def _mask(self) -> mx.array:
        """The mask token's embedding, [1, hidden]."""
        row = self._embed([self.config.mask_token_id])
        mx.eval(row)
        return row

    def _project(self) -> None:
        """Makes context rows of the pending accumulators."""
        if not self._pending:
            return
        columns = zip(*(taps for _, taps in self._pending), strict=True)
        joined = mx.concatenate([mx.concatenate(list(column)) for column in columns], axis=1)
        places = [np.arange(first, first + len(taps[0])) for first, taps in self._pending]
        turn = self._turn(np.concatenate(places))
        shared = self._norm(self._product(joined, self._w["context_proj.weight"]), self._shared_norm)
        rank = self.config.q_lora_rank
        made = mx.stack([self._latents(w, self._product(shared, w.qkv_a[rank:]), turn) for w in self._layers])
        # Attention does not ask for the order of its keys, but the oldest rows are the ones to be forgotten.
        self._context = mx.concatenate([self._context, made], axis=1)[:, -self.capacity :]
        self._pending, self._pending_rows = [], 0

    def _attention(self, context: mx.array, w: Layer, x: mx.array, turn: _Turn) -> mx.array:
        """Latent attention over the context and the block itself, not causal. fp32 [7, hidden] → [7, hidden]."""
        c = self.config
        heads, nope, lora = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
        qkv_a = self._product(x, w.qkv_a)
        q_a, kv_a = qkv_a[:, : c.q_lora_rank], qkv_a[:, c.q_lora_rank :]
        q = self._product(self._norm(q_a, w.q_a_norm), w.q_b).reshape(BLOCK, heads, -1)
        absorbed = q[..., :nope].transpose(1, 0, 2).astype(self._dtype) @ w.key
        rotated = turn.apply(q[..., nope:]).transpose(1, 0, 2)
        flat = mx.concatenate([absorbed.astype(mx.float32), rotated], axis=-1).reshape(heads * BLOCK, -1)
        keys = mx.concatenate([context, self._latents(w, kv_a, turn)])
        weights = mx.softmax(flat @ keys.T * self._scale, axis=-1)
        mixed = (weights @ keys[:, :lora]).reshape(heads, BLOCK, lora).astype(self._dtype)
        out = (mixed @ w.value).transpose(1, 0, 2).reshape(BLOCK, heads * c.v_head_dim)
        return self._product(out, w.out)

    def _latents(self, w: Layer, kv: mx.array, turn: _Turn) -> mx.array:
        """Compressed latent and rotated position part, fp32 [n, kv_lora + rope]."""
        lora = self.config.kv_lora_rank
        return mx.concatenate([self._norm(kv[:, :lora], w.kv_a_norm), turn.apply(kv[:, lora:])], axis=1)

    def _product(self, x: mx.array, weight: mx.array) -> mx.array:
        """x·Wᵀ in the activations' precision, as fp32."""
        return (x.astype(self._dtype) @ weight.T).astype(mx.float32)

    def _norm(self, x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, self.config.rms_norm_eps)

    def _turn(self, positions: npt.NDArray[np.int64]) -> _Turn:
        angle = mx.array(positions.astype(np.float32))[:, None] * self._frequencies
        return _Turn(mx.cos(angle), mx.sin(angle))


@dataclass(frozen=True, slots=True)
class _Turn:
    """Rotary position on interleaved pairs; cos and sin fp32 [n, rope / 2]."""

    cos: mx.array
    sin: mx.array

    def apply(self, x: mx.array) -> mx.array:
        """Rotates x [n, …, rope]."""
        cos, sin = (self.cos[:, None], self.sin[:, None]) if x.ndim == 3 else (self.cos, self.sin)
        even, odd = x[..., 0::2], x[..., 1::2]
        return mx.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


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

    def tensors(self) -> Sequence[tuple[str, npt.NDArray[Any]]]:
        """The context, for a saved session."""
        return [("context", self._draft.rows())]

    def restore(self, position: int, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Takes back a saved context."""
        self._draft.restore(position, tensors["context"])


def dspark_source(
    folder: Path, config: DSparkConfig, embed: Embed, lm_head: mx.array, capacity: int
) -> Callable[[], DraftSource]:
    """Reads the weights; what is returned makes a source for each session.

    Args:
        embed: K3's embedding rows as activations.
        lm_head: K3's head, bf16 [vocab, hidden].
        capacity: most context rows.

    Raises:
        DraftError, TensorFileError: the files cannot be used.
    """
    weights = load(folder, config)
    return lambda: DSparkSource(DSpark(weights, embed, lm_head, capacity=capacity))
