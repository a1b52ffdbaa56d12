"""A model in this process: `from tokenmill import LLM, SamplingParams`.

    with LLM("smollm2") as llm:
        answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}])
        print(answer.text)

The second wiring of the rooms, beside `cli.wire`: the same engine shell, client and text path as the server, on an
event loop in a thread of its own and a link of queues, so that answers are those the server gives. Prompts given
together run together. Methods may be called from several threads.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np

from .cli.load import load_engine
from .cli.machine import read_machine
from .cli.resolve import EngineOptions, EngineSettings
from .cli.sampling import choose_sampling
from .core.config import check_keys
from .core.errors import ContextTooLong, InvalidRequest, ModelNotFound
from .core.events import FINISH_ERROR, Ready
from .core.request import PoolingParams, Request, SamplingParams
from .core.step import TokenLogprob
from .engine.build import build_engine
from .engine.link import local_link
from .formats.checkpoint import open_checkpoint
from .formats.hub import Progress, default_cache_dir, resolve_model
from .net.clock import MonotonicClock
from .net.entropy import new_seed
from .net.loop import new_event_loop
from .server.adapters import ServedAdapter
from .server.choice import Choice, Piece
from .server.client import EngineClient
from .server.errors import from_engine
from .server.tokens import context_limit
from .server.vectors import (
    Input,
    cosine,
    floats,
    make_pooling_requests,
    require_tokens,
    require_vectors,
    take_vectors,
    with_prompt,
)
from .text.load import TextModel, load_text

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached_tokens`: of the prompt, served from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `token_ids` holds what was drawn, a stop token included. `stop_reason`: the stop string or stop token
    id that ended it, else None."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All choices of one prompt; the properties are those of the first."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    outputs: tuple[CompletionOutput, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason


@dataclass(frozen=True, slots=True)
class _Call:
    """One prompt's requests, and the text it came from."""

    prompt: str | None
    requests: tuple[Request, ...]


class LLM:
    """Loads `model` (alias, .gguf file, Hugging Face folder or hub name) when made, fetching it where needed.

    options   fields of EngineOptions: max_model_len, max_num_seqs, max_num_batched_tokens, block_size,
              kv_cache_memory_bytes, enable_prefix_caching, threads, backend ("auto", "native" or "numpy"),
              enable_lora, max_loras, max_lora_rank, runner ("auto", "generate" or "pooling"), pooling
    progress  called with (bytes so far, bytes in all) while the model is fetched
    generation_config  sampling of calls that name none: "auto" what the model recommends (of GGUF files that say
              nothing: what llama.cpp does), "vllm" temperature 1
    override_generation_config  settings that come before those, such as {"temperature": 0.7}

    Raises ConfigError, FetchError and BadCheckpoint. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        progress: Progress | None = None,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_keys(options, EngineOptions.__dataclass_fields__, "LLM()")
        found = resolve_model(model, progress=progress)
        checkpoint = open_checkpoint(found.path)
        sampling = choose_sampling(checkpoint, generation_config=generation_config, override=override_generation_config)
        self._text = replace(load_text(checkpoint), sampling_defaults=sampling.defaults)
        self._engine = load_engine(checkpoint, EngineOptions(**options), read_machine(), default_cache_dir())
        checkpoint.close()
        self._ready = self._engine.ready(found.served_name, self._text.eos_token_ids)
        self._clock = MonotonicClock()
        self._client = EngineClient()
        self._numbers = itertools.count()
        self._loop = new_event_loop()
        self._closing = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="tokenmill-engine", daemon=True)
        self._thread.start()
        started.wait()

    @property
    def ready(self) -> Ready:
        """The engine's facts: name, context, blocks, kernels, and each choice made for it with its reason."""
        return self._ready

    @property
    def settings(self) -> EngineSettings:
        """How the options were resolved."""
        return self._engine.settings

    @property
    def text(self) -> TextModel:
        """Tokenizer, chat template and defaults of the model."""
        return self._text

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        lora: str = "",
    ) -> list[RequestOutput]:
        """Continues each prompt (text, or token ids); one result for each, in order.

        `sampling`: for all prompts, or one for each; default: the model's own settings with 16 tokens. `lora`: name of
        a loaded adapter. Raises InvalidRequest (ContextTooLong among them) before anything has run.
        """
        several = _several(prompts)
        if not isinstance(sampling, Sequence):
            sampling = [sampling or self.default_sampling()] * len(several)
        if len(sampling) != len(several):
            raise InvalidRequest(
                f"{len(several)} prompts came with {len(sampling)} sampling parameters.", param="sampling"
            )
        calls = [self._call(prompt, params, cache_salt, lora) for prompt, params in zip(several, sampling, strict=True)]
        return self._wait(self._complete_all(calls))

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora: str = "",
    ) -> RequestOutput:
        """Answers a conversation through the model's chat template; default length: the rest of the context."""
        return self._wait(self._complete(self._chat_call(messages, sampling, cache_salt, lora)))

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora: str = "",
    ) -> Iterator[Piece]:
        """Continues a prompt, or answers a conversation, piece by piece (`piece.text`, `piece.tokens`; the last has a
        `finish_reason`). One choice only. Leaving the loop early cancels the request."""
        if not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            call = self._chat_call(cast(Sequence[Message], prompt), sampling, cache_salt, lora)
        else:
            call = self._call(cast(Prompt, prompt), sampling or self.default_sampling(), cache_salt, lora)
        if len(call.requests) != 1:
            raise InvalidRequest("stream gives one choice; leave n at 1.", param="n")
        pieces = self._pieces(call)
        try:
            while True:
                _, piece = self._wait(anext(pieces))
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self._wait(pieces.aclose())

    def load_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in a folder of PEFT's format, to be named by `lora=` from then on. Needs
        enable_lora=True. Raises InvalidRequest."""
        self._wait(self._client.adapters.load(ServedAdapter(name, path)))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; what uses it runs to its end. Raises ModelNotFound."""

        async def unload() -> None:
            self._client.adapters.unload(name)

        self._wait(unload())

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        dimensions: int = 0,
        normalize: bool | None = None,
        prompt_name: str | None = None,
    ) -> np.ndarray:
        """A vector for each input (text, or token ids): float32 [inputs, values], in order. `dimensions`: values to
        keep (0: all). `normalize`: whether vectors have length 1 (None: as the model says). `prompt_name`: of the
        model's prompts, the one to put before texts. Raises InvalidRequest before anything has run."""
        params = require_vectors(self._ready)
        if not 0 <= dimensions <= self._ready.vector_size:
            raise InvalidRequest(f"dimensions must be from 0 to {self._ready.vector_size}.", param="dimensions")
        activation = params.activation if normalize is None else "unit" if normalize else ""
        prompts = with_prompt(self._text, prompt_name, _several(inputs))
        encoded = [
            self._text.tokenizer.encode_inputs([prompt])[0] if isinstance(prompt, str) else (prompt, 0)
            for prompt in prompts
        ]
        vectors = self._pool(encoded, replace(params, dimensions=dimensions, activation=activation))
        return np.stack([np.frombuffer(vector, np.float32) for vector in vectors])

    def score(self, text: str, others: Sequence[str]) -> list[float]:
        """How well each of `others` goes with `text`: what a model of pairs says, or the cosine of two vectors."""
        params = require_vectors(self._ready, scores=True)
        if params.how == "score":
            encoded = self._text.tokenizer.encode_inputs([text] * len(others), others)
            return [floats(vector)[0] for vector in self._pool(encoded, params)]
        vectors = self.embed([text, *others], normalize=True)
        return [cosine(vectors[0].tobytes(), other.tobytes()) for other in vectors[1:]]

    def _pool(self, inputs: Sequence[Input], params: PoolingParams) -> list[bytes]:
        root_id, now = f"pool-{next(self._numbers)}", self._clock.now()
        requests = make_pooling_requests(inputs, params, self._ready, root_id=root_id, arrival_s=now)

        async def pool() -> list[bytes]:
            stream = self._client.open(requests)
            try:
                return await take_vectors(stream, requests)
            finally:
                stream.close()

        return self._wait(pool()) if requests else []

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it count as such."""
        return self._text.tokenizer.encode(text, add_special=add_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._text.tokenizer.decode(list(token_ids))

    def default_sampling(self, **overrides: Any) -> SamplingParams:
        """The model's own recommendations, with `overrides`."""
        return SamplingParams(**{**self._text.sampling_defaults, **overrides})

    def close(self) -> None:
        """Cancels what runs and frees the model. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self, started: threading.Event) -> None:
        try:
            self._loop.run_until_complete(self._serve(started))
        finally:
            self._loop.close()
            self._engine.close()
            started.set()

    async def _serve(self, started: threading.Event) -> None:
        engine_end, front_end = local_link()
        await engine_end.send(self._ready)
        self._client.attach(front_end)
        # The server's bound on its queue is not one on a list that the caller holds already.
        config = replace(self._engine.config, max_num_waiting=sys.maxsize)
        shell = build_engine(config, self._engine.worker.executor, engine_end, self._clock)
        running = asyncio.create_task(shell.run())
        running.add_done_callback(lambda _: self._closing.set())
        while self._client.ready is None:
            await asyncio.sleep(0)
        started.set()
        await self._closing.wait()
        self._client.detach("The model has been closed.")
        front_end.close()
        # Callers in other threads wait for tasks of this loop, which have just been told of the end.
        callers = asyncio.all_tasks() - {asyncio.current_task(), running}
        await asyncio.gather(running, *callers, return_exceptions=True)
        running.result()

    def _wait(self, work: Awaitable[T]) -> T:
        """Awaits `work` on the engine's thread; Ctrl-C here cancels it there."""
        if not self._thread.is_alive():
            if asyncio.iscoroutine(work):
                work.close()
            raise InvalidRequest("This model has been closed.")
        future = asyncio.run_coroutine_threadsafe(_await(work), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _chat_call(
        self, messages: Sequence[Message], sampling: SamplingParams | None, cache_salt: str, lora: str
    ) -> _Call:
        chat = self._text.chat
        if chat is None:
            raise InvalidRequest("This model has no chat template; use generate.", param="messages")
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequest(
                'messages must be a list such as [{"role": "user", "content": "..."}].', param="messages"
            )
        prompt = chat.render([dict(message) for message in messages])
        sampling = sampling or self.default_sampling(max_tokens=None)
        # The template writes the special tokens itself.
        return self._call(self.encode(prompt, add_special=False), sampling, cache_salt, lora, prompt)

    def _call(
        self, prompt: Prompt, sampling: SamplingParams, cache_salt: str, lora: str, text: str | None = None
    ) -> _Call:
        adapter = self._client.adapters.get(lora)
        if lora and adapter is None:
            raise ModelNotFound(f"There is no adapter {lora!r}; load it with load_adapter first.", param="lora")
        tokens = tuple(self.encode(prompt) if isinstance(prompt, str) else prompt)
        require_tokens(self._ready)
        limit = context_limit(self._ready)
        if not tokens:
            raise InvalidRequest("The prompt must give at least one token.", param="prompt")
        if any(not 0 <= token < self._ready.vocab_size for token in tokens):
            raise InvalidRequest(f"Token ids must be from 0 to {self._ready.vocab_size - 1}.", param="prompt")
        room = limit - len(tokens)
        if room < (sampling.max_tokens or 1):
            raise ContextTooLong(
                f"The prompt has {len(tokens)} tokens and max_tokens is {sampling.max_tokens}, but this model's context"
                f" is {limit}. Shorten the prompt or lower max_tokens.",
                param="prompt" if room < 1 else "max_tokens",
            )
        max_tokens = sampling.max_tokens or room
        seed = new_seed() if sampling.seed is None else sampling.seed % 2**64
        number = next(self._numbers)
        requests = tuple(
            Request(
                id=f"{number}-{choice}",
                prompt_tokens=tokens,
                sampling=replace(sampling, max_tokens=max_tokens),
                max_tokens=max_tokens,
                seed=seed,
                choice=choice,
                eos_token_ids=self._ready.eos_token_ids,
                cache_salt=cache_salt,
                adapter="" if adapter is None else adapter.digest,
                arrival_s=self._clock.now(),
            )
            for choice in range(sampling.n)
        )
        return _Call(text if text is not None else prompt if isinstance(prompt, str) else None, requests)

    async def _complete_all(self, calls: Sequence[_Call]) -> list[RequestOutput]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._complete(call)) for call in calls]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _complete(self, call: _Call) -> RequestOutput:
        parts: dict[int, list[Piece]] = {request.choice: [] for request in call.requests}
        choices: dict[int, Choice] = {}
        async for choice, piece in self._pieces(call):
            choices[choice.index] = choice
            parts[choice.index].append(piece)
        first, sampling = choices[0], call.requests[0].sampling
        outputs = tuple(_output(index, pieces, sampling) for index, pieces in parts.items())
        return RequestOutput(
            prompt=call.prompt,
            prompt_token_ids=call.requests[0].prompt_tokens,
            prompt_logprobs=None if sampling.prompt_logprobs is None else tuple(first.prompt_logprobs),
            outputs=outputs,
            usage=Usage(
                prompt_tokens=len(call.requests[0].prompt_tokens),
                completion_tokens=sum(choice.num_tokens for choice in choices.values()),
                cached_tokens=max(0, first.num_cached),
            ),
        )

    async def _pieces(self, call: _Call) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """What the choices of a call say, as it is said, until all have ended."""
        choices = {request.id: Choice(request.choice, request, self._text.tokenizer) for request in call.requests}
        stream = self._client.open(call.requests)
        try:
            while not all(choice.is_finished for choice in choices.values()):
                for delta in await stream.take():
                    if delta.finish_reason == FINISH_ERROR:
                        raise from_engine(delta.error, delta.error_kind, delta.error_param)
                    choice = choices[delta.request_id]
                    if choice.is_finished:
                        continue
                    piece = choice.push(delta)
                    if piece.finish_reason is not None:
                        stream.finish(delta.request_id, piece.finish_reason)
                    yield choice, piece
        finally:
            stream.close()


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several, as several."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return cast(Sequence[Prompt], [prompts] if is_one else prompts)


async def _await(work: Awaitable[T]) -> T:
    return await work


def _output(index: int, pieces: Sequence[Piece], sampling: SamplingParams) -> CompletionOutput:
    last = pieces[-1]
    assert last.finish_reason is not None, f"choice {index} has not ended"
    return CompletionOutput(
        index=index,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.tokens),
        logprobs=None if sampling.logprobs is None else tuple(entry for piece in pieces for entry in piece.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
