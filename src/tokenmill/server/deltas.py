"""What requests have produced and nobody has read yet.

What an engine produces while nobody reads is merged into one delta per request: a slow reader costs its own tokens,
never a queue of messages. A stream that only passes text on takes it at once, and its task sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..core.events import FINISH_ABORT, Output, Timing
from ..core.step import TokenLogprob


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
    is_saved: bool = False
    predicted: tuple[int, int] = (0, 0)
    timing: Timing | None = None
    draft_steps: list[tuple[int, int]] = field(default_factory=list)

    def add(self, output: Output) -> None:
        self.tokens.extend(output.tokens)
        self.logprobs.extend(output.logprobs)
        self.prompt_logprobs.extend(output.prompt_logprobs)
        self.finish_reason = output.finish_reason
        self.stop_token = output.stop_token
        self.num_cached = output.num_cached
        self.vector = output.vector
        self.is_saved = output.is_saved
        if output.timing is not None:
            self.timing = output.timing
        if output.num_drafted:
            self.draft_steps += output.draft_steps
            (accepted, rejected), (more, others) = self.predicted, output.predicted
            self.predicted = (accepted + more, rejected + others)
        self.error, self.error_kind, self.error_param = output.error, output.error_kind, output.error_param


class Stream:
    """The deltas of the requests of one call, read by one reader. Always `close` it. `end` is told, once for each
    request, that its reader wants no more of it, and how it ended. `interval`: after the first delta of a request the
    next is due when it has so many tokens, or is the last."""

    __slots__ = ("_begun", "_end", "_failure", "_interval", "_open", "_pending", "_taker", "_waiter")

    def __init__(self, end: Callable[[str, str], None], request_ids: Iterable[str], interval: int = 1) -> None:
        self._end = end
        self._interval = interval
        self._begun: set[str] = set()
        self._open = set(request_ids)
        self._pending: dict[str, Delta] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Callable[[Output], bool] | None = None
        self._failure: Exception | None = None

    async def take(self) -> list[Delta]:
        """Everything new, at most one delta per request; waits until there is something. Raises what `fail` gave."""
        while not (deltas := self._due()):
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return deltas

    def _due(self) -> list[Delta]:
        """What is due, taken out."""
        pending = self._pending
        if self._interval == 1:
            self._pending = {}
            return list(pending.values())
        deltas = [delta for delta in pending.values() if self._is_due(delta)]
        for delta in deltas:
            self._begun.add(delta.request_id)
            del pending[delta.request_id]
        return deltas

    def _is_due(self, delta: Delta) -> bool:
        is_first = delta.request_id not in self._begun
        return is_first or delta.finish_reason is not None or len(delta.tokens) >= self._interval

    def divert(self, taker: Callable[[Output], bool]) -> None:
        """While the reader waits in `take`, outputs that do not end their request go to `taker` instead, as they come.
        What it refuses (False) is the reader's; what it raises, the reader gets as from `fail`. With an interval all is
        the reader's."""
        if self._interval == 1:
            self._taker = taker

    def finish(self, request_id: str, reason: str) -> None:
        """The reader has decided that this request is done (a stop string): the engine may forget it."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._pending.pop(request_id, None)
            self._end(request_id, reason)

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

    def push(self, output: Output) -> None:
        """The client's side: what a request of the stream has produced."""
        if self._taker is not None and output.finish_reason is None and self.is_awaited:
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
        if self._interval == 1 or self._is_due(delta):
            self._wake()

    @property
    def is_closed(self) -> bool:
        """Whether nothing of it is open any more."""
        return not self._open

    @property
    def is_immediate(self) -> bool:
        """Whether its reader gets each output as it comes."""
        return self._interval == 1

    @property
    def is_awaited(self) -> bool:
        """Whether the reader has taken all there was and waits for more."""
        return self._waiter is not None and not self._waiter.done()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
