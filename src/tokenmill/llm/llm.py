"""A model in this process: `from tokenmill import LLM, SamplingParams`.

    with LLM("smollm2") as llm:
        (answer,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}])
        print(answer.text)

The second wiring of the rooms, beside `cli.serve`: the same engine shell, client and text path as the server, on an
event loop in a thread of its own and a link of queues, so that answers are those the server gives. Prompts given
together run together. Methods may be called from several threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..api.pooling import floats
from ..core.errors import ConfigError, InvalidRequest
from ..core.events import Ready
from ..core.experts import ExpertLoad
from ..core.request import SamplingParams
from ..engine.journal import Recorder
from ..formats.hub import Progress
from ..node.resolve import EngineSettings
from ..server.adapters import ServedAdapter
from ..server.vectors import cosine
from ..text.beams import Beams, BeamSearchParams
from ..text.calls import require_vectors, with_prompt
from ..text.choice import Piece
from ..text.text_model import TextModel
from .arguments import (
    ChatOptions,
    Message,
    Prompt,
    StructuredOutputs,
    progress_of,
    read_conversations,
    read_options,
    read_prompts,
    read_sampling,
    read_structured,
)
from .calls import Calls, PieceReader
from .outputs import BeamSearchOutput, PromptCall, RequestOutput
from .runtime import Runtime
from .tokenizer import LLMTokenizer


class LLM:
    """Loads `model` (a name, .gguf file, Hugging Face folder or hub repository) when made, fetching it where needed.

    options   fields of EngineOptions, TextOptions and TierOptions (node/), flags of `tokenmill generate`, such as
              max_model_len=8192 or chat_template="file"; sizes may be text such as "2GiB". Those of vLLM's that do
              nothing here are warned of
    seed      requests that bring no seed draw theirs from it, in order; None: fresh ones
    progress  called with (bytes so far, bytes in all) while the model is fetched
    record    hears of all that the engine is told, plans and gives (engine.journal), in the engine's thread

    Raises ConfigError, FetchError and BadCheckpoint. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        *,
        seed: int | None = None,
        progress: Progress | None = None,
        record: Recorder | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, (str, os.PathLike)):
            raise ConfigError(f"model must be a name or a path, got {type(model).__name__}.", param="model")
        engine_options, text_options, tiers = read_options(options)
        self._runtime = Runtime(os.fspath(model), engine_options, text_options, seed, progress, tiers, record)
        self._calls = Calls(self._runtime)

    @property
    def ready(self) -> Ready:
        """The engine's facts: name, context, blocks, kernels, and each choice made for it with its reason."""
        return self._runtime.ready

    @property
    def settings(self) -> EngineSettings:
        """How the options were resolved."""
        return self._runtime.engine.settings

    @property
    def text(self) -> TextModel:
        """Tokenizer, chat template and defaults of the model."""
        return self._runtime.text

    def expert_load(self) -> ExpertLoad | None:
        """The rows that each expert of each layer has computed since the model was loaded; None: it has none."""
        return self._runtime.engine.worker.expert_load()

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer, with the names that users of transformers know."""
        return LLMTokenizer(self.text, self._calls.render)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        structured_outputs: StructuredOutputs = None,
        use_tqdm: bool = False,
        cache_salt: str = "",
        lora: str = "",
    ) -> list[RequestOutput]:
        """Continues each prompt (text, token ids, or a dict of either); one result for each, in order.

        `sampling_params`: for all prompts, or one for each; default: the model's own settings with 16 tokens.
        `structured_outputs`: what answers must be, in vLLM's words, as {"json": schema}; for all, or one for each.
        `use_tqdm`: show progress on a terminal. `lora`: name of a loaded adapter. Raises InvalidRequest
        (ContextTooLong among them) before anything has run.
        """
        several = read_prompts(prompts)
        sampling = read_sampling(sampling_params, len(several), self.default_sampling)
        sampling = self._calls.constrain(sampling, structured_outputs)
        calls = [
            self._calls.of_prompt(prompt, params, cache_salt, lora)
            for prompt, params in zip(several, sampling, strict=True)
        ]
        return self._run_all(calls, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        structured_outputs: StructuredOutputs = None,
        use_tqdm: bool = False,
        cache_salt: str = "",
        lora: str = "",
    ) -> list[RequestOutput]:
        """Answers a conversation through the model's chat template, or each of a list of conversations, which run
        together; one result for each, in order. Default length: the rest of the context. `structured_outputs`: as of
        `generate`. `tools`, `tool_choice` and `parallel_tool_calls`: as OpenAI writes them; an answer's `tool_calls`,
        `reasoning` and `content` are taken from its text. Raises InvalidRequest before anything has run."""
        conversations = read_conversations(messages)
        sampling = read_sampling(sampling_params, len(conversations), self._calls.chat_sampling)
        constraints = read_structured(structured_outputs, len(conversations))
        calls = [
            self._calls.of_messages(
                conversation,
                params,
                cache_salt,
                lora,
                ChatOptions(tools, tool_choice, parallel_tool_calls, chat_template_kwargs, constraint),
            )
            for conversation, params, constraint in zip(conversations, sampling, constraints, strict=True)
        ]
        return self._run_all(calls, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False, lora: str = ""
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, as a search of `params.beam_width` beams finds them; one result
        for each prompt, in order. Raises InvalidRequest before anything has run."""
        sampling = SamplingParams(max_tokens=params.max_tokens)
        calls = [
            (self._calls.of_prompt(prompt, sampling, "", lora), Beams(params, self.ready.eos_token_ids))
            for prompt in read_prompts(prompts)
        ]
        with progress_of(len(calls), use_tqdm) as advance:
            return self._runtime.wait(self._calls.search_all(calls, advance))

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        structured_outputs: StructuredOutputs = None,
        cache_salt: str = "",
        lora: str = "",
    ) -> Iterator[Piece]:
        """Continues a prompt, or answers a conversation, piece by piece (`piece.text`, `piece.tokens`; the last has a
        `finish_reason`). One choice only. Leaving the loop early cancels the request."""
        call = self._calls.of_any(prompt, sampling_params, cache_salt, lora, structured_outputs)
        if len(call.requests) != 1:
            raise InvalidRequest("stream gives one choice; leave n at 1.", param="n")
        pieces = PieceReader(self._calls.pieces(call))
        try:
            while True:
                _, piece = self._runtime.wait(pieces.next())
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self._runtime.wait(pieces.close())

    def load_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in a folder of PEFT's format, to be named by `lora=` from then on. Needs
        enable_lora=True. Raises InvalidRequest."""
        self._runtime.wait(self._runtime.client.adapters.load(ServedAdapter(name, path)))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; what uses it runs to its end. Raises ModelNotFound."""

        async def unload() -> None:
            self._runtime.client.adapters.unload(name)

        self._runtime.wait(unload())

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
        params = require_vectors(self.ready)
        if not 0 <= dimensions <= self.ready.vector_size:
            raise InvalidRequest(f"dimensions must be from 0 to {self.ready.vector_size}.", param="dimensions")
        activation = params.activation if normalize is None else "unit" if normalize else ""
        prompts = with_prompt(self.text, prompt_name, [each.content for each in read_prompts(inputs)])
        encoded = [
            self.text.tokenizer.encode_inputs([prompt])[0] if isinstance(prompt, str) else (prompt, 0)
            for prompt in prompts
        ]
        vectors = self._calls.vectors(encoded, replace(params, dimensions=dimensions, activation=activation))
        return np.stack([np.frombuffer(vector, np.float32) for vector in vectors])

    def score(self, text: str, others: str | Sequence[str]) -> list[float]:
        """How well each of `others` goes with `text`: what a model of pairs says, or the cosine of two vectors."""
        others = [others] if isinstance(others, str) else others
        if not all(isinstance(each, str) for each in (text, *others)):
            raise InvalidRequest("score takes a text and a list of texts.", param="text")
        params = require_vectors(self.ready, scores=True)
        if params.how == "score":
            encoded = self._calls.pairs([(text, other) for other in others])
            return [floats(vector)[0] for vector in self._calls.vectors(encoded, params)]
        vectors = self.embed([text, *others], normalize=True)
        return [cosine(vectors[0].tobytes(), other.tobytes()) for other in vectors[1:]]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it count as such."""
        return self._runtime.text.tokenizer.encode(text, add_special=add_special)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, through the model's chat template, as `chat` sends them."""
        return self._calls.render(messages)[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._runtime.text.tokenizer.decode(list(token_ids))

    def default_sampling(self, **overrides: Any) -> SamplingParams:
        """The model's own recommendations, with `overrides`."""
        return self._calls.default_sampling(**overrides)

    def close(self) -> None:
        """Cancels what runs and frees the model. May be called again."""
        self._runtime.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_all(self, calls: Sequence[PromptCall], use_tqdm: bool) -> list[RequestOutput]:
        with progress_of(len(calls), use_tqdm) as advance:
            return self._runtime.wait(self._calls.complete_all(calls, advance))
