"""API keys: 256 random bits behind `tm-`, of which only the SHA-256 digest is kept; and keys and tenants as they are
kept and shown, with times in seconds since the epoch.

A key has so many bits that its digest needs neither salt nor a slow hash, and may be looked up in a table: what the
time of a look-up tells of digests says nothing of keys.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError
from .settings import TenantSettings

KEY_OF_FLAGS = "key-"
"""What the ids of tenants begin with that come from --api-key."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """deleted_s: 0 while it is there."""

    id: str
    created_s: float
    settings: TenantSettings
    deleted_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        shown = self.settings.shown()
        shown["name"] = shown["name"] or self.id
        return {"object": "tenant", "id": self.id, "created_at": int(self.created_s), **shown}


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """hint: the end of the key. expires_s, revoked_s, used_s: 0: never. replaced_by: the key that it was rotated to, ""
    if it was not."""

    id: str
    tenant: str
    name: str
    hint: str
    is_admin: bool
    created_s: float
    expires_s: float = 0.0
    revoked_s: float = 0.0
    replaced_by: str = ""
    used_s: float = 0.0

    def is_live(self, now_s: float) -> bool:
        return not self.revoked_s and not 0 < self.expires_s <= now_s

    def to_json(self, now_s: float) -> dict[str, Any]:
        state = "live" if self.is_live(now_s) else "revoked" if self.revoked_s else "expired"
        return {
            "object": "api_key",
            "id": self.id,
            "tenant": self.tenant,
            "name": self.name,
            "hint": self.hint,
            "scopes": ["admin"] if self.is_admin else [],
            "state": state,
            "created_at": int(self.created_s),
            "expires_at": int(self.expires_s) or None,
            "revoked_at": int(self.revoked_s) or None,
            "last_used_at": int(self.used_s) or None,
            "replaced_by": self.replaced_by or None,
        }


def check_tenant_id(identifier: str) -> str:
    """Raises ConfigError."""
    if not _ID.fullmatch(identifier) or identifier.startswith(KEY_OF_FLAGS):
        raise ConfigError(
            "tenant must be 1 to 63 letters, digits, '.', '_' or '-', beginning with a letter or digit and not with "
            f"{KEY_OF_FLAGS!r}; got {identifier[:100]!r}.",
            param="tenant",
        )
    return identifier


def check_key_name(name: str) -> str:
    """Raises ConfigError."""
    if not (0 < len(name) <= _MAX_NAME and name.isprintable() and name == name.strip()):
        raise ConfigError(
            f"name must be printable, of 1 to {_MAX_NAME} characters and without spaces at its ends; "
            f"got {name[:100]!r}.",
            param="name",
        )
    return name


PREFIX = "tm-"
_NUM_BYTES = 32
_SHOWN = 4


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(_NUM_BYTES)


def digest_of(key: str) -> bytes:
    """Of what a header says: bytes beyond ASCII are as the header has them."""
    return hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()


def hint_of(key: str) -> str:
    """Enough to tell one's keys apart: 24 bits."""
    return f"{PREFIX}...{key[-_SHOWN:]}"
