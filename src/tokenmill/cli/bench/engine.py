"""`bench engine`, `bench speculation` and `bench rows`: hand the bench room engines in this process, wired as `LLM`
wires them."""

from __future__ import annotations

import argparse
import random
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

from ...api.constraints import read_constraint
from ...api.fields import Fields
from ...bench import rows as row_times
from ...bench import speculation as drafts
from ...bench.engine import Demand, run
from ...bench.machine import RunTime, peak_memory
from ...bench.peer.llama_server import LlamaServer
from ...core.errors import ConfigError
from ...core.request import SamplingParams
from ...core.speculation import MOST_DRAFTS, NGRAM
from ...core.step import Introduction, PlanRow, StepPlan
from ...formats.checkpoint import open_checkpoint
from ...formats.hub import default_cache_dir, resolve_model
from ...llm.llm import LLM
from ...node.load import Engine, load_engine
from ...node.machine import read_machine
from ...node.resolve import EngineSettings
from ...sim.acceptance import AcceptanceRecorder
from ...text.grammar.build import to_grammar
from ..draft.acceptance import write_record
from ..expert_load import write_load
from ..models import progress_bar
from ..options import engine_options


class LocalEngine:
    """bench.engine.BenchEngine over an LLM. One process, so no other pids."""

    pids: tuple[int, ...] = ()
    takes_uneven = True

    def __init__(
        self, llm: LLM, model_path: Path, threads: int, settings: dict[str, Any], expert_load: str | None = None
    ) -> None:
        self.name = "tokenmill"
        self.facts = dict(llm.ready.facts)
        self.vocab_size = llm.ready.vocab_size
        self.model_path = model_path
        self.threads = threads
        self._llm = llm
        self._since_s, self._expert_load = time.time(), expert_load
        self._settings = {"temperature": 0.0, **with_grammar(settings)}

    def run(self, prompts: list[list[int]], max_tokens: Sequence[int]) -> RunTime:
        sampling = [SamplingParams(max_tokens=count, ignore_eos=True, **self._settings) for count in max_tokens]
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        outputs = self._llm.generate(prompts, sampling)
        spent = RunTime(time.perf_counter() - start_s, time.process_time() - start_cpu_s)
        given = [len(output.outputs[0].token_ids) for output in outputs]
        if given != list(max_tokens):
            raise ConfigError(
                f"A stream ended after {min(given)} tokens, but what is measured must go on. Ask for an answer that is "
                'long enough, such as {"json": {"type": "array", "items": {"type": "string"}, "minItems": 1000}}.',
                param="sampling",
            )
        return spent

    def peak_bytes(self) -> int | None:
        return peak_memory()

    def close(self) -> None:
        load, ready = self._llm.expert_load(), self._llm.ready
        self._llm.close()
        if self._expert_load is not None and load is not None:
            try:
                write_load(Path(self._expert_load), ready.model, ready.numerics_id, self._since_s, load)
            except OSError as error:
                raise ConfigError(f"--expert-load {self._expert_load}: {error}.", param="expert_load") from error


def with_grammar(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which vLLM's structured_outputs have become a grammar. Raises InvalidRequest."""
    constraint = read_constraint(Fields({"structured_outputs": settings.get("structured_outputs")}))
    plain = {name: value for name, value in settings.items() if name != "structured_outputs"}
    return plain if constraint is None else {**plain, "grammar": to_grammar(constraint)}


def engine(args: argparse.Namespace) -> int:
    with progress_bar(f"fetching {args.model}") as progress:
        path = resolve_model(args.model, progress=progress).path
    options = asdict(engine_options(args)) | {"enable_prefix_caching": False}

    def make(demand: Demand) -> LocalEngine:
        needed = {"max_num_seqs": demand.num_seqs, "max_model_len": demand.num_tokens}
        asked = {name: value for name, value in options.items() if value is not None}
        llm = LLM(str(path), **{**needed, **asked})
        if args.expert_load is not None and llm.expert_load() is None:
            llm.close()
            raise ConfigError("--expert-load is about mixtures of experts; this model is none.", param="expert_load")
        return LocalEngine(llm, path, llm.settings.threads, args.sampling, args.expert_load)

    return run(args, make)


_SUFFIX = {"method": "suffix"}
_KV_BYTES = "1GiB"
"""Of each of two engines, where nothing else is asked for: by itself each would take most of the memory."""


class Answerer:
    """bench.speculation.Answering over an LLM. Each prompt has a seed of its own: prompts with equal seeds would draw
    much alike, and so be drafted well from each other's answers."""

    def __init__(self, llm: LLM, temperature: float) -> None:
        self.vocab_size = llm.ready.vocab_size
        self._llm = llm
        self._temperature = temperature

    def encode(self, messages: Sequence[drafts.Message]) -> list[int]:
        if self._llm.text.chat is None:
            return self._llm.encode("\n\n".join(message["content"] for message in messages))
        return self._llm.encode_chat(messages)

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str, *, ignore_eos: bool) -> drafts.Given:
        sampling = [
            SamplingParams(
                temperature=self._temperature,
                seed=zlib.crc32(repr(prompt).encode()),
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
            )
            for prompt in prompts
        ]
        start_s = time.perf_counter()
        outputs = self._llm.generate([list(prompt) for prompt in prompts], sampling, cache_salt=salt)
        seconds = time.perf_counter() - start_s
        choices = [output.outputs[0] for output in outputs]
        steps = [step for choice in choices for step in choice.draft_steps]
        timings = [choice.timing for choice in choices if choice.timing is not None]
        return drafts.Given(
            seconds,
            sum(timing.finished_s - timing.first_token_s for timing in timings),
            [list(choice.token_ids) for choice in choices],
            [choice.text for choice in choices],
            sum(step[0] for step in steps),
            sum(step[1] for step in steps),
        )

    def close(self) -> None:
        self._llm.close()


def speculation(args: argparse.Namespace) -> int:
    with progress_bar(f"fetching {args.model}") as progress:
        path = resolve_model(args.model, progress=progress).path
    asked = {name: value for name, value in asdict(engine_options(args)).items() if value is not None}
    config = asked.pop("speculative_config", _SUFFIX)
    needed = {"max_num_seqs": max(args.streams), "kv_cache_memory_bytes": _KV_BYTES}
    settings: list[EngineSettings] = []

    recorder = None if args.acceptance is None else AcceptanceRecorder()

    def make(drafting: Mapping[str, Any] | None) -> Answerer:
        more = {} if drafting is None else {"speculative_config": {**config, **drafting}}
        record = recorder if drafting == {} else None
        llm = LLM(str(path), record=record, **{**needed, **asked, **more})
        settings.append(llm.settings)
        return Answerer(llm, args.temperature)

    def make_peer(flags: str) -> drafts.Peer:
        threads, max_tokens = settings[0].threads, settings[0].config.max_model_len
        options = {"threads": threads, "streams": max(args.streams), "max_tokens": max_tokens}
        return LlamaServer(args.peer_llama_server, flags, path, temperature=args.temperature, **options)

    code = drafts.run(args, make, make_peer)
    if recorder is not None:
        write_record(args.acceptance, recorder.end())
    return code


class RowSteps:
    """Steps of one sequence on a worker, behind so many tokens. Each begins at the same position: what it writes, the
    next one writes again. Tokens are random ones."""

    def __init__(self, engine: Engine, context: int, most_rows: int) -> None:
        self._execute = engine.worker.executor.execute_now
        self._context = context
        self._steps = count(1)
        rng, ids = random.Random(0), range(engine.worker.model_config.vocab_size)
        tokens = [rng.choice(ids) for _ in range(context + most_rows)]
        self._tokens = tuple(tokens[context:])
        config = engine.config
        num_blocks = -(-len(tokens) // config.block_size)
        blocks = tuple(number % group.num_blocks for group in config.groups for number in range(num_blocks))
        prompt = tuple(tokens[:context])
        intro = Introduction(prompt, (), SamplingParams(temperature=0.0), seed=0, choice=0, eos_token_ids=())
        for start in range(0, context, config.max_num_batched_tokens):
            part = prompt[start : start + config.max_num_batched_tokens]
            row = PlanRow(0, start, part) if start else PlanRow(0, 0, part, blocks=blocks, intro=intro)
            self._execute(StepPlan(next(self._steps), (row,)))

    def run(self, num_rows: int) -> float:
        """Seconds of a step with so many rows, each of which draws."""
        drafts = self._tokens[1:num_rows]
        row = PlanRow(0, self._context, self._tokens[:1], sample=True, drafts=drafts)
        return self._execute(StepPlan(next(self._steps), (row,))).duration_s


def rows(args: argparse.Namespace) -> int:
    with progress_bar(f"fetching {args.model}") as progress:
        path = resolve_model(args.model, progress=progress).path
    asked, num_tokens = engine_options(args), args.context + max(args.rows)
    options = replace(
        asked,
        max_model_len=asked.max_model_len or num_tokens,
        max_num_seqs=asked.max_num_seqs or 1,
        speculative_config={"method": NGRAM, "num_speculative_tokens": MOST_DRAFTS},
    )
    checkpoint = open_checkpoint(path)
    engine = load_engine(checkpoint, options, read_machine(), default_cache_dir())
    checkpoint.close()
    try:
        if engine.config.max_model_len < num_tokens:
            raise ConfigError(
                f"--context {args.context} and the rows are more than the context of {engine.config.max_model_len} "
                "tokens.",
                param="context",
            )
        return row_times.run(
            args,
            RowSteps(engine, args.context, max(args.rows)).run,
            {"model": path.name, "kernels": engine.kernels, "KV": engine.settings.spec.kv_dtype},
        )
    finally:
        engine.close()
