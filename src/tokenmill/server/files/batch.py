"""A batch: its record on the disk, the states it goes through, and what a client is shown of it. Pure.

validating -> in_progress -> finalizing -> completed
validating -> failed                                 the input is not in order, or there is no room for answers
in_progress -> expired                               its time is over; what was answered is kept
validating, in_progress -> cancelling -> cancelled   likewise
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...api.fields import Fields
from ...core.errors import InvalidRequest
from .lines import ENDPOINTS, MESSAGES, Fault

WINDOWS = {"24h": 24 * 3600}
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_LEAST_KEPT_S, _MOST_KEPT_S = 3600, 30 * 24 * 3600


class Batch(msgspec.Struct, frozen=True):
    """The record. output_id, error_id: of the files that are being written; they are shown once they are files. times:
    of the states it has reached, by their names. kept_s: how long its files are kept; num_*: when it has ended."""

    id: str
    owner: str
    endpoint: str
    input_id: str
    window: str
    created_at: int
    expires_at: int
    output_id: str
    error_id: str
    kept_s: int = _MOST_KEPT_S
    status: str = "validating"
    times: dict[str, int] = {}
    metadata: dict[str, str] | None = None
    models: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    has_output: bool = False
    has_errors: bool = False

    @property
    def is_of_messages(self) -> bool:
        """A message batch: models that are not served are its lines' errors, and lines that were not called are told of
        when its results are read."""
        return self.endpoint == MESSAGES

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def moved(self, status: str, now: float, **changes: Any) -> Batch:
        return msgspec.structs.replace(self, status=status, times={**self.times, status: int(now)}, **changes)


def shown(batch: Batch, num_completed: int, num_failed: int) -> dict[str, Any]:
    """OpenAI's object. The counts: as of now."""
    errors = [msgspec.to_builtins(fault) for fault in batch.faults]
    times = {
        f"{state}_at": batch.times.get(state)
        for state in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    }
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.models[0] if len(batch.models) == 1 else None,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_id,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output_id if batch.has_output else None,
        "error_file_id": batch.error_id if batch.has_errors else None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **times,
        "request_counts": {"total": batch.num_lines, "completed": num_completed, "failed": num_failed},
        "metadata": batch.metadata,
    }


class Wanted(msgspec.Struct, frozen=True):
    """What a client asks for. kept_s: how long it wants the answers kept."""

    input_id: str
    endpoint: str
    window: str
    metadata: dict[str, str] | None
    kept_s: int


def parse_batch(body: Mapping[str, Any]) -> Wanted:
    """The body of POST /v1/batches. Raises InvalidRequest naming the field."""
    fields = Fields(dict(body))
    input_id = fields.required_text("input_file_id")
    endpoint = fields.required_text("endpoint")
    if endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
    window = fields.required_text("completion_window")
    if window not in WINDOWS:
        raise InvalidRequest("completion_window must be '24h'.", param="completion_window")
    metadata = fields.object("metadata")
    if metadata is not None:
        _check_metadata(metadata)
    kept_s = parse_lifetime(fields.object("output_expires_after"), "output_expires_after")
    unknown = fields.unread()
    if unknown:
        raise InvalidRequest(f"A batch has no field {unknown[0][:100]!r}.", param=unknown[0][:100])
    return Wanted(input_id, endpoint, window, metadata, kept_s)


def parse_lifetime(given: dict[str, Any] | None, name: str) -> int:
    """{"anchor": "created_at", "seconds": ...} in seconds; the longest where there is none. Raises InvalidRequest."""
    if given is None:
        return _MOST_KEPT_S
    fields = Fields(given, name)
    if fields.required_text("anchor") != "created_at":
        raise InvalidRequest(f"{name}.anchor must be 'created_at'.", param=f"{name}.anchor")
    seconds = fields.integer("seconds", _LEAST_KEPT_S, _MOST_KEPT_S)
    if seconds is None:
        raise InvalidRequest(f"{name}.seconds must be given.", param=f"{name}.seconds")
    return seconds


def _check_metadata(metadata: dict[str, Any]) -> None:
    fits = all(
        len(key) <= _MAX_KEY and isinstance(text, str) and len(text) <= _MAX_VALUE for key, text in metadata.items()
    )
    if not fits or len(metadata) > _MAX_PAIRS:
        raise InvalidRequest(
            f"metadata may hold at most {_MAX_PAIRS} strings of {_MAX_VALUE} characters, under names of {_MAX_KEY}.",
            param="metadata",
        )
