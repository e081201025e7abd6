from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deltafin.bench.synthetic import TINY, write_synthetic_checkpoint


@pytest.fixture(scope="session")
def _tiny_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_synthetic_checkpoint(folder, layers=3, experts=6, vocab_size=512, text_overrides=TINY)
    return folder


@pytest.fixture
def tiny(_tiny_once: Path, tmp_path: Path) -> Path:
    """A copy of a released-format checkpoint of four small shards, free to be damaged."""
    folder = tmp_path / "model"
    shutil.copytree(_tiny_once, folder)
    return folder
