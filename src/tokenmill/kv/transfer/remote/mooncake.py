"""Values in a Mooncake Store: memory that machines of a cluster lend, and a master that knows what is where.

This process lends none; `mooncake_client` does. Mooncake's own calls have no limits: where its master hangs, they hang,
each on its thread. Its engine listens on a port of its own choosing, on all addresses of the machine, and lets whoever
reaches it read and write the buffers that values pass through: values are sealed, and copied before they are opened.

Options: protocol (tcp, rdma), device (of rdma), metadata (P2PHANDSHAKE, or the address of a metadata server).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ....core.errors import ConfigError
from ....core.units import MiB
from .backend import PARAM, Address, Buffer

_PORT = 50051
_ROOM_BYTES = 64 * MiB
"""For values that are on their way."""

_NO_SPACE, _NOT_THERE = -200, -704


class MooncakeBackend:
    SCHEMES = ("mooncake",)
    OPTIONS = ("protocol", "device", "metadata")

    num_threads = 2
    batch_bytes = 2 * MiB
    look_names = 1024
    look_s = 0.2

    def __init__(self, address: Address) -> None:
        self.name = address.name
        self._master = (address.url.hostname or "127.0.0.1", address.url.port or _PORT)
        self._options = address.options
        self._lock = threading.Lock()
        self._store: Any = None
        _store_type()

    def check(self, limit_s: float) -> None:
        with self._lock:
            if self._store is None:
                self._store = self._connect(limit_s)
        self._require_health(self._store)

    def has(self, names: Sequence[str], limit_s: float) -> list[bool]:
        found = self._there().batch_is_exist(list(names))
        _require(min(found, default=0))
        return [bool(is_there) for is_there in found]

    def get(
        self, names: Sequence[str], most_bytes: int, take: Callable[[int, memoryview], None], limit_s: float
    ) -> None:
        store, num_there = self._there(), 0
        for nth, value in enumerate(store.get_batch(list(names))):
            if value:
                num_there += 1
                take(nth, memoryview(value)[: most_bytes + 1])
        if not num_there:
            self._require_health(store)

    def put(self, values: Sequence[tuple[str, Buffer]], limit_s: float) -> list[bool]:
        store, taken = self._there(), []
        for name, value in values:
            status = store.upsert(name, value)
            if status != _NO_SPACE:
                _require(status)
            taken.append(status == 0)
        return taken

    def delete(self, names: Sequence[str], limit_s: float) -> None:
        for status in self._there().batch_remove(list(names), True):
            if status != _NOT_THERE:
                _require(status)

    def close(self) -> None:
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _require_health(self, store: Any) -> None:
        if status := store.health_check():
            raise ConnectionError(f"The Mooncake Store's master is not reached (status {status}).")

    def _there(self) -> Any:
        if self._store is None:
            raise ConnectionError("The Mooncake Store has not been joined.")
        return self._store

    def _connect(self, limit_s: float) -> Any:
        """Raises OSError. Mooncake itself would wait for a master for a minute and a half."""
        with socket.create_connection(self._master, limit_s) as probe:
            host = probe.getsockname()[0]
        store = _store_type()()
        metadata, protocol = self._options.get("metadata", "P2PHANDSHAKE"), self._options.get("protocol", "tcp")
        device, master = self._options.get("device", ""), f"{self._master[0]}:{self._master[1]}"
        if status := store.setup(host, metadata, 0, _ROOM_BYTES, protocol, device, master):
            with suppress(Exception):
                store.close()
            raise ConnectionError(f"The Mooncake Store cannot be joined (status {status}).")
        return store


def _require(status: int) -> None:
    """Of a call that gives 0, or a negative number. Raises ConnectionError."""
    if status < 0:
        raise ConnectionError(f"The Mooncake Store fails (status {status}).")


def _store_type() -> Any:
    os.environ.setdefault("GLOG_minloglevel", "2")
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            f"--kv-remote mooncake:// needs Mooncake: pip install 'tokenmill[kv-mooncake]' ({error}).", param=PARAM
        ) from error
    return MooncakeDistributedStore
