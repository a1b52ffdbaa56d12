"""Where a model's packed weights lie that are kept on disk: a file of the cache folder, known by what decides its
bytes."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ..core.errors import ConfigError
from ..formats.checkpoint import Checkpoint, weights_digest
from ..formats.hub import default_cache_dir
from ..models.config import config_from_checkpoint
from ..ops.api import Ops
from ..ops.disk import DiskWeights
from .spec import WorkerSpec

PACKING = "packing-1"
"""How stored weights become packed ones. Raise it with every change to models/weights.py, models/repack.py or the tiles
of native/src/pack.cpp that can change a packed byte, or their order."""


def kept_on_disk(
    checkpoint: Checkpoint, ops: Ops, spec: WorkerSpec, cache_dir: Path | None
) -> AbstractContextManager[None]:
    """What is packed inside is kept on disk as the spec says. cache_dir: default, the user's. Raises ConfigError where
    the model or the backend has no use for that, or the memory given is too little."""
    experts, others = spec.expert_memory, spec.weight_memory
    if experts is None and others is None:
        return nullcontext()
    if spec.gives_vectors:
        param = "weight_memory" if experts is None else "expert_memory"
        raise ConfigError(f"--{param.replace('_', '-')} is for models that give tokens.", param=param)
    if experts is not None and config_from_checkpoint(checkpoint).moe is None:
        raise ConfigError("--expert-memory is for mixtures of experts; this model has none.", param="expert_memory")
    cache_dir = cache_dir or default_cache_dir()
    digest = weights_digest(checkpoint.path, cache_dir)
    kept = f"{experts is not None} {others is not None}"
    facts = [PACKING, digest, spec.quantization or "as stored", ops.family, kept]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    path = cache_dir / "packed" / f"{digest[:16]}-{key[:16]}.weights"
    return ops.on_disk(DiskWeights(path, key, experts, others))
