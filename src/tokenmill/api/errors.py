"""Failures as each API tells them, and the matching status.

OpenAI's shape, {"error": {"message", "type", "param", "code"}}, is that of every path for which `STYLES` has no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..core.errors import (
    MAX_RETRY_S,
    AuthenticationFailed,
    ContextTooLong,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PreviousResponseNotFound,
    RateLimited,
    RequestTimeout,
    TokenmillError,
    Unavailable,
)
from ..core.events import FINISH_ERROR

_CODES: tuple[tuple[type[TokenmillError], str], ...] = (
    (ContextTooLong, "context_length_exceeded"),
    (ModelNotFound, "model_not_found"),
    (AuthenticationFailed, "invalid_api_key"),
    (RateLimited, "rate_limit_exceeded"),
    (Overloaded, "overloaded"),
    (PreviousResponseNotFound, "previous_response_not_found"),
)
_OF_KIND = {class_.kind: class_ for class_ in (InvalidRequest, Overloaded, Unavailable, EngineFailed, RequestTimeout)}


class ClientGone(Exception):
    """The client closed its connection; there is nobody to tell."""


class Fault(NamedTuple):
    """A failure, whatever API tells it. `kind`: OpenAI's word for its type; `param`: the field at fault; `request_id`:
    what the response calls the request, where it does; `model`: a model that is not there; `hint`: which are.
    """

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | int | None = None
    request_id: str = ""
    model: str = ""
    hint: str = ""


Style = Callable[[Fault], dict[str, Any]]
"""A fault as the JSON body of an API."""


def error_body(message: str, kind: str, param: str | None = None, code: str | int | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def openai_style(fault: Fault) -> dict[str, Any]:
    return error_body(fault.message, fault.kind, fault.param, fault.code)


def _naming(fault: Fault) -> str:
    """The message with the name of the field at fault, for a shape that has no other place for it."""
    is_named = fault.param is None or fault.param.partition("[")[0].partition(".")[0] in fault.message
    return fault.message if is_named else f"{fault.param}: {fault.message}"


def ollama_style(fault: Fault) -> dict[str, Any]:
    """Clients look for Ollama's own words where a model is missing."""
    return {"error": f"model '{fault.model}' not found; {fault.hint}" if fault.model else _naming(fault)}


def llama_style(fault: Fault) -> dict[str, Any]:
    """OpenAI's, but that the code is the status."""
    kind = "exceed_context_size_error" if fault.code == "context_length_exceeded" else fault.kind
    return {"error": {"code": fault.status, "message": fault.message, "type": kind, "param": fault.param}}


_LLAMA_PATHS = ("/completion", "/infill", "/props", "/apply-template", "/slots", "/embedding", "/lora-adapters")
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def anthropic_style(fault: Fault) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(fault.status, "api_error" if fault.status >= 500 else "invalid_request_error")
    # Agents shorten their history when a message has these words.
    too_long = "prompt is too long: " if fault.code == "context_length_exceeded" else ""
    error: dict[str, Any] = {"type": kind, "message": too_long + _naming(fault)}
    if fault.param == "thread":  # by this the package knows to send the whole conversation instead
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    body = {"type": "error", "error": error}
    return body | {"request_id": fault.request_id or None}


STYLES: Mapping[str, Style] = {"/api/": ollama_style, "/v1/messages": anthropic_style} | dict.fromkeys(
    _LLAMA_PATHS, llama_style
)
"""By what a path begins with."""


def style_of(path: str) -> Style:
    """How errors are told to who asked for this path, whether or not there is such a path."""
    return next((style for start, style in STYLES.items() if path.startswith(start)), openai_style)


def fault_of(error: TokenmillError) -> Fault:
    """503 carries its number as code, as llama.cpp's clients expect."""
    code: str | int | None = next((code for class_, code in _CODES if isinstance(error, class_)), None)
    code = 503 if isinstance(error, Unavailable) else code
    fault = Fault(error.status, error.message, error.kind, error.param, code)
    return fault._replace(model=error.name, hint=error.hint) if isinstance(error, ModelNotFound) else fault


def describe(error: TokenmillError, style: Style = openai_style, request_id: str = "") -> dict[str, Any]:
    """The body for an expected failure."""
    return style(fault_of(error)._replace(request_id=request_id))


def headers(error: TokenmillError) -> dict[str, str]:
    if isinstance(error, RateLimited):
        return {**error.headers, "retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, (Overloaded, Unavailable)) and error.retry_after_s is not None:
        return {"retry-after": str(told_s(error.retry_after_s))}
    if isinstance(error, AuthenticationFailed):
        return {"www-authenticate": "Bearer"}
    return {}


def told_s(retry_after_s: float) -> int:
    """When to come back, in seconds, as clients are told."""
    return min(MAX_RETRY_S, max(1, math.ceil(retry_after_s)))


def from_engine(message: str, kind: str, param: str) -> TokenmillError:
    """The exception for an Output whose finish_reason is FINISH_ERROR."""
    return _OF_KIND.get(kind, EngineFailed)(
        message or f"The engine ended the request with {FINISH_ERROR!r}.", param=param or None
    )
