"""What a KV type costs a model: how its log probabilities differ from those over float32 KV.

    python scripts/kv_quality.py MODEL TEXT [--windows 12] [--tokens 512] [--dequantise]

MODEL is a name, a .gguf file or a folder; TEXT may be gzip'd. Every window of the text is read whole over KV of each
type, by the native kernels. Printed are, over all positions, the mean of |log probability of the token that follows,
less that over float32 KV| and the mean KL divergence from the distribution over float32 KV, both in nats.
`--dequantise` makes float32 of a .gguf file's weights, so that activations stay as they are: with integer weights, any
difference moves some across the borders of their 8-bit codes, whatever KV is.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tokenmill.core.block import KV_DTYPES
from tokenmill.formats.checkpoint import Checkpoint, open_checkpoint
from tokenmill.formats.ggml import dequantise
from tokenmill.formats.hub import resolve_model
from tokenmill.formats.tensor import Tensor
from tokenmill.models.loader import load_model
from tokenmill.ops.api import StepBatch, StepLimits
from tokenmill.ops.native import NativeOps
from tokenmill.text.text_model import load_text

EXACT = "f32"
ROWS = 128
"""Logits that are held at once for each type."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--dequantise", action="store_true")
    args = parser.parse_args()
    checkpoint = open_checkpoint(resolve_model(args.model).path)
    data = args.text.read_bytes()
    text = (gzip.decompress(data) if args.text.suffix == ".gz" else data).decode()
    tokens = np.array(load_text(checkpoint).tokenizer.encode(text[: 20 * args.windows * args.tokens]), np.int32)
    windows_WN = tokens[: args.windows * args.tokens].reshape(args.windows, args.tokens)
    if args.dequantise:
        checkpoint.tensors = {name: dequantised(tensor) for name, tensor in checkpoint.tensors.items()}
    readers = {dtype: reader(checkpoint, dtype, args.tokens) for dtype in KV_DTYPES}
    sums = {dtype: np.zeros(2) for dtype in KV_DTYPES if dtype != EXACT}
    for window_N in windows_WN:
        for start in range(0, args.tokens, ROWS):
            end = min(start + ROWS, args.tokens)
            follow_L = np.append(window_N, 0)[start + 1 : end + 1]
            exact_LV = readers[EXACT](window_N[:end], start)
            for dtype, total in sums.items():
                less_LV = exact_LV - readers[dtype](window_N[:end], start)
                of_text_L = np.abs(less_LV[np.arange(len(follow_L)), follow_L])
                total += of_text_L[: args.tokens - 1 - start].sum(), (np.exp(exact_LV) * less_LV).sum()
    num_positions = windows_WN.size
    print(f"{'KV':<6} {'|log probability|':>18} {'KL':>10}   over {num_positions:,} positions")
    for dtype, (of_text, divergence) in sums.items():
        print(f"{dtype:<6} {of_text / (num_positions - args.windows):>18.4f} {divergence / num_positions:>10.6f}")


def dequantised(tensor: Tensor) -> Tensor:
    values = dequantise(tensor.kind, tensor.data, tensor.num_values)
    return Tensor(tensor.name, "f32", tensor.shape, memoryview(values.view(np.uint8)))


def reader(checkpoint: Checkpoint, dtype: str, num_tokens: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """Of (tokens [end] so far, how many of them were read before) the log probabilities [end - start, V] of what
    follows each of the others."""
    ops = NativeOps(2)
    model = load_model(checkpoint, ops, max_model_len=num_tokens, kv_dtype=dtype)
    num_blocks = -(-num_tokens // model.kv_group.block_size)
    pool = ops.new_pool(model.kv_group, num_blocks)
    limits = StepLimits(ROWS, 1, num_blocks, ROWS)
    program = ops.compile(lambda recorder, batch: model.forward(recorder, pool.kv, batch), limits)

    def read(tokens_P: np.ndarray, start: int) -> np.ndarray:
        end = len(tokens_P)
        batch = StepBatch(
            tokens_T=tokens_P[start:],
            positions_T=np.arange(start, end, dtype=np.int32),
            row_starts_S1=np.array([0, end - start], np.int32),
            context_lens_S=np.array([end], np.int32),
            block_tables_SB=np.arange(num_blocks, dtype=np.int32)[None],
            logit_rows_L=np.arange(end - start, dtype=np.int32),
        )
        logits_LV = program(batch).astype(np.float64)
        logits_LV -= logits_LV.max(axis=1, keepdims=True)
        return logits_LV - np.log(np.exp(logits_LV).sum(axis=1, keepdims=True))

    return read


if __name__ == "__main__":
    main()
