"""The front end's view of one engine: requests out, deltas in, and what is known of its health.

One message a step arrives here and is dealt out to the streams that wait for it, without a task per token or per
request; a stream that only passes text on takes it at once, and its task sleeps. Every submitted request stays in the
books until the engine's own last word on it, also after the client has gone or a stop string has ended it here, so that
counts are true and a stuck engine cannot look idle.

Where the engine is shared, choices go to it as places come free (`cluster.desk`), and wait here with their call before.

What the engine produces while nobody reads is merged into one delta per request: a slow reader costs its own tokens,
never a queue of messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..cluster.desk import FrontDesk
from ..cluster.places import Room
from ..core.errors import EngineFailed, TokenmillError, Unavailable
from ..core.events import (
    FINISH_ABORT,
    Abort,
    AdapterLoaded,
    EngineStats,
    LoadAdapter,
    Output,
    Ready,
    StepOutputs,
    Submit,
    UnloadAdapter,
)
from ..core.ports import FrontEnd
from ..core.request import Request
from ..core.step import TokenLogprob
from .adapters import AdapterBook, ServedAdapter

if TYPE_CHECKING:  # the library runs without it, and it takes a while to load
    from .metrics import Metrics
    from .request_log import RequestLog

_log = logging.getLogger(__name__)

_Notice = LoadAdapter | UnloadAdapter


@dataclass(slots=True, eq=False)
class Delta:
    """What a request has produced since its stream was last read; fields as in core.events.Output."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token: int | None = None
    num_cached: int = 0
    error: str = ""
    error_kind: str = ""
    error_param: str = ""
    vector: bytes = b""

    def add(self, output: Output) -> None:
        self.tokens.extend(output.tokens)
        self.logprobs.extend(output.logprobs)
        self.prompt_logprobs.extend(output.prompt_logprobs)
        self.finish_reason = output.finish_reason
        self.stop_token = output.stop_token
        self.num_cached = output.num_cached
        self.vector = output.vector
        self.error, self.error_kind, self.error_param = output.error, output.error_kind, output.error_param


class Stream:
    """The deltas of the requests of one call, read by one reader. Always `close` it."""

    __slots__ = ("_client", "_failure", "_open", "_pending", "_taker", "_waiter")

    def __init__(self, client: EngineClient, request_ids: Iterable[str]) -> None:
        self._client = client
        self._open = set(request_ids)
        self._pending: dict[str, Delta] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Callable[[Output], bool] | None = None
        self._failure: Exception | None = None

    async def take(self) -> list[Delta]:
        """Everything new, at most one delta per request; waits until there is something. Raises what `fail` gave."""
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas = list(self._pending.values())
        self._pending.clear()
        return deltas

    def divert(self, taker: Callable[[Output], bool]) -> None:
        """While the reader waits in `take`, outputs that do not end their request go to `taker` instead, as they come.
        What it refuses (False) is the reader's; what it raises, the reader gets as from `fail`."""
        self._taker = taker

    def finish(self, request_id: str, reason: str) -> None:
        """The reader has decided that this request is done (a stop string): the engine may forget it."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._pending.pop(request_id, None)
            self._client._end(request_id, reason)

    def fail(self, failure: Exception) -> None:
        """End the stream: its reader gets `failure`, the engine forgets its requests."""
        if self._failure is None:
            self._failure = failure
            self._pending.clear()
            self._wake()
        self.close()

    def close(self) -> None:
        """Cancel whatever is still running, and let go of what takes outputs, which may hold this stream."""
        self._taker = None
        for request_id in sorted(self._open):
            self.finish(request_id, FINISH_ABORT)

    def _push(self, output: Output) -> None:
        if self._taker is not None and output.finish_reason is None and self._is_awaited():
            try:
                if self._taker(output):
                    return
            except Exception as failure:
                self.fail(failure)
                return
        delta = self._pending.get(output.request_id)
        if delta is None:
            delta = self._pending[output.request_id] = Delta(output.request_id)
        delta.add(output)
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._wake()

    def _is_awaited(self) -> bool:
        """Whether the reader has taken all there was and waits for more."""
        return self._waiter is not None and not self._waiter.done()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True, eq=False)
class _Entry:
    """One request in the books. `stream` is None once nobody listens; `ending` is then how it ended for its client."""

    request: Request
    stream: Stream | None
    ending: str | None = None
    last_token_s: float = -1.0


class EngineClient:
    """Speaks to one engine at a time over a link. `attach` a link for each life of the engine.

    ready        the engine's facts, or None while it is loading or down
    stats        its state after the last step
    desk         what is open: requests whose end the engine has not yet confirmed, and those it is yet to be told of
    is_shared    many clients use the engine, and have places in turn
    adapters     the LoRA adapters that requests may name

    wanted: adapters to load into the first engine. An engine is ready once it has all its adapters; on_prepared is
    called then, or with what kept a wanted one from being loaded.
    """

    def __init__(
        self,
        wanted: Sequence[ServedAdapter] = (),
        on_prepared: Callable[[TokenmillError | None], None] = lambda error: None,
    ) -> None:
        self.adapters = AdapterBook(self._tell, wanted)
        self._on_prepared = on_prepared
        self._notices: list[_Notice] = []
        self.ready: Ready | None = None
        self.stats = EngineStats()
        self.desk = FrontDesk()
        self.is_shared = False
        self.metrics: Metrics | None = None
        self.request_log: RequestLog | None = None
        self._why_down = "Loading model"
        self._back_s: float | None = None
        self._on_broken: Callable[[], None] = lambda: None
        self._entries: dict[str, _Entry] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._progress_s = 0.0
        self._submits: list[Request] = []
        self._aborts: list[str] = []
        self._outbox = asyncio.Event()

    @property
    def num_open(self) -> int:
        return self.desk.num_open

    def attach(self, link: FrontEnd, on_broken: Callable[[], None] = lambda: None) -> None:
        """Take up a new engine; requests are accepted once its Ready has come. Needs a running loop. The link stays
        its maker's to close. `on_broken` is called when what comes over the link cannot be used: the engine has been
        let go, but may live on and hear of it from nobody else."""
        self._let_go("Loading model")
        self._on_broken = on_broken
        self._tasks = [
            asyncio.create_task(self._guard(self._read(link)), name="engine-client-read"),
            asyncio.create_task(self._guard(self._write(link)), name="engine-client-write"),
        ]

    def detach(self, reason: str, back_s: float | None = None) -> None:
        """Let go of the engine. Open streams fail; `reason` is told to whoever asks until the next Ready, and to come
        back when that is expected: in `back_s` seconds from now, if it is known."""
        self.expect(back_s)
        self._let_go(reason)

    def _let_go(self, reason: str) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        self._lose(reason)

    def expect(self, back_s: float | None) -> None:
        """The engine will be ready in so many seconds; None: nobody knows."""
        self._back_s = None if back_s is None else asyncio.get_running_loop().time() + back_s

    def open(self, requests: Sequence[Request], client: str = "") -> Stream:
        """Submit the requests of one call, or let them wait for places. Raises Unavailable while no engine is ready."""
        self.require_ready()
        if not self._entries:
            self._progress_s = max(self._progress_s, requests[0].arrival_s)
        stream = Stream(self, [request.id for request in requests])
        for request in requests:
            assert request.id not in self._entries, f"request id {request.id} is in use"
            self._entries[request.id] = _Entry(request, stream)
        self.desk.join(requests, client)
        self._submit()
        return stream

    def require_ready(self) -> Ready:
        if self.ready is None:
            back_s = self._back_s
            left_s = None if back_s is None else max(0.0, back_s - asyncio.get_running_loop().time())
            raise Unavailable(self._why_down, retry_after_s=left_s)
        return self.ready

    def stalled_s(self, now: float) -> float:
        """Seconds since the last step while there is work; 0 when idle."""
        return max(0.0, now - self._progress_s) if self._entries else 0.0

    def fail_open(self, failure: TokenmillError) -> None:
        """End every open stream with `failure`, and cancel its requests in the engine."""
        for stream in {id(entry.stream): entry.stream for entry in self._entries.values() if entry.stream}.values():
            stream.fail(failure)

    def _end(self, request_id: str, reason: str) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and self.desk.is_waiting(request_id):
            self.desk.end(entry.request, 0, reason)
            del self._entries[request_id]
            if self._notices:
                self._outbox.set()
            if self.metrics is not None:
                self.metrics.request_lost(reason)
            if self.request_log is not None:
                self.request_log.given_up(entry.request, reason)
        elif entry is not None and entry.ending is None:
            entry.stream, entry.ending = None, reason
            self._aborts.append(request_id)
            self._outbox.set()

    def _submit(self) -> None:
        while (request := self.desk.choose()) is not None:
            self._submits.append(request)
        if self._submits or self._notices:
            self._outbox.set()

    async def _read(self, link: FrontEnd) -> None:
        while True:
            message = await link.receive()
            if isinstance(message, StepOutputs):
                self._take_step(message)
            elif isinstance(message, AdapterLoaded):
                self.adapters.answer(message)
            else:
                self._tasks.append(
                    asyncio.create_task(self._guard(self._prepare(message)), name="engine-client-prepare")
                )

    async def _prepare(self, ready: Ready) -> None:
        try:
            await self.adapters.restore()
        except TokenmillError as error:
            self._on_prepared(error)
            return
        self.ready = ready
        if self.is_shared and ready.max_num_seqs:
            self.desk.share(Room(ready.max_num_seqs, ready.max_num_batched_tokens))
        if self.metrics is not None:
            self.metrics.engine_ready(ready)
        self._on_prepared(None)

    async def _write(self, link: FrontEnd) -> None:
        while True:
            await self._outbox.wait()
            self._outbox.clear()
            submits, self._submits = self._submits, []
            aborts, self._aborts = self._aborts, []
            notices, self._notices = self._split_notices()
            if submits:
                await link.send(Submit(tuple(submits)))
            if aborts:
                await link.send(Abort(tuple(aborts)))
            for notice in notices:
                await link.send(notice)

    def _tell(self, notice: _Notice) -> None:
        """Sent after all requests opened so far, which may name an adapter that is unloaded now."""
        self._notices.append(notice)
        self._outbox.set()

    def _split_notices(self) -> tuple[list[_Notice], list[_Notice]]:
        """What can be told now, and what must wait, with all after it, for choices that wait themselves: that an
        adapter goes, unless it has another name."""
        for place, notice in enumerate(self._notices):
            if not isinstance(notice, UnloadAdapter) or self.adapters.name_of(notice.digest):
                continue
            if self.desk.waits_for(notice.digest):
                return self._notices[:place], self._notices[place:]
        return self._notices, []

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Whatever ends the link's reading or writing is the end of this engine."""
        try:
            await work
        except EOFError:
            _log.warning("The engine has gone; %d requests were open.", self.desk.num_open)
            self.detach("The engine is down and will be restarted.")
        except Exception:
            _log.exception("The link to the engine failed.")
            self.detach("The link to the engine failed; it will be restarted.")
            self._on_broken()

    def _lose(self, reason: str) -> None:
        self.ready = None
        self._why_down = reason
        self.stats = EngineStats()
        entries, self._entries = self._entries, {}
        self.desk = FrontDesk()
        self._submits, self._aborts, self._notices = [], [], []
        self.adapters.lose(Unavailable(reason))
        failure = EngineFailed("The engine stopped while the request was running; it may be sent again.")
        for entry in entries.values():
            if entry.stream is not None:
                entry.stream.fail(failure)
            if self.metrics is not None:
                self.metrics.request_lost(entry.ending)
            if self.request_log is not None:
                self.request_log.lost(entry.request, entry.ending)
        if self.metrics is not None:
            self.metrics.engine_lost()

    def _take_step(self, step: StepOutputs) -> None:
        now, metrics = step.now_s, self.metrics
        if step.stats.num_steps != self.stats.num_steps:
            self._progress_s = now
        entries = self._entries
        gaps: dict[float, int] = {}  # by when a request last got tokens: how many got some now
        for output in step.outputs:
            entry = entries.get(output.request_id)
            if entry is None:
                continue
            if output.tokens:
                last_s, entry.last_token_s = entry.last_token_s, now
                if last_s >= 0:
                    gaps[last_s] = gaps.get(last_s, 0) + 1
                else:
                    self.desk.start(entry.request, output.num_cached, now)
                    if metrics is not None:
                        metrics.first_token(now - entry.request.arrival_s)
            if entry.stream is not None:
                entry.stream._push(output)
            if output.finish_reason is not None:
                self._finish(entry, output, now)
        self.stats = step.stats
        self.desk.step(step.stats)
        if self.desk.num_waiting:
            self._submit()
        if metrics is not None:
            for last_s, count in gaps.items():
                metrics.further_tokens(now - last_s, count)
            metrics.step(step.stats)

    def _finish(self, entry: _Entry, output: Output, now: float) -> None:
        request = entry.request
        del self._entries[request.id]
        self.desk.end(request, output.num_output, entry.ending or output.finish_reason or "")
        if self.metrics is not None:
            reason = entry.ending or output.finish_reason or ""
            self.metrics.request_done(request, output, reason, entry.last_token_s, now)
        if self.request_log is not None:
            self.request_log.ended(request, output, entry.ending or output.finish_reason or "", now)
