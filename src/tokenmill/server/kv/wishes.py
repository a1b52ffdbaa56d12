"""What a request says of its KV after its end: `kv_hints` of a body."""

from __future__ import annotations

from ..fields import Fields

MOST_S = 86400


def read_keep(fields: Fields) -> int | None:
    """For how long it is to be kept; None: it does not say. Raises InvalidRequest naming the field."""
    hints = Fields(fields.object("kv_hints") or {}, "kv_hints")
    keep_s = hints.integer("keep_s", 0, MOST_S)
    hints.unread()
    return keep_s
