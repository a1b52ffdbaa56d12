"""Runs llama.cpp for the comparison, as a program of its own: `python llama_worker.py MODEL.gguf '{"threads": 2}'`.

It imports nothing of tokenmill, so that any interpreter that has llama-cpp-python can run it, and answers one JSON
line on standard output for each JSON line on standard input:

    at the start                                    -> {"facts": {name: value}, "vocab_size": n}
    {"prompts": [[id, ...], ...], "max_tokens": n}  -> {"seconds": s}

A run is what llama.cpp's own benchmarks do: all prompts, then max_tokens - 1 steps that extend every sequence by one
token. The tokens fed are given, not drawn, so that llama.cpp is charged for no sampling. Each number of sequences has
a context of its own, made before the clock starts.
"""

import json
import os
import sys
import time
from typing import Any

BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
ROUND_TO = 256


class Runner:
    def __init__(
        self, llama_cpp: Any, model_path: str, *, threads: int, flash_attention: bool, extra_buffers: bool
    ) -> None:
        self.lib = llama_cpp
        self.threads = threads
        self.flash_attention = flash_attention
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = extra_buffers
        self.model = llama_cpp.llama_load_model_from_file(model_path.encode(), params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {model_path}")
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.context = None
        self.shape = (0, 0)

    @property
    def vocab_size(self) -> int:
        return int(self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model)))

    def prepare(self, num_sequences: int, num_tokens: int) -> None:
        """An empty context for sequences of up to num_tokens each."""
        length = -(-num_tokens // ROUND_TO) * ROUND_TO
        if self.shape == (num_sequences, length):
            self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
            return
        if self.context is not None:
            self.lib.llama_free(self.context)
        params = self.lib.llama_context_default_params()
        params.n_ctx = length * num_sequences
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = MICRO_BATCH_TOKENS
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = self.lib.GGML_TYPE_F16
        params.flash_attn_type = int(self.flash_attention)
        self.context = self.lib.llama_new_context_with_model(self.model, params)
        if not self.context:
            raise SystemExit(f"llama.cpp cannot make a context for {num_sequences} sequences of {length} tokens")
        self.shape = (num_sequences, length)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run (sequence, position, token, wants logits) rows, at most BATCH_TOKENS of them."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, token, wants_logits) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wants_logits
        code = self.lib.llama_decode(self.context, batch)
        if code != 0:
            raise SystemExit(f"llama_decode answered {code}")

    def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds for all prompts and max_tokens tokens of each."""
        self.prepare(len(prompts), max(map(len, prompts)) + max_tokens)
        rows = [
            (sequence, position, token, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        start = time.perf_counter()
        for first in range(0, len(rows), BATCH_TOKENS):
            self.decode(rows[first : first + BATCH_TOKENS])
        for step in range(max_tokens - 1):
            self.decode([(s, len(p) + step, p[step % len(p)], True) for s, p in enumerate(prompts)])
        self.lib.llama_synchronize(self.context)
        return time.perf_counter() - start


def main() -> None:
    model_path, options = sys.argv[1], json.loads(sys.argv[2])
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the library prints must not mix with the replies
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
    llama_cpp.llama_log_set(silent, None)
    runner = Runner(llama_cpp, model_path, **options)
    facts = {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "features": llama_cpp.llama_print_system_info().decode().strip(" |"),
    }
    print(json.dumps({"facts": facts, "vocab_size": runner.vocab_size}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"seconds": runner.run(request["prompts"], request["max_tokens"])}), file=replies, flush=True)


if __name__ == "__main__":
    main()
