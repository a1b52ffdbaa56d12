"""Whose call the code that runs now works for: logs and traces name it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

CALL: ContextVar[Mapping[str, Any] | None] = ContextVar("state of the call", default=None)
"""The call's `scope["state"]`, as the gate fills it; None outside of calls."""

PATH: ContextVar[str] = ContextVar("path of the call", default="")


def names_of(state: Mapping[str, Any] | None) -> dict[str, str]:
    """What a log line says of a call: its X-Request-Id, tenant and trace, where it has them."""
    if state is None:
        return {}
    tenant = state.get("tenant")
    found = {
        "request_id": state.get("told_id", ""),
        "tenant": "" if tenant is None else tenant.id,
        "trace_id": state.get("trace_id", ""),
    }
    return {name: value for name, value in found.items() if value}
