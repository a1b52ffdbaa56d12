"""Calls of `LLM` and `AsyncLLM`: what a caller gave becomes requests, what the engine says of them becomes pieces and
outputs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from ..api.conversations import Conversation
from ..api.errors import from_engine
from ..api.jobs import render_job, unpack_rendered
from ..api.parsers import constraint_of, parsers_of
from ..core.errors import InvalidRequest, ModelNotFound
from ..core.events import FINISH_ERROR
from ..core.request import PoolingParams, SamplingParams
from ..server.beam_search import search
from ..server.grammars import GrammarCompiler
from ..server.vectors import take_vectors
from ..text.beams import Beams
from ..text.calls import (
    Input,
    TextCall,
    bad_word_ids,
    breaker_ids,
    make_pooling_requests,
    make_requests,
    pair_messages,
)
from ..text.choice import Choice, Piece
from ..text.grammar.constraint import Constraint
from .arguments import (
    ChatOptions,
    GivenPrompt,
    Message,
    StructuredOutputs,
    read_chat,
    read_conversations,
    read_prompts,
    read_sampling,
    read_structured,
)
from .outputs import BeamSearchOutput, PromptCall, RequestOutput, Said, beams_found
from .runtime import Runtime

T = TypeVar("T")


class Calls:
    """Makes and runs the calls of one loaded model. What is no coroutine may be called from any thread but the
    engine's."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._grammars = GrammarCompiler(runtime.sandbox)
        self._numbers = itertools.count()

    def default_sampling(self, **overrides: Any) -> SamplingParams:
        """The model's own recommendations, with `overrides`."""
        return SamplingParams(**{**self._runtime.text.sampling_defaults, **overrides})

    def constrain(self, sampling: Sequence[SamplingParams], wanted: StructuredOutputs) -> list[SamplingParams]:
        """The same for answers that are what is `wanted`. Raises InvalidRequest where no grammar can be made of it."""
        constraints = read_structured(wanted, len(sampling))
        return [
            each if constraint is None else replace(each, grammar=self._compile(constraint))
            for each, constraint in zip(sampling, constraints, strict=True)
        ]

    def _compile(self, constraint: Constraint) -> str:
        return self._runtime.wait(self._grammars.compile(constraint))

    def chat_sampling(self) -> SamplingParams:
        """Of a conversation: an answer may take the rest of the context."""
        return self.default_sampling(max_tokens=None)

    def of_any(
        self,
        prompt: Any,
        sampling: SamplingParams | None,
        cache_salt: str,
        lora: str,
        structured_outputs: StructuredOutputs = None,
    ) -> PromptCall:
        """Of one prompt or one conversation. Raises InvalidRequest."""
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            (sampling,) = read_sampling(sampling, 1, self.chat_sampling)
            (constraint,) = read_structured(structured_outputs, 1)
            options = ChatOptions(constraint=constraint)
            return self.of_messages(cast(Sequence[Message], prompt), sampling, cache_salt, lora, options)
        prompts = read_prompts(prompt)
        if len(prompts) != 1:
            raise InvalidRequest(f"Give one prompt, got {len(prompts)}.", param="prompt")
        (sampling,) = self.constrain(read_sampling(sampling, 1, self.default_sampling), structured_outputs)
        return self.of_prompt(prompts[0], sampling, cache_salt, lora)

    def of_messages(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        cache_salt: str,
        lora: str,
        options: ChatOptions | None = None,
    ) -> PromptCall:
        """Of a conversation, whose answers are taken apart. Raises InvalidRequest."""
        chat_format = self._runtime.text.chat_format
        chat = read_chat(messages, self._runtime.text, options)
        assert chat.conversation is not None
        tokens, text = self._render(chat.conversation)
        constraint = constraint_of(chat, chat_format, text)
        if chat.tool_use is not None:
            sampling = chat.tool_use.settings(sampling)
        if constraint is not None:
            sampling = replace(sampling, grammar=self._compile(constraint))
        call = self.of_prompt(GivenPrompt(None, tuple(tokens)), sampling, cache_salt, lora, text)
        return replace(call, parser=parsers_of(chat, chat_format, text), shown=chat_format.shown(chat.tool_use))

    def of_prompt(
        self, prompt: GivenPrompt, sampling: SamplingParams, cache_salt: str, lora: str, text: str | None = None
    ) -> PromptCall:
        """text: what the prompt's tokens came from. Raises InvalidRequest (ContextTooLong among them) and
        ModelNotFound."""
        runtime, tokenizer = self._runtime, self._runtime.text.tokenizer
        adapter = runtime.client.adapters.get(lora)
        if lora and adapter is None:
            raise ModelNotFound(f"There is no adapter {lora!r}; load it with load_adapter first.", param="lora")
        given = prompt.content
        tokens = tuple(tokenizer.encode(given, add_special=True)) if isinstance(given, str) else given
        if any(not 0 <= token < runtime.ready.vocab_size for token in tokens):
            raise InvalidRequest(f"Token ids must be from 0 to {runtime.ready.vocab_size - 1}.", param="prompt")
        call = TextCall(
            sampling=sampling,
            cache_salt=prompt.cache_salt or cache_salt,
            adapter="" if adapter is None else adapter.digest,
            bad_words=bad_word_ids(tokenizer, sampling.bad_words),
            dry_breakers=breaker_ids(tokenizer, sampling),
        )
        requests = make_requests(
            call,
            [tokens],
            runtime.ready,
            root_id=str(next(self._numbers)),
            arrival_s=runtime.clock.now(),
            new_seed=runtime.new_seed,
        )
        return PromptCall(prompt.text if text is None else text, tuple(requests))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> tuple[list[int], str]:
        """Token ids and text of a conversation's prompt."""
        (messages,) = read_conversations(messages)
        chat = read_chat(messages, self._runtime.text, add_generation_prompt=add_generation_prompt)
        assert chat.conversation is not None
        return self._render(chat.conversation)

    def _render(self, conversation: Conversation) -> tuple[list[int], str]:
        text = self._runtime.text
        if text.chat is None:
            raise InvalidRequest("This model has no chat template; use generate.", param="messages")
        rendered = unpack_rendered(self._runtime.wait(self._runtime.sandbox.run(render_job(conversation), "")))
        # The template writes the special tokens itself.
        if rendered.is_split:
            return text.tokenizer.encode_split(rendered.pieces, add_special=False), rendered.text
        return text.tokenizer.encode(rendered.text, add_special=False), rendered.text

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Input]:
        """Pairs of texts as the model reads them."""
        text = self._runtime.text
        if not text.renders_pairs:
            firsts, seconds = zip(*texts, strict=True) if texts else ((), ())
            return list(text.tokenizer.encode_inputs(firsts, seconds))
        pairs = (pair_messages(text, first, second) for first, second in texts)
        return [
            (self._render(Conversation(messages=pair, add_generation_prompt=text.opens_answer))[0], 0) for pair in pairs
        ]

    def vectors(self, inputs: Sequence[Input], params: PoolingParams) -> list[bytes]:
        """Of each input, in order: float32 values."""
        root_id, now = f"pool-{next(self._numbers)}", self._runtime.clock.now()
        requests = make_pooling_requests(inputs, params, self._runtime.ready, root_id=root_id, arrival_s=now)

        async def pool() -> list[bytes]:
            stream = self._runtime.client.open(requests)
            try:
                return await take_vectors(stream, requests)
            finally:
                stream.close()

        return self._runtime.wait(pool()) if requests else []

    async def search_all(
        self, calls: Sequence[tuple[PromptCall, Beams]], advance: Callable[[], None]
    ) -> list[BeamSearchOutput]:
        """Beam searches, all at once; `advance` is called at each one's end."""
        runtime = self._runtime

        async def find(call: PromptCall, beams: Beams) -> BeamSearchOutput:
            (request,) = call.requests
            await search(runtime.client, request, beams, runtime.clock.now)
            advance()
            return beams_found(request, beams, runtime.text.tokenizer)

        return await _all([find(call, beams) for call, beams in calls])

    async def complete_all(self, calls: Sequence[PromptCall], advance: Callable[[], None]) -> list[RequestOutput]:
        """All calls at once, to their ends; `advance` is called at each one's."""

        async def complete(call: PromptCall) -> RequestOutput:
            said: dict[int, Said] = {}
            async for choice, piece in self.pieces(call):
                said.setdefault(choice.index, Said(choice)).add(piece)
            advance()
            return call.output(said)

        return await _all([complete(call) for call in calls])

    async def pieces(self, call: PromptCall) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """What the choices of a call say, as it is said, until all have ended."""
        tokenizer = self._runtime.text.tokenizer
        choices = {
            request.id: Choice(request.choice, request, tokenizer, call.parser(request.id), call.shown)
            for request in call.requests
        }
        stream = self._runtime.client.open(call.requests)
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


class PieceReader:
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


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all together; the first that fails ends the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
