"""The server keeps to its own OpenAPI document under generated requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from serving import MODEL, Running, serving


@pytest.fixture(scope="module")
def small(mini_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose replies are short and that lets everybody wait."""
    with serving(mini_store, tmp_path_factory.mktemp("states"), max_tokens=4, queue=100) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_generated_requests(small: Running, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    for found in document.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and operation.method != "post":
            continue

        @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def conforms(case: schemathesis.Case) -> None:
            # Some rules between fields have no words in JSON schema, so a fitting request may still be refused.
            case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=60)

        conforms()


def test_the_document_says_what_is_refused(small: Running) -> None:
    import httpx

    document = httpx.get(f"{small.url}/openapi.json").json()
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert chat["properties"]["model"] == {"const": MODEL}
    for name, operations in document["paths"].items():
        for operation in operations.values():
            assert {"400", "401", "429", "500"} <= set(operation["responses"]), name
