"""Failures in OpenAI's error shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from deltafin.errors import DeltafinError, InputError, UsageError
from deltafin.server.schema import PARAM_OF

_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported": "unsupported_parameter",
}
_WHERE = re.compile(r"(messages|tools|response_format|reasoning effort|tool_choice)((?:\[\d+\]|\.\w+)*)")


class ApiError(Exception):
    """What a client is told.

    Args:
        status: HTTP status.
        message: what happened and what to do.
        param: the offending request field.
        code: OpenAI's short word for it.
        headers: more response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a request."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = PARAM_OF.get(first["type"]) or path_of(first["loc"])
    if first["type"] in PARAM_OF:
        return ApiError(400, first["msg"], param=param, code="invalid_value")
    if first["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}"
    elif first["type"] == "missing":
        message = f"you must provide {param}"
    else:
        message = f"{param}: {first['msg'].removeprefix('Value error, ')}" if param else first["msg"]
    return ApiError(400, message, param=param or None, code=_CODES.get(first["type"], "invalid_value"))


def from_deltafin(error: DeltafinError, param: str | None = None) -> ApiError:
    """The product's own failures; messages about a request name the field they begin with.

    Files and drives are the operator's business: they are left out of what a client is told.
    """
    if isinstance(error, InputError | UsageError):
        text = f"{error.message}; {error.remedy}" if error.remedy else error.message
        if match := _WHERE.match(error.message):
            param = match[1].replace(" ", "_") + match[2]
        return ApiError(400, text, param=param, code="invalid_value")
    text = f"{type(error).__name__}: the engine cannot go on; the server's own output says why"
    return ApiError(error.http_status, text, code="engine_error")


def path_of(loc: tuple[int | str, ...]) -> str:
    """``("tools", 0, "function")`` as ``tools[0].function``."""
    out = ""
    for part in loc:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def place_of(error: BaseException) -> str:
    """Type and place of a defect, fit for a log: an exception's text may hold a request's."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame is not None else ""
    return f"{type(error).__name__}{where}"
