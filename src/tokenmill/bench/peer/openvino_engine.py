"""OpenVINO GenAI's continuous batching for `worker.py`: one batch of token prompts, greedy."""

import json
import time
from pathlib import Path
from typing import Any

BATCH_TOKENS = 2048
CACHE_GIB = 2


class Runner:
    def __init__(self, model: str, threads: int, max_sequences: int) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._genai: Any = openvino_genai
        self._to_tensor = lambda prompt: openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = max_sequences
        scheduler.max_num_batched_tokens = BATCH_TOKENS
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.vocab_size = int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])
        self.facts = {"version": f"OpenVINO GenAI {openvino_genai.__version__}", "threads": str(threads)}

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> float:
        """Seconds for all prompts and max_tokens[i] tokens of prompt i."""
        inputs = [self._to_tensor(prompt) for prompt in prompts]
        configs = [self._config(count) for count in max_tokens]
        start = time.perf_counter()
        outputs = self._pipeline.generate(inputs, configs)
        seconds = time.perf_counter() - start
        made = [len(output.m_generation_ids[0]) for output in outputs]
        if made != max_tokens:
            raise SystemExit(f"OpenVINO made {made} tokens where {max_tokens} were asked for")
        return seconds

    def _config(self, count: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        return config


def start(model: str, *, threads: int, max_sequences: int) -> Runner:
    return Runner(model, threads, max_sequences)
