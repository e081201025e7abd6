"""Qwen3 base models on MLX: ``mlx-lm``'s layers, given only values and tensors that were checked before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from deltafin.apple.mlx_lm_models import model_file
from deltafin.checkpoint.tensorfile import SINGLE_NAME, read_bounded
from deltafin.drafting.controller import DraftSource
from deltafin.drafting.qwen_files import CACHE_POSITIONS, MAX_TOKENIZER_BYTES, QwenFiles, check, model_folders
from deltafin.drafting.qwen_text import QwenSource
from deltafin.errors import DraftError
from deltafin.text.tokenizer import K3Tokenizer

_PREFILL = 512
_REFETCH = "fetch the Qwen draft again"


class QwenModel:
    """A Qwen3 base model with the cache of one text; the part that two texts share is kept.

    Args:
        files: checked files.

    Raises:
        DraftError: a package is missing, or the files cannot be used.
    """

    def __init__(self, files: QwenFiles) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as e:
            raise DraftError(f"Qwen drafts need a package ({e})", remedy="pip install tokenizers") from None
        path = files.folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_str(read_bounded(path, MAX_TOKENIZER_BYTES).decode())
        except Exception as e:  # the library raises bare Exception
            raise DraftError(f"{path}: {e}", remedy=_REFETCH) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        qwen3 = model_file("qwen3")
        self._new_layer_cache: Callable[[], Any] = model_file("cache").KVCache
        self._model: Any = qwen3.Model(qwen3.ModelArgs.from_dict(files.config.model_dump()))
        path = files.folder / SINGLE_NAME
        try:
            lazy: Any = mx.load(str(path))
            self._model.load_weights([(name, lazy[name]) for name in files.tensors], strict=True)
            self._model.eval()
            mx.eval(self._model.parameters())
        except (KeyError, OSError, RuntimeError, ValueError) as e:
            raise DraftError(f"{path} cannot be used: {e}", remedy=_REFETCH) from None
        self._end = files.config.eos_token_id
        self._positions = min(files.config.max_position_embeddings, CACHE_POSITIONS)
        self._forget()

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special ones around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def complete(self, ids: Sequence[int], count: int) -> list[tuple[int, float]]:
        """Up to ``count`` greedy (id, probability) after ``ids``; none for a text longer than the cache may be."""
        if len(ids) + count > self._positions:
            return []
        pairs = zip(ids[:-1], self._cached, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for layer in self._cache:
            layer.trim(len(self._cached) - same)
        del self._cached[same:]
        out: list[tuple[int, float]] = []
        feed = list(ids[same:])
        while True:
            for i in range(0, len(feed), _PREFILL):
                token, probability = self._forward(feed[i : i + _PREFILL])
            if token == self._end:
                return out
            out.append((token, probability))
            if len(out) == count:
                return out
            feed = [token]

    def _forward(self, ids: list[int]) -> tuple[int, float]:
        """The likeliest token after the last of ``ids``, and its probability."""
        try:
            hidden = self._model.model(mx.array([ids]), self._cache)[0, -1]
            logits = self._model.model.embed_tokens.as_linear(hidden).astype(mx.float32)
            token = mx.argmax(logits)
            probability = mx.softmax(logits)[token]
            found = int(np.array(token)), float(np.array(probability))
        except BaseException:
            # Some layers may have grown and others not.
            self._forget()
            raise
        self._cached += ids
        return found

    def _forget(self) -> None:
        self._cache: list[Any] = [self._new_layer_cache() for _ in self._model.layers]
        self._cached: list[int] = []


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
