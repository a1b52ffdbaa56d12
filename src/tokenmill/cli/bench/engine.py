"""`bench engine`: hands the bench room an engine in this process, wired as `LLM` wires it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...bench.engine import Demand, run
from ...bench.machine import peak_memory
from ...core.request import SamplingParams
from ...formats.hub import resolve_model
from ...llm.llm import LLM
from ..models import progress_bar
from ..options import engine_options


class LocalEngine:
    """bench.engine.BenchEngine over an LLM. One process, so no other pids."""

    pids: tuple[int, ...] = ()
    takes_uneven = True

    def __init__(self, llm: LLM, model_path: Path, threads: int, settings: dict[str, Any]) -> None:
        self.name = "tokenmill"
        self.facts = dict(llm.ready.facts)
        self.vocab_size = llm.ready.vocab_size
        self.model_path = model_path
        self.threads = threads
        self._llm = llm
        self._settings = {"temperature": 0.0, **settings}

    def run(self, prompts: list[list[int]], max_tokens: Sequence[int]) -> float:
        sampling = [SamplingParams(max_tokens=count, ignore_eos=True, **self._settings) for count in max_tokens]
        start_s = time.perf_counter()
        self._llm.generate(prompts, sampling)
        return time.perf_counter() - start_s

    def peak_bytes(self) -> int | None:
        return peak_memory()

    def close(self) -> None:
        self._llm.close()


def engine(args: argparse.Namespace) -> int:
    with progress_bar(f"fetching {args.model}") as progress:
        path = resolve_model(args.model, progress=progress).path
    options = asdict(engine_options(args)) | {"enable_prefix_caching": False}

    def make(demand: Demand) -> LocalEngine:
        needed = {"max_num_seqs": demand.num_seqs, "max_model_len": demand.num_tokens}
        asked = {name: value for name, value in options.items() if value is not None}
        llm = LLM(str(path), **{**needed, **asked})
        return LocalEngine(llm, path, llm.settings.threads, args.sampling)

    return run(args, make)
