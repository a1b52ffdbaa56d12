"""Damages GGUF, safetensors and config.json files at random and opens them.

    python tests/fuzz_formats.py --count 10000 --seed 0

Every file must open or be refused as BadCheckpoint; none may take more memory than 16 MB plus twice its size, nor (in
the command) more than a second. What went wrong is printed with the seed of the case, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
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
from tokenmill.formats.quantization_config import join_quantised  # noqa: E402
from tokenmill.formats.safetensors import open_safetensors, read_json  # noqa: E402
from tokenmill.models.config import config_from_checkpoint  # noqa: E402
from tokenmill.models.families import HF_FAMILIES  # noqa: E402
from tokenmill.models.rope import rope_frequencies  # noqa: E402
from tokenmill.models.weights import load_weights  # noqa: E402
from tokenmill.ops.reference import ReferenceOps  # noqa: E402

EXTREMES = (0, 1, 2, 7, 8, 9, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
STRANGE = (
    *(None, 0, 1, -1, 3, 2**31, 2**70, 0.0, -0.5, 1e-300, 1e300, float("inf"), float("nan"), True, "x"),
    *([], [0] * 99, ["full_attention"] * 2, {}, {"rope_type": "yarn"}),
)
EXPERT_COUNTS = ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"]
EXPERT_SETTINGS = [
    *("num_experts_per_tok", "moe_k", "moe_intermediate_size", "shared_expert_intermediate_size", "n_group"),
    *("shared_intermediate_size", "n_shared_experts", "moe_num_shared_experts", "topk_group", "routed_scaling_factor"),
    *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "moe_layer_interval"),
    *("moe_layer_start_index", "moe_layer_end_index", "moe_norm_min", "num_nextn_predict_layers", "scoring_func"),
]
FREE_BYTES = 16 << 20


def sound_gguf(with_experts: bool = False) -> bytes:
    """with_experts: a Qwen3-MoE, else a Llama."""
    keys: dict[str, object] = {
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
    if with_experts:
        keys = {key.replace("llama.", "qwen3moe."): value for key, value in keys.items() if "scaling" not in key}
        keys |= {
            "general.architecture": "qwen3moe",
            "qwen3moe.expert_count": 3,
            "qwen3moe.expert_used_count": 2,
            "qwen3moe.expert_feed_forward_length": 32,
            "qwen3moe.expert_gating_func": 1,
            "qwen3moe.expert_group_count": 1,
            "qwen3moe.expert_weights_scale": 1.5,
            "qwen3moe.nextn_predict_layers": 0,
        }
        tensors |= {
            "blk.0.ffn_gate_inp.weight": (0, [64, 3], bytes(4 * 64 * 3)),
            "blk.0.ffn_gate_exps.weight": (2, [64, 32, 3], bytes(64 * 32 * 3 // 32 * 18)),
            "blk.0.ffn_up_exps.weight": (2, [64, 32, 3], bytes(64 * 32 * 3 // 32 * 18)),
            "blk.0.ffn_down_exps.weight": (8, [32, 64, 3], bytes(64 * 32 * 3 // 32 * 34)),
        }
    return gguf_bytes(keys, tensors)


GPT_OSS = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
_EXPERTS = {
    "x.experts.down_proj_blocks": {"dtype": "U8", "shape": [2, 3, 1, 16], "data_offsets": [168, 264]},
    "x.experts.down_proj_scales": {"dtype": "U8", "shape": [2, 3, 1], "data_offsets": [264, 270]},
    "x.experts.gate_up_proj": {"dtype": "BF16", "shape": [2, 4, 6], "data_offsets": [270, 366]},
}


def sound_safetensors(*, with_experts: bool = False) -> bytes:
    header = {
        **(_EXPERTS if with_experts else {}),
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        "b": {"dtype": "BF16", "shape": [16], "data_offsets": [128, 160]},
        "c": {"dtype": "I64", "shape": [], "data_offsets": [160, 168]},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(366 if with_experts else 168)


def sound_folder(folder: Path, merged: bool) -> bytes:
    """config.json of a Mixtral in `folder` -> its model.safetensors. merged: experts as transformers 5 holds them."""
    config = {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 8, "max_position_embeddings": 16,
        "num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    layer, block = "model.layers.0.", "model.layers.0.mlp." if merged else "model.layers.0.block_sparse_moe."
    shapes: dict[str, list[int]] = {f"{block}gate.weight": [2, 32]}
    if merged:
        shapes |= {f"{block}experts.gate_up_proj": [2, 64, 32], f"{block}experts.down_proj": [2, 32, 32]}
    else:
        shapes |= {f"{block}experts.{e}.w{n}.weight": [32, 32] for e in range(2) for n in (1, 2, 3)}
    shapes |= {f"{layer}self_attn.{part}_proj.weight": [32, 32] for part in "qkvo"}
    shapes |= {f"{layer}{part}_layernorm.weight": [32] for part in ("input", "post_attention")}
    shapes |= {"model.norm.weight": [32], "model.embed_tokens.weight": [8, 32], "lm_head.weight": [8, 32]}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


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
    if HF_FAMILIES[config["architectures"][0]].moe is not None:  # type: ignore[index]
        config |= dict.fromkeys(draw.sample(EXPERT_COUNTS, 3), 4) | dict.fromkeys(draw.sample(EXPERT_SETTINGS, 3), 1)
        for _ in range(draw.choice((0, 1, 2))):
            config[draw.choice(EXPERT_COUNTS + EXPERT_SETTINGS)] = draw.choice(STRANGE)
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
    if seed % 8 == 4:
        path = folder / "experts" / "model.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(damage(sound_folder(path.parent, bool(seed & 8)), draw))
        return _opened(lambda: _frequencies(open_checkpoint(path.parent)), path)
    sound = sound_gguf(with_experts=seed % 8 == 3) if is_gguf else sound_safetensors(with_experts=seed % 16 == 8)
    data = damage(sound, draw)
    path = folder / ("m.gguf" if is_gguf else "m.safetensors")
    path.write_bytes(data)
    if is_gguf:
        return _opened(lambda: _frequencies(open_checkpoint(path)), path)
    return _opened(lambda: join_quantised(open_safetensors(path), GPT_OSS), path)


def _frequencies(checkpoint: Checkpoint) -> None:
    config = config_from_checkpoint(checkpoint)
    if config.moe is not None:
        how = config.moe.routing
        assert 1 <= how.top_k <= how.num_experts and config.moe.expert_width > 0, config.moe
        if checkpoint.tensors:
            with contextlib.suppress(BadCheckpoint):
                load_weights(checkpoint, config, ReferenceOps())
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
