import json
import os
from pathlib import Path
from typing import Any

import pytest

import deltafin
from deltafin.checkpoint.config import K3Config
from deltafin.text.tokenizer import K3Tokenizer

MINI = Path(deltafin.__file__).parent / "mini_k3" / "target"
ORACLE = Path(__file__).parents[1] / "data" / "oracle" / "prompts.json"


@pytest.fixture(scope="session")
def mini_folder() -> Path:
    return MINI


@pytest.fixture(scope="session")
def tok() -> K3Tokenizer:
    return K3Tokenizer.load(MINI, K3Config.load(MINI))


@pytest.fixture(scope="session")
def real_tok() -> K3Tokenizer:
    folder = os.environ.get("K3_TOKENIZER_DIR")
    if not folder:
        pytest.skip("K3_TOKENIZER_DIR names no folder with the released tiktoken.model and tokenizer_config.json")
    return K3Tokenizer.load(Path(folder))


@pytest.fixture(scope="session")
def oracle() -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads(ORACLE.read_text(encoding="utf-8"))["prompts"]
    return prompts
