"""K3 from token ids to logits on MLX, layer by layer, read top to bottom.

The host waits for the device once in each layer: for the router's scores. Everything else is submitted without waiting,
and whatever a wait has shown to be finished gives its leases back. Two cases need one wait more: a layer whose weights
are streamed (its buffer is about to be read into again), and a layer with more missing experts than free frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from deltafin.apple import kda, mla, moe
from deltafin.apple.frames import MlxFrames
from deltafin.apple.ops import Bank, Linear, gated, start, total
from deltafin.apple.rows import Mode, linear_for
from deltafin.apple.state import MlxState
from deltafin.apple.weights import KdaWeights, LayerWeights, MlpWeights, MoeWeights, Names, Tensors, arrays_of
from deltafin.checkpoint.config import K3Config
from deltafin.contract import PassTimes, Routes, Rows, finished
from deltafin.expert_layout import ExpertLayout
from deltafin.residency.prefetch import RANKS_PER_EXPERT
from deltafin.streaming.experts import ExpertStream, Lease
from deltafin.streaming.spine import Spine
from deltafin.streaming.stop import StopFlag

# Rows of a prefill chunk whose predicted routes are looked at, and how many must agree on an expert before it is
# read ahead of its router.
_SAMPLE_ROWS = 64
_SURE_ROWS = 3


class MlxTarget:
    """The complete text model over streamed bytes; see ``contract.Target``.

    Args:
        config: the model's geometry.
        layout: where an expert's tensors lie in its blob.
        spine: non-expert tensors by unit.
        experts: routed experts by layer.
        frames: the memory of the experts' leases.
        file_order: layer → all its experts in the order they lie on the drives.
        block_rows: rows whose attention transients may exist at one time.
        stop: polled between blocks of rows.
        activations: dtype in which the model computes.
        mode: how rows are kept apart.

    Attributes:
        mode: as above.
        waits: how often the host waited for the device.
        wait_seconds: how long.
    """

    def __init__(
        self,
        config: K3Config,
        layout: ExpertLayout,
        spine: Spine[mx.array],
        experts: ExpertStream,
        frames: MlxFrames,
        *,
        file_order: Callable[[int], Sequence[int]],
        block_rows: int,
        stop: StopFlag,
        activations: mx.Dtype,
        mode: Mode,
    ) -> None:
        self.config = config
        self.taps: tuple[int, ...] = ()
        self.tap_rows = 1 << 30
        self.times = PassTimes()
        self.routes: list[Routes] = []
        self.waits = 0
        self.wait_seconds = 0.0
        self._layout = layout
        self._spine = spine
        self._experts = experts
        self._frames = frames
        self._file_order = file_order
        self._limit = block_rows
        self.mode = mode
        self._block_rows = 1 if mode == "alone" else block_rows
        self._stop = stop
        self._activations = activations
        self._linear: Linear = linear_for(mode)
        self._names = Names(config, activations)
        self._named: dict[int, LayerWeights] = {}
        self._bias: dict[int, Any] = {}
        self._held: list[Lease] = []
        # Whether the stream wanted predictions for (layer, prefill) last time: they are made before it is asked.
        self._asked: dict[tuple[int, bool], bool] = {}

    def forward(
        self,
        tokens: Sequence[int],
        state: MlxState,
        *,
        logits: Literal["all", "last"] = "all",
        partial: bool = False,
    ) -> Rows:
        """Computes ``len(tokens)`` provisional positions after the committed ones; see ``run``."""
        return finished(self.run(tokens, state, logits=logits, partial=partial))

    def run(
        self,
        tokens: Sequence[int],
        state: MlxState,
        *,
        logits: Literal["all", "last"] = "all",
        partial: bool = False,
    ) -> Generator[int, None, Rows]:
        """The same pass as a generator that yields the number of finished layers; see ``contract.Target``."""
        config, rows = self.config, len(tokens)
        if not tokens or min(tokens) < 0 or max(tokens) >= config.vocab_size:
            raise ValueError("token ids must lie inside the vocabulary")
        if partial and rows > self._limit:
            raise ValueError(f"a partial pass holds at most {self._limit} rows")
        state.begin(rows, partial=partial)
        accumulator = self._spine.embedding(tokens)
        bank = Bank(config.rms_eps)
        self.routes = []
        taps = {}
        try:
            for layer in range(config.layers):
                with self._spine.unit(f"layer.{layer}") as unit:
                    accumulator = self._layer(layer, unit, accumulator, bank, state)
                    if f"layer.{layer}" not in self._spine.resident_keys:
                        # Its buffer is read into again as soon as it is given back.
                        self._wait([accumulator, *state.provisional()])
                if layer in self.taps:
                    # A draft reads them as bf16, and of a long prompt only the end.
                    tail = accumulator if rows <= self.tap_rows else accumulator[-self.tap_rows :]
                    taps[layer] = tail.astype(mx.bfloat16)
                yield layer + 1
            wanted = slice(0, rows) if logits == "all" else slice(rows - 1, rows)
            with self._spine.unit("head") as unit:
                started = time.perf_counter()
                head = self._names.head(unit)
                parts = [
                    self._linear(bank.mixed(head.mix, accumulator, block), head.lm_head)
                    for block in self._blocks(wanted)
                ]
                out = total(parts).astype(mx.float32)
                self._wait([out, *taps.values(), *state.provisional()])
                self.times.head += time.perf_counter() - started
        except BaseException:
            mx.synchronize()  # The device may still read what is about to be given back.
            raise
        finally:
            self._give_back()
        state.taps = [taps[layer] for layer in self.taps]
        return np.array(out)

    def _layer(self, layer: int, unit: Tensors, accumulator: mx.array, bank: Bank, state: MlxState) -> mx.array:
        config = self.config
        started = time.perf_counter()
        w = self._weights(layer, unit)
        rows = slice(0, len(accumulator))
        # At a snapshot layer the accumulator joins the bank and restarts from the attention output alone; the mixture
        # that feeds the attention is taken over the old bank and the old accumulator.
        snapshot = layer % config.attn_res_block == 0
        attended = []
        for block in self._blocks(rows):
            self._stop.check()
            x = bank.mixed(w.attention_mix, accumulator, block)
            attended.append(self._attend(layer, w, x, state, block))
            if block.stop < rows.stop:
                start(attended[-1:])  # so that what is written down and not yet computed stays small
        if snapshot:
            bank.append(accumulator)
            target = total(attended)
        else:
            target = accumulator + total(attended)
        self.times.attention += time.perf_counter() - started

        started = time.perf_counter()
        if isinstance(w.mlp, MlpWeights):
            parts = []
            for block in self._blocks(rows):
                self._stop.check()
                parts.append(self._gated(w.mlp, bank.mixed(w.mlp_mix, target, block)))
            out = target + total(parts)
            self._look_ahead(layer + 1, bank, target, state)
        else:
            out = target + self._routed(layer, w, w.mlp, bank, target, state)
        self.times.mlp += time.perf_counter() - started
        return out

    def _routed(
        self, layer: int, w: LayerWeights, own: MoeWeights, bank: Bank, target: mx.array, state: MlxState
    ) -> mx.array:
        """Shared and routed experts of one layer, [T, hidden]."""
        config = self.config
        blocks = list(self._blocks(slice(0, len(target))))
        xs = [bank.mixed(w.mlp_mix, target, block) for block in blocks]
        scores = total([self._scores(x, own) for x in xs])
        predicted = self._predicted(layer + 1, bank, target, state)
        asked = [scores] if predicted is None else [scores, predicted]
        # What needs no routed expert keeps the device busy while the host looks at the scores.
        latent = total([self._linear(x, own.latent_down) for x in xs])
        shared = total([self._gated(own.shared, x) for x in xs])
        start([*asked, *state.made(layer)])
        start([latent, shared])
        self._wait(asked)
        # Once this layer's wait is over, the products of the layer before are computed.
        self._give_back()
        bias = self._bias.get(layer)
        if bias is None:
            bias = self._bias[layer] = np.array(own.router_bias)
        ids, weights = moe.choose(config, np.array(scores, copy=False), bias)
        self.routes.append(ids)
        assignment = moe.Assignment.of(ids)
        wanted: Sequence[int] = assignment.experts
        if len(ids) > 1:
            needed = assignment.slots
            wanted = [e for e in self._file_order(layer) if e in needed]

        def looked() -> None:
            guess = None if predicted is None else np.array(predicted, copy=False)
            self._look_ahead(layer + 1, bank, target, state, guess)

        with self._experts.fetch(layer, wanted) as batches:
            products = moe.Products(config, self._layout, self._frames, latent, assignment)
            try:
                self.times.moe.experts += moe.compute(
                    products, batches, self._experts.release, self._held, looked, self._wait
                )
            except BaseException:
                mx.synchronize()  # before the frames are taken back
                self._held.clear()
                raise
        routed = mx.fast.rms_norm(products.combined(weights), own.latent_norm, config.rms_eps)
        up = total([self._linear(routed[block], own.latent_up) for block in blocks])
        return up + shared

    def _scores(self, x: mx.array, w: MoeWeights) -> mx.array:
        """The router's sigmoids, fp32 [T, experts]."""
        return mx.sigmoid(self._linear(x.astype(mx.float32), w.router.astype(mx.float32)))

    def _predicted(self, layer: int, bank: Bank, accumulator: mx.array, state: MlxState) -> mx.array | None:
        """What ``layer``'s router would say to the sums known now, when the stream may want to know it.

        Missing from them are this layer's MLP (its experts are being read) and the next attention.
        """
        prefill = len(accumulator) > 1 and not state.partial
        if not self._asked.get((layer, prefill), True):
            return None
        if layer >= self.config.layers or not self._experts.may_look_ahead(layer):
            return None
        w = self._named.get(layer)
        if w is None or not isinstance(w.mlp, MoeWeights):
            return None
        rows = slice(max(0, len(accumulator) - _SAMPLE_ROWS), len(accumulator))
        return self._scores(bank.mixed(w.mlp_mix, accumulator, rows), w.mlp) + w.mlp.router_bias

    def _look_ahead(
        self, layer: int, bank: Bank, accumulator: mx.array, state: MlxState, scores: Any | None = None
    ) -> None:
        """Lets the stream read ahead for ``layer``."""
        config = self.config
        prefill = len(accumulator) > 1 and not state.partial
        wraps = layer == config.layers
        if wraps:
            layer = config.dense_layers  # of the next pass, whose tokens nobody knows yet: history must do
        if layer not in config.moe_layers or (wraps and prefill):
            return

        asked = False

        def predict(layer: int) -> Sequence[int] | None:
            nonlocal asked
            asked = True
            if wraps or scores is None:
                return None
            if not prefill:
                count = min(RANKS_PER_EXPERT * config.experts_per_token, config.experts)
                ranked: list[int] = np.argsort(-scores.max(axis=0), kind="stable")[:count].tolist()
                return ranked
            best = np.argpartition(-scores, config.experts_per_token - 1, axis=1)[:, : config.experts_per_token]
            chosen = np.bincount(best.reshape(-1), minlength=config.experts)
            return [expert for expert in self._file_order(layer) if chosen[expert] >= _SURE_ROWS]

        self._experts.look_ahead(layer, predict, long=prefill)
        self._asked[layer, prefill] = asked

    def _attend(self, layer: int, w: LayerWeights, x: mx.array, state: MlxState, block: slice) -> mx.array:
        if isinstance(w.attention, KdaWeights):
            first = block.start == 0
            own = state.kda[layer]
            return kda.forward(self.config, w.attention, x, own, self._linear, first=first, keep_rows=state.partial)
        return mla.forward(self.config, w.attention, x, state.mla[layer], state.position + block.start, self._linear)

    def _gated(self, w: MlpWeights, x: mx.array) -> mx.array:
        return gated(w, x, self.config.situ_beta, self.config.situ_linear_beta, self._linear)

    def _blocks(self, rows: slice) -> list[slice]:
        step = self._block_rows
        return [slice(i, min(i + step, rows.stop)) for i in range(rows.start, rows.stop, step)]

    def _wait(self, arrays: Sequence[mx.array]) -> None:
        started = time.perf_counter()
        mx.eval(list(arrays))
        self.waits += 1
        self.wait_seconds += time.perf_counter() - started

    def _give_back(self) -> None:
        """Releases leases whose products are known to be computed."""
        if self._held:
            self._experts.release(self._held)
            self._held.clear()

    def _weights(self, layer: int, unit: Tensors) -> LayerWeights:
        named = self._named.get(layer)
        if named is None:
            named = self._names.layer(layer, unit)
            mx.eval(arrays_of(named))  # the next pass may be another thread's
            if f"layer.{layer}" in self._spine.resident_keys:
                self._named[layer] = named
        return named
