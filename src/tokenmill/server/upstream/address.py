"""Where an upstream is: the URL of a server that speaks OpenAI's API."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

_VERSION = "/v1"


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """base: the path in front of /v1, without a slash at its end."""

    host: str
    port: int
    base: str = ""
    is_tls: bool = False

    @classmethod
    def of(cls, url: str) -> UpstreamAddress:
        """http://HOST[:PORT][/PATH], with or without /v1 at its end. Raises ValueError."""
        try:
            parts = urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # as the look-up of the name does
        except ValueError:
            raise ValueError(f"must be the URL of a server, got {url!r}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable():
            raise ValueError(f"must be an http:// or https:// URL, got {url!r}.")
        if parts.username is not None or parts.query or parts.fragment or " " in url:
            raise ValueError("must be a URL without user, query and fragment; keys go into --upstream-api-key-file.")
        is_tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix(_VERSION).rstrip("/")
        return cls(parts.hostname, port or (443 if is_tls else 80), base, is_tls)

    @property
    def authority(self) -> str:
        """As a Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.base}"

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.is_tls else None
