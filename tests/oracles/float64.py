"""Kimi K3's text model in float64 NumPy: plain, slow, and written from the published description only.

Recurrent KDA and expanded MLA, so it shares neither code nor algorithm with the engine's kernels. Read top to bottom:
state, trace, model, layers. ``T`` is the number of new positions, ``L`` the number already in the state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .released import Array, Released, one_blas_thread

PREFIX = "language_model."


@dataclass(frozen=True)
class KdaState:
    """``s`` [heads, key, value] and ``conv`` [kernel - 1, 3 * width], the last un-convolved rows of q, k, v."""

    s: Array
    conv: Array


@dataclass(frozen=True)
class MlaState:
    """``rows`` [L, kv_lora + rope]: normed latent, then the shared position-free key part."""

    rows: Array


State = tuple[KdaState | MlaState, ...]


@dataclass
class Trace:
    """What happened inside a pass; each list is filled layer by layer.

    Attributes:
        layers: accumulator P after each layer's MLP, ``[T, hidden]``.
        attention: output of each layer's attention, ``[T, hidden]``.
        experts: chosen experts by falling biased score (or as forced), ``[T, k]``, one entry per MoE layer.
        weights: their weights, ``[T, k]``.
        route_margins: smallest biased score chosen minus largest rejected, ``[T]``. A margin below the other side's
            rounding error is a tie that either side may break its own way; negative means a forced choice that this
            model would not have made.
    """

    layers: list[Array] = field(default_factory=list)
    attention: list[Array] = field(default_factory=list)
    experts: list[npt.NDArray[np.intp]] = field(default_factory=list)
    weights: list[Array] = field(default_factory=list)
    route_margins: list[Array] = field(default_factory=list)

    def clear_rows(self, margin: float = 1e-5) -> int:
        """Leading positions before the first router choice closer than ``margin``.

        From that position on, an implementation in lower precision may rightly compute other numbers: one exchanged
        expert moved logits of the miniature checkpoint by 0.05, a thousand times the float32 error.
        """
        close = np.min(self.route_margins, axis=0) < margin
        return int(close.argmax()) if close.any() else len(close)


def sigmoid(x: Array) -> Array:
    """Logistic function without overflow."""
    out: Array = 0.5 * (1 + np.tanh(0.5 * x))
    return out


def rms(x: Array, weight: Array, eps: float) -> Array:
    """RMS normalisation over the last axis, times ``weight``."""
    out: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return out


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    out: Array = e / e.sum(-1, keepdims=True)
    return out


class Float64K3:
    """The target model of a released-format folder.

    Args:
        folder: config, safetensors shards and index.
        latent_norm_eps: epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``, on which sources disagree.
        keep_bytes: decoded weights kept in memory; the rest is decoded at each use.
    """

    def __init__(self, folder: Path | str, *, latent_norm_eps: float = 1e-6, keep_bytes: int = 3 << 29) -> None:
        self.w = Released(folder, keep_bytes)
        self.config = c = self.w.config["text_config"]
        self.layers: int = c["num_hidden_layers"]
        self.hidden: int = c["hidden_size"]
        self.kda_layers = {n - 1 for n in c["linear_attn_config"]["kda_layers"]}
        self.eps: float = c["rms_norm_eps"]
        self.latent_norm_eps = latent_norm_eps

    @one_blas_thread
    def forward(
        self,
        ids: Sequence[int],
        state: State | None = None,
        trace: Trace | None = None,
        routes: Sequence[npt.NDArray[np.integer]] | None = None,
    ) -> tuple[Array, State]:
        """Appends ``ids`` to ``state`` (left untouched; None is the empty sequence).

        Args:
            ids: T token ids.
            state: of the positions before them.
            trace: filled if given.
            routes: experts to use instead of the router's choice, ``[T, k]`` per MoE layer; their weights are still
                this model's. Lets an implementation be compared past a tie that it broke its own way.

        Returns:
            Logits ``[T, vocab]`` and the new state.
        """
        every = self.config["attn_res_block_size"]
        p = self.embed(ids)
        bank: list[Array] = []
        new: list[KdaState | MlaState] = []
        for layer in range(self.layers):
            name = f"{PREFIX}model.layers.{layer}"
            h = self._mix(bank, p, f"{name}.self_attention_res") if bank else p
            start = layer % every == 0
            if start:
                bank = [*bank, p]
            h = rms(h, self.w.get(f"{name}.input_layernorm.weight"), self.eps)
            old = None if state is None else state[layer]
            attend = self._kda if layer in self.kda_layers else self._mla
            a, after = attend(f"{name}.self_attn", h, old)
            new.append(after)
            p = a if start else p + a
            h = self._mix(bank, p, f"{name}.mlp_res")
            h = rms(h, self.w.get(f"{name}.post_attention_layernorm.weight"), self.eps)
            if layer < self.config["first_k_dense_replace"]:
                p = p + self._mlp(f"{name}.mlp", h)
            else:
                forced = None if routes is None else routes[layer - self.config["first_k_dense_replace"]]
                p = p + self._moe(f"{name}.block_sparse_moe", h, trace, forced)
            if trace is not None:
                trace.layers.append(p)
                trace.attention.append(a)
        h = self._mix(bank, p, f"{PREFIX}model.output_attn_res")
        return self.head(rms(h, self.w.get(f"{PREFIX}model.norm.weight"), self.eps)), tuple(new)

    def greedy(self, ids: Sequence[int], max_new: int, stop: Collection[int] = ()) -> tuple[list[int], list[float]]:
        """Greedy continuation (a stop token is included) and the top-two logit margin at each step."""
        out: list[int] = []
        margins: list[float] = []
        logits, state = self.forward(ids)
        while True:
            out.append(int(logits[-1].argmax()))
            second, first = np.partition(logits[-1], -2)[-2:]
            margins.append(float(first - second))
            if out[-1] in stop or len(out) >= max_new:
                return out, margins
            logits, state = self.forward(out[-1:], state)

    def embed(self, ids: Sequence[int]) -> Array:
        """Embedding rows ``[T, hidden]``."""
        return self.w.rows(f"{PREFIX}model.embed_tokens.weight", ids)

    def head(self, normed: Array) -> Array:
        """Logits ``[T, vocab]`` of normed rows."""
        return self.w.linear(normed, f"{PREFIX}lm_head.weight")

    def _mix(self, bank: list[Array], p: Array, name: str) -> Array:
        # Block attention residuals: each token weighs the saved rows and its running sum.
        v = np.stack([*bank, p], axis=1)  # [T, m + 1, hidden]
        key = self.w.get(f"{name}_norm.weight") * self.w.get(f"{name}_proj.weight")[0]
        scores = (v @ key) / np.sqrt((v * v).mean(-1) + self.eps)
        out: Array = np.einsum("tm,tmd->td", softmax(scores), v)
        return out

    def _situ(self, gate: Array, up: Array) -> Array:
        b, u = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        out: Array = b * np.tanh(gate / b) * sigmoid(gate) * u * np.tanh(up / u)
        return out

    def _mlp(self, name: str, x: Array) -> Array:
        gate, up = (self.w.linear(x, f"{name}.{n}_proj.weight") for n in ("gate", "up"))
        return self.w.linear(self._situ(gate, up), f"{name}.down_proj.weight")

    def _kda(self, name: str, x: Array, old: KdaState | MlaState | None) -> tuple[Array, KdaState]:
        c, w = self.config["linear_attn_config"], self.w
        heads, dim, taps = c["num_heads"], c["head_dim"], c["short_conv_kernel_size"]
        width, t = heads * dim, len(x)
        z = np.concatenate([w.linear(x, f"{name}.{n}_proj.weight") for n in "qkv"], axis=1)
        past = old.conv if isinstance(old, KdaState) else np.zeros((taps - 1, 3 * width))
        z = np.concatenate([past, z])
        filters = np.concatenate([w.get(f"{name}.{n}_conv1d.weight")[:, 0] for n in "qkv"])  # [3 width, taps]
        y = sum((z[j : j + t] * filters[:, j] for j in range(taps)), np.zeros((t, 3 * width)))
        q, k, v = (part.reshape(t, heads, dim) for part in np.split(y * sigmoid(y), 3, axis=1))
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        q = q * dim**-0.5
        r = w.linear(w.linear(x, f"{name}.f_a_proj.weight"), f"{name}.f_b_proj.weight")
        r = (r + w.get(f"{name}.dt_bias")).reshape(t, heads, dim)
        a_log = w.get(f"{name}.A_log")[:heads]
        decay = np.exp(c["gate_lower_bound"] * sigmoid(np.exp(a_log)[:, None] * r))
        beta = sigmoid(w.linear(x, f"{name}.b_proj.weight"))
        s = old.s if isinstance(old, KdaState) else np.zeros((heads, dim, dim))
        o = np.empty((t, heads, dim))
        for i in range(t):
            s = s * decay[i, :, :, None]
            u = beta[i, :, None] * (v[i] - np.einsum("hkv,hk->hv", s, k[i]))
            s = s + k[i, :, :, None] * u[:, None, :]
            o[i] = np.einsum("hkv,hk->hv", s, q[i])
        gate = sigmoid(w.linear(x, f"{name}.g_proj.weight"))
        o = rms(o, w.get(f"{name}.o_norm.weight"), self.eps).reshape(t, width) * gate
        return w.linear(o, f"{name}.o_proj.weight"), KdaState(s, z[t:])

    def _mla(self, name: str, x: Array, old: KdaState | MlaState | None) -> tuple[Array, MlaState]:
        c, w, t = self.config, self.w, len(x)
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        lora, value = c["kv_lora_rank"], c["v_head_dim"]
        q = rms(w.linear(x, f"{name}.q_a_proj.weight"), w.get(f"{name}.q_a_layernorm.weight"), self.latent_norm_eps)
        q = w.linear(q, f"{name}.q_b_proj.weight").reshape(t, heads, nope + rope).swapaxes(0, 1)
        kv = w.linear(x, f"{name}.kv_a_proj_with_mqa.weight")
        latent = rms(kv[:, :lora], w.get(f"{name}.kv_a_layernorm.weight"), self.latent_norm_eps)
        rows = np.concatenate([latent, kv[:, lora:]], axis=1)
        if isinstance(old, MlaState):
            rows = np.concatenate([old.rows, rows])
        total = len(rows)
        expanded = w.linear(rows[:, :lora], f"{name}.kv_b_proj.weight")
        expanded = expanded.reshape(total, heads, nope + value).swapaxes(0, 1)  # [heads, total, nope + value]
        k, v = expanded[..., :nope], expanded[..., nope:]
        scores = (q[..., :nope] @ k.swapaxes(1, 2) + q[..., nope:] @ rows[:, lora:].T) * (nope + rope) ** -0.5
        hidden = np.arange(total) > np.arange(total - t, total)[:, None]  # a later position than the row's own
        o = softmax(np.where(hidden, -np.inf, scores)) @ v
        o = o.swapaxes(0, 1).reshape(t, heads * value) * sigmoid(w.linear(x, f"{name}.g_proj.weight"))
        return w.linear(o, f"{name}.o_proj.weight"), MlaState(rows)

    def _moe(self, name: str, x: Array, trace: Trace | None, forced: npt.NDArray[np.integer] | None) -> Array:
        c, w, k = self.config, self.w, self.config["num_experts_per_token"]
        score = sigmoid(w.linear(x, f"{name}.gate.weight"))
        biased = score + w.get(f"{name}.gate.e_score_correction_bias")
        # A stable sort: of equal scores the smaller id comes first.
        chosen = np.argsort(-biased, axis=1, kind="stable")[:, :k] if forced is None else forced
        weight = np.take_along_axis(score, chosen, axis=1)
        if c["moe_renormalize"]:
            weight = weight / (weight.sum(1, keepdims=True) + 1e-20)
        weight = weight * c["routed_scaling_factor"]
        if trace is not None:
            taken = np.zeros(biased.shape, bool)
            np.put_along_axis(taken, chosen, True, axis=1)
            margin = np.where(taken, biased, np.inf).min(1) - np.where(taken, -np.inf, biased).max(1)
            trace.experts.append(chosen.astype(np.intp))
            trace.weights.append(weight)
            trace.route_margins.append(margin)
        latent = w.linear(x, f"{name}.routed_expert_down_proj.weight")
        y = np.zeros_like(latent)
        for e in np.unique(chosen):
            row, slot = np.nonzero(chosen == e)
            w1, w3, w2 = w.expert(f"{name}.experts.{e}")
            part = latent[row]
            y[row] += weight[row, slot, None] * (self._situ(part @ w1.T, part @ w3.T) @ w2.T)
        y = rms(y, w.get(f"{name}.routed_expert_norm.weight"), self.eps)
        return w.linear(y, f"{name}.routed_expert_up_proj.weight") + self._mlp(f"{name}.shared_experts", x)
