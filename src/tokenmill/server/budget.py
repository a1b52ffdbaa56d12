"""What the front end holds at most, from its limits."""

from __future__ import annotations

from ..api.jobs import MAX_RESULT_BYTES
from ..core.units import KiB
from .config import ServerConfig

REPLY_BYTES = 64 * KiB
"""Of one open request: what was generated and is not sent yet, and the request itself without its prompt."""

_RESULTS = 3
"""Results of the helper that arrive at a time: its heavy jobs, and a rendering."""


def front_end_bytes(config: ServerConfig, base_bytes: int, *, tls: bool = False) -> int:
    """base_bytes: what the process holds when it is idle. Bodies are held as they came and once more as what was read
    from them; the first of the two, and prompts that wait, are the plan's queue."""
    decoded = config.max_buffered_bytes
    connections = config.http.max_bytes(tls=tls)
    held = connections + decoded + _RESULTS * MAX_RESULT_BYTES + config.result_cache
    return base_bytes + held + config.max_open_requests * REPLY_BYTES
