"""All an engine process is told, and how it is written down between two processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ..net.kv_endpoints import KVEventsConfig
from ..node.machine import MachineFacts
from ..node.options import EngineOptions


@dataclass(frozen=True, slots=True)
class Launch:
    """path, model    the checkpoint, and the name it is served under
    cache_dir      where digests are remembered
    queue_bytes    what the front end may hold for waiting requests, for the printed plan
    address        of the link
    lifeline_fd    inherited read end of a pipe that closes when the front end ends
    heartbeat_fd   inherited write end of a pipe that takes signs of progress
    log_level      of the engine process's own messages
    log_format     of them (cli.logs)
    journal        file that takes the engine's story; "": none does
    flight         file of its flight recorder; "": there is none
    step_log       file of its step log; "": there is none
    worker, pool   what WorkerFacts calls id and pool
    kv_transfer    how it takes KV from workers of this machine, and gives it to them (cli.kv_peers); "": not at all
    kv_events      how it publishes what it caches; None: not at all
    rank           its number among the engines of its front end
    machine        what there is for it; None: it looks for itself
    """

    path: str
    model: str
    cache_dir: str
    options: EngineOptions
    queue_bytes: int = 0
    address: str = ""
    lifeline_fd: int = -1
    heartbeat_fd: int = -1
    log_level: str = "warning"
    log_format: str = "text"
    journal: str = ""
    flight: str = ""
    step_log: str = ""
    worker: str = ""
    pool: str = "mixed"
    kv_transfer: str = ""
    kv_events: KVEventsConfig | None = None
    rank: int = 0
    machine: MachineFacts | None = None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Launch:
        fields: dict[str, Any] = json.loads(data)
        machine = fields["machine"]
        if machine is not None:
            machine = MachineFacts(**{**machine, "cpu_features": tuple(machine["cpu_features"])})
        kv_events = KVEventsConfig(**fields["kv_events"]) if fields["kv_events"] is not None else None
        options = EngineOptions(**fields["options"])
        return cls(**{**fields, "options": options, "kv_events": kv_events, "machine": machine})
