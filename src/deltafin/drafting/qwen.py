"""Qwen drafts for raw completions: guesses text, and K3's tokenizer turns the text into guessed tokens.

Two vocabularies meet only in text. The whole history is decoded, encoded for Qwen, continued greedily, decoded and
encoded for K3 again; where the result does not begin with the very history, there is no proposal. The model's
arithmetic is ``transformers``' with our product kernels in place of its linear layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from deltafin import kernels
from deltafin.checkpoint.tensorfile import SINGLE_NAME, read_bounded
from deltafin.drafting.dspark import Proposal
from deltafin.drafting.qwen_files import CACHE_POSITIONS, MAX_TOKENIZER_BYTES, QwenFiles, check, model_folders
from deltafin.errors import DraftError
from deltafin.text.tokenizer import K3Tokenizer

MAX_BUDGET = 20
SURE = 0.3
"""A Qwen token less likely than this ends a longer proposal."""
CLEARLY_BETTER = 0.02
_PREFILL = 512


@dataclass(frozen=True, slots=True)
class Guess:
    """One model's proposal.

    Attributes:
        ids: K3 tokens after the history, up to the first unsure Qwen token.
        raw: the same without that cut.
        least: smallest probability among all generated Qwen tokens; 0 when none were generated.
        stopped: whether unsure tokens were cut off.
    """

    ids: tuple[int, ...]
    raw: tuple[int, ...]
    least: float
    stopped: bool


NOTHING = Guess((), (), 0.0, False)


class Completer(Protocol):
    """A small language model with its own tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Its ids of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of its ids."""

    def complete(self, ids: Sequence[int], count: int) -> list[tuple[int, float]]:
        """Up to ``count`` greedy (id, probability) after ``ids``."""


def guess(model: Completer, tokenizer: K3Tokenizer, history: Sequence[int], count: int) -> Guess:
    """One model's proposal of up to ``count`` K3 tokens after ``history``."""
    text = tokenizer.decode(history)
    if tokenizer.encode(text, allow_special=True) != list(history):
        return NOTHING
    prefix = model.encode(text)
    if not prefix:
        return NOTHING
    budget = min(max(count + 2, 3), MAX_BUDGET)
    while True:
        drawn = model.complete(prefix, budget)
        sure = len(drawn)
        if count > 2:
            sure = next((i for i, (_, p) in enumerate(drawn) if p < SURE), len(drawn))

        def translate(kept: int, drawn: list[tuple[int, float]] = drawn) -> tuple[int, ...]:
            whole = model.decode([*prefix, *(token for token, _ in drawn[:kept])])
            ids = tokenizer.encode(whole, allow_special=True)
            if ids[: len(history)] != list(history):
                return ()
            return tuple(ids[len(history) : len(history) + count])

        ids, stopped = translate(sure), sure < len(drawn)
        if len(ids) < count and not stopped and len(drawn) == budget < MAX_BUDGET:
            budget = MAX_BUDGET
            continue
        raw = translate(len(drawn)) if stopped else ids
        return Guess(ids, raw, min((p for _, p in drawn), default=0.0), stopped)


def combine(count: int, probe: Guess, wide: Callable[[], Guess]) -> tuple[int, ...]:
    """The proposal of a small and a larger model; the larger one is asked only when the small one falls short."""
    if len(probe.ids) == count:
        return probe.ids
    if len(probe.raw) == count and len(probe.ids) >= min(3, count):
        return probe.raw
    other = wide()
    if len(probe.raw) == count and probe.raw == other.raw:
        return probe.raw
    return other.ids if other.least > probe.least + CLEARLY_BETTER else probe.ids


class QwenModel:
    """A Qwen3 base model with the cache of one text; the part that two texts share is kept.

    Args:
        files: checked files.

    Raises:
        DraftError: the optional packages are missing, or the files cannot be used.
    """

    def __init__(self, files: QwenFiles) -> None:
        try:
            from safetensors.torch import load_file
            from tokenizers import Tokenizer
            from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
            from transformers.utils import logging
        except ImportError as e:
            raise DraftError(
                f"Qwen drafts need optional packages ({e})", remedy="install them with: pip install 'deltafin[qwen]'"
            ) from None
        c = files.config
        path = files.folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_str(read_bounded(path, MAX_TOKENIZER_BYTES).decode())
        except Exception as e:  # the library raises bare Exception
            raise DraftError(f"{path}: {e}", remedy="fetch the Qwen draft again") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        tensors = load_file(files.folder / SINGLE_NAME)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        # Given as values and tensors, so that the library looks at no file of the folder itself.
        config: Any = Qwen3Config(**c.model_dump(exclude={"model_type"}))
        # A terminal belongs to the user's text.
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        model_class: Any = Qwen3ForCausalLM
        self._model = model_class.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.bfloat16)
        self._model.eval()
        _use_kernels(self._model)
        self._cache_name = "cache" if "cache" in signature(Qwen3ForCausalLM.forward).parameters else "past_key_values"
        self._new_cache: Callable[[], Any] = DynamicCache
        self._cache: Any = DynamicCache()
        self._cached: list[int] = []
        self._end = c.eos_token_id
        self._positions = min(c.max_position_embeddings, CACHE_POSITIONS)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special ones around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    @torch.inference_mode()
    def complete(self, ids: Sequence[int], count: int) -> list[tuple[int, float]]:
        """Up to ``count`` greedy (id, probability) after ``ids``; none for a text longer than the cache may be."""
        if len(ids) + count > self._positions:
            return []
        pairs = zip(ids[:-1], self._cached, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same < len(self._cached):
            # Newer versions only know how many to remove; older ones understand it too.
            self._cache.crop(same - len(self._cached))
            del self._cached[same:]
        out: list[tuple[int, float]] = []
        feed = list(ids[same:])
        while True:
            for i in range(0, len(feed), _PREFILL):
                logits = self._forward(feed[i : i + _PREFILL])
            probability, token = torch.max(torch.softmax(logits, -1), -1)
            if int(token) == self._end:
                return out
            out.append((int(token), float(probability)))
            if len(out) == count:
                return out
            feed = [int(token)]

    def _forward(self, ids: list[int]) -> torch.Tensor:
        """Logits after the last of ``ids``, fp32 [vocab]."""
        try:
            cache = {self._cache_name: self._cache}
            result = self._model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1, **cache)
        except BaseException:
            # Some layers may have grown and others not.
            self._cache, self._cached = self._new_cache(), []
            raise
        self._cached += ids
        logits: torch.Tensor = result.logits[0, -1].float()
        return logits


class _Linear(nn.Module):
    """x·Wᵀ on our kernels: fp32 activations, bf16 weights as stored, on the engine's threads."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.float().reshape(-1, x.shape[-1])
        return kernels.linear(flat, self.weight.data).view(*x.shape[:-1], len(self.weight))


class _Embedding(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids].float()


def _use_kernels(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, _Linear(child.weight.data))
            elif isinstance(child, nn.Embedding):
                setattr(parent, name, _Embedding(child.weight.data))


class QwenSource:
    """One or two Qwen models as a session's source; needs nothing from K3 but its tokens.

    Args:
        models: the small one, and perhaps a larger one.
        tokenizer: K3's.
    """

    name = "qwen"

    def __init__(self, models: Sequence[Completer], tokenizer: K3Tokenizer) -> None:
        self._models = models
        self._tokenizer = tokenizer

    def propose(self, tokens: Sequence[int], count: int) -> Proposal:
        """Guesses after ``tokens``; without confidences of its own, since probabilities belong to Qwen's tokens."""
        probe, *wide = (partial(guess, model, self._tokenizer, tokens, count) for model in self._models)
        first = probe()
        return Proposal(combine(count, first, wide[0]) if wide else first.ids, ())

    def commit(self, tokens: Sequence[int], taps: Sequence[torch.Tensor]) -> None:
        """Nothing to note: the history comes with every proposal."""

    def reset(self, position: int) -> None:
        """Nothing to forget: the cache keeps what the next text shares with the last one."""

    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Nothing to save."""
        return []

    def restore(self, position: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing to take back."""


def load_models(folder: Path) -> list[QwenModel]:
    """Loads the one or two models in ``folder``.

    Raises:
        DraftError, TensorFileError: they cannot be used.
    """
    return [QwenModel(check(f)) for f in model_folders(folder)]
