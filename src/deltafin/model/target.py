"""K3 from token ids to logits, layer by layer, read top to bottom.

``forward`` computes T provisional positions; ``SequenceState.commit`` decides how many of them count. Every row has
the same bits as if it had been computed alone: all kernels fix their reduction order per output row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Literal

import torch

from deltafin import kernels
from deltafin.checkpoint.config import K3Config
from deltafin.contract import PassTimes, Routes, Rows, finished
from deltafin.expert_layout import ExpertLayout
from deltafin.model import kda, mla, moe
from deltafin.model.state import SequenceState
from deltafin.model.weights import (
    KdaWeights,
    LayerWeights,
    MlpWeights,
    MoeWeights,
    ResidualMix,
    Tensors,
    head_weights,
    layer_weights,
)
from deltafin.residency.prefetch import RANKS_PER_EXPERT
from deltafin.streaming.experts import ExpertStream
from deltafin.streaming.spine import Spine
from deltafin.streaming.stop import StopFlag

# Rows of a prefill chunk whose predicted routes are looked at, and how many must agree on an expert before it is
# read ahead of its router: with three rows guessing it, that nobody in the chunk uses it hardly happens.
_SAMPLE_ROWS = 512
_SURE_ROWS = 3

# Uses per expert from which on a chunk is taken to use all of a layer's where its router cannot be asked: routers
# balance their experts' load in training, and of 8 expected uses none at all happens to one expert in 3,000.
_SURE_USES = 8


class Target:
    """The complete text model over streamed bytes.

    Args:
        config: the model's geometry.
        layout: where an expert's tensors lie in its blob.
        spine: non-expert tensors by unit.
        experts: routed experts by layer.
        file_order: layer → all its experts in the order they lie on the drives.
        block_rows: rows whose attention transients may exist at one time.
        taps: layers after which the accumulator is kept for a draft.
        stop: polled between blocks of rows.

    Attributes:
        taps: as above; may be set before the first pass.
        tap_rows: of a longer pass only the accumulators of this many last rows are kept.
    """

    def __init__(
        self,
        config: K3Config,
        layout: ExpertLayout,
        spine: Spine[torch.Tensor],
        experts: ExpertStream,
        *,
        file_order: Callable[[int], Sequence[int]],
        block_rows: int,
        stop: StopFlag,
        taps: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.taps = tuple(taps)
        self.tap_rows = 1 << 30
        self.times = PassTimes()
        self.routes: list[Routes] = []
        self._layout = layout
        self._spine = spine
        self._experts = experts
        self._file_order = file_order
        self._block_rows = block_rows
        self._stop = stop
        self._named: dict[int, LayerWeights] = {}

    def forward(
        self,
        tokens: Sequence[int],
        state: SequenceState,
        *,
        logits: Literal["all", "last"] = "all",
        partial: bool = False,
    ) -> Rows:
        """Computes ``len(tokens)`` provisional positions after the committed ones; see ``run``."""
        return finished(self.run(tokens, state, logits=logits, partial=partial))

    def run(
        self,
        tokens: Sequence[int],
        state: SequenceState,
        *,
        logits: Literal["all", "last"] = "all",
        partial: bool = False,
    ) -> Generator[int, None, Rows]:
        """The same pass as a generator that yields the number of finished layers, so that long passes can be watched.

        Args:
            tokens: vocabulary ids.
            state: receives the provisional rows; its committed part is untouched, also when this raises.
            logits: for which rows.
            partial: whether fewer positions than computed may be committed later (verification of a draft).

        Returns:
            fp32 logits [T or 1, vocab].

        Raises:
            InputError: the context is full.
            SliceError: bytes missing, unreadable or corrupt.
            Interrupted: a stop was asked for.
            ValueError: a token id outside the vocabulary, or a partial pass longer than one block.
        """
        config, rows = self.config, len(tokens)
        if not tokens or min(tokens) < 0 or max(tokens) >= config.vocab_size:
            raise ValueError("token ids must lie inside the vocabulary")
        if partial and rows > self._block_rows:
            raise ValueError(f"a partial pass holds at most {self._block_rows} rows")
        state.begin(rows, partial=partial)
        blocks = [slice(i, min(i + self._block_rows, rows)) for i in range(0, rows, self._block_rows)]
        accumulator = self._spine.embedding(tokens)
        bank: list[torch.Tensor] = []
        if self._uses_nearly_all(rows) and not partial:
            self._experts.look_ahead(config.dense_layers, self._file_order, long=True)
        self.routes = []
        taps = {}
        for layer in range(config.layers):
            with self._spine.unit(f"layer.{layer}") as unit:
                accumulator = self._layer(layer, unit, accumulator, bank, state, blocks)
            if layer in self.taps:
                # A draft reads them as bf16, and of a long prompt only the end.
                tail = accumulator if rows <= self.tap_rows else accumulator[-self.tap_rows :]
                taps[layer] = tail.bfloat16()
            yield layer + 1
        state.taps = [taps[layer] for layer in self.taps]
        wanted = slice(0, rows) if logits == "all" else slice(rows - 1, rows)
        with self._spine.unit("head") as unit:
            started = time.perf_counter()
            head = head_weights(unit)
            out = kernels.linear(self._mixed(head.mix, bank, accumulator, wanted), head.lm_head)
            self.times.head += time.perf_counter() - started
        rows_out: Rows = out.numpy()
        return rows_out

    def _layer(
        self,
        layer: int,
        unit: Tensors,
        accumulator: torch.Tensor,
        bank: list[torch.Tensor],
        state: SequenceState,
        blocks: Sequence[slice],
    ) -> torch.Tensor:
        config = self.config
        started = time.perf_counter()
        w = self._weights(layer, unit)
        # At a snapshot layer the accumulator joins the bank and restarts from the attention output alone; the mixture
        # that feeds the attention is taken over the old bank and the old accumulator.
        snapshot = layer % config.attn_res_block == 0
        target = torch.empty_like(accumulator) if snapshot else accumulator
        for block in blocks:
            self._stop.check()
            x = self._mixed(w.attention_mix, bank, accumulator, block)
            attended = self._attend(layer, w, x, state, block)
            if snapshot:
                target[block] = attended
            else:
                target[block] += attended
        if snapshot:
            bank.append(accumulator)
        self.times.attention += time.perf_counter() - started

        started = time.perf_counter()
        if isinstance(w.mlp, MlpWeights):
            for block in blocks:
                self._stop.check()
                target[block] += moe.gated(config, w.mlp, self._mixed(w.mlp_mix, bank, target, block))
            self._look_ahead(layer + 1, bank, target, state)
        else:
            x = torch.empty_like(target)
            for block in blocks:
                x[block] = self._mixed(w.mlp_mix, bank, target, block)
            order = self._file_order(layer) if len(x) > 1 else None
            out, ids = moe.forward(
                config,
                w.mlp,
                self._layout,
                layer,
                x,
                blocks,
                self._experts,
                order,
                self.times.moe,
                lambda: self._look_ahead(layer + 1, bank, target, state),
            )
            target += out
            self.routes.append(ids)
            self._look_ahead(layer + 1, bank, target, state, again=True)
        self.times.mlp += time.perf_counter() - started
        return target

    def _look_ahead(
        self,
        layer: int,
        bank: Sequence[torch.Tensor],
        accumulator: torch.Tensor,
        state: SequenceState,
        *,
        again: bool = False,
    ) -> None:
        """Lets the stream read ahead what ``layer``'s router would choose from the sums known now.

        Missing from them are the MLP of the layer before (its experts are being read) and the attention of ``layer``;
        when asked ``again``, only the latter. Where ``layer`` takes a snapshot, its mixture has the present accumulator
        among its sources all the same.
        """
        config = self.config
        prefill = len(accumulator) > 1 and not state.partial
        wraps = layer == config.layers
        if wraps:
            layer = config.dense_layers  # of the next pass, whose tokens nobody knows yet: history must do
        if layer not in config.moe_layers or (wraps and prefill) or (again and (wraps or prefill)):
            return

        def predict(layer: int) -> Sequence[int] | None:
            w = self._named.get(layer)
            if w is None or not isinstance(w.mlp, MoeWeights) or wraps:
                return self._file_order(layer) if prefill and self._uses_nearly_all(len(accumulator)) else None
            rows = slice(max(0, len(accumulator) - _SAMPLE_ROWS), len(accumulator))
            x = self._mixed(w.mlp_mix, bank, accumulator, rows)
            scores = torch.sigmoid(kernels.linear(x, w.mlp.router)) + w.mlp.router_bias
            if not prefill:
                best = scores.amax(dim=0).topk(min(RANKS_PER_EXPERT * config.experts_per_token, config.experts)).indices
                ranked: list[int] = best.tolist()
                return ranked
            chosen = torch.bincount(
                scores.topk(config.experts_per_token, dim=1).indices.reshape(-1), minlength=config.experts
            ).tolist()
            return [expert for expert in self._file_order(layer) if chosen[expert] >= _SURE_ROWS]

        if again:
            self._experts.look_again(layer, predict)
        else:
            self._experts.look_ahead(layer, predict, long=prefill)

    def _uses_nearly_all(self, rows: int) -> bool:
        """Whether a pass of so many rows needs no router to say which experts a layer uses."""
        return rows * self.config.experts_per_token >= _SURE_USES * self.config.experts

    def _attend(self, layer: int, w: LayerWeights, x: torch.Tensor, state: SequenceState, block: slice) -> torch.Tensor:
        if isinstance(w.attention, KdaWeights):
            return kda.forward(
                self.config,
                w.attention,
                x,
                state.kda[layer],
                first=block.start == 0,
                keep_rows=state.partial,
            )
        return mla.forward(self.config, w.attention, x, state.mla[layer], state.position + block.start)

    def _mixed(
        self, mix: ResidualMix, bank: Sequence[torch.Tensor], accumulator: torch.Tensor, rows: slice
    ) -> torch.Tensor:
        sources = [saved[rows] for saved in bank]
        sources.append(accumulator[rows])
        return kernels.attnres_mix_norm(sources, mix.score, mix.norm, self.config.rms_eps)

    def _weights(self, layer: int, unit: Tensors) -> LayerWeights:
        named = self._named.get(layer)
        if named is None:
            named = layer_weights(self.config, layer, unit)
            if f"layer.{layer}" in self._spine.resident_keys:
                self._named[layer] = named
        return named
