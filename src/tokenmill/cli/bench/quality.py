"""`bench quality`: hands the bench room a server, or a model in this process, wired as `LLM` wires it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...bench.quality.api import ApiSubject
from ...bench.quality.command import run
from ...bench.quality.run import Completion, Subject
from ...core.errors import InvalidRequest
from ...core.request import SamplingParams
from ...llm.llm import LLM, Prompt
from ..models import progress_bar
from ..options import engine_options


class LocalSubject:
    """bench.quality.run.Subject over an LLM."""

    def __init__(self, llm: LLM) -> None:
        ready = llm.ready
        self.facts: dict[str, Any] = {"model": ready.model, "numerics_id": ready.numerics_id, **dict(ready.facts)}
        self._llm = llm

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str], chat: bool) -> list[Completion]:
        asked: list[Prompt] = [self._chat_tokens(prompt) if chat else prompt for prompt in prompts]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=tuple(stop))
        return [Completion(output.text, output.finish_reason or "") for output in self._llm.generate(asked, sampling)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = self._llm.generate(list(sequences), sampling)
        return [[entry.logprob for entry in output.prompt_logprobs or ()] for output in outputs]

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        return self._llm.encode(text, add_special=add_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._llm.decode(tokens)

    def close(self) -> None:
        self._llm.close()

    def _chat_tokens(self, prompt: str) -> list[int]:
        if self._llm.text.chat is None:
            raise InvalidRequest("This model has no chat template; leave --chat out.", param="chat")
        return self._llm.encode_chat([{"role": "user", "content": prompt}])


def quality(args: argparse.Namespace) -> int:
    def make() -> Subject:
        if args.url:
            return ApiSubject(
                args.url,
                model=args.served_model_name,
                api_key=args.api_key,
                concurrency=args.concurrency,
                extra=args.extra_body,
            )
        with progress_bar(f"fetching {args.model}") as progress:
            return LocalSubject(LLM(args.model, progress=progress, **asdict(engine_options(args))))

    return run(args, make)
