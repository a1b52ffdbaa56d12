"""Workers for tests: build_worker with the fields of its spec and of the engine's configuration as keywords."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tokenmill.core.config import EngineConfig
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.ops.api import Ops
from tokenmill.worker import build
from tokenmill.worker.spec import WorkerSpec

_SPEC = {field.name for field in fields(WorkerSpec)}
_CONFIG = {field.name for field in fields(EngineConfig)}


def build_worker(checkpoint: Checkpoint, ops: Ops, **given: Any) -> build.Worker:
    config = EngineConfig(**{name: given.pop(name) for name in tuple(given) if name in _CONFIG})
    spec = WorkerSpec(config, **{name: given.pop(name) for name in tuple(given) if name in _SPEC})
    return build.build_worker(checkpoint, ops, spec, **given)


def build_vector_worker(checkpoint: Checkpoint, ops: Ops, **given: Any) -> build.Worker:
    return build_worker(checkpoint, ops, gives_vectors=True, **given)
