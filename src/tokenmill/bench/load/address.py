"""Where a server is, how it is trusted, and what it says at other paths than the one under load."""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ...core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `base`: path before /chat/completions, "/v1" unless the URL says otherwise. `tls`: for https;
    None for http."""

    host: str
    port: int
    base: str = "/v1"
    headers: dict[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None

    @property
    def root_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def get(self, url: str, timeout_s: float, most: int) -> bytes:
        """The first bytes at `url`. Raises OSError, of which urllib's HTTPError is one."""
        request = urllib.request.Request(url, headers=self.headers)
        with urllib.request.urlopen(request, timeout=timeout_s, context=self.tls) as reply:
            data: bytes = reply.read(most)
        return data


def make_tls(ca_file: Path | None = None, insecure: bool = False) -> ssl.SSLContext:
    """What is asked of a server's certificate: to be signed by ca_file's, or the system's, or nothing. Raises
    ConfigError."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca_file} holds no certificates to trust: {error}.", param="ca_file") from None
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def parse_url(
    url: str, api_key: str | None = None, headers: Sequence[str] = (), tls: ssl.SSLContext | None = None
) -> Address:
    """`http(s)://host:port`, with or without /v1 or a path of the server's own. tls: for https, by default the system's
    checks. Raises ConfigError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port < 0:
        raise ConfigError(f"--url must look like http://127.0.0.1:8000, got {url}.", param="url")
    extra = {}
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"--header must be NAME:VALUE, got {header}.", param="header")
        extra[name.strip()] = value.strip()
    if api_key is not None:
        extra["Authorization"] = f"Bearer {api_key}"
    for name, value in extra.items():
        if not (name + value).isascii() or any(ord(c) < 32 for c in name + value):
            raise ConfigError(f"--header {name} has characters that a header cannot have.", param="header")
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/responses", "/messages"):
        path = path.removesuffix(ending)
    is_secure = parts.scheme == "https"
    return Address(parts.hostname, port, path or "/v1", extra, (tls or make_tls()) if is_secure else None)
