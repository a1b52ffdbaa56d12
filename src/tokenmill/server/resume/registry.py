"""The streams that are kept and under way: of this process, and of an earlier one that was ended before them.

An Observer: outputs are put to the file before clients hear of them, and nobody waits for the disk.
Only the first bytes of an answer wait, until its call is in the file: whoever has an id can come back with it.

A stream of an earlier process is carried out again from the body of its call, by the same endpoint, with its request,
its names and the outputs that it had. So every API is resumed by the code that serves it, and what clients have read
already is written again to the same bytes, which nobody is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Scope

from ...control.observe.call_context import CALL
from ...control.observe.observers import Observer
from ...control.tenants.access import Access
from ...core.errors import Unavailable
from ...core.events import Output, StepOutputs
from ...core.masking import Mask
from ...core.tenant import Tenant
from ..access_log import without_secrets
from ..client import EngineClient
from ..config import ServerConfig
from ..limits import Limits
from .store import ADAPTER, KeptAnswer, KeptCall, ResumeStore
from .stream_log import StreamLog, Subscriber

if TYPE_CHECKING:
    from ...api.answer import Answer
    from ..client import EngineClient

_LOOK_S = 1.0
_log = logging.getLogger(__name__)
_SECRET = (b"authorization", b"proxy-authorization", b"x-api-key", b"cookie")
WISH = "x-tokenmill-resume"
"""A header: "true" asks that the stream goes on for a while when its connection is lost."""


class StreamRegistry(Observer):
    """`restart` it before it serves, `close` it after; the store is its maker's. grace_s: how long a stream goes on
    that nobody reads, where that is wanted. tenant_of: as of Access. is_draining: whether the server is about to end:
    what that cuts off is left in the file, for the next one. mask: of what is kept of heads.

    app     what is behind the layer, which tells
    client  of the engines whose streams are kept; those of other models are not
    num_resumed, num_reconnects: since the start
    """

    def __init__(
        self,
        store: ResumeStore,
        grace_s: float,
        tenant_of: Callable[[str], Tenant | None],
        is_draining: Callable[[], bool] = lambda: False,
        mask: Mask | None = None,
    ) -> None:
        self._store = store
        self._mask = mask or Mask()
        self._grace_s = grace_s
        self._tenant_of = tenant_of
        self.app: ASGIApp | None = None
        self.client: EngineClient | None = None
        self._is_draining = is_draining
        self.num_resumed = 0
        self.num_reconnects = 0
        self._logs: dict[tuple[str, str], StreamLog] = {}
        self._by_request: dict[str, StreamLog] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def num_open(self) -> int:
        return len(self._by_request)

    # ---- streams come and go ----

    def stream_log_of(self, scope: Scope) -> StreamLog:
        """For a call that has come, whose body is still to be read."""

        def keep(log: StreamLog, answer: Answer, client: EngineClient) -> bool:
            if log.body is None or self._is_closed or client is not self.client:
                return False
            state, request = scope["state"], answer.choices[0].request
            headers = tuple((name, self._masked(value)) for name, value in log.headers if name.lower() not in _SECRET)
            query = self._masked(without_secrets(scope["query_string"]))
            log.call = KeptCall(
                answer.id, answer.created, answer.fingerprint, request, _wish(headers), state["owner"],
                state["client"], state.get("key", ""), state["request_id"], state["told_id"], scope["path"],
                query, headers, bytes(log.body),
            )  # fmt: skip
            log.key = self._store.new_key()
            self._enter(log)
            self.spawn(self._write(log))
            return True

        log = StreamLog(keep)
        log.headers, log.body = tuple(scope["headers"]), bytearray()
        return log

    def _masked(self, value: bytes) -> bytes:
        return self._mask(value.decode("latin1")).encode("latin1")

    async def _write(self, log: StreamLog) -> None:
        assert log.call is not None
        try:
            await self._store.begin(log.key, log.call)
        finally:
            log.kept.set()
            log.wake()

    def _enter(self, log: StreamLog) -> None:
        assert log.call is not None
        call = log.call
        self._logs[call.owner, call.id] = log
        if call.told_id:
            self._logs[call.owner, call.told_id] = log
        self._by_request[call.request.id] = log

    def spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name="kept-stream")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run(self, log: StreamLog, work: Any) -> None:
        """Carry out the call of a stream to its end, whoever reads it."""
        try:
            await work
        finally:
            log.end()
            if log.is_kept:
                await self._close(log)

    async def _close(self, log: StreamLog) -> None:
        """Its answer is kept, or nothing of it; but what the end of this process has cut off goes on in the next."""
        call = log.call
        assert call is not None
        self._by_request.pop(call.request.id, None)
        self._stop_timer(log)
        if self._is_closed or (log.was_cut and self._is_draining()):
            pass
        elif log.is_whole:
            await self._store.end(log.key, call, log.answer())
        else:
            self._store.drop(log.key)
        for name in (call.id, call.told_id):
            if self._logs.get((call.owner, name)) is log:
                del self._logs[call.owner, name]

    async def find(self, owner: str, name: str) -> StreamLog | KeptAnswer | None:
        """A stream of this owner by the id of its answer or the X-Request-Id of its call. Raises Unavailable."""
        log = self._logs.get((owner, name)) if name else None
        if log is not None and not log.abandoned.is_set():
            return log
        return await self._store.find(owner, name)

    # ---- subscribers ----

    def attach(self, log: StreamLog, subscriber: Subscriber) -> None:
        log.subscribers.append(subscriber)
        self._stop_timer(log)

    def detach(self, log: StreamLog, subscriber: Subscriber) -> None:
        """Where it was the last one, the stream goes on for the grace, or ends."""
        log.subscribers.remove(subscriber)
        log.wake()
        if log.subscribers or log.is_over or self._is_closed or not log.is_kept:
            return
        assert log.call is not None
        if log.call.waits:
            self._wait(log)
        else:
            log.abandoned.set()

    def _wait(self, log: StreamLog) -> None:
        self._stop_timer(log)
        self._timers[log.key] = asyncio.get_running_loop().call_later(self._grace_s, log.abandoned.set)

    def _stop_timer(self, log: StreamLog) -> None:
        timer = self._timers.pop(log.key, None)
        if timer is not None:
            timer.cancel()

    # ---- from one process to the next ----

    async def restart(self, app: Starlette) -> None:
        """Take up what an earlier process left; needs no engine yet. Raises Unavailable."""
        if app.middleware_stack is None:
            app.middleware_stack = app.build_middleware_stack()
        for each in await self._store.unfinished():
            tenant = self._tenant_of(each.call.owner)
            if tenant is None:
                _log.warning("A stream of a tenant that is gone is not resumed.")
                self._store.drop(each.key)
                continue
            log = StreamLog(call=each.call._replace(waits=True))
            log.key, log.outputs = each.key, each.outputs
            log.kept.set()
            self._enter(log)
            self.num_resumed += 1
            self.spawn(self.run(log, self._again(log, each.call, tenant, app)))
        if self.num_resumed:
            _log.warning("%d streams of an earlier process are resumed.", self.num_resumed)

    async def _again(self, log: StreamLog, call: KeptCall, tenant: Tenant, app: Starlette) -> None:
        assert self.app is not None, "the layer is there"
        client = self.client if call.request.adapter else None
        while client is not None and client.ready is None and not self._is_draining():
            with contextlib.suppress(Unavailable):  # an engine that is ready has all adapters
                await client.wait_ready(_LOOK_S)
                break
            await asyncio.sleep(_LOOK_S)  # it is known to come back later
        scope = _scope_of(call, tenant, log) | {"app": app}
        unread = [call.body]

        async def hear() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await log.abandoned.wait()
            return {"type": "http.disconnect"}

        async def tell(message: Message) -> None:
            log.take(message)
            if message["type"] == "http.response.start" and not log.subscribers:  # from now on somebody can read it
                self._wait(log)

        CALL.set(scope["state"])
        try:
            await self.app(scope, hear, tell)
        except Exception:
            _log.exception("A stream could not be resumed.")

    async def close(self) -> None:
        """End what runs; what is not complete stays in the file, for the next process."""
        self._is_closed = True
        for timer in self._timers.values():
            timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- as an Observer ----

    def sending(self, outputs: Sequence[Output], step: StepOutputs | None) -> None:
        found = self._by_request
        if not found:
            return
        rows = [(log.key, each) for each in outputs if (log := found.get(each.request_id)) is not None]
        if rows:
            self._store.add(rows)


def _wish(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == WISH.encode() and value.strip().lower() in (b"true", b"1") for name, value in headers)


def _scope_of(call: KeptCall, tenant: Tenant, log: StreamLog) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": None,
        "server": None,
        "state": {
            "request_id": call.request_id,
            "told_id": call.told_id,
            "client": call.client,
            "owner": call.owner,
            "tenant": tenant,
            "key": call.key,
            "scopes": frozenset(),
            "stream_log": log,
        },
    }


_LABELS = ("model_name", "engine")


def stream_registry(
    store: ResumeStore, config: ServerConfig, access: Access, client: EngineClient, limits: Limits
) -> StreamRegistry:
    """A registry that hears of what `client` does."""
    assert client.observers.metrics is not None
    streams = StreamRegistry(store, config.resume_grace_s, access.tenant_of, lambda: limits.draining, config.mask)
    streams.client = client
    client.adapters.take_up(store.loaded(ADAPTER), config.lora_dir)
    client.adapters.keep = partial(store.keep_loaded, ADAPTER)
    client.observers.added.append(streams)
    client.observers.metrics.registry.register(ResumeMetrics(config.model_names[0], streams))
    return streams


class ResumeMetrics:
    """A collector of a registry."""

    def __init__(self, model_name: str, streams: StreamRegistry) -> None:
        self._values = (model_name, "0")
        self._streams = streams

    def collect(self) -> Iterator[Metric]:
        kept = GaugeMetricFamily("tokenmill:streams_kept", "Streams under way that are kept", labels=_LABELS)
        kept.add_metric(self._values, self._streams.num_open)
        yield kept
        for name, text, number in (
            ("streams_resumed", "Streams of an earlier process that were resumed", self._streams.num_resumed),
            ("stream_reconnects", "Connections that came back to a stream", self._streams.num_reconnects),
        ):
            family = CounterMetricFamily(f"tokenmill:{name}", text, labels=_LABELS)
            family.add_metric(self._values, number)
            yield family
