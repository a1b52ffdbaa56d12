"""Serving an application until a signal: listen, drain, stop. uvicorn does the HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from ..core.errors import ConfigError, Unavailable

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AFTER_DRAIN_S = 5
_FORCE_S = 1.0
_POLL_S = 0.002


async def serve(
    app: Starlette,
    host: str,
    port: int,
    *,
    drain_s: float,
    on_started: Callable[[str, int], None],
) -> None:
    """Serve `app` (of `build_app`) until SIGINT or SIGTERM; `on_started` gets the address that is listened on.

    The first signal stops accepting and lets open calls finish for `drain_s` seconds; then they end with an error, as
    they do at once on a second signal. Raises ConfigError when the port cannot be had.
    """
    listener = _listen(host, port)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(drain_s) + _AFTER_DRAIN_S,
            backlog=2048,
        )
    )
    serving = asyncio.create_task(server.serve([listener]), name="http")
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(_POLL_S)
        if server.started:
            on_started(*listener.getsockname()[:2])
        with _on_signals(_Stop(app, server, serving, drain_s)):
            await serving
    except asyncio.CancelledError:
        if not server.force_exit:
            raise
    finally:
        serving.cancel()
        listener.close()


class _Stop:
    """What a signal does: drain, and the second time stop at once."""

    def __init__(self, app: Starlette, server: uvicorn.Server, serving: asyncio.Task[None], drain_s: float) -> None:
        self._app = app
        self._server = server
        self._serving = serving
        self._drain_s = drain_s

    def __call__(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._server.should_exit:
            self._app.state.limits.draining = True
            self._server.should_exit = True
            loop.call_later(self._drain_s, self._end_open)
        elif not self._server.force_exit:
            self._server.force_exit = True
            self._end_open()
            loop.call_later(_FORCE_S, self._serving.cancel)

    def _end_open(self) -> None:
        self._app.state.client.fail_open(Unavailable("The server is shutting down."))


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


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"Cannot listen on {host} port {port}: {error}.", param="port") from error
    listener.setblocking(False)
    return listener
