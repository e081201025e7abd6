"""Token ids to text as they are decided, never showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from deltafin.text.tokenizer import K3Tokenizer


class StreamingDetokenizer:
    """Turns a stream of ids into text pieces whose concatenation equals ``tokenizer.decode`` of all ids.

    A token may end inside a UTF-8 character; those bytes wait for the next one. Special ids give their name.
    """

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` completes; may be empty.

        Raises:
            InputError: an id outside the vocabulary.
        """
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def flush(self) -> str:
        """Ends the stream: an incomplete character becomes U+FFFD. A new stream may follow."""
        return self._decoder.decode(b"", final=True)
