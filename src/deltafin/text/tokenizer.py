"""K3's tokenizer, from the released rank file: ordinary bytes are BPE ranks, the last 256 ids are special.

Pattern, slicing and order of steps follow Moonshot's tokenizer; the byte-pair merging is tiktoken's.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tiktoken

from deltafin.checkpoint.config import K3Config
from deltafin.errors import InputError, TokenizerError

SPECIAL_IDS = 256
MAX_RANK_FILE_BYTES = 64 << 20  # the released file has 2.8 MB
MAX_CONFIG_BYTES = 4 << 20
MAX_TOKEN_BYTES = 1024
MAX_RANKS = 1 << 22
MAX_SPECIAL_CHARS = 256

SLICE_CHARS = 400_000
RUN_CHARS = 25_000

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
END_OF_MESSAGE, END_OF_TEXT = "<|end_of_msg|>", "[EOS]"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# One piece: whole runs of whitespace or of other characters up to RUN_CHARS, then the first RUN_CHARS of a
# longer one. Python's \s is str.isspace, which the released tokenizer uses here; the pattern's lacks U+001C
# to U+001F.
_PIECE = re.compile(
    rf"(?:\s{{1,{RUN_CHARS}}}+(?!\s)|\S{{1,{RUN_CHARS}}}+(?!\S))*+(?:\s{{{RUN_CHARS}}}|\S{{{RUN_CHARS}}})?"
)


class K3Tokenizer:
    """Text to ids and back. Immutable after loading; safe to share between threads.

    Attributes:
        vocab_size: ordinary ids plus the 256 special ones.
        special: id of each special token by name, e.g. ``"<|open|>"``.
        stop_ids: ids after which nothing follows: end of message (chat) and end of text (raw completions).
    """

    def __init__(self, tokens: list[bytes], named: dict[int, str]) -> None:
        """Use ``load``. ``tokens`` are the ordinary tokens in rank order, ``named`` some special ones."""
        self.first_special = len(tokens)
        names = [named.get(i, f"<|reserved_token_{i}|>") for i in range(len(tokens), len(tokens) + SPECIAL_IDS)]
        self.special = {name: i for i, name in enumerate(names, len(tokens))}
        self.vocab_size = len(tokens) + SPECIAL_IDS
        self.stop_ids = frozenset({self.special[END_OF_MESSAGE], self.special[END_OF_TEXT]})
        # Longest name first, so that a name which begins another never hides it.
        self._special_names = re.compile("|".join(re.escape(n) for n in sorted(names, key=len, reverse=True)))
        self._bytes = [*tokens, *(name.encode() for name in names)]
        self._bpe = tiktoken.Encoding(
            "kimi-k3",
            pat_str=PATTERN,
            mergeable_ranks={t: i for i, t in enumerate(tokens)},
            special_tokens={},
        )

    @classmethod
    def load(cls, folder: Path, config: K3Config | None = None) -> K3Tokenizer:
        """Reads ``tiktoken.model`` and ``tokenizer_config.json`` in ``folder``.

        Args:
            config: when given, the vocabulary size and the end-of-message id must agree with it.

        Raises:
            TokenizerError: missing, too large, malformed, or not the tokenizer of this model.
        """
        ranks, names = folder / "tiktoken.model", folder / "tokenizer_config.json"
        tokens = _parse_ranks(_read(ranks, MAX_RANK_FILE_BYTES), ranks)
        named = _parse_names(_read(names, MAX_CONFIG_BYTES), names, len(tokens))
        for required in (OPEN, CLOSE, SEP, END_OF_MESSAGE, END_OF_TEXT):
            if required not in named.values():
                raise _bad(names, f"added_tokens_decoder does not name {required}")
        self = cls(tokens, named)
        if len(self.special) != SPECIAL_IDS:
            raise _bad(names, "added_tokens_decoder gives one name to two ids")
        if config is not None and config.vocab_size != self.vocab_size:
            raise _bad(
                ranks,
                f"{self.vocab_size} ids with the special ones, but config.json says {config.vocab_size}",
            )
        if config is not None and config.eos_id != self.special[END_OF_MESSAGE]:
            raise _bad(names, f"{END_OF_MESSAGE} is not config.json's eos_token_id {config.eos_id}")
        return self

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of ``text``, without any begin or end token.

        Args:
            allow_special: names of special tokens become their id. Only for text written by this program; by
                default they are encoded as the ordinary characters they are.

        Raises:
            InputError: a lone surrogate, which no UTF-8 text can contain.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(
                f"the text has a lone surrogate (U+{ord(text[e.start]):04X}) at character {e.start}",
                remedy="send well-formed Unicode text",
            ) from None
        ids: list[int] = []
        for piece in _pieces(text):
            start = 0
            for hit in self._special_names.finditer(piece) if allow_special else ():
                ids += self._bpe.encode_ordinary(piece[start : hit.start()])
                ids.append(self.special[hit.group()])
                start = hit.end()
            ids += self._bpe.encode_ordinary(piece[start:])
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that id ``token`` stands for; a special id's are its name.

        Raises:
            InputError: an id outside the vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise InputError(f"token id {token} is not in the vocabulary of {self.vocab_size}")
        return self._bytes[token]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, special ids their name.

        Raises:
            InputError: an id outside the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        """Whether ``token`` is one of the 256 special ids."""
        return token >= self.first_special


def _pieces(text: str) -> Iterator[str]:
    """Cuts ``text`` as the released tokenizer does: every SLICE_CHARS, then inside runs above RUN_CHARS."""
    for start in range(0, len(text), SLICE_CHARS):
        piece = text[start : start + SLICE_CHARS]
        if len(piece) <= RUN_CHARS:
            yield piece
        else:
            yield from filter(None, _PIECE.findall(piece))


def _bad(path: Path, problem: str) -> TokenizerError:
    return TokenizerError(f"{path}: {problem}", remedy=f"fetch the released {path.name} again")


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as f:
            data = f.read(limit + 1)
    except FileNotFoundError:
        raise TokenizerError(
            f"{path} does not exist", remedy="point --model at a folder with the released Kimi K3 files"
        ) from None
    except OSError as e:
        raise _bad(path, f"cannot be read: {e.strerror}") from None
    if len(data) > limit:
        raise _bad(path, f"larger than {limit} bytes")
    return data


def _parse_ranks(data: bytes, path: Path) -> list[bytes]:
    """``<base64 of the token's bytes> <rank>`` a line; ranks count up from 0."""
    tokens: list[bytes] = []
    for n, line in enumerate(data.splitlines()):
        text, _, rank = line.partition(b" ")
        try:
            token = binascii.a2b_base64(text, strict_mode=True)
        except binascii.Error:
            raise _bad(path, f"line {n + 1} does not begin with base64") from None
        if rank != b"%d" % n:
            raise _bad(path, f"line {n + 1} has rank {rank[:20]!r} instead of {n}")
        if not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise _bad(path, f"line {n + 1} has a token of {len(token)} bytes (1 to {MAX_TOKEN_BYTES} are valid)")
        if n >= MAX_RANKS:
            raise _bad(path, f"more than {MAX_RANKS} tokens")
        tokens.append(token)
    unique = set(tokens)
    if len(unique) != len(tokens):
        raise _bad(path, f"{len(tokens) - len(unique)} tokens occur twice")
    if missing := [b for b in range(256) if bytes([b]) not in unique]:
        raise _bad(path, f"no token for the single byte {missing[0]}")
    return tokens


def _parse_names(data: bytes, path: Path, first: int) -> dict[int, str]:
    """The special ids that ``added_tokens_decoder`` names."""
    try:
        raw: Any = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise _bad(path, f"not JSON: {e}") from None
    table = raw.get("added_tokens_decoder") if isinstance(raw, dict) else None
    if not isinstance(table, dict):
        raise _bad(path, "has no object added_tokens_decoder")
    named: dict[int, str] = {}
    for key, entry in table.items():
        if not re.fullmatch(r"[0-9]{1,9}", key) or not first <= int(key) < first + SPECIAL_IDS:
            raise _bad(path, f"id {key[:20]!r} is not one of the special ids {first}…{first + SPECIAL_IDS - 1}")
        name = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not 0 < len(name) <= MAX_SPECIAL_CHARS or not name.isprintable():
            raise _bad(path, f"id {key} has no printable name of 1 to {MAX_SPECIAL_CHARS} characters")
        named[int(key)] = name
    return named
