"""The model over tensors in memory, without store or streams, and with plain kernels where wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from deltafin.checkpoint.config import K3Config
from deltafin.kernels import ExpertLayout, reference
from deltafin.model.target import Target
from deltafin.streaming.experts import Lease
from deltafin.streaming.stop import StopFlag

PREFIX = "language_model."
PARTS = [f"w{n}.weight_{part}" for n in (1, 2, 3) for part in ("packed", "scale")]


class MemorySpine:
    """Every unit resident."""

    resident_keys: frozenset[str] = frozenset()

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @contextmanager
    def unit(self, key: str) -> Iterator[dict[str, torch.Tensor]]:
        if key == "head":
            yield {k: v for k, v in self._tensors.items() if ".layers." not in k and "embed" not in k}
        else:
            name = f"{PREFIX}model.layers.{key.split('.')[1]}."
            yield {k: v for k, v in self._tensors.items() if k.startswith(name)}

    def embedding(self, ids: Sequence[int]) -> torch.Tensor:
        return self._tensors[f"{PREFIX}model.embed_tokens.weight"][list(ids)].float()


class MemoryBatches(list[list[Lease]]):
    """All that was asked for, at hand."""

    submitted = True


class MemoryExperts:
    """Every expert at hand, in the released byte order."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: K3Config) -> None:
        self.blobs: dict[tuple[int, int], torch.Tensor] = {}
        for layer in config.moe_layers:
            for expert in range(config.experts):
                p = f"{PREFIX}model.layers.{layer}.block_sparse_moe.experts.{expert}."
                self.blobs[layer, expert] = torch.cat([tensors[p + part].reshape(-1) for part in PARTS])
        self.by_address = {blob.data_ptr(): blob for blob in self.blobs.values()}

    @contextmanager
    def fetch(self, layer: int, experts: Sequence[int], **_: object) -> Iterator[MemoryBatches]:
        # Two batches in an order that is not the router's, as drives deliver them.
        leases = [Lease((layer, e), self.blobs[layer, e].data_ptr(), 0) for e in reversed(experts)]
        yield MemoryBatches([batch for batch in (leases[:3], leases[3:]) if batch])

    def release(self, leases: Sequence[Lease]) -> None:
        pass

    def look_ahead(self, *_: object, **__: object) -> None:
        """Nothing is read, so nothing is read ahead."""

    def look_again(self, *_: object, **__: object) -> None:
        """Nothing is read, so nothing is read ahead."""


class WatchedTarget(Target):
    """Keeps the fp32 accumulator after each layer of the last pass in ``accumulators``."""

    def run(self, *args, **how):  # type: ignore[no-untyped-def]
        self.accumulators: list[torch.Tensor] = []
        return super().run(*args, **how)

    def _layer(self, *args, **how):  # type: ignore[no-untyped-def]
        after = super()._layer(*args, **how)
        self.accumulators.append(after.clone())
        return after


def open_target(folder: Path) -> tuple[WatchedTarget, MemoryExperts]:
    """The released files in ``folder`` as a target."""
    config = K3Config.load(folder)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    experts = MemoryExperts(tensors, config)
    layout = ExpertLayout.released(config.latent, config.expert_intermediate)
    target = WatchedTarget(
        config,
        layout,
        MemorySpine(tensors),  # type: ignore[arg-type]
        experts,  # type: ignore[arg-type]
        file_order=lambda layer: sorted(range(config.experts), key=str),
        block_rows=256,
        stop=StopFlag(),
    )
    return target, experts


def plain_kernels(experts: MemoryExperts) -> SimpleNamespace:
    """The reference kernels under the native ones' calling conventions; takes fp32 matrices too."""

    def into(out: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
        if out is None:
            return value
        out.copy_(value)
        return out

    def simple(name: str) -> object:
        function = getattr(reference, name)
        return lambda *args, out=None, **how: into(out, function(*args, **how))

    def recurrence(q, k, v, decay, beta, state_in, state_out, out) -> None:  # type: ignore[no-untyped-def]
        result, state = reference.kda_recurrence(k if q is None else q, k, v, decay, beta, state_in)
        state_out.copy_(state)
        if out is not None:
            out.copy_(result)

    def expert_forward(x, blobs, layout, splits, rows, slots, out, *, beta, linear_beta) -> None:  # type: ignore[no-untyped-def]
        for i, address in enumerate(blobs):
            part = slice(int(splits[i]), int(splits[i + 1]))
            blob = experts.by_address[address]
            out[slots[part].long()] = reference.expert(x[rows[part].long()], blob, layout, beta, linear_beta)

    def kda_prepare(qkv, *args, **how):  # type: ignore[no-untyped-def]
        return reference.kda_prepare(qkv, *args, **how)

    names = ("linear", "rmsnorm", "attnres_mix_norm", "gated_mlp", "kda_output", "mla_attention", "combine_norm")
    return SimpleNamespace(
        **{name: simple(name) for name in names},
        kda_prepare=kda_prepare,
        kda_recurrence=recurrence,
        expert_forward=expert_forward,
        router=reference.router,
    )
