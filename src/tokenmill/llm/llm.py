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
import os
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar, cast, overload

import numpy as np

from ..core.errors import ConfigError, ContextTooLong, InvalidRequest, ModelNotFound
from ..core.events import FINISH_ERROR, Ready
from ..core.request import PoolingParams, Request, SamplingParams
from ..engine.build import build_engine
from ..engine.link import local_link
from ..formats.checkpoint import open_checkpoint
from ..formats.hub import Progress, default_cache_dir, resolve_model
from ..helper.parent import HelperProcess, materials
from ..net.clock import MonotonicClock
from ..net.entropy import new_seed, seeds_from
from ..net.loop import new_event_loop
from ..node.load import load_engine
from ..node.machine import read_machine
from ..node.resolve import EngineSettings
from ..node.text import load_text_model
from ..server.adapters import ServedAdapter
from ..server.choice import Choice, Piece
from ..server.client import EngineClient
from ..server.errors import from_engine
from ..server.jobs import Render, unpack_rendered
from ..server.tokens import context_limit
from ..server.vectors import (
    Given,
    Input,
    cosine,
    floats,
    make_pooling_requests,
    require_tokens,
    require_vectors,
    take_vectors,
    with_prompt,
)
from ..text.bad_words import bad_word_ids
from ..text.load import TextModel
from .arguments import (
    GivenPrompt,
    Message,
    Prompt,
    progress_of,
    read_conversations,
    read_options,
    read_prompts,
    read_sampling,
)
from .outputs import Call, RequestOutput, completion_output
from .tokenizer import LLMTokenizer

T = TypeVar("T")


class LLM:
    """Loads `model` (alias, .gguf file, Hugging Face folder or hub name) when made, fetching it where needed.

    options   fields of EngineOptions and TextOptions (node/options.py), flags of `tokenmill generate`, such as
              max_model_len=8192 or chat_template="file"; sizes may be text such as "2GiB". Those of vLLM's that do
              nothing here are warned of
    seed      requests that bring no seed draw theirs from it, in order; None: fresh ones
    progress  called with (bytes so far, bytes in all) while the model is fetched

    Raises ConfigError, FetchError and BadCheckpoint. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        *,
        seed: int | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, (str, os.PathLike)):
            raise ConfigError(f"model must be a name or a path, got {type(model).__name__}.", param="model")
        wanted, text_options = read_options(options)
        found = resolve_model(os.fspath(model), progress=progress)
        checkpoint = open_checkpoint(found.path)
        self._text, _ = load_text_model(checkpoint, text_options)
        self._engine = load_engine(checkpoint, wanted, read_machine(), default_cache_dir())
        self._settings = self._engine.settings
        checkpoint.close()
        self._ready = self._engine.ready(found.served_name, self._text.eos_token_ids)
        self._clock = MonotonicClock()
        self._client = EngineClient()
        self._helper = HelperProcess(
            str(found.path), materials(self._text, allow_special=text_options.allow_special_in_content)
        )
        self._numbers = itertools.count()
        self._new_seed = new_seed if seed is None else seeds_from(seed)
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
        return self._settings

    @property
    def text(self) -> TextModel:
        """Tokenizer, chat template and defaults of the model."""
        return self._text

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer, with the names that users of transformers know."""
        return LLMTokenizer(self._text, self._render)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        cache_salt: str = "",
        lora: str = "",
    ) -> list[RequestOutput]:
        """Continues each prompt (text, token ids, or a dict of either); one result for each, in order.

        `sampling_params`: for all prompts, or one for each; default: the model's own settings with 16 tokens.
        `use_tqdm`: show progress on a terminal. `lora`: name of a loaded adapter. Raises InvalidRequest
        (ContextTooLong among them) before anything has run.
        """
        several = read_prompts(prompts)
        sampling = read_sampling(sampling_params, len(several), self.default_sampling)
        calls = [self._call(prompt, params, cache_salt, lora) for prompt, params in zip(several, sampling, strict=True)]
        return self._run_all(calls, use_tqdm)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = False,
        cache_salt: str = "",
        lora: str = "",
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        cache_salt: str = "",
        lora: str = "",
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        cache_salt: str = "",
        lora: str = "",
    ) -> RequestOutput | list[RequestOutput]:
        """Answers a conversation through the model's chat template, or each of a list of conversations, which run
        together; default length: the rest of the context. Raises InvalidRequest before anything has run."""
        conversations, several = read_conversations(messages)
        sampling = read_sampling(sampling_params, len(conversations), self._chat_sampling)
        pairs = zip(conversations, sampling, strict=True)
        calls = [self._chat_call(conversation, params, cache_salt, lora) for conversation, params in pairs]
        outputs = self._run_all(calls, use_tqdm)
        return outputs if several else outputs[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora: str = "",
    ) -> Iterator[Piece]:
        """Continues a prompt, or answers a conversation, piece by piece (`piece.text`, `piece.tokens`; the last has a
        `finish_reason`). One choice only. Leaving the loop early cancels the request."""
        call = self._one_call(prompt, sampling_params, cache_salt, lora)
        if len(call.requests) != 1:
            raise InvalidRequest("stream gives one choice; leave n at 1.", param="n")
        pieces = Pieces(self._pieces(call))
        try:
            while True:
                _, piece = self._wait(pieces.next())
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self._wait(pieces.close())

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
        given = [each.text if each.tokens is None else each.tokens for each in read_prompts(inputs)]
        prompts = with_prompt(self._text, prompt_name, cast(Sequence[Given], given))
        encoded = [
            self._text.tokenizer.encode_inputs([prompt])[0] if isinstance(prompt, str) else (prompt, 0)
            for prompt in prompts
        ]
        vectors = self._pool(encoded, replace(params, dimensions=dimensions, activation=activation))
        return np.stack([np.frombuffer(vector, np.float32) for vector in vectors])

    def score(self, text: str, others: str | Sequence[str]) -> list[float]:
        """How well each of `others` goes with `text`: what a model of pairs says, or the cosine of two vectors."""
        others = [others] if isinstance(others, str) else others
        if not all(isinstance(each, str) for each in (text, *others)):
            raise InvalidRequest("score takes a text and a list of texts.", param="text")
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

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, through the model's chat template, as `chat` sends them."""
        return self._render(messages)[0]

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
        self._client.close("The model has been closed.")
        front_end.close()
        await self._helper.close()
        # Callers in other threads wait for tasks of this loop, which have just been told of the end.
        callers = asyncio.all_tasks() - {asyncio.current_task(), running}
        await asyncio.gather(running, *callers, return_exceptions=True)
        running.result()

    def _submit(self, work: Awaitable[T]) -> Future[T]:
        """Runs `work` on the engine's thread; to cancel what it gives cancels it there. Raises InvalidRequest once the
        model has been closed."""
        if not self._thread.is_alive():
            if asyncio.iscoroutine(work):
                work.close()
            raise InvalidRequest("This model has been closed.")
        return asyncio.run_coroutine_threadsafe(_await(work), self._loop)

    def _wait(self, work: Awaitable[T]) -> T:
        """Awaits `work` on the engine's thread; Ctrl-C here cancels it there."""
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _one_call(self, prompt: Any, sampling: SamplingParams | None, cache_salt: str, lora: str) -> Call:
        """Of a prompt or a conversation."""
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            (sampling,) = read_sampling(sampling, 1, self._chat_sampling)
            return self._chat_call(cast(Sequence[Message], prompt), sampling, cache_salt, lora)
        prompts = read_prompts(prompt)
        if len(prompts) != 1:
            raise InvalidRequest(f"Give one prompt, got {len(prompts)}.", param="prompt")
        (sampling,) = read_sampling(sampling, 1, self.default_sampling)
        return self._call(prompts[0], sampling, cache_salt, lora)

    def _chat_sampling(self) -> SamplingParams:
        return self.default_sampling(max_tokens=None)

    def _chat_call(self, messages: Sequence[Message], sampling: SamplingParams, cache_salt: str, lora: str) -> Call:
        tokens, text = self._render(messages)
        return self._call(GivenPrompt(None, tuple(tokens)), sampling, cache_salt, lora, text)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> tuple[list[int], str]:
        """Token ids and text of a conversation's prompt."""
        ((messages,), _) = read_conversations(messages)
        if self._text.chat is None:
            raise InvalidRequest("This model has no chat template; use generate.", param="messages")
        job = Render(tuple(dict(message) for message in messages), add_generation_prompt=add_generation_prompt)
        rendered = unpack_rendered(self._wait(self._helper.run(job, "")))
        # The template writes the special tokens itself.
        if rendered.is_split:
            return self._text.tokenizer.encode_split(rendered.pieces, add_special=False), rendered.text
        return self.encode(rendered.text, add_special=False), rendered.text

    def _call(
        self, prompt: GivenPrompt, sampling: SamplingParams, cache_salt: str, lora: str, text: str | None = None
    ) -> Call:
        adapter = self._client.adapters.get(lora)
        if lora and adapter is None:
            raise ModelNotFound(f"There is no adapter {lora!r}; load it with load_adapter first.", param="lora")
        tokens = prompt.tokens if prompt.text is None else tuple(self.encode(prompt.text))
        assert tokens is not None
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
        seed = self._new_seed() if sampling.seed is None else sampling.seed % 2**64
        bad_words = bad_word_ids(self._text.tokenizer, sampling.bad_words)
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
                cache_salt=prompt.cache_salt or cache_salt,
                adapter="" if adapter is None else adapter.digest,
                arrival_s=self._clock.now(),
                bad_words=bad_words,
            )
            for choice in range(sampling.n)
        )
        return Call(prompt.text if text is None else text, requests)

    def _run_all(self, calls: Sequence[Call], use_tqdm: bool) -> list[RequestOutput]:
        with progress_of(len(calls), use_tqdm) as advance:
            return self._wait(self._complete_all(calls, advance))

    async def _complete_all(self, calls: Sequence[Call], advance: Callable[[], None]) -> list[RequestOutput]:
        async def complete(call: Call) -> RequestOutput:
            output = await self._complete(call)
            advance()
            return output

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(complete(call)) for call in calls]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _complete(self, call: Call) -> RequestOutput:
        parts: dict[int, list[Piece]] = {request.choice: [] for request in call.requests}
        choices: dict[int, Choice] = {}
        async for choice, piece in self._pieces(call):
            choices[choice.index] = choice
            parts[choice.index].append(piece)
        sampling = call.requests[0].sampling
        return call.output(choices, [completion_output(index, pieces, sampling) for index, pieces in parts.items()])

    async def _pieces(self, call: Call) -> AsyncGenerator[tuple[Choice, Piece], None]:
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


class Pieces:
    """What a call says, read from another thread. To cancel a read takes a moment to reach the engine's loop, and what
    closes then waits for it: an asynchronous generator cannot be closed while it runs."""

    def __init__(self, pieces: AsyncGenerator[tuple[Choice, Piece], None]) -> None:
        self._pieces = pieces
        self._lock = asyncio.Lock()

    async def next(self) -> tuple[Choice, Piece]:
        """Raises StopAsyncIteration when all has been said."""
        async with self._lock:
            return await anext(self._pieces)

    async def close(self) -> None:
        async with self._lock:
            await self._pieces.aclose()


async def _await(work: Awaitable[T]) -> T:
    return await work
