"""Every test may change threads and instruction set; both are put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _machine_restored() -> Iterator[None]:
    # Imported here, so that where PyTorch is not installed each file of tests can say so.
    from deltafin import kernels

    threads, isa = kernels.threads(), kernels.isa()
    yield
    kernels.set_threads(threads)
    kernels.select_isa(isa)
