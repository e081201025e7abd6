"""Checks that every draft's files go through, whatever the kind of draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from deltafin.checkpoint.config import MAX_CONFIG_BYTES
from deltafin.checkpoint.tensorfile import TensorInfo, read_bounded
from deltafin.errors import DraftError

Config = TypeVar("Config", bound=BaseModel)


def read_values(path: Path, kind: type[Config], remedy: str) -> Config:
    """Reads a draft's ``config.json`` as ``kind``.

    Raises:
        DraftError: not JSON, or a value that is missing or not supported.
        TensorFileError: missing, too large or unreadable.
    """
    try:
        raw: Any = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
        return kind.model_validate(raw)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(str(p) for p in first["loc"]) or "the file"
        raise DraftError(f"{path}: {where}: {first['msg']}", remedy=remedy) from None
    except (ValueError, RecursionError) as e:
        raise DraftError(f"{path} is not JSON: {e}", remedy=remedy) from None


def check_inventory(
    path: Path, found: Mapping[str, TensorInfo], wanted: Mapping[str, tuple[int, ...]], remedy: str
) -> None:
    """Compares the tensors of a file with the bf16 tensors a draft consists of.

    Raises:
        DraftError: one is missing, unknown, or of another dtype or shape.
    """
    for name, shape in wanted.items():
        info = found.get(name)
        if info is None:
            raise DraftError(f"{path} lacks {name}", remedy=remedy)
        if info.dtype != "BF16" or info.shape != shape:
            raise DraftError(f"{path}: {name} is {info.dtype} {info.shape}, not BF16 {shape}", remedy=remedy)
    if extra := sorted(found.keys() - wanted.keys()):
        raise DraftError(f"{path} has the unknown tensor {extra[0]}", remedy=remedy)
