"""Random checkpoints for benchmarks.

    python tests/random_models.py OUT --model moe|mla|dense --form q4_0|q8_0|mxfp4|hf [--layers N] [--seed N]
        [--zipf] [--old]

`moe` is Qwen3-30B-A3B in small, `mla` DeepSeek-V2-Lite in small, `dense` has the shape of Qwen3-0.6B (GGUF only).
Weights are a function of the seed, with spreads at which activations keep their size over the layers; those of a GGUF
and of a folder differ. Quantised blocks are drawn as bytes, which takes seconds where quantising takes minutes. The
tokenizer is a byte-level BPE made here, which llama.cpp reads too. `--old`: one matrix `attn_kv_b`, which llama.cpp
decompresses, instead of the two with which it absorbs.

`--zipf`: experts are chosen as Zipf's cost model (exponent 1) has it, each layer in its own order. Routers have no
biases in these families, so one coordinate of the residual stream gets a constant (from the embeddings; the layers add
little to it, and norms hide it from attention and the head), and its column of the router holds a bias for each expert:
the normal quantile of the share of tokens that is to choose it, min(1, c / rank), in units of the spread of the other
logits. Two independent tokens then share 0.4 of their experts; neighbours, with what attention gives both, nearly half.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

from tokenmill.text.pretokenizers import ALPHABET

Q4_0, Q8_0, MXFP4 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.MXFP4
FORMS = {"q4_0": (Q4_0, Q4_0), "q8_0": (Q8_0, Q8_0), "mxfp4": (Q8_0, MXFP4)}
"""Type of the matrices, and of those of the experts."""

VOCAB = 32_000
STEP = 0.25
"""What a layer's half adds to the residual stream, beside embeddings of spread 1."""
ROUTER = 1.5
"""The spread of router logits."""
SHARED, PUSH = 2.0, 8.0
"""With `zipf`: how much more attention adds, which neighbours have in common, and the constant coordinate."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. latent: 0 where keys and values are heads; head: of queries and keys, rope: its rotated part;
    experts: 0 where all layers are dense; dense_ffn: of dense layers, which is the first where there are experts, 0: it
    has experts too; shared: experts that every token uses. A model without experts has one matrix for embeddings and
    head."""

    architecture: str
    layers: int = 24
    width: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head: int = 128
    rope: int = 128
    value: int = 128
    latent: int = 0
    experts: int = 64
    top_k: int = 8
    expert_ffn: int = 384
    shared: int = 0
    dense_ffn: int = 0
    context: int = 16_384
    theta: float = 1e6
    vocab: int = VOCAB

    def is_dense(self, layer: int) -> bool:
        return not self.experts or (self.dense_ffn > 0 and not layer)


SHAPES = {
    "moe": Shape("qwen3moe"),
    "mla": Shape(
        "deepseek2", head=192, rope=64, latent=512, top_k=6, expert_ffn=352, shared=2, dense_ffn=2816, theta=1e4
    ),
    "dense": Shape("qwen3", layers=28, kv_heads=8, experts=0, dense_ffn=3072, context=40_960, vocab=151_936),
}


@dataclass(frozen=True)
class Matrix:
    """One to be drawn: rows (the last but one) by columns, a stack of them where shape has three sizes."""

    name: str
    shape: tuple[int, ...]
    spread: float
    role: str = "matrix"


def write_gguf_model(
    path: Path, shape: Shape, form: str, *, seed: int = 0, zipf: bool = False, old: bool = False
) -> None:
    """A GGUF file. form: of FORMS. Overwrites `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, shape.architecture)
    _add_keys(writer, shape, old)
    matrices = list(_matrices(shape, _gguf_names(shape, old)))
    drawn: list[Callable[[], np.ndarray]] = []
    for index, matrix in enumerate(matrices):
        kind = _kind(matrix, form)
        sizes = _byte_shape(matrix.shape, kind) if kind is not None else matrix.shape
        num_bytes = math.prod(sizes) * (4 if kind is None else 1)
        dtype = np.dtype(np.float32 if kind is None else np.uint8)
        writer.add_tensor_info(matrix.name, sizes, dtype, num_bytes, raw_dtype=kind)
        rng = np.random.default_rng([seed, index])
        drawn.append(lambda m=matrix, k=kind, r=rng: _gguf_data(m, k, r, shape, zipf))  # type: ignore[misc]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for draw in drawn:
        writer.write_tensor_data(draw())
    writer.close()


def write_hf_model(folder: Path, shape: Shape, *, seed: int = 0, zipf: bool = False) -> None:
    """A folder as transformers saves it, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_hf_config(shape), indent=1))
    _write_hf_tokenizer(folder, shape)
    matrices = list(_matrices(shape, _hf_names(shape)))
    header: dict[str, Any] = {}
    offset = 0
    for matrix in matrices:
        end = offset + 2 * math.prod(matrix.shape)
        header[matrix.name] = {"dtype": "BF16", "shape": list(matrix.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, matrix in enumerate(matrices):
            values = _values(matrix, np.random.default_rng([seed, index]), shape, zipf)
            file.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())


def _matrices(shape: Shape, names: dict[str, str]) -> Iterator[Matrix]:
    """All weights of a model, under the names that a format has for their roles. An empty name is left out."""

    def give(role: str, layer: int, sizes: tuple[int, ...], spread: float, kind: str = "matrix") -> Iterator[Matrix]:
        if names.get(role):
            if "{x}" in names[role]:
                for x in range(sizes[0]):
                    yield Matrix(names[role].format(l=layer, x=x), sizes[1:], spread, kind)
            else:
                yield Matrix(names[role].format(l=layer), sizes, spread, kind)

    width, heads, experts, ffn = shape.width, shape.heads, shape.experts, shape.expert_ffn
    nope = shape.head - shape.rope
    yield from give("embed", 0, (shape.vocab, width), 1.0, "embed")
    yield from give("norm", 0, (width,), 0.1, "deaf norm")
    if experts:
        yield from give("head", 0, (shape.vocab, width), 3 * width**-0.5)
    for layer in range(shape.layers):
        yield from give("attn_norm", layer, (width,), 0.1, "deaf norm")
        yield from give("q", layer, (heads * shape.head, width), width**-0.5)
        if shape.latent:
            yield from give("kv_a", layer, (shape.latent + shape.rope, width), width**-0.5)
            yield from give("kv_norm", layer, (shape.latent,), 0.1, "norm")
            yield from give("kv_b", layer, (heads * (nope + shape.value), shape.latent), shape.latent**-0.5)
            yield from give("k_b", layer, (heads, shape.latent, nope), shape.latent**-0.5)
            yield from give("v_b", layer, (heads, shape.value, shape.latent), shape.latent**-0.5)
        else:
            yield from give("k", layer, (shape.kv_heads * shape.head, width), width**-0.5)
            yield from give("v", layer, (shape.kv_heads * shape.head, width), width**-0.5)
            yield from give("q_norm", layer, (shape.head,), 0.1, "norm")
            yield from give("k_norm", layer, (shape.head,), 0.1, "norm")
        yield from give("o", layer, (width, heads * shape.value), 2 * STEP * (heads * shape.value) ** -0.5, "mix")
        yield from give("ffn_norm", layer, (width,), 0.1, "norm")
        if shape.is_dense(layer):
            yield from _ffn(give, "", layer, (), width, shape.dense_ffn, 1.0)
            continue
        yield from give("router", layer, (experts, width), ROUTER * width**-0.5, f"router {layer}")
        yield from _ffn(give, "_exps", layer, (experts,), width, ffn, shape.top_k**0.5)
        if shape.shared:
            yield from _ffn(give, "_shared", layer, (), width, shape.shared * ffn, 0.5)


def _ffn(
    give: Callable[..., Iterator[Matrix]], suffix: str, layer: int, stack: tuple[int, ...], width: int, ffn: int,
    gain: float,
) -> Iterator[Matrix]:  # fmt: skip
    kind = "experts" if stack else "matrix"
    yield from give("gate" + suffix, layer, (*stack, ffn, width), width**-0.5, kind)
    yield from give("up" + suffix, layer, (*stack, ffn, width), width**-0.5, kind)
    yield from give("down" + suffix, layer, (*stack, width, ffn), gain * STEP / 0.5 * ffn**-0.5, kind)


def _gguf_names(shape: Shape, old: bool) -> dict[str, str]:
    roles = {
        "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm", "o": "attn_output", "ffn_norm": "ffn_norm", "router": "ffn_gate_inp",
        "kv_a": "attn_kv_a_mqa", "kv_norm": "attn_kv_a_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
        "gate_exps": "ffn_gate_exps", "up_exps": "ffn_up_exps", "down_exps": "ffn_down_exps",
        "gate_shared": "ffn_gate_shexp", "up_shared": "ffn_up_shexp", "down_shared": "ffn_down_shexp",
    }  # fmt: skip
    roles |= {"kv_b": "attn_kv_b"} if old else {"k_b": "attn_k_b", "v_b": "attn_v_b"}
    names = {role: "blk.{l}." + name + ".weight" for role, name in roles.items()}
    return names | {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}


def _hf_names(shape: Shape) -> dict[str, str]:
    roles = {
        "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "o": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm", "router": "mlp.gate", "kv_a": "self_attn.kv_a_proj_with_mqa",
        "kv_norm": "self_attn.kv_a_layernorm", "kv_b": "self_attn.kv_b_proj",
    }  # fmt: skip
    for part in ("gate", "up", "down"):
        roles[part] = f"mlp.{part}_proj"
        roles[f"{part}_exps"] = "mlp.experts.{x}." + f"{part}_proj"
        roles[f"{part}_shared"] = f"mlp.shared_experts.{part}_proj"
    names = {role: "model.layers.{l}." + name + ".weight" for role, name in roles.items()}
    return names | {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}


def _kind(matrix: Matrix, form: str) -> GGMLQuantizationType | None:
    """None: float32."""
    if matrix.role.endswith("norm") or matrix.role.startswith("router"):
        return None
    plain, experts = FORMS[form]
    return Q8_0 if matrix.role == "embed" else experts if matrix.role == "experts" else plain


_BLOCK = {Q4_0: 18, Q8_0: 34, MXFP4: 17}


def _byte_shape(shape: tuple[int, ...], kind: GGMLQuantizationType) -> tuple[int, ...]:
    assert shape[-1] % 32 == 0, shape
    return (*shape[:-1], shape[-1] // 32 * _BLOCK[kind])


def _gguf_data(
    matrix: Matrix, kind: GGMLQuantizationType | None, rng: np.random.Generator, shape: Shape, zipf: bool
) -> np.ndarray:
    if kind is None:
        return _values(matrix, rng, shape, zipf)
    if matrix.role == "embed":
        return np.asarray(quantize(_values(matrix, rng, shape, zipf), kind))
    sizes = _byte_shape(matrix.shape, kind)
    blocks = np.frombuffer(rng.bytes(math.prod(sizes)), np.uint8).reshape(-1, _BLOCK[kind]).copy()
    if kind == MXFP4:  # an exponent, then values whose mean square is 8.56
        blocks[:, 0] = 127 + round(math.log2(matrix.spread / 2.93))
    else:  # uniform integers of 4 or 8 bits, but for the least: a mean would be a direction that all layers feed
        if kind == Q8_0:
            blocks[blocks == 0x80] = 0
        for half in (0x0F, 0xF0) if kind == Q4_0 else ():
            blocks[blocks & half == 0] |= half & 0x88
        scale = matrix.spread / (4.18 if kind == Q4_0 else 73.3) * (SHARED if zipf and matrix.role == "mix" else 1)
        blocks[:, :2] = np.array([scale], "<f2").view(np.uint8)
    return blocks.reshape(sizes)


def _values(matrix: Matrix, rng: np.random.Generator, shape: Shape, zipf: bool) -> np.ndarray:
    shared = SHARED if zipf and matrix.role == "mix" else 1.0
    values = rng.standard_normal(matrix.shape, np.float32) * np.float32(matrix.spread * shared)
    if matrix.role.endswith("norm"):
        values += 1
        values[0] = 0 if zipf and matrix.role == "deaf norm" else 1
    elif zipf and matrix.role == "embed":
        values[:, 0] = PUSH
    elif zipf and matrix.role.startswith("router"):
        layer = int(matrix.role.split()[1])
        rms = math.sqrt(1 + PUSH**2 / shape.width + 3 * (2 * layer + 1) * STEP**2)
        values[:, 0] = rng.permutation(zipf_biases(shape.experts, shape.top_k)) * np.float32(rms / PUSH)
    return values


def zipf_biases(experts: int, top_k: int) -> np.ndarray:
    """Biases [experts] of router logits of spread ROUTER, the likeliest expert first, with which expert r is among the
    best top_k of a token about min(1, c / r) of the time."""
    ranks = np.arange(1, experts + 1)
    low, high = 0.0, float(experts * top_k)
    for _ in range(60):
        c = (low + high) / 2
        low, high = (c, high) if np.minimum(1, c / ranks).sum() < top_k else (low, c)
    share = np.clip(np.minimum(1, low / ranks), 1e-3, 0.995)
    return np.array([ROUTER * NormalDist().inv_cdf(float(each)) for each in share], np.float32)


def _add_keys(writer: GGUFWriter, shape: Shape, old: bool) -> None:
    writer.add_name(f"Random {shape.architecture}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.dense_ffn or shape.expert_ffn * shape.top_k)
    writer.add_head_count(shape.heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.theta)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.top_k)
        writer.add_expert_feed_forward_length(shape.expert_ffn)
    writer.add_vocab_size(shape.vocab)
    if shape.latent:
        writer.add_head_count_kv(shape.heads if old else 1)
        writer.add_leading_dense_block_count(1 if shape.dense_ffn else 0)
        if shape.layers not in (26, 27):  # llama.cpp knows the Lite model by its layers, and wants the key of others
            writer.add_q_lora_rank(0)
        writer.add_kv_lora_rank(shape.latent)
        writer.add_rope_dimension_count(shape.rope)
        writer.add_key_length(shape.head if old else shape.latent + shape.rope)
        writer.add_value_length(shape.value if old else shape.latent)
        if not old:
            writer.add_key_length_mla(shape.head)
            writer.add_value_length_mla(shape.value)
        writer.add_expert_shared_count(shape.shared)
        writer.add_expert_weights_scale(1.0)
    else:
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head)
        writer.add_value_length(shape.value)
    tokens, merges = vocabulary()
    tokens += [f"<|unused {number}|>" for number in range(len(tokens), shape.vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [TokenType.CONTROL] * len(SPECIALS) + [TokenType.NORMAL] * (VOCAB - len(SPECIALS))
    writer.add_token_types(kinds + [TokenType.UNUSED] * (shape.vocab - VOCAB))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges): special tokens, the bytes, all pairs and triples of letters, and longer ones up to VOCAB."""
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    merges = [f"{a} {b}" for a in ("Ġ", *letters) for b in letters]
    merges += [f"{a}{b} {c}" for a in letters for b in letters for c in letters]
    room = VOCAB - len(SPECIALS) - len(ALPHABET) - len(merges)
    pairs = [f"Ġ{a} {b}{c}" for a in letters for b in letters for c in letters]
    merges += pairs[:room]
    assert len(pairs) >= room
    return [*SPECIALS, *ALPHABET, *(merge.replace(" ", "") for merge in merges)], merges


def _hf_config(shape: Shape) -> dict[str, Any]:
    common = {
        "hidden_size": shape.width, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.top_k, "moe_intermediate_size": shape.expert_ffn, "rms_norm_eps": 1e-6,
        "rope_theta": shape.theta, "max_position_embeddings": shape.context, "vocab_size": VOCAB,
        "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "bos_token_id": 0,
        "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if not shape.latent:
        return common | {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": shape.head,
            "num_key_value_heads": shape.kv_heads, "num_experts": shape.experts, "norm_topk_prob": True,
            "intermediate_size": shape.expert_ffn * shape.top_k, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    return common | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "intermediate_size": shape.dense_ffn,
        "num_key_value_heads": shape.heads, "kv_lora_rank": shape.latent, "q_lora_rank": None,
        "qk_nope_head_dim": shape.head - shape.rope, "qk_rope_head_dim": shape.rope, "v_head_dim": shape.value,
        "n_routed_experts": shape.experts, "n_shared_experts": shape.shared, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "rope_scaling": None,
    }  # fmt: skip


def _write_hf_tokenizer(folder: Path, shape: Shape) -> None:
    tokens, merges = vocabulary()
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    made = {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": text, **special} for index, text in enumerate(SPECIALS)],
        "pre_tokenizer": by_bytes,
        "decoder": by_bytes,
        "model": {"type": "BPE", "vocab": {text: index for index, text in enumerate(tokens)}, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(made))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[0], "eos_token": SPECIALS[2],
        "model_max_length": shape.context, "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--form", choices=[*FORMS, "hf"], required=True)
    parser.add_argument("--layers", type=int, help="(default: 24, 28 of dense)")
    parser.add_argument("--seed", type=int, default=0)
    for flag in ("--zipf", "--old"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    shape = SHAPES[args.model]
    shape = replace(shape, layers=args.layers or shape.layers)
    if args.form == "hf" and not shape.experts:
        parser.error("--form hf is not for --model dense")
    if args.form == "hf":
        write_hf_model(args.out, shape, seed=args.seed, zipf=args.zipf)
    else:
        write_gguf_model(args.out, shape, args.form, seed=args.seed, zipf=args.zipf, old=args.old)


if __name__ == "__main__":
    main()
