"""The front end's part of the printed plan follows its limits."""

from __future__ import annotations

from tokenmill.api.jobs import JOB_BYTES, RENDER_BYTES
from tokenmill.core.units import MiB, format_parts
from tokenmill.sandbox.parent import NUM_HEAVY, sandbox_bytes
from tokenmill.server.config import ServerConfig
from tokenmill.server.limits import REPLY_BYTES, front_end_bytes
from tokenmill.text.grammar.matcher import BYTES_PER_TOKEN


def test_each_limit_counts() -> None:
    plain = front_end_bytes(ServerConfig(("m",)), 50 * MiB)
    assert front_end_bytes(ServerConfig(("m",)), 51 * MiB) == plain + MiB
    bodies = ServerConfig(("m",), max_buffered_bytes=ServerConfig(("m",)).max_buffered_bytes + MiB)
    assert front_end_bytes(bodies, 50 * MiB) == plain + MiB
    requests = ServerConfig(("m",), max_open_requests=ServerConfig(("m",)).max_open_requests + 1)
    assert front_end_bytes(requests, 50 * MiB) == plain + REPLY_BYTES


def test_the_sandbox_counts_all_its_children() -> None:
    assert sandbox_bytes(7, 3) == 7 + 3 * BYTES_PER_TOKEN + 2 * RENDER_BYTES + NUM_HEAVY * JOB_BYTES


def test_parts_are_added_up() -> None:
    assert format_parts([("weights", 2048), ("KV", 1024)]) == "3.0 KiB (weights 2.0 KiB + KV 1.0 KiB)"
