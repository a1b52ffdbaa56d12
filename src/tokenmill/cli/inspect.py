"""`inspect`: what a model (or a LoRA adapter) is, what it is stored as, what it will take, and what will compute it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import BadCheckpoint, ConfigError
from ..core.units import format_bytes
from ..formats.adapter import CONFIG_NAME, Adapter, open_adapter
from ..formats.checkpoint import Checkpoint, open_checkpoint, open_settings, why_no_weights
from ..formats.config_keys import ARCHITECTURES, model_type_of
from ..formats.hub import local_model
from ..models.config import ModelConfig
from ..models.encoder_config import EncoderConfig
from ..models.summary import ModelSummary, check, imagine, model_summary
from ..models.unsupported_keys import wanted_keys
from ..node.load import model_facts
from ..node.machine import read_machine
from ..node.notes import NOTE, notes
from ..node.options import KV_CACHE_DTYPES, QUANTIZATIONS, EngineOptions
from ..node.pooling import choose_pooling
from ..node.resolve import ModelFacts, resolve
from ..ops.native import available
from .expert_load import read_load
from .expert_map import draw_load
from .layer_facts import as_json, layer_facts
from .options import given_options

_KERNELS = {
    "f32": "float32 products",
    "f16": "float16 weights, float32 products",
    "bf16": "bfloat16 weights, float32 products",
    "q6_h": "6-bit codes by 8-bit activations, a scale for 16",
    "q4_0": "4-bit codes by 8-bit activations, a scale for 32",
    "q4_1": "4-bit codes by 8-bit activations, a scale and a minimum for 32",
    "q8_0": "8-bit codes by 8-bit activations, a scale for 32",
    "q8_m": "8-bit codes by 8-bit activations, a scale and a minimum for 32",
    "q8_h": "8-bit codes by 8-bit activations, a scale for 16",
    "q8_hm": "8-bit codes by 8-bit activations, a scale and a minimum for 16",
}


def inspect(args: argparse.Namespace) -> int:
    if args.expert_load is not None:
        for line in draw_load(read_load(Path(args.expert_load))):
            print(line)
        return 0
    if (Path(args.model) / CONFIG_NAME).is_file():
        for name, value in _adapter_facts(open_adapter(args.model)):
            print(f"{name:<14} {value}")
        return 0
    path = local_model(args.model)
    why_no_tensors = why_no_weights(path)
    is_whole = not why_no_tensors
    checkpoint = open_checkpoint(path) if is_whole else open_settings(path)
    quantization = None if args.quantization is None else QUANTIZATIONS[args.quantization]
    try:
        checkpoint = checkpoint if is_whole else imagine(checkpoint)
        found = model_summary(checkpoint, quantization=quantization, kv_dtype=KV_CACHE_DTYPES[args.kv_cache_dtype])
    except BadCheckpoint as error:
        raise BadCheckpoint(error.message + _wanted(checkpoint)) from error
    config = found.config
    facts = _encoder_facts(config) if isinstance(config, EncoderConfig) else _decoder_facts(config)
    pooling = choose_pooling(checkpoint, "auto", None)
    gives = "tokens" if pooling is None else pooling.describe()
    shared = (
        ("model", str(checkpoint.path)),
        ("architecture", f"{config.architecture} ({config.family.title})"),
        ("parameters", _parameters(found)),
        ("gives", gives),
    )
    if args.json:
        print(json.dumps(as_json(found, str(checkpoint.path)), indent=1))
        check(checkpoint)
        return 0
    for name, value in (*shared, *facts):
        print(f"{name:<14} {value}")
    if not is_whole:
        print(f"{'tensors':<14} {why_no_tensors}; sizes are those that config.json asks for")
    elif checkpoint.left_out:
        print(f"{'left out':<14} {checkpoint.left_out}")
    for note in notes(checkpoint, quantization):
        print(f"{NOTE:<14} {note}")
    print()
    for line in _table(found):
        print(line)
    print()
    options = given_options(EngineOptions, args)
    for name, value in _memory(found, model_facts(checkpoint, pooling, options), options):
        print(f"{name:<14} {value}")
    check(checkpoint)
    checkpoint.close()
    return 0


def _wanted(checkpoint: Checkpoint) -> str:
    """What an architecture that is not known would need, as far as its settings tell."""
    if checkpoint.kind != "hf" or model_type_of(checkpoint.metadata):
        return ""
    nearest, keys = wanted_keys(checkpoint.metadata)
    told = f"does not read {', '.join(keys)}" if keys else "reads all that it says"
    return f" Nearest is {ARCHITECTURES[nearest]}, which {told}."


def _parameters(found: ModelSummary) -> str:
    total, active = found.num_parameters, found.num_active_parameters
    return f"{total:,}" + (f", of which a token uses {active:,} ({active / total:.0%})" if active != total else "")


def _adapter_facts(adapter: Adapter) -> Iterator[tuple[str, str]]:
    modules = adapter.modules
    yield "adapter", str(adapter.path)
    yield "digest", adapter.digest
    yield "modules", f"{len(modules)}: {', '.join(dict.fromkeys(each.name.rsplit('.', 1)[-1] for each in modules))}"
    yield "rank", ", ".join(map(str, sorted({module.rank for module in modules})))
    yield "scale", ", ".join(f"{scale:g}" for scale in sorted({module.scale for module in modules}))
    kinds = ", ".join(dict.fromkeys(half.kind for module in modules for half in (module.a, module.b)))
    yield "stored", f"{format_bytes(adapter.num_bytes)} of {kinds}"


def _decoder_facts(config: ModelConfig) -> Iterator[tuple[str, str]]:
    tied = ", tied to the head" if config.tied_embeddings else ""
    yield from layer_facts(config)
    yield "vocabulary", f"{config.vocab_size:,}{tied}"
    yield "context", f"{config.max_context:,} tokens{_windows(config)}"
    ropes = dict.fromkeys(layer.rope for layer in config.layers)
    yield "RoPE", "; ".join("none" if rope is None else f"base {rope.base:g}, {rope.scaling}" for rope in ropes)


def _encoder_facts(config: EncoderConfig) -> Iterator[tuple[str, str]]:
    windows = [layer.window for layer in config.layers if layer.window]
    sees = f"{len(windows)} of them see {max(windows) - 1} tokens to each side" if windows else "every token sees all"
    yield "shape", f"{config.num_layers} layers of {config.width}, FFN {config.ffn_width}, {sees}"
    yield "heads", f"{config.num_heads} of {config.head_dim}"
    yield "vocabulary", f"{config.vocab_size:,}"
    yield (
        "context",
        f"{config.max_context:,} tokens, {config.num_types} type{'s' if config.num_types > 1 else ''} of text",
    )


def _windows(config: ModelConfig) -> str:
    windows = [layer.window for layer in config.layers]
    if not any(windows):
        return ""
    return f"; {sum(map(bool, windows))} of {len(windows)} layers see the last {max(windows):,}"


def _table(found: ModelSummary) -> Iterator[str]:
    native = available() is None
    yield f"{'part':<18} {'stored':<26} {'tensors':>7} {'bytes':>10}   {'in memory':<14} {'bytes':>10}   kernel"
    for group in found.groups:
        kernel = _KERNELS.get(re.split(" or | and ", group.packed)[-1], "") if native else "numpy, on float32"
        if group.part == "norms and biases":
            kernel = "float32"
        yield (
            f"{group.part:<18} {group.stored:<26} {group.num_tensors:>7} {format_bytes(group.stored_bytes):>10}   "
            f"{group.packed:<14} {format_bytes(group.packed_bytes):>10}   {kernel}"
        )


def _memory(found: ModelSummary, facts: ModelFacts, options: EngineOptions) -> Iterator[tuple[str, str]]:
    """What serving it here would take, then what one sequence takes."""
    weights, length = found.packed_bytes, found.config.max_context
    try:
        settings = resolve(options, read_machine(), facts)
    except ConfigError as error:
        yield "served here", f"not as it is: {error.message}"
        yield "weights", format_bytes(weights)
    else:
        length, kv = settings.config.max_model_len, sum(group.num_bytes for group in settings.config.groups)
        reason = next(decision.reason for decision in settings.decisions if decision.name.startswith("kv_"))
        pool = f" and a KV pool of {format_bytes(kv)}, which fills as it is used ({reason})" if kv else ""
        yield "served here", f"at most {format_bytes(weights + kv)}: weights {format_bytes(weights)}{pool}"
        yield "", f"at most {settings.config.max_num_seqs} sequences at once, of at most {length:,} tokens"
    per_token, one = found.kv_bytes_per_token, found.kv_bytes(length)
    if not per_token:
        yield "KV", "none: an input runs whole in one step"
        return
    shown, left = format_bytes(per_token), per_token
    for group in found.kv_groups:
        if group.window:
            left -= group.bytes_per_token
            shown += f" up to {group.window:,} tokens, {format_bytes(left)} beyond"
    yield "KV per token", shown
    yield "read per token", f"{format_bytes(found.bytes_read())} of weights, and the KV of what it sees"
    saved = per_token * length - one
    instead = f", {format_bytes(one + saved)} if layers kept what they no longer see" if saved else ""
    yield "one sequence", f"{format_bytes(one)} of KV at {length:,} tokens{instead}"
