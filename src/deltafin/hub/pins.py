"""What is fetched: repositories at fixed revisions, with the checksums known in advance."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from deltafin.errors import UsageError

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Pin:
    """A repository at one revision.

    Attributes:
        repo: ``owner/name``.
        revision: full commit id; a branch or tag would let the same command fetch different bytes tomorrow.
        sha256: checksums known in advance, by file name; they outrank whatever the hub says.
    """

    repo: str
    revision: str
    sha256: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _REPO.fullmatch(self.repo) or ".." in self.repo:
            raise UsageError(f"{self.repo[:100]!r} is not a repository", remedy="write it as OWNER/NAME")
        if not _REVISION.fullmatch(self.revision):
            raise UsageError(
                f"{self.revision[:60]!r} is not a full commit id", remedy="give all 40 hexadecimal digits of the commit"
            )


K3 = Pin(
    "moonshotai/Kimi-K3",
    "c5d1dd4c428bd1ce8b88c5044f3b6ccde9e3b721",
    {
        "config.json": "9710e121a58d03ac92c8d6da287a19541994319afbbe6d6202af001ffd379213",
        "tiktoken.model": "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103",
    },
)
"""The released model."""

DSPARK = Pin(
    "Inferact/Kimi-K3-DSpark",
    "cf6b8244620e7ea4b0651d214f28e89eac75bed6",
    {
        "model.safetensors": "f9972a636d92a11994cdcfc88fd4c5b5d50d6eb2a89af016031593b8c65c2053",
        "config.json": "5a3c2f4f91c965ed93b14de5f12a4e9c17fd98d8c99916ed2deb26ce8702f970",
    },
)
"""The default draft."""

_QWEN_TOKENIZER = "c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539"

QWEN = {
    "probe": Pin(
        "Qwen/Qwen3-0.6B-Base",
        "da87bfb608c14b7cf20ba1ce41287e8de496c0cd",
        {
            "model.safetensors": "cd2a512003e2f9f3cd3c32a9c3573f820bb28c940f73c57b1ddaa983d9223eba",
            "config.json": "504a6b58c4271583724e66584b6b7698aea18450209df6b2f7582df0e89cee59",
            "tokenizer.json": _QWEN_TOKENIZER,
        },
    ),
    "wide": Pin(
        "Qwen/Qwen3-1.7B-Base",
        "ea980cb0a6c2ae4b936e82123acc929f1cec04c1",
        {
            "model.safetensors": "6df85b39330e5a425ee36253d0f894e4387e4f0a15b9c53cb467d668e6b3a841",
            "config.json": "1bb33a92c3548fbc68b889b490e810440435253598835bd71dff0396060c12db",
            "tokenizer.json": _QWEN_TOKENIZER,
        },
    ),
}
"""The drafts for raw completions, by the subfolder each goes to."""

DRAFT_FILES: Mapping[str, int] = {
    "config.json": 1 << 20,
    "tokenizer.json": 64 << 20,
    "LICENSE": 1 << 20,
    "model.safetensors": 64 << 30,
}
"""Files of a draft that are taken, each with the most bytes it may have. ``tokenizer.json`` only where there is one."""
