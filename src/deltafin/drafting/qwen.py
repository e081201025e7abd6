"""Qwen drafts in PyTorch: ``transformers``' model with our product kernels in place of its linear layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deltafin import kernels
from deltafin.checkpoint.tensorfile import SINGLE_NAME, read_bounded
from deltafin.drafting.controller import DraftSource
from deltafin.drafting.qwen_files import CACHE_POSITIONS, MAX_TOKENIZER_BYTES, QwenFiles, check, model_folders
from deltafin.drafting.qwen_text import QwenSource
from deltafin.errors import DraftError
from deltafin.text.tokenizer import K3Tokenizer

_PREFILL = 512


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


def load_models(folder: Path) -> list[QwenModel]:
    """Loads the one or two models in ``folder``.

    Raises:
        DraftError, TensorFileError: they cannot be used.
    """
    return [QwenModel(check(f)) for f in model_folders(folder)]


def qwen_source(folder: Path, tokenizer: K3Tokenizer) -> Callable[[], DraftSource]:
    """Loads the models in ``folder``; what is returned makes a source for each session.

    Args:
        tokenizer: K3's.

    Raises:
        DraftError, TensorFileError: they cannot be used.
    """
    return partial(QwenSource, load_models(folder), tokenizer)
