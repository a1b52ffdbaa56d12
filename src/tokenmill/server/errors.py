"""Failures in OpenAI's shape: {"error": {"message", "type", "param", "code"}} and the matching status."""

from __future__ import annotations

import math
from typing import Any

from ..core.errors import (
    AuthenticationFailed,
    ContextTooLong,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TokenmillError,
    Unavailable,
)
from ..core.events import FINISH_ERROR

_CODES: tuple[tuple[type[TokenmillError], str], ...] = (
    (ContextTooLong, "context_length_exceeded"),
    (ModelNotFound, "model_not_found"),
    (AuthenticationFailed, "invalid_api_key"),
    (Overloaded, "overloaded"),
)
_MAX_RETRY_S = 120
"""Clients give up when they are told to wait longer."""
_OF_KIND = {class_.kind: class_ for class_ in (InvalidRequest, Overloaded, Unavailable, EngineFailed)}


class ClientGone(Exception):
    """The client closed its connection; there is nobody to tell."""


def error_body(message: str, kind: str, param: str | None = None, code: str | int | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: TokenmillError) -> dict[str, Any]:
    """The body for an expected failure. 503 carries its number as code, as llama.cpp's clients expect."""
    code: str | int | None = next((code for class_, code in _CODES if isinstance(error, class_)), None)
    return error_body(error.message, error.kind, error.param, 503 if isinstance(error, Unavailable) else code)


def headers(error: TokenmillError) -> dict[str, str]:
    if isinstance(error, (Overloaded, Unavailable)) and error.retry_after_s is not None:
        return {"retry-after": str(told_s(error.retry_after_s))}
    if isinstance(error, AuthenticationFailed):
        return {"www-authenticate": "Bearer"}
    return {}


def told_s(retry_after_s: float) -> int:
    """When to come back, in seconds, as clients are told."""
    return min(_MAX_RETRY_S, max(1, math.ceil(retry_after_s)))


def from_engine(message: str, kind: str, param: str) -> TokenmillError:
    """The exception for an Output whose finish_reason is FINISH_ERROR."""
    return _OF_KIND.get(kind, EngineFailed)(
        message or f"The engine ended the request with {FINISH_ERROR!r}.", param=param or None
    )
