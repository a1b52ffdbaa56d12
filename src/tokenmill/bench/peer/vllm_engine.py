"""vLLM's offline interface for `worker.py`: one batch of token prompts, greedy, no text.

The processor build settles on its threads when it is imported; what must be in the environment before that is set by
whoever starts the process (`environment` in bench/peer/processes.py).
"""

import time
from typing import Any

MAX_MODEL_LEN = 2048
BATCH_TOKENS = 2048


class Runner:
    def __init__(self, vllm: Any, model: str, threads: int, max_sequences: int) -> None:
        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_sequences,
            max_num_batched_tokens=BATCH_TOKENS,
            enable_prefix_caching=False,
            seed=0,
        )
        config = self._llm.llm_engine.model_config
        self.vocab_size = int(config.get_vocab_size())
        quantised = getattr(config, "quantization", None)
        self.facts = {
            "version": f"vLLM {vllm.__version__}",
            "precision": f"{config.dtype}, weights {quantised or 'as they are'}",
            "threads": str(threads),
        }

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> float:
        """Seconds for all prompts and max_tokens[i] tokens of prompt i."""
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        sampling = [
            self._sampling(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
            for count in max_tokens
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = [len(output.outputs[0].token_ids) for output in outputs]
        if made != max_tokens:
            raise SystemExit(f"vLLM made {made} tokens where {max_tokens} were asked for")
        return seconds


def start(model: str, *, threads: int, max_sequences: int) -> Runner:
    import vllm

    return Runner(vllm, model, threads, max_sequences)
