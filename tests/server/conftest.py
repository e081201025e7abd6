"""One server for all tests of a file that need nothing special."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import Running, serving


@pytest.fixture(scope="module")
def server(mini_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(mini_store, tmp_path_factory.mktemp("states")) as running:
        yield running
