"""Mixtures of experts and latent attention beside llama.cpp, and beside what memory allows.

    python tests/bench/bench_moe.py MODEL --llama-bin DIR [--load LOAD]... [--peer-model FILE] [--repeats N] [--new N]
        [--threads N] [--json FILE]

MODEL: a file of tests/random_models.py. Loads, by default prefill:512, decode:128 and 16x128:

    prefill:P  one prompt of P tokens that no cache knows
    decode:D   one stream behind D tokens, N new ones
    SxD        S streams behind D tokens each, distinct

Engines take turns. Ours runs each load of decoding twice behind a cached prompt, to one token and to N, and counts what
lies between; llama.cpp is measured by llama-bench (prefill, one stream) and llama-batched-bench (several, one prompt
copied to all), the better of with and without flash attention, which the first turn finds. `--peer-model`: another file
for llama.cpp.

The roofline of a step of decoding is the time in which two threads read, at the best speed seen before and after, the
matrices that every row uses, the experts that are in use, and the KV. Experts in use are counted: the engine's tally
after N + 1 tokens less that after N is the last step's.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tokenmill import LLM, SamplingParams
from tokenmill.bench import machine
from tokenmill.bench.report import summarise
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.models.summary import model_summary

SETTLE_S = 0.3
DEFAULT = ("prefill:512", "decode:128", "16x128")


@dataclass(frozen=True)
class Load:
    """streams: 0 for a prefill, of which depth is the length."""

    name: str
    streams: int
    depth: int

    @classmethod
    def read(cls, text: str) -> Load:
        kind, _, depth = text.replace("x", ":").partition(":")
        kind, _, depth = text.replace("x", ":").partition(":")
        named = {"prefill": 0, "decode": 1}
        return cls(text, named[kind] if kind in named else int(kind), int(depth))

    @property
    def room(self) -> int:
        return max(1, self.streams) * (self.depth + 128)


@dataclass
class Result:
    """Tokens a second of each run; touched: experts in use in a step, mean over layers; limit: the roofline's."""

    load: str
    own: list[float] = field(default_factory=list)
    peer: dict[str, list[float]] = field(default_factory=dict)
    touched: float = 0.0
    step_bytes: float = 0.0
    limit: float = 0.0
    others: str = ""

    @property
    def best(self) -> str:
        return max(self.peer, key=lambda name: median(self.peer[name]), default="")

    def rows(self) -> list[str]:
        own = summarise(self.own)
        words = [f"{self.load}: tokenmill {own.show('.1f')} tokens/s"]
        if self.best:
            theirs = summarise(self.peer[self.best])
            words.append(f"llama.cpp {theirs.show('.1f')} ({self.best}), ratio {own.median / theirs.median:.2f}")
        if self.limit:
            words.append(
                f"{self.step_bytes / 1e6:.0f} MB a step, of {self.touched:.1f} experts a layer: "
                f"{own.median / self.limit:.0%} of the {self.limit:.0f} that memory allows"
            )
        return ["; ".join(words), f"    {self.others}"]


class Own:
    """The engine under test, in this process."""

    def __init__(self, path: Path, loads: list[Load], new: int, threads: int) -> None:
        longest = max(load.depth for load in loads) + new + 16
        checkpoint = open_checkpoint(path)
        self.summary = model_summary(checkpoint)
        checkpoint.close()
        room = max(max(load.room for load in loads), longest) + 1024
        self.llm = LLM(
            str(path), max_model_len=longest, max_num_seqs=max(16, *(load.streams for load in loads)), threads=threads,
            kv_cache_memory_bytes=str(int(room * 1.1 * self.summary.kv_bytes_per_token)),
        )  # fmt: skip
        self.new = new
        self._rng = random.Random(0)
        self._prompts: dict[str, list[list[int]]] = {}

    def run(self, load: Load) -> float:
        if not load.streams:
            return load.depth / self._time([self._prompt(load.depth)], 1)
        prompts = self.prompts(load)
        first_s = median(self._time(prompts, 1) for _ in range(3))
        return load.streams * (self.new - 1) / (self._time(prompts, self.new) - first_s)

    def prompts(self, load: Load) -> list[list[int]]:
        """Those of a load, in the cache."""
        if load.name not in self._prompts:
            self._prompts = {load.name: [self._prompt(load.depth) for _ in range(load.streams)]}
            for prompt in self._prompts[load.name]:
                self._time([prompt], 1)
        return self._prompts[load.name]

    def touched(self, load: Load) -> float:
        """Experts in use in one step, mean over the layers that have them. 0 where there are none."""
        prompts = self.prompts(load)
        tallies = [self._tally()]
        for extra in (8, 9):
            self._time(prompts, extra)
            time.sleep(SETTLE_S)  # a step that was planned ahead may still run
            tallies.append(self._tally())
        if not tallies[0]:
            return 0.0
        step = np.diff(np.diff(np.array(tallies, np.int64), axis=0), axis=0)[0]
        assert (step >= 0).all() and (step.sum(axis=-1) == step.sum(axis=-1)[:1]).all(), "not one step's counts"
        return float((step > 0).sum(axis=-1).mean())

    def step_bytes(self, load: Load, touched: float) -> float:
        config = self.summary.config
        moe = getattr(config, "moe", None)
        parts: dict[str, int] = {}
        for group in self.summary.groups:
            parts[group.part] = parts.get(group.part, 0) + group.packed_bytes
        share = touched / moe.routing.num_experts if moe is not None else 0.0
        plain = sum(size for part, size in parts.items() if part not in ("embeddings", "experts"))
        head = parts.get("embeddings", 0) if "head" not in parts else 0
        kv = load.streams * self.summary.kv_bytes(load.depth + self.new // 2)
        return plain + head + share * parts.get("experts", 0) + kv

    def close(self) -> None:
        self.llm.close()

    def _tally(self) -> tuple[tuple[int, ...], ...]:
        load = self.llm.expert_load()
        return () if load is None else load.tokens

    def _prompt(self, size: int) -> list[int]:
        return [self._rng.randrange(300, self.llm.ready.vocab_size) for _ in range(size)]

    def _time(self, prompts: list[list[int]], new: int) -> float:
        # Greedy streams of random weights soon say one token for ever, all of them the same.
        sampling = [
            SamplingParams(max_tokens=new, ignore_eos=True, temperature=1.5, seed=seed) for seed in range(len(prompts))
        ]
        start_s = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling)
        seconds = time.perf_counter() - start_s
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return seconds


class Llama:
    """llama.cpp's own programs. `modes`: with flash attention and without, until one is known to be better."""

    def __init__(self, folder: Path, model: Path, new: int, threads: int) -> None:
        self._folder, self._model, self._new, self._threads = folder, model, new, threads

    def run(self, load: Load, flash: bool) -> float:
        common = {"-m": self._model, "-t": self._threads}
        if load.streams < 2:
            sizes = {"-p": load.depth, "-n": 0} if not load.streams else {"-p": 0, "-n": self._new, "-d": load.depth}
            rows = self._call("llama-bench", common | sizes | {"-r": 1, "-fa": int(flash), "-o": "jsonl"})
            return float(rows[-1]["avg_ts"])
        room = -(-(load.depth + self._new) // 256) * 256 * load.streams
        sizes = {"-c": room, "-npp": load.depth, "-ntg": self._new, "-npl": load.streams, "-b": 2048, "-ub": 512}
        flags = {"-tb": self._threads, "-fa": "on" if flash else "off", "--output-format": "jsonl"}
        return float(self._call("llama-batched-bench", common | sizes | flags, "-pps")[-1]["speed_tg"])

    def _call(self, tool: str, options: dict[str, Any], *flags: str) -> list[dict[str, Any]]:
        command = [str(self._folder / tool), *flags, *(str(word) for pair in options.items() for word in pair)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if not rows:
            raise SystemExit(f"{' '.join(command)} ended with code {done.returncode} and told nothing")
        return rows


def measure(load: Load, own: Own, peer: Llama | None, repeats: int, bandwidth: Callable[[], float]) -> Result:
    result = Result(load.name)
    own.run(load)
    gbs = [max(bandwidth() for _ in range(3))]
    if load.streams:
        result.touched = own.touched(load)
        result.step_bytes = own.step_bytes(load, result.touched)
    modes = [True, False] if peer is not None else []
    before = machine.read_cpu_time()
    for repeat in range(repeats):
        time.sleep(SETTLE_S)
        result.own.append(own.run(load))
        for flash in modes:
            assert peer is not None
            name = "flash attention" if flash else "no flash attention"
            result.peer.setdefault(name, []).append(peer.run(load, flash))
        if not repeat and modes:
            modes = [result.best == "flash attention"]
        print(f"{load.name} {repeat + 1} of {repeats}: {result.own[-1]:.1f} {result.peer}", file=sys.stderr)
    result.others = str(machine.interference(before, machine.read_cpu_time()) or "")
    gbs.append(max(bandwidth() for _ in range(3)))
    if load.streams:
        result.limit = load.streams * max(gbs) * 1e9 / result.step_bytes
    result.others += f"; memory read {gbs[0]:.1f} and {gbs[1]:.1f} GB/s"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bin", type=Path, metavar="DIR")
    parser.add_argument("--peer-model", type=Path, metavar="FILE")
    parser.add_argument("--load", action="append", type=Load.read, metavar="LOAD")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    loads = args.load or [Load.read(text) for text in DEFAULT]
    own = Own(args.model, loads, args.new, args.threads)
    peer = None
    if args.llama_bin is not None:
        peer = Llama(args.llama_bin, args.peer_model or args.model, args.new, args.threads)
    results = []
    for load in loads:
        results.append(measure(load, own, peer, args.repeats, lambda: machine.read_bandwidth(args.threads)))
        for line in results[-1].rows():
            print(line, flush=True)
    facts = {"model": args.model.name, "commit": machine.commit(), **machine.hardware(), **dict(own.llm.ready.facts)}
    own.close()
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    if args.json is not None:
        args.json.write_text(json.dumps({"facts": facts, "results": [asdict(each) for each in results]}, indent=1))


if __name__ == "__main__":
    main()
