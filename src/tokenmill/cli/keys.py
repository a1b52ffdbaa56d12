"""`keys` and `tenants`: who may call a server, and what each may use. Works on the file that servers read, whether or
not one runs; a running one knows within a second."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError
from .state import OFF, tenants_file

if TYPE_CHECKING:
    from ..control.tenants.keys import KeyRecord, TenantRecord
    from ..control.tenants.store import TenantStore

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "": 1}
_DURATION = re.compile(r"(\d{1,9})([smhd]?)")


def duration(text: str) -> int:
    """'90s', '15m', '12h', '30d', or seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"must be a duration such as 15m, 12h or 30d, got {text!r}.")
    return int(match[1]) * _UNITS[match[2]]


def keep_alive(text: str) -> int:
    """Ollama's: '5m', '1h30m', seconds; -1: for ever, which is 0 here; 0: no longer than now. Raises ValueError."""
    if re.fullmatch(r"-\d+[smh]?", text):
        return 0
    if text.isdigit():
        return int(text) or 1
    units = {"h": 3600, "m": 60, "s": 1}
    parts = re.findall(r"(\d{1,9})([hms])", text)
    if not parts or "".join(map("".join, parts)) != text:
        raise ValueError(f"must be a duration such as 5m or 1h30m, or -1 for ever, got {text!r}.")
    return sum(int(number) * units[unit] for number, unit in parts) or 1


@contextlib.contextmanager
def opened(args: argparse.Namespace) -> Iterator[TenantStore]:
    """The store that `--tenants` names, or that servers of this user have. Raises ConfigError."""
    from ..control.tenants.store import TenantStore

    if args.tenants == OFF:
        raise ConfigError("--tenants off keeps no keys; name a file.", param="tenants")
    store = TenantStore(tenants_file(args.tenants))
    try:
        yield store
    finally:
        store.close()


# ---- keys ----


def create(args: argparse.Namespace) -> int:
    from ..control.tenants.keys import check_tenant_id
    from ..control.tenants.settings import TenantSettings
    from .servers import running

    given = given_settings(args)
    settings = TenantSettings.from_fields(given) if given else None
    expires_s = time.time() + args.expires_in if args.expires_in else 0.0
    if args.tenant is None:
        try:
            check_tenant_id(args.key_name)
        except ConfigError as error:
            raise ConfigError(f"Say with --tenant whose key it is: {error.message}", param="tenant") from None
    with opened(args) as store:
        record, key = store.create_key(
            args.key_name, args.tenant or args.key_name, is_admin=args.admin, expires_s=expires_s, settings=settings
        )
    _show_new(record, key, args)
    if args.tenants is None and not running():
        told = "one with another TOKENMILL_STATE has keys of its own"
        print(f"tokenmill: note: no running server reads {tenants_file(None)}; {told}.", file=sys.stderr)
    return 0


def rotate(args: argparse.Namespace) -> int:
    with opened(args) as store:
        record, key = store.rotate_key(args.key, args.overlap)
    _show_new(record, key, args)
    return 0


def revoke(args: argparse.Namespace) -> int:
    with opened(args) as store:
        revoked = store.revoke_keys(args.key)
    _show(args, revoked, [f"revoked {key.id} ({key.name}, of tenant {key.tenant})" for key in revoked])
    return 0


def list_keys(args: argparse.Namespace) -> int:
    now_s = time.time()
    with opened(args) as store:
        used = store.used()
        found = [key for key in store.all_keys(args.tenant) if args.all or key.is_live(now_s)]
    found = [replace(key, used_s=used.get(key.id, 0.0)) for key in found]
    rows = [("ID", "NAME", "TENANT", "KEY", "SCOPE", "CREATED", "EXPIRES", "LAST USED", "STATE")]
    for key in found:
        shown = key.to_json(now_s)
        state = "replaced" if key.replaced_by and shown["state"] == "live" else shown["state"]
        scope = "admin" if key.is_admin else "-"
        rows.append(
            (
                key.id,
                key.name,
                key.tenant,
                key.hint,
                scope,
                _day(key.created_s),
                _day(key.expires_s),
                _day(key.used_s),
                state,
            )
        )
    _show(args, found, _table(rows))
    return 0


# ---- tenants ----


def create_tenant(args: argparse.Namespace) -> int:
    from ..control.tenants.settings import TenantSettings

    with opened(args) as store:
        made = store.create_tenant(args.tenant, TenantSettings.from_fields(given_settings(args)))
    _show(args, [made], _described(made))
    return 0


def set_tenant(args: argparse.Namespace) -> int:
    changes = given_settings(args)
    if not changes:
        raise ConfigError("Say what to set, such as --requests-per-minute 60.")
    with opened(args) as store:
        changed = store.change_tenant(args.tenant, changes)
    _show(args, [changed], _described(changed))
    return 0


def show_tenant(args: argparse.Namespace) -> int:
    with opened(args) as store:
        found = store.tenant(args.tenant)
    _show(args, [found], _described(found))
    return 0


def delete_tenant(args: argparse.Namespace) -> int:
    with opened(args) as store:
        num_keys = store.delete_tenant(args.tenant)
    said = f"deleted the tenant {args.tenant}; {num_keys} key{'' if num_keys == 1 else 's'} revoked"
    print(json.dumps({"id": args.tenant, "deleted": True, "keys_revoked": num_keys}) if args.json else said)
    return 0


def list_tenants(args: argparse.Namespace) -> int:
    with opened(args) as store:
        found = store.tenants()
    rows = [("TENANT", "CREATED", "SETTINGS")]
    for tenant in found:
        changes = tenant.settings.changes()
        rows.append((tenant.id, _day(tenant.created_s), " ".join(f"{name}={changes[name]}" for name in changes) or "-"))
    _show(args, found, _table(rows))
    return 0


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What flags say of a tenant, and nothing that they do not say."""
    from ..control.tenants.settings import TenantSettings

    return {name: getattr(args, name) for name in TenantSettings.__dataclass_fields__ if hasattr(args, name)}


# ---- output ----


def _show_new(record: KeyRecord, key: str, args: argparse.Namespace) -> None:
    """The key is the last word."""
    if args.json:
        print(json.dumps({**record.to_json(time.time()), "key": key}))
        return
    scope = "admin key" if record.is_admin else "key"
    print(f"{record.id}: {scope} {record.name} of tenant {record.tenant}, shown this once: {key}")


def _show(args: argparse.Namespace, found: Sequence[KeyRecord | TenantRecord], lines: Sequence[str]) -> None:
    if not args.json:
        print("\n".join(lines))
        return
    from ..control.tenants.keys import KeyRecord

    now_s = time.time()
    data = [each.to_json(now_s) if isinstance(each, KeyRecord) else each.to_json() for each in found]
    print(json.dumps({"object": "list", "data": data}))


def _described(tenant: TenantRecord) -> list[str]:
    fields = tenant.to_json()
    del fields["object"], fields["created_at"]
    return [
        f"{name.ljust(max(map(len, fields)))}  {'none' if value in ('', None) else value}"
        for name, value in fields.items()
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _day(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s)) if at_s and math.isfinite(at_s) else "-"
