"""mlx-lm's own Kimi K3, on CPU, over any released-format folder.

A second implementation by other people: expanded MLA for several rows, absorbed for one, its own MXFP4 product. Safe to
use in a process that also runs torch; the caller's default mlx device is restored after each call.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models import kimi_k3
from mlx_lm.models.base import create_attention_mask

Dtype = Literal["float32", "stored"]

# Not typed, or not usefully so.
_K3: Any = kimi_k3
_NN: Any = mlx.nn
_LOAD: Any = mx.load


class MlxTrace(NamedTuple):
    """One pass: ``logits`` [T, vocab]; P after each layer's MLP, ``[T, hidden]``; experts per MoE layer, ``[T, k]``."""

    logits: npt.NDArray[np.float32]
    layers: list[npt.NDArray[np.float32]]
    experts: list[npt.NDArray[np.intp]]


class MlxK3:
    """The target model of a folder.

    Args:
        folder: config, safetensors shards and index.
        dtype: ``float32`` widens all weights (exactly), and so the activations; ``stored`` leaves both as they are,
            which means bf16 activations for a released checkpoint.
        latent_norm_eps: epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``; mlx-lm's own is 1e-6.
        lean: with ``float32``, keep weights as stored and widen each for the moment of its use. The same numbers in
            half the memory, a little slower.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        dtype: Dtype = "float32",
        latent_norm_eps: float = 1e-6,
        lean: bool = False,
    ) -> None:
        folder = Path(folder)
        weights: dict[str, Any] = {}
        with _on_cpu():
            config = json.loads((folder / "config.json").read_text())
            self.model: Any = _K3.Model(_K3.ModelArgs.from_dict(config))
            model = self.model
            for file in sorted(folder.glob("model*.safetensors")):
                weights |= _LOAD(str(file))
            weights = model.sanitize(weights)
            _NN.quantize(
                model,
                group_size=32,
                bits=4,
                mode="mxfp4",
                class_predicate=lambda path, module: hasattr(module, "to_quantized") and f"{path}.scales" in weights,
            )
            model.load_weights(list(weights.items()), strict=True)
            if dtype == "float32" and lean:
                # Every product promotes its weight to the activations' dtype, which starts here.
                model.model.embed_tokens.weight = model.model.embed_tokens.weight.astype(mx.float32)
            elif dtype == "float32":
                model.set_dtype(mx.float32)
            for layer in model.layers:
                if not layer.is_linear:
                    layer.self_attn.q_a_layernorm.eps = latent_norm_eps
                    layer.self_attn.kv_a_layernorm.eps = latent_norm_eps
            model.eval()
            mx.eval(model.parameters())

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits ``[T, vocab]`` of one pass over ``ids`` from the empty state."""
        with _on_cpu():
            return _numpy(self.model(mx.array([list(ids)]), self.model.make_cache())[0])

    def trace(self, ids: Sequence[int]) -> MlxTrace:
        """One pass over ``ids`` from the empty state, with what happened inside."""
        text = self.model.model
        layers: list[npt.NDArray[np.float32]] = []
        experts: list[npt.NDArray[np.intp]] = []
        eps = text.args.rms_norm_eps
        with _on_cpu():
            h = text.embed_tokens(mx.array([list(ids)]))
            # The mask depends on T alone here: an empty state and no padding.
            mask = create_attention_mask(h, None, return_array=True)
            blocks = _K3.ResidualBlocks(eps)
            for layer, cache in zip(self.model.layers, self.model.make_cache(), strict=True):
                with _recorded_experts(layer.mlp, experts):
                    h, blocks = layer(h, mask=None if layer.is_linear else mask, cache=cache, blocks=blocks)
                layers.append(_numpy(h[0]))
            w_eff = text.output_attn_res_norm.weight.astype(mx.float32) * text.output_attn_res_proj.weight[0]
            h = text.norm(_K3._attn_res_mix(blocks, h, w_eff, eps))
            return MlxTrace(_numpy(self.model.language_model.lm_head(h)[0]), layers, experts)

    def generate_greedy(
        self, ids: Sequence[int], max_new: int, stop: Collection[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Greedy continuation (a stop token is included) and the top-two logit margin at each step."""
        out: list[int] = []
        margins: list[float] = []
        for token, margin in self.steps(ids):
            out.append(token)
            margins.append(margin)
            if token in stop or len(out) >= max_new:
                break
        return out, margins

    def steps(self, ids: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Endless greedy decoding with cache: each next token and its top-two logit margin, when it is known."""
        cache, x = self.model.make_cache(), [list(ids)]
        while True:
            with _on_cpu():
                logits = self.model(mx.array(x), cache)[0, -1].astype(mx.float32)
                best, top = mx.argmax(logits), mx.topk(logits, 2)
                mx.eval(best, top)
            x = [[int(np.array(best))]]
            yield x[0][0], float(np.ptp(np.array(top)))


@contextmanager
def _on_cpu() -> Iterator[None]:
    before: Any = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        yield
    finally:
        mx.set_default_device(before)


@contextmanager
def _recorded_experts(mlp: Any, log: list[npt.NDArray[np.intp]]) -> Iterator[None]:
    inner = getattr(mlp, "switch_mlp", None)
    if inner is None:  # a dense layer
        yield
        return

    def recorder(x: mx.array, indices: mx.array) -> Any:
        log.append(np.array(indices[0]).astype(np.intp))
        return inner(x, indices)

    mlp.switch_mlp = recorder
    try:
        yield
    finally:
        mlp.switch_mlp = inner


def _numpy(x: mx.array) -> npt.NDArray[np.float32]:
    x = x.astype(mx.float32)
    mx.eval(x)
    return np.array(x)
