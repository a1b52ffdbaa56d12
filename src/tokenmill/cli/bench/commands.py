"""Benchmarks of the room `bench`, and what they need of others.

That is the tokenizer that --tokenizer names, the text side of a model without its weights, or a model in this process,
wired as `LLM` wires it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...bench.html.report import read_results, requests_csv, summary_csv, write_report
from ...bench.load import command as load_command
from ...bench.load import overload_command
from ...bench.load.fairness import run as run_fairness
from ...bench.on_demand import run as run_on_demand
from ...bench.quality import command as quality_command
from ...bench.quality.api import ApiSubject
from ...bench.quality.run import Completion, Subject
from ...bench.structured import command as structured_command
from ...bench.tools import run as run_tools
from ...core.errors import ConfigError, InvalidRequest
from ...core.request import SamplingParams
from ...formats.checkpoint import open_text
from ...formats.hub import resolve_model
from ...text.text_model import TextModel, fetch_text, load_text
from ...text.tokenizer import Tokenizer
from ..models import progress_bar
from ..options import engine_options

if TYPE_CHECKING:
    from ...llm.llm import LLM, Prompt


def serve(args: argparse.Namespace) -> int:
    return load_command.serve(args, sys.argv, tokenizer_of(args))


def goodput(args: argparse.Namespace) -> int:
    return load_command.search_goodput(args, sys.argv, tokenizer_of(args))


def fairness(args: argparse.Namespace) -> int:
    return run_fairness(args, sys.argv, tokenizer_of(args))


def compare(args: argparse.Namespace) -> int:
    return load_command.compare_endpoints(args, sys.argv, tokenizer_of(args))


def overload(args: argparse.Namespace) -> int:
    return overload_command.run(args, sys.argv, tokenizer_of(args))


def tokenizer_of(args: argparse.Namespace) -> Tokenizer | None:
    """Of --tokenizer; None where none is named."""
    return None if args.tokenizer is None else read_tokenizer(args.tokenizer)


def read_tokenizer(model: str) -> Tokenizer:
    """Of a model, fetched if need be."""
    return read_text(model).tokenizer


def read_text(model: str) -> TextModel:
    """Of a model, fetched if need be."""
    with progress_bar(f"fetching {model}") as progress:
        return fetch_text(model, progress)


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
    from ...llm.llm import LLM

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

    return quality_command.run(args, make)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json", help="of bench serve, goodput, ...")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page with tables and plots")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one line per run")
    parser.add_argument("--requests-csv", type=Path, metavar="FILE", help="write one line per request")


def report(args: argparse.Namespace) -> int:
    if not (args.html or args.csv or args.requests_csv):
        raise ConfigError("Say what to write: --html, --csv or --requests-csv.", param="html")
    results = read_results(args.results)
    try:
        if args.html:
            write_report(results, args.html)
        if args.csv:
            args.csv.write_text(summary_csv(results), encoding="utf8")
        if args.requests_csv:
            args.requests_csv.write_text(requests_csv(results), encoding="utf8")
    except OSError as error:
        raise ConfigError(f"The report cannot be written: {error}.", param="html") from None
    return 0


def structured(args: argparse.Namespace) -> int:
    def load() -> TextModel:
        with progress_bar(f"fetching {args.model}") as progress:
            return load_text(open_text(resolve_model(args.model, progress=progress).path))

    return structured_command.run(args, load)


def tools(args: argparse.Namespace) -> int:
    return run_tools(args)


def on_demand(args: argparse.Namespace) -> int:
    return run_on_demand(args)
