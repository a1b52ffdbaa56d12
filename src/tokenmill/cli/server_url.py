"""Where a server is that a command asks over HTTP."""

from __future__ import annotations

import http.client
import urllib.parse
from typing import NamedTuple

from ..core.errors import ConfigError


class ServerURL(NamedTuple):
    """host, port: port None: that of the scheme. base: of all paths, without /v1."""

    is_secure: bool
    host: str
    port: int | None
    base: str

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """Connects with the first request."""
        kind = http.client.HTTPSConnection if self.is_secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout_s)


def read_url(url: str, name: str, like: str) -> ServerURL:
    """`url` may lack its scheme. name, like: what it is called and an example, for the ConfigError where it is none."""
    wrong = ConfigError(f"{name} must be like {like}, got {url!r}.", param="url")
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not host:
        raise wrong
    return ServerURL(parts.scheme == "https", host, port, parts.path.rstrip("/").removesuffix("/v1"))
