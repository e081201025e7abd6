from __future__ import annotations

from pathlib import Path

import pytest

from store.installs_help import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A released-format checkpoint of four small shards, not to be changed."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
