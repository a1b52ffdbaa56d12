"""A store of others that a plug-in talks to. What a plug-in raises is a failure of that store, as a lost connection is:
nobody asks it for a while, and blocks are computed. It sees names and sealed values alone."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ....core.errors import TokenmillError
from ....plugins.fit import Unfit, check_methods
from ....plugins.groups import KV_BACKENDS
from ....plugins.load import bad_plugin, load_plugin
from .backend import OPTIONS, PARAM, Address, Backend, Buffer, parse

_Result = TypeVar("_Result")


def open_plugin_backend(text: str) -> tuple[Backend, Address] | None:
    """Of the plug-in that has the name of the address' scheme, as `tier.open_backend` does; None where there is none.
    Raises ConfigError."""
    scheme = text.partition("://")[0]
    kind = load_plugin(KV_BACKENDS, scheme, type, param=PARAM)
    if kind is None:
        return None
    try:
        check_methods(kind, Backend, "KV backend")
    except Unfit as error:
        raise bad_plugin(KV_BACKENDS, scheme, str(error), PARAM) from None
    address = parse(text, (*OPTIONS, *getattr(kind, "OPTIONS", ())))
    try:
        backend = kind(address)
    except TokenmillError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise bad_plugin(KV_BACKENDS, scheme, f"{kind.__name__} failed: {what}", PARAM) from error
    for name in inspect.get_annotations(Backend):
        if not hasattr(backend, name):
            raise bad_plugin(KV_BACKENDS, scheme, f"{kind.__name__} is no KV backend: it has no {name}.", PARAM)
    return _Guarded(backend), address


class _Guarded:
    """A Backend whose calls raise OSError and EOFError alone. The tier closes its store while calls may still run; a
    plug-in need not bear that: it is closed by the last call that ends, and called no more."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._num_calls = 0
        self._is_closed = False
        self.name = backend.name
        self.num_threads = backend.num_threads
        self.batch_bytes = backend.batch_bytes
        self.look_names = backend.look_names
        self.look_s = backend.look_s

    def check(self, limit_s: float) -> None:
        self._call(self._backend.check, limit_s)

    def has(self, names: Sequence[str], limit_s: float) -> list[bool]:
        return self._call(self._backend.has, names, limit_s)

    def get(
        self, names: Sequence[str], most_bytes: int, take: Callable[[int, memoryview], None], limit_s: float
    ) -> None:
        self._call(self._backend.get, names, most_bytes, take, limit_s)

    def put(self, values: Sequence[tuple[str, Buffer]], limit_s: float) -> list[bool]:
        return self._call(self._backend.put, values, limit_s)

    def delete(self, names: Sequence[str], limit_s: float) -> None:
        self._call(self._backend.delete, names, limit_s)

    def close(self) -> None:
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            is_last = self._num_calls == 0
        if is_first and is_last:
            _as_store(self._backend.close)

    def _call(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        with self._lock:
            if self._is_closed:
                raise OSError("the store is closed")
            self._num_calls += 1
        try:
            return _as_store(call, *arguments)
        finally:
            with self._lock:
                self._num_calls -= 1
                is_last = self._is_closed and self._num_calls == 0
            if is_last:
                _as_store(self._backend.close)


def _as_store(call: Callable[..., _Result], *arguments: Any) -> _Result:
    try:
        return call(*arguments)
    except (OSError, EOFError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
