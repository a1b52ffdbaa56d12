"""Asks llama.cpp what it makes of our prompts and passages, and writes the answers to llama_goldens.json.gz.

Runs under an interpreter that has llama-cpp-python, outside the project's own environment (`make oracle` builds one):

    python tests/oracle/make_llama_goldens.py MODEL.gguf [--data FOLDER]

For each prompt: its token ids, the greedy continuation (up to 64 tokens, ending with the end token if it comes), and
the five best tokens with their log probabilities at each step. For each passage: the log probability of every token
but the first of each window of 512 tokens, windows being independent of each other. Prompts that come from public data
sets are stored as token ids, the longer public text as a digest; both need the data folder to be made again.

llama.cpp runs with its plain kernels (no weights rearranged for one machine), a float16 KV cache, no flash attention,
two threads. Every figure is also taken with flash attention, to show by how much llama.cpp differs from itself.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[2] / "shared" / "data"
GOLDENS = HERE / "llama_goldens.json.gz"
NUM_NEW = 64
NUM_TOP = 5
WINDOW = 512
NUM_THREADS = 2
PUBLIC_TEXT = "text/wikitext2_valid_unk.txt.gz"
PUBLIC_CHARS = 65536
PUBLIC_WINDOWS = 16


class Model:
    """One loaded GGUF file. Without extra buffer types, llama.cpp keeps the file's layout and its plain kernels."""

    def __init__(self, path: str) -> None:
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False
        params.n_gpu_layers = 0
        self.handle = llama_cpp.llama_load_model_from_file(path.encode(), params)
        if not self.handle:
            raise SystemExit(f"llama.cpp cannot load {path}.")
        self.vocab = llama_cpp.llama_model_get_vocab(self.handle)
        self.num_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.eos = llama_cpp.llama_vocab_eos(self.vocab)

    def metadata(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(65536)
        size = llama_cpp.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        if size < 0:
            raise SystemExit(f"The model has no {key}.")
        return buffer.value.decode()

    def piece(self, token: int) -> str:
        buffer = ctypes.create_string_buffer(256)
        size = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:size].decode()

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`, special tokens recognised, none added."""
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 16))()
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), ids, len(ids), False, True)
        assert count >= 0, f"tokenising {text[:40]!r} needs {-count} ids"
        return list(ids[:count])

    @contextmanager
    def context(self, num_ctx: int, *, flash: bool = False) -> Iterator[Context]:
        context = Context(self, num_ctx, flash)
        try:
            yield context
        finally:
            llama_cpp.llama_free(context.handle)


class Context:
    """One sequence's KV and the logits that follow from it."""

    def __init__(self, model: Model, num_ctx: int, flash: bool) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_ctx
        params.n_batch = num_ctx
        params.n_ubatch = WINDOW
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = NUM_THREADS
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F16
        self.model = model
        self.handle = llama_cpp.llama_new_context_with_model(model.handle, params)
        self.num_past = 0

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), True)
        self.num_past = 0

    def extend(self, tokens: list[int], *, every: bool) -> np.ndarray:
        """Append tokens; log probabilities [len(tokens) or 1, V] (float64) of what follows each, or the last."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self.num_past + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every or i == len(tokens) - 1
        code = llama_cpp.llama_decode(self.handle, batch)
        llama_cpp.llama_batch_free(batch)
        assert code == 0, f"llama_decode returned {code}"
        self.num_past += len(tokens)
        wanted = range(len(tokens)) if every else [len(tokens) - 1]
        return np.stack([self._logprobs(i) for i in wanted])

    def _logprobs(self, index: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self.handle, index)
        logits = np.ctypeslib.as_array(pointer, shape=(self.model.num_vocab,)).astype(np.float64)
        logits -= logits.max()
        return logits - np.log(np.exp(logits).sum())


@llama_cpp.llama_log_callback
def be_silent(level: int, text: bytes, user_data: object) -> None:
    """llama.cpp logs a line per graph node; nobody needs them."""


def best(logprobs_V: np.ndarray) -> list[tuple[int, float]]:
    """The NUM_TOP best tokens, best first, ties to the lower id."""
    candidates = np.argpartition(-logprobs_V, NUM_TOP + 3)[: NUM_TOP + 4]
    order = sorted(candidates.tolist(), key=lambda token: (-logprobs_V[token], token))
    return [(token, round(float(logprobs_V[token]), 5)) for token in order[:NUM_TOP]]


def continue_greedily(context: Context, prompt: list[int]) -> tuple[list[int], list[list[tuple[int, float]]]]:
    """Up to NUM_NEW greedy tokens, the last one the end token if it came; and the best tokens at each step."""
    context.clear()
    tokens: list[int] = []
    tops = []
    row = context.extend(prompt, every=False)[0]
    while True:
        top = best(row)
        tops.append(top)
        tokens.append(top[0][0])
        if len(tokens) == NUM_NEW or tokens[-1] == context.model.eos:
            return tokens, tops
        row = context.extend(tokens[-1:], every=False)[0]


def score_window(context: Context, window: list[int]) -> list[float]:
    """Log probability of window[1:], each given all before it."""
    context.clear()
    rows = context.extend(window[:-1], every=True)
    return [round(float(rows[i, token]), 4) for i, token in enumerate(window[1:])]


def perplexity(windows: list[list[float]]) -> float:
    """Over the second half of each window, as llama.cpp's own perplexity tool counts it."""
    scored = [value for window in windows for value in window[WINDOW // 2 - 1 :]]
    return float(np.exp(-np.mean(scored)))


def prompt_texts(data: Path | None, model: Model) -> list[tuple[dict, str]]:
    """(what identifies the prompt, its text with the chat template applied)."""
    listed = json.loads((HERE / "prompts.json").read_text())
    template = Jinja2ChatFormatter(
        template=model.metadata("tokenizer.chat_template"), eos_token=model.piece(model.eos), bos_token=""
    )
    texts = []
    for entry in listed["own"]:
        messages = entry.get("messages")
        texts.append(({"name": entry["name"]}, template(messages=messages).prompt if messages else entry["text"]))
    if data is None:
        return texts
    for entry in listed["shared"]:
        row = json.loads((data / entry["file"]).read_text().splitlines()[entry["row"]])
        value = row[entry["field"]]
        content = value if isinstance(value, str) else value[0]
        source = {"name": entry["name"], "file": entry["file"], "row": entry["row"]}
        texts.append((source, template(messages=[{"role": "user", "content": content}]).prompt))
    return texts


def passages(data: Path | None) -> list[tuple[str, str, int]]:
    """(name, text, windows)."""
    found = [("passage", (HERE / "passage.txt").read_text(), 4)]
    if data is not None:
        public = gzip.decompress((data / PUBLIC_TEXT).read_bytes()).decode()
        found.append((PUBLIC_TEXT, public[:PUBLIC_CHARS], PUBLIC_WINDOWS))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the GGUF file")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the public prompts and texts")
    options = parser.parse_args()

    llama_cpp.llama_log_set(be_silent, None)
    model = Model(options.model)
    prompts = []
    data = options.data if options.data.is_dir() else None
    with model.context(2048) as context, model.context(2048, flash=True) as other:
        for source, text in prompt_texts(data, model):
            ids = model.tokenize(text)
            tokens, tops = continue_greedily(context, ids)
            other.clear()
            rows = other.extend(ids + tokens[:-1], every=True)[len(ids) - 1 :]
            prompts.append(
                source
                | {
                    "prompt_tokens": ids,
                    "tokens": tokens,
                    "top_ids": [[token for token, _ in top] for top in tops],
                    "top_logprobs": [[value for _, value in top] for top in tops],
                    "flash_logprobs": [round(float(row[t]), 5) for row, t in zip(rows, tokens, strict=True)],
                    "flash_choice": [int(row.argmax()) for row in rows],
                }
            )
            print(f"{source['name']}: {len(ids)} + {len(tokens)} tokens", flush=True)
    scored = []
    with model.context(WINDOW) as context, model.context(WINDOW, flash=True) as other:
        for name, text, num_windows in passages(data):
            ids = model.tokenize(text)[: WINDOW * num_windows]
            assert len(ids) == WINDOW * num_windows, f"{name} has only {len(ids)} tokens"
            windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
            logprobs = [score_window(context, window) for window in windows]
            scored.append(
                {
                    "name": name,
                    "num_windows": num_windows,
                    "window": WINDOW,
                    "tokens_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
                    "logprobs": logprobs,
                    "perplexity": perplexity(logprobs),
                    "flash_perplexity": perplexity([score_window(other, window) for window in windows]),
                }
            )
            print(f"{name}: perplexity {scored[-1]['perplexity']:.4f}", flush=True)

    goldens = {
        "made_with": {
            "llama_cpp_python": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode(),
            "model_sha256": hashlib.sha256(Path(options.model).read_bytes()).hexdigest(),
            "options": f"KV f16, flash attention off, {NUM_THREADS} threads, plain kernels",
        },
        "prompts": prompts,
        "passages": scored,
    }
    text = json.dumps(goldens, separators=(",", ":"))
    GOLDENS.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{GOLDENS.name}: {GOLDENS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
