"""What a connection may take before anybody has asked who is there: bytes, places and time."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import ConfigError
from ..core.units import KiB, MiB

CONNECTION_BYTES = 32 * KiB
"""What one open connection takes at most besides the shared part of its heads, measured: 6 KiB for itself, its own
share of heads, one part that is being read, and the request that runs."""

TLS_BYTES = 384 * KiB
"""What TLS adds where a body has come through it, measured: the event loop's read buffer, and OpenSSL's."""


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """Bounds of the HTTP layer; all hold before the key is looked at.

    max_connections    open at once; at the bound the address with the most gives up one that waits for its client
    max_head_bytes     request line and header lines of one request; more is 431
    max_head_lines     header lines of one request; more is 431
    max_target_bytes   path and query; more is 414
    max_heads_bytes    heads of all connections together beyond `own_head_bytes` each; more is 503
    own_head_bytes     what every connection may hold of heads, whatever the others hold
    max_pipelined      requests sent ahead on one connection; it is closed after the answer to the last of them
    head_s             from the first byte of a head, or from the connection's start, to its end; then 408
    idle_s             a connection without a request is closed after this; longer than the 60 s that load balancers
                       keep theirs, so that it is they who close
    body_s             a body may rest this long, and must come at `min_body_rate` bytes a second after it; else 408
    write_s            a client that takes nothing of its answer for this long is let go
    linger_s           what still arrives after the last answer is read and dropped this long, so that the answer
                       is not lost to a reset
    """

    max_connections: int = 2048
    max_head_bytes: int = 64 * KiB
    max_head_lines: int = 100
    max_target_bytes: int = 16 * KiB
    max_heads_bytes: int = 16 * MiB
    own_head_bytes: int = 8 * KiB
    max_pipelined: int = 8
    head_s: float = 20.0
    idle_s: float = 75.0
    body_s: float = 30.0
    min_body_rate: float = 4 * KiB
    write_s: float = 120.0
    linger_s: float = 2.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}.", param=name)

    def max_bytes(self, *, tls: bool = False) -> int:
        """Memory that connections can take before a key is checked; bodies are counted where they are read."""
        each = CONNECTION_BYTES + TLS_BYTES if tls else CONNECTION_BYTES
        return self.max_connections * each + self.max_heads_bytes
