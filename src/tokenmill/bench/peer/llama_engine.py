"""llama.cpp for `worker.py`, through llama-cpp-python's low-level functions.

A step holds one row for every sequence that is being extended, then as many prompt tokens as fit: prompts first at the
beginning, then both together, as llama.cpp's server does it. The tokens fed are given, not drawn, so that llama.cpp is
charged for no sampling. Each number of sequences has a context of its own, made before the clock starts.
"""

import time
from collections.abc import Iterator
from typing import Any

BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
ROUND_TO = 256

Row = tuple[int, int, int, bool]
"""(sequence, position, token, wants logits)"""


class Runner:
    def __init__(
        self, llama_cpp: Any, model_path: str, *, threads: int, flash_attention: bool, extra_buffers: bool
    ) -> None:
        self.lib = llama_cpp
        self.silent = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
        llama_cpp.llama_log_set(self.silent, None)
        self.facts = {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "features": llama_cpp.llama_print_system_info().decode().strip(" |"),
            "threads": str(threads),
        }
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

    def decode(self, rows: list[Row]) -> None:
        """Run rows, at most BATCH_TOKENS of them."""
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

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> float:
        """Seconds for all prompts and max_tokens[i] tokens of prompt i."""
        self.prepare(len(prompts), max(len(prompt) + count for prompt, count in zip(prompts, max_tokens, strict=True)))
        start = time.perf_counter()
        for rows in steps(prompts, max_tokens):
            self.decode(rows)
        self.lib.llama_synchronize(self.context)
        return time.perf_counter() - start


def steps(prompts: list[list[int]], max_tokens: list[int]) -> Iterator[list[Row]]:
    """The rows of each step. The first new token of a sequence comes with its prompt's last row, so it is extended by
    max_tokens - 1 rows; what is fed then is its prompt again."""
    done = [0] * len(prompts)
    ends = [len(prompt) + count - 1 for prompt, count in zip(prompts, max_tokens, strict=True)]
    while done != ends:
        rows: list[Row] = []
        for sequence, prompt in enumerate(prompts):
            if len(prompt) <= done[sequence] < ends[sequence]:
                rows.append((sequence, done[sequence], prompt[done[sequence] % len(prompt)], True))
        extended = [row[0] for row in rows]
        for sequence, prompt in enumerate(prompts):
            for position in range(done[sequence], min(len(prompt), done[sequence] + BATCH_TOKENS - len(rows))):
                rows.append((sequence, position, prompt[position], position == len(prompt) - 1))
                done[sequence] = position + 1
        for sequence in extended:
            done[sequence] += 1
        yield rows


def start(model: str, *, threads: int, flash_attention: bool, extra_buffers: bool) -> Runner:
    import llama_cpp

    return Runner(llama_cpp, model, threads=threads, flash_attention=flash_attention, extra_buffers=extra_buffers)
