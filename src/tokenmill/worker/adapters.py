"""The adapters a worker holds: digest -> slot of the model's LoRA tables.

Reading and checking an adapter touches nothing that a step uses and may run on any thread; `install` and `remove`
change the tables and belong to the step thread, between steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..core.errors import InvalidRequest
from ..formats.adapter import open_adapter
from ..models.lora import Base, Changes, LoraLimits, changes_of, fill_slot, is_of_images, most_bytes
from ..models.weights import ModelWeights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """An adapter that fits the model, read but not yet packed."""

    digest: str
    changes: Changes


class Adapters:
    """base: the model whose packed weights are `weights`."""

    def __init__(self, base: Base, weights: ModelWeights, limits: LoraLimits) -> None:
        self._base = base
        self._ops = base.ops
        self._weights = weights
        self._limits = limits
        self._slot_of: dict[str, int] = {}
        self._free = list(range(limits.max_loras, 0, -1))

    @property
    def most_bytes(self) -> int:
        return most_bytes(self._base.config, self._limits)

    def prepare(self, path: str, inside: str) -> PreparedAdapter:
        """Read and check the adapter in folder `path`, which must lie under `inside` unless that is "". Raises
        BadCheckpoint."""
        adapter = open_adapter(path, inside=inside or None)
        changes = changes_of(adapter, self._base, self._limits)
        num_left_out = sum(is_of_images(module.name) for module in adapter.modules)
        if num_left_out:
            _log.warning("%s: %d modules that read images are left out: text is not changed.", path, num_left_out)
        return PreparedAdapter(adapter.digest, changes)

    def install(self, adapter: PreparedAdapter) -> str:
        """Give it a slot, unless it has one; returns its digest. Raises InvalidRequest where no slot is free."""
        if adapter.digest not in self._slot_of:
            if not self._free:
                raise InvalidRequest(
                    f"All {self._limits.max_loras} places for adapters are taken. Unload one and let its requests end,"
                    " or start with a larger --max-loras.",
                    param="lora_name",
                )
            fill_slot(self._weights, self._ops, self._free[-1], adapter.changes)
            self._slot_of[adapter.digest] = self._free.pop()
        return adapter.digest

    def remove(self, digest: str) -> None:
        """Free its slot and its memory; unknown digests are ignored."""
        slot = self._slot_of.pop(digest, None)
        if slot is not None:
            fill_slot(self._weights, self._ops, slot, {})
            self._free.append(slot)

    def slot_of(self, digest: str) -> int:
        """0 for "", which is no adapter."""
        return self._slot_of[digest] if digest else 0
