"""The KV store that a server, a worker or an `LLM` starts for itself, where its options ask for tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ...core.config import BLOCK_SIZE
from ...core.errors import ConfigError
from ...core.units import format_bytes
from ...node.machine import MachineFacts, left_of
from ...node.options import EngineOptions
from .options import TierOptions

if TYPE_CHECKING:
    from .child import KVStoreProcess


@contextmanager
def own_store(
    tiers: TierOptions, engine: EngineOptions, log_level: str = "warning", log_format: str = "text"
) -> Iterator[tuple[EngineOptions, KVStoreProcess | None]]:
    """The options of engines that use it, and the store itself, which runs until this ends; None: there is none of its
    own. Raises ConfigError."""
    if not tiers.tiers:
        if tiers != TierOptions():
            raise ConfigError(
                "Flags of KV tiers need a tier: --kv-host, --kv-disk, --kv-remote or --kv-peers.", param="kv_host"
            )
        if engine.kv_write is not None and engine.kv_store is None:
            message = "--kv-write needs KV tiers: --kv-host, --kv-disk, --kv-remote, --kv-peers or --kv-store."
            raise ConfigError(message, param="kv_write")
        yield engine, None
        return
    if engine.kv_store is not None:
        raise ConfigError(
            "--kv-store uses a KV store that runs, whose tiers are its own: give them to tokenmill kv serve.",
            param="kv_store",
        )
    if engine.kv_save is not None:
        message = "--kv-save and KV tiers do not go together: --kv-disk FOLDER:SIZE outlives the server, too."
        raise ConfigError(message, param="kv_save")
    if not engine.enable_prefix_caching:
        raise ConfigError("KV tiers have nothing to keep: prefix caching is off.", param="enable_prefix_caching")
    from .child import KVStoreProcess

    with KVStoreProcess(tiers, log_level, log_format, engine.block_size or BLOCK_SIZE) as store:
        yield replace(engine, kv_store=store.path), store


def machine_beside(machine: MachineFacts, tiers: TierOptions) -> MachineFacts:
    """What is left for engines. Raises ConfigError where the store would take all."""
    if not tiers.tiers:
        return machine
    left = left_of(machine, tiers.host_bytes)
    if not left.usable_memory:
        raise ConfigError(
            f"--kv-host {format_bytes(tiers.host_bytes)} is more than the"
            f" {format_bytes(machine.usable_memory * machine.num_sharing)} that are free.",
            param="kv_host",
        )
    return left
