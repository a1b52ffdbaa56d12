"""Another tokenmill for `worker.py`, of whatever interpreter runs it: one batch of token prompts, greedy."""

import importlib
import time
from typing import Any

MAX_MODEL_LEN = 2048


class Runner:
    def __init__(self, tokenmill: Any, model: str, threads: int, max_sequences: int) -> None:
        self._sampling = tokenmill.SamplingParams
        self._llm = tokenmill.LLM(
            model,
            threads=threads,
            max_num_seqs=max_sequences,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=False,
        )
        self.vocab_size = int(self._llm.ready.vocab_size)
        self.facts = {"version": f"tokenmill {tokenmill.__version__}", **dict(self._llm.ready.facts)}

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> float:
        """Seconds for all prompts and max_tokens[i] tokens of prompt i."""
        sampling = [self._sampling(max_tokens=count, ignore_eos=True, temperature=0.0) for count in max_tokens]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling)
        seconds = time.perf_counter() - start
        made = [len(output.outputs[0].token_ids) for output in outputs]
        if made != max_tokens:
            raise SystemExit(f"tokenmill made {made} tokens where {max_tokens} were asked for")
        return seconds


def start(model: str, *, threads: int, max_sequences: int) -> Runner:
    return Runner(importlib.import_module("tokenmill"), model, threads, max_sequences)
