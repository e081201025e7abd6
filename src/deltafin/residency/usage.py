"""How likely each expert is to be used by the next token, learned from the routes of the tokens so far.

An expert's past is summarised by its share of tokens in several exponentially fading windows, from a few tokens (what
the text is about now) to thousands (what is popular in general, kept between runs as the heat histogram). How much each
window says differs between models and texts, so the weights are not chosen here: they are the running least-squares
fit of "used by the next token" on the shares.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

HALF_LIVES = (1.0, 4.0, 16.0, 64.0, 256.0)
"""Tokens after which a use counts half, per fading window."""

LONG_HALF_LIFE = 4096.0
"""The same for the window that persists between runs."""

_FORGET = 0.999  # per token, of the fit: a new topic is noticed within a few hundred tokens
_RIDGE = 10.0  # tokens' worth of belief in equal weights, while little has been seen
_FLOOR = 1e-6
_MAX_FITTED = 32  # tokens of one commit the fit looks at: a long prefill would teach nothing more

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


class UseModel:
    """Chances of use of ``layers`` x ``experts`` experts, all in flat arrays indexed ``layer * experts + expert``.

    Args:
        layers: layers with routed experts, counted from 0.
        experts: per layer.
        heat: counts [layers, experts] of earlier runs, faded with ``LONG_HALF_LIFE``.
        heat_tokens: tokens (equally faded) those counts come from.
    """

    def __init__(
        self, layers: int, experts: int, *, heat: npt.NDArray[np.floating] | None = None, heat_tokens: float = 0.0
    ) -> None:
        self.layers, self.experts = layers, experts
        half_lives = np.array([*HALF_LIVES, LONG_HALF_LIFE])
        windows = len(half_lives)
        self._fade = (2.0 ** (-1.0 / half_lives)).astype(np.float32)
        self._counts = np.zeros((windows, layers * experts), np.float32)
        self._tokens = np.zeros(windows, np.float32)
        if heat is not None and heat_tokens > 0:
            self._counts[-1] = np.asarray(heat, np.float32).reshape(-1)
            self._tokens[-1] = heat_tokens
        self._weights = np.full(windows, 1.0 / windows, np.float32)
        self._prior = np.eye(windows) * (_RIDGE * layers * 256 / experts)
        self._gram = self._prior.copy()
        self._cross = self._gram @ self._weights
        self._offsets = (np.arange(layers) * experts)[:, None]
        self.chances: Floats = np.full(layers * experts, _FLOOR, np.float32)
        self._estimate()

    def observe(self, routes: npt.NDArray[np.integer]) -> None:
        """Learns from committed tokens.

        Args:
            routes: expert numbers [tokens, layers, k], in token order.
        """
        if len(routes) > _MAX_FITTED:
            self._skip(routes[:-_MAX_FITTED])
            routes = routes[-_MAX_FITTED:]
        for row in routes:
            used = (row + self._offsets).reshape(-1)
            shares = self._counts / np.maximum(self._tokens, 1e-3)[:, None]
            if self._tokens[0]:
                self._gram = _FORGET * self._gram + shares @ shares.T
                self._cross = _FORGET * self._cross + shares[:, used].sum(axis=1)
            self._counts *= self._fade[:, None]
            self._counts[:, used] += 1
            self._tokens = self._tokens * self._fade + 1
        # The prior fades with the rest; a trace of it keeps the system solvable.
        self._weights = np.linalg.solve(self._gram + 1e-4 * self._prior, self._cross).astype(np.float32)
        self._estimate()

    def after_layer(self, layer: int, used: Indices) -> Floats:
        """Chances of all experts of ``layer`` for the next token, once the running token has used ``used`` of them.

        Not having been used is news too: last token's experts that were passed over lose most of their chance.
        """
        span = slice(layer * self.experts, (layer + 1) * self.experts)
        scale = self._weights / (self._tokens * self._fade + 1)
        chances: Floats = (scale * self._fade) @ self._counts[:, span]
        chances[used] += scale.sum()
        return np.maximum(chances, _FLOOR, out=chances)

    def likeliest(self, layer: int, count: int) -> list[int]:
        """The ``count`` experts of ``layer`` most likely to be used by the next token, likeliest first."""
        chances = self.chances[layer * self.experts : (layer + 1) * self.experts]
        count = min(count, self.experts)
        best = np.argpartition(chances, self.experts - count)[-count:]
        ranked: list[int] = best[np.argsort(-chances[best], kind="stable")].tolist()
        return ranked

    def long_share(self) -> Floats:
        """Share of tokens that used each expert, over the long window, [layers * experts]."""
        shares: Floats = self._counts[-1] / np.maximum(self._tokens[-1], 1e-3)
        return shares

    def _skip(self, routes: npt.NDArray[np.integer]) -> None:
        """Counts tokens without fitting, all at once."""
        count = len(routes)
        ages = np.arange(count - 1, -1, -1, dtype=np.float32)
        used = (routes + self._offsets).reshape(count, -1)
        flat = used.reshape(-1)
        for i, fade in enumerate(self._fade):
            weight = fade**ages
            self._counts[i] *= fade**count
            self._counts[i] += np.bincount(flat, np.repeat(weight, used.shape[1]), self._counts.shape[1])
            self._tokens[i] = self._tokens[i] * fade**count + weight.sum()

    def _estimate(self) -> None:
        scale = self._weights / np.maximum(self._tokens, 1e-3)
        np.maximum(scale @ self._counts, _FLOOR, out=self.chances)
