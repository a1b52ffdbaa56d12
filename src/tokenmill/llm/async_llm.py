"""A model in this process for asyncio programs: `from tokenmill import AsyncLLM, SamplingParams`.

    async with AsyncLLM("smollm2") as llm:
        async for output in llm.generate("The sea is", SamplingParams(max_tokens=32)):
            print(output.text)

The same model, engine and thread as an `LLM`, whose coroutines run on the engine's loop while the caller's awaits them:
any number at once, batched together. Each output is all that has been said so far, as in vLLM; a slow reader gets fewer
and longer ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncGenerator, Awaitable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from ..core.errors import InvalidRequest
from ..core.events import FINISH_ABORT, Ready
from ..core.request import SamplingParams
from .arguments import Message, Prompt, StructuredOutputs
from .calls import PieceReader
from .llm import LLM
from .outputs import RequestOutput, Said
from .tokenizer import LLMTokenizer

T = TypeVar("T")


@dataclass(slots=True)
class _Open:
    """A call that runs: what its reader waits for now, and whether `abort` has ended it."""

    waiting: Future[Any] | None = None
    aborted: bool = False


class AsyncLLM:
    """Loads `model` when made, as LLM does and with the same options; loading blocks. Its methods belong to one event
    loop at a time. Close it, or use it as an asynchronous context manager."""

    def __init__(self, model: str | os.PathLike[str] = "smollm2", **options: Any) -> None:
        self._llm = LLM(model, **options)
        self._runtime, self._calls = self._llm._runtime, self._llm._calls
        self._open: dict[str, _Open] = {}
        self._numbers = itertools.count()

    @property
    def ready(self) -> Ready:
        """The engine's facts, as of LLM.ready."""
        return self._llm.ready

    def get_tokenizer(self) -> LLMTokenizer:
        return self._llm.get_tokenizer()

    def default_sampling(self, **overrides: Any) -> SamplingParams:
        """The model's own recommendations, with `overrides`."""
        return self._llm.default_sampling(**overrides)

    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        structured_outputs: StructuredOutputs = None,
        cache_salt: str = "",
        lora: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt (text, token ids, or a dict of either) or answers a conversation; the last output is
        `finished`. Leaving the loop, cancelling the task and `abort(request_id)` cancel the request. Raises
        InvalidRequest."""
        name = f"call-{next(self._numbers)}" if request_id is None else request_id
        if name in self._open:
            raise InvalidRequest(f"The request id {name!r} is in use.", param="request_id")
        state = self._open[name] = _Open()
        try:
            # Encoding a long prompt takes a while, which the caller's loop need not wait for.
            call = await asyncio.to_thread(
                self._calls.of_any, prompt, sampling_params, cache_salt, lora, structured_outputs
            )
            said: dict[int, Said] = {}
            pieces = PieceReader(self._calls.pieces(call))
            try:
                while not state.aborted:
                    try:
                        choice, piece = await self._run(pieces.next(), state)
                    except StopAsyncIteration:
                        return
                    said.setdefault(choice.index, Said(choice)).add(piece)
                    yield call.output(said)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not state.aborted or (task is not None and task.cancelling()):
                    raise
            finally:
                with contextlib.suppress(InvalidRequest):  # a closed model has let go of its calls
                    await self._run(pieces.close())
            yield call.output(said, unfinished=FINISH_ABORT)
        finally:
            del self._open[name]

    async def abort(self, request_id: str) -> None:
        """Ends a call of `generate`: its last output has the finish_reason "abort". An unknown id is no error: the call
        may just have ended."""
        state = self._open.get(request_id)
        if state is not None:
            state.aborted = True
            if state.waiting is not None:
                state.waiting.cancel()

    async def embed(self, inputs: Prompt | Sequence[Prompt], **how: Any) -> np.ndarray:
        """As LLM.embed."""
        return await asyncio.to_thread(self._llm.embed, inputs, **how)

    async def score(self, text: str, others: Sequence[str]) -> list[float]:
        """As LLM.score."""
        return await asyncio.to_thread(self._llm.score, text, others)

    async def load_adapter(self, name: str, path: str) -> None:
        """As LLM.load_adapter."""
        await asyncio.to_thread(self._llm.load_adapter, name, path)

    async def unload_adapter(self, name: str) -> None:
        """As LLM.unload_adapter."""
        await asyncio.to_thread(self._llm.unload_adapter, name)

    def close(self) -> None:
        """Cancels what runs and frees the model. May be called again."""
        self._llm.close()

    shutdown = close

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    async def _run(self, work: Awaitable[T], state: _Open | None = None) -> T:
        """Awaits `work` on the engine's loop."""
        future = self._runtime.submit(work)
        if state is not None:
            state.waiting = future
        try:
            return await asyncio.wrap_future(future)
        finally:
            if state is not None:
                state.waiting = None
