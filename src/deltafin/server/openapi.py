"""The OpenAPI document: requests are read by hand within limits, so their schemas are written in here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from deltafin.server.schema import ChatRequest, CompletionRequest
from deltafin.text.messages import MESSAGES_SCHEMA

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REPLY = {
    "type": "object",
    "required": ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"],
    "properties": {
        "choices": {"type": "array", "minItems": 1, "maxItems": 1, "items": {"type": "object"}},
        "usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]},
    },
}
_REFUSALS = {
    "400": "The request cannot be honoured; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "403": "The host name is not served here.",
    "404": "There is no such model.",
    "405": "Another method is needed.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "422": "The idempotency key belongs to another request.",
    "429": "K3 is busy; see Retry-After.",
    "500": "A defect of the server.",
    "503": "The engine cannot go on, or is being stopped.",
}
_POSTS: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/chat/completions": ("ChatRequest", ChatRequest),
    "/v1/completions": ("CompletionRequest", CompletionRequest),
}


def describe(app: FastAPI, model: str) -> None:
    """Completes the document of ``app``."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None or "x-complete" not in app.openapi_schema:
            app.openapi_schema = _complete(make(), model)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any], model: str) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.clear()
    schemas["Error"] = _ERROR
    schemas.update(MESSAGES_SCHEMA.get("$defs", {}))
    for path, (name, kind) in _POSTS.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schema["properties"]["model"] = {"const": model}
        schemas[name] = schema
        if "messages" in schema["properties"]:
            messages = {k: v for k, v in MESSAGES_SCHEMA.items() if k != "$defs"}
            schema["properties"]["messages"] = messages
        operation = document["paths"][path]["post"]
        reference = {"$ref": f"#/components/schemas/{name}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"description": "chunks"}}
        operation["responses"]["200"]["content"]["application/json"] = {"schema": _REPLY}
        operation["parameters"] = [
            {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "pattern": "^[!-~]{1,256}$"}}
        ]
    for item in document["paths"].values():
        for operation in item.values():
            operation["responses"].pop("422", None)
            for status, text in _REFUSALS.items():
                content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
                operation["responses"][status] = {"description": text, "content": content}
    metrics = document["paths"]["/metrics"]["get"]["responses"]["200"]
    metrics["content"] = {"text/plain": {"schema": {"type": "string"}}}
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["x-complete"] = True
    return document
