"""Damages GGUF, safetensors and config.json files at random and opens them.

    python tests/fuzz_formats.py --count 10000 --seed 0

Every file must open or be refused as BadCheckpoint; none may take more memory than 16 MB plus twice its size, nor (in
the command) more than a second. What went wrong is printed with the seed of the case, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "unit")]
import numpy as np  # noqa: E402
from gguf_writer import gguf_bytes  # noqa: E402

from tokenmill.core.errors import BadCheckpoint  # noqa: E402
from tokenmill.formats.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from tokenmill.formats.safetensors import open_safetensors, read_json  # noqa: E402
from tokenmill.models.config import config_from_checkpoint  # noqa: E402
from tokenmill.models.families import HF_FAMILIES  # noqa: E402
from tokenmill.models.rope import rope_frequencies  # noqa: E402

EXTREMES = (0, 1, 2, 7, 8, 9, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
STRANGE = (
    *(None, 0, 1, -1, 3, 2**31, 2**70, 0.0, -0.5, 1e-300, 1e300, float("inf"), float("nan"), True, "x"),
    *([], [0] * 99, ["full_attention"] * 2, {}, {"rope_type": "yarn"}),
)
FREE_BYTES = 16 << 20


def sound_gguf() -> bytes:
    keys = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
        "llama.feed_forward_length": 96,
        "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "tokenizer.ggml.tokens": [f"token {number}" for number in range(50)],
        "tokenizer.ggml.token_type": [1] * 50,
        "nested": [[1, 2], [3]],
        "general.alignment": 32,
    }
    tensors = {
        "token_embd.weight": (0, [64, 50], bytes(4 * 64 * 50)),
        "blk.0.attn_q.weight": (12, [256, 2], bytes(2 * 144)),
        "rope_freqs.weight": (0, [8], struct.pack("<8f", *range(1, 9))),
    }
    return gguf_bytes(keys, tensors)


def sound_safetensors() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        "b": {"dtype": "BF16", "shape": [16], "data_offsets": [128, 160]},
        "c": {"dtype": "I64", "shape": [], "data_offsets": [160, 168]},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(168)


def damage(data: bytes, draw: random.Random) -> bytes:
    """A few random wounds: bytes, sizes, cuts, repeats, digits of the JSON."""
    wounded = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(wounded)) if wounded else 0
        if draw.random() < 0.7:  # most structure is at the beginning
            at = at * draw.randrange(100) // 300
        kind = draw.randrange(8)
        if kind == 0 and wounded:
            wounded[at] = draw.randrange(256)
        elif kind == 1:
            wounded[at : at + 8] = struct.pack("<Q", draw.choice(EXTREMES))
        elif kind == 2:
            wounded[at : at + 4] = struct.pack("<I", draw.choice(EXTREMES) % 2**32)
        elif kind == 3:
            del wounded[draw.choice((at, at + draw.randrange(64))) :]
        elif kind == 4:
            del wounded[at : at + draw.randrange(1, 20)]
        elif kind == 5:
            wounded[at:at] = wounded[at : at + draw.randrange(1, 200)]
        elif kind == 6:
            wounded[at:at] = draw.randbytes(draw.randrange(1, 20))
        else:
            digits = [index for index, byte in enumerate(wounded[:600]) if 48 <= byte <= 57]
            if digits:
                index = draw.choice(digits)
                wounded[index : index + 1] = draw.choice(
                    (b"-1", b"1e9", b"[" * 9, b"99999999999999999999", b"null", b'"')
                )
    return bytes(wounded)


def strange_config(draw: random.Random) -> dict[str, object]:
    """A config.json with a few values that make no sense."""
    config: dict[str, object] = {
        "architectures": [draw.choice(list(HF_FAMILIES))],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 96,
        "max_position_embeddings": 256,
        "sliding_window": 8,
    }
    scaling = draw.choice(("default", "linear", "dynamic", "yarn", "longrope", "llama3"))
    rope: dict[str, object] = {"rope_type": scaling, "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config["rope_parameters"] = draw.choice((rope, {"full_attention": rope, "sliding_attention": {}}))
    for _ in range(draw.choice((0, 1, 2, 4))):
        target = draw.choice((config, rope))
        key = draw.choice([*target, "head_dim", "layer_types", "no_rope_layers", "query_pre_attn_scalar", "hidden_act"])
        target[key] = draw.choice(STRANGE)
    return config


def check(seed: int, folder: Path) -> tuple[str, float]:
    """Damage and open one file -> (what is wrong, or nothing; seconds)."""
    draw = random.Random(seed)
    is_gguf = bool(seed & 1)
    if seed % 4 == 2:
        path = folder / "config.json"
        path.write_text(json.dumps(strange_config(draw)))
        return _opened(lambda: _frequencies(Checkpoint("hf", path, read_json(path), {})), path)
    data = damage(sound_gguf() if is_gguf else sound_safetensors(), draw)
    path = folder / ("m.gguf" if is_gguf else "m.safetensors")
    path.write_bytes(data)
    if is_gguf:
        return _opened(lambda: _frequencies(open_checkpoint(path)), path)
    return _opened(lambda: open_safetensors(path), path)


def _frequencies(checkpoint: Checkpoint) -> None:
    config = config_from_checkpoint(checkpoint)
    for layer in config.layers:
        if layer.rope is not None:
            frequencies = rope_frequencies(layer.rope, config.rotary_dim, 1000)
            assert len(frequencies) == config.rotary_dim // 2 and np.isfinite(frequencies).all(), frequencies


def _opened(open_it: Callable[[], object], path: Path) -> tuple[str, float]:
    tracemalloc.start()
    began = time.perf_counter()
    try:
        open_it()
        wrong = ""
    except BadCheckpoint:
        wrong = ""
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if not wrong and peak > FREE_BYTES + 2 * path.stat().st_size:
        wrong = f"took {peak} bytes for a file of {path.stat().st_size}"
    return wrong, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    args = parser.parse_args()
    failed, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seed, args.seed + args.count):
            wrong, seconds = check(seed, Path(folder))
            slowest = max(slowest, seconds)
            if not wrong and seconds > 1:
                wrong = f"took {seconds:.1f} s"
            if wrong:
                failed += 1
                print(f"seed {seed}: {wrong}")
    print(f"{args.count} files, {failed} failed, slowest {slowest * 1000:.0f} ms")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
