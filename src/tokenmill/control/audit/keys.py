"""Entries of the audit log for keys and tenants that have come, changed or gone, whoever did it.

An admin over HTTP, the command line, or somebody with the file in an editor: all are found by comparing what is known
before and after.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..tenants.access import Known
from .log import AuditLog


def note_changes(log: AuditLog, before: Known, after: Known) -> None:
    for event in changes(before, after):
        log.note(event)


def changes(before: Known, after: Known) -> Iterator[dict[str, Any]]:
    """Of keys the ids are told, of settings what is in `Terms` and limits; never a key or its digest."""
    old, new = _keys(before), _keys(after)
    for name in sorted(new.keys() - old.keys()):
        yield {"action": "key.begin", "object": name, "outcome": "live", **new[name]}
    for name in sorted(old.keys() - new.keys()):
        yield {"action": "key.end", "object": name, "outcome": "ended", **old[name]}
    for name in sorted(before.tenants.keys() | after.tenants.keys()):
        was, is_now = before.tenants.get(name), after.tenants.get(name)
        if was is None or is_now is None:
            yield {"action": "tenant.begin" if was is None else "tenant.end", "object": name, "outcome": "done"}
        elif was != is_now:
            told = {"terms": is_now.terms._asdict(), "limits": is_now.limits._asdict()}
            yield {"action": "tenant.change", "object": name, "outcome": "done", **told}


def _keys(known: Known) -> dict[str, dict[str, Any]]:
    return {each.key: {"tenant": each.tenant.id, "scopes": sorted(each.scopes)} for each in known.credentials.values()}
