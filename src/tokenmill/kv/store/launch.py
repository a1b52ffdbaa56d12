"""All that the process of a KV store is told, and how it is written down between two processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from ...core.config import BLOCK_SIZE
from .options import TierOptions


@dataclass(frozen=True, slots=True)
class StoreLaunch:
    """block_size   tokens of a block
    listener_fd     inherited socket on which workers join
    lifeline_fd     inherited read end of a pipe that closes when the parent ends
    report_fd       inherited write end of a pipe that takes one line, only where the store cannot be as it was asked
    log_level, log_format   of its own messages (cli.logs)
    """

    options: TierOptions
    block_size: int = BLOCK_SIZE
    listener_fd: int = -1
    lifeline_fd: int = -1
    report_fd: int = -1
    log_level: str = "warning"
    log_format: str = "text"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        fields: dict[str, Any] = json.loads(data)
        options = fields["options"]
        quota = tuple((owner, num_bytes) for owner, num_bytes in options["kv_quota"])
        return cls(**{**fields, "options": TierOptions(**{**options, "kv_quota": quota})})
