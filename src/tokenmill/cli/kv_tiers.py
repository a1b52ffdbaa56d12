"""The KV store of a command that runs engines: the one that it starts for them, or one that runs already."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kv.store.options import TierOptions
from ..node.machine import MachineFacts, read_machine
from ..node.options import EngineOptions

if TYPE_CHECKING:
    from ..kv.store.child import KVStoreProcess
    from .kv_admin import StoreAdmin


@dataclass(frozen=True, slots=True)
class KVTiers:
    """machine  what there is for engines beside the store
    own      the store that was started for them; None: there is none, or it is somebody else's
    admin    to ask it; None: there is no store
    memory   what the plan says of it
    """

    machine: MachineFacts
    own: KVStoreProcess | None = None
    admin: StoreAdmin | None = None
    memory: tuple[tuple[str, int], ...] = ()

    @property
    def machine_if_shared(self) -> MachineFacts | None:
        """None: an engine may look for itself."""
        return None if self.own is None else self.machine

    def works(self) -> list[Coroutine[Any, Any, None]]:
        """What runs as long as the store is to be there; raises where it cannot be as it was asked."""
        return [] if self.own is None else [self.own.run()]


@contextmanager
def kv_tiers(
    options: TierOptions, engine: EngineOptions, log_level: str, log_format: str
) -> Iterator[tuple[EngineOptions, KVTiers]]:
    """With the options of engines that use the store. Raises ConfigError."""
    if options == TierOptions() and engine.kv_write is None and engine.kv_store is None:
        yield engine, KVTiers(read_machine())
        return
    from ..kv.store.child import machine_beside, own_store
    from .kv_admin import StoreAdmin

    machine = machine_beside(read_machine(), options)
    with own_store(options, engine, log_level, log_format) as (engine, own):
        if engine.kv_store is None:
            yield engine, KVTiers(machine)
            return
        admin = StoreAdmin(engine.kv_store)
        memory = () if own is None else (("KV store", options.host_bytes),)
        with contextlib.closing(admin):
            yield engine, KVTiers(machine, own, admin, memory)
