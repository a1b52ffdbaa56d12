"""Weights that are kept on disk, of which a bounded part is in memory: what a backend that can do so offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..core.errors import ConfigError
from ..core.experts import WeightReads
from .weights import RawTensor, Stack, Weight


@dataclass(frozen=True, slots=True)
class DiskWeights:
    """Weights that are kept on disk: packed once into the file `path`, of which `key` says the content (64 hex digits).

    expert_bytes  memory for routed experts, as many of them as fit; None: all are in memory as usual
    weight_bytes  memory for the other weights of layers; None: as above
    """

    path: Path
    key: str
    expert_bytes: int | None = None
    weight_bytes: int | None = None


class DiskOps(Protocol):
    """A part of Ops."""

    def pack_layer(self, make: Callable[[], Sequence[RawTensor]]) -> Weight:
        """As `pack` of what `make` gives, for a weight that every step uses once. Where it is kept on disk already,
        `make` is not called."""
        ...

    def pack_experts(self, make: Callable[[], Sequence[Sequence[RawTensor]]]) -> Stack:
        """As `pack_stack` of what `make` gives, for routed experts: of a layer gate_up, then down. Where they are kept
        on disk already, `make` is not called."""
        ...

    def on_disk(self, where: DiskWeights) -> AbstractContextManager[None]:
        """What is packed inside by the two functions above is kept on disk, as `where` says. Raises ConfigError where
        this backend cannot, there is no room on the disk, or the memory given is too little for the model."""
        ...

    @property
    def disk_memory_bytes(self) -> tuple[int, int]:
        """Memory for experts and for other weights that are kept on disk."""
        ...

    def weight_reads(self) -> WeightReads | None:
        """None where nothing is kept on disk. From any thread, until `close`."""
        ...


class AllInMemory:
    """Of a backend that keeps nothing on disk."""

    def pack_layer(self, make: Callable[[], Sequence[RawTensor]]) -> Any:
        return self.pack(make())  # type: ignore[attr-defined]

    def pack_experts(self, make: Callable[[], Sequence[Sequence[RawTensor]]]) -> Any:
        return self.pack_stack(make())  # type: ignore[attr-defined]

    def on_disk(self, where: DiskWeights) -> AbstractContextManager[None]:
        param = "expert_memory" if where.expert_bytes is not None else "weight_memory"
        raise ConfigError(f"--{param.replace('_', '-')} needs the native backend, on Linux or macOS.", param=param)

    @property
    def disk_memory_bytes(self) -> tuple[int, int]:
        return 0, 0

    def weight_reads(self) -> WeightReads | None:
        return None
