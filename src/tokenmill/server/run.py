"""Serving an application until a signal: listen, drain, stop. uvicorn does the HTTP, with our bounds (connection)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from ..control.slo.objectives import CLIENT as MEASURING
from ..core.errors import Unavailable
from .access_log import Noting
from .connection import Connection
from .connections import Connections
from .listen import BACKLOG, listening, raise_file_limit

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AFTER_DRAIN_S = 5
_FORCE_S = 1.0
_POLL_S = 0.002
_log = logging.getLogger(__name__)


async def serve(
    app: Starlette,
    host: str,
    port: int,
    *,
    drain_s: float,
    on_started: Callable[[str, int], None],
    on_draining: Callable[[int], None] = lambda num_open: None,
    on_shrunk: Callable[[], None] = lambda: None,
    uds: str = "",
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve `app` (of `build_app`) until SIGINT or SIGTERM; `on_started` gets the address that is listened on, which
    is the path (and port 0) of a Unix socket.

    The first signal stops accepting and lets open calls finish for `drain_s` seconds; then they end with an error, as
    they do at once on a second signal. `on_draining` gets the number of requests that are waited for, and
    `on_shrunk` is called when memory may be given back. Raises ConfigError when the address cannot be had.
    """
    connections = _connections(app, on_shrunk, tls)
    server = uvicorn.Server(_settings(app, connections, drain_s))
    handover = app.state.handover
    with listening(host, port, uds) as listener:
        connections.open()
        if handover is not None:
            handover.open()
        app.state.measuring.open()
        app.state.models.open()
        serving = asyncio.create_task(server.serve([listener]), name="http")
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(_POLL_S)
            if server.started:
                on_started(*((uds, 0) if uds else listener.getsockname()[:2]))
            with _on_signals(_Stop(app, server, serving, drain_s, on_draining)):
                await serving
                await app.state.background.drain()
        except asyncio.CancelledError:
            if not server.force_exit:
                raise
        finally:
            serving.cancel()
            for each in getattr(server, "servers", ()):
                each.close()
            connections.close()
            await app.state.background.end()
            await app.state.measuring.close()
            await app.state.models.close()
            if handover is not None:
                await handover.close()


def _connections(app: Starlette, on_shrunk: Callable[[], None], tls: ssl.SSLContext | None) -> Connections:
    config = app.state.config
    bounds = replace(config.http, max_connections=raise_file_limit(config.http.max_connections))
    if bounds.max_connections < config.http.max_connections:
        _log.warning("At most %d connections can be open here (ulimit -n).", bounds.max_connections)
    return Connections(
        bounds,
        config.mask,
        root_path=config.root_path,
        tls=tls,
        note_refused=app.state.client.observers.metrics.call_refused,
        on_shrunk=on_shrunk,
    )


def _settings(app: Starlette, connections: Connections, drain_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        Noting(app),
        http=cast(Any, partial(Connection, connections)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=[("x-content-type-options", "nosniff")],
        proxy_headers=False,
        timeout_keep_alive=cast(int, app.state.config.http.idle_s),
        timeout_graceful_shutdown=int(drain_s) + _AFTER_DRAIN_S,
        backlog=BACKLOG,
    )


class _Stop:
    """What a signal does: drain, and the second time stop at once."""

    def __init__(
        self,
        app: Starlette,
        server: uvicorn.Server,
        serving: asyncio.Task[None],
        drain_s: float,
        on_draining: Callable[[int], None],
    ) -> None:
        self._app = app
        self._server = server
        self._serving = serving
        self._drain_s = drain_s
        self._on_draining = on_draining

    def __call__(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._server.should_exit:
            self._app.state.limits.draining = True
            if self._app.state.handover is not None:
                self._app.state.handover.stop()
            client = self._app.state.client
            num_own = client.request_queue.num_open_of(MEASURING)
            self._on_draining(client.num_open - num_own + self._app.state.models.num_open)
            self._server.should_exit = True
            loop.call_later(self._drain_s, self._end_open)
        elif not self._server.force_exit:
            self._server.force_exit = True
            self._end_open()
            loop.call_later(_FORCE_S, self._serving.cancel)

    def _end_open(self) -> None:
        state, error = self._app.state, Unavailable("The server is shutting down.")
        state.client.fail_open(error)
        state.background.end_between(state.client, error)
        state.models.end_calls()


@contextlib.contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Only the main thread may listen for signals; elsewhere the caller stops by cancelling."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
