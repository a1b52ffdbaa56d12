"""`inspect`: what a model (or a LoRA adapter) is, what it is stored as, what it will take, and what will compute it."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.config import QUANTIZATIONS
from ..core.errors import ConfigError
from ..core.units import format_bytes, format_parts
from ..formats.adapter import CONFIG_NAME, Adapter, open_adapter
from ..formats.checkpoint import Checkpoint, open_checkpoint, open_settings, why_no_weights
from ..formats.hub import local_model
from ..models.config import ModelConfig
from ..models.encoder_config import EncoderConfig
from ..models.moe import MoeConfig
from ..models.summary import ModelSummary, check, imagine, model_summary
from ..node.load import choose_pooling, model_facts, open_drafter, planned_memory
from ..node.machine import read_machine
from ..node.memory import private_bytes
from ..node.model_warnings import NOTE, model_warnings
from ..node.options import KV_CACHE_DTYPES, EngineOptions
from ..node.resolve import EngineSettings, ModelFacts, resolve
from ..node.speculation import read_speculation
from ..ops.api import SIGMOID, SOFTMAX_CHOSEN, SPARSE_MIXER
from ..ops.native import available
from ..ops.native.library import replaced_kinds
from ..plan.config import shape_facts
from ..server.config import ServerConfig
from .expert_load import draw_load, read_load
from .front_end import memory_beside
from .options import given_options
from .serve import queued_bytes


def layer_facts(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """What `inspect` says of a decoder's layers, as (name, value) of each line: attention, FFN, experts and their
    router."""
    num_moe = sum(layer.is_moe for layer in config.layers)
    num_dense = sum(layer.has_ffn and not layer.is_moe for layer in config.layers)
    if num_dense:
        where = "" if num_dense == config.num_layers else f" in {num_dense} of them"
        yield "shape", f"{config.num_layers} layers of {config.width}, FFN {config.ffn_width}{where}"
    else:
        yield "shape", f"{config.num_layers} layers of {config.width}"
    if config.num_heads:
        yield "heads", _heads(config)
    if config.moe is not None:
        yield "experts", _experts(config.moe, num_moe)
        yield "router", router_words(config.moe)


def _heads(config: ModelConfig) -> str:
    through = f", queries through {config.query_rank} channels" if config.query_rank else ""
    latent = config.latent
    if latent is None:
        heads = f"{config.num_heads} of {config.head_dim} on {config.num_kv_heads} KV heads{through}"
        for own, count in Counter(layer.heads for layer in config.layers if layer.heads is not None).items():
            heads += f"; {count} layers {own.num_heads} of {own.head_dim} on {own.num_kv_heads}"
        shared = sum(layer.kv_layer is not None for layer in config.layers)
        return heads + (f"; {shared} layers see KV of others" if shared else "")
    return (
        f"{latent.num_heads} of {latent.nope_dim} + {latent.rope_dim} on one latent of {latent.latent_dim} +"
        f" {latent.rope_dim} channels, values of {latent.value_dim}{through}"
    )


def _experts(moe: MoeConfig, num_layers: int) -> str:
    routing = moe.routing
    shared = f", and shared ones of {moe.shared_width} together" if moe.shared_width else ""
    gated = ", behind a gate" if moe.shared_mix else ""
    return (
        f"{routing.num_experts} of FFN {moe.expert_width} in each of {num_layers} layers, {routing.top_k} for a token"
        f"{shared}{gated}"
    )


def router_words(moe: MoeConfig) -> str:
    """How a token's experts are chosen and weighed."""
    routing = moe.routing
    best = f"the best {routing.top_k}"
    if routing.score == SOFTMAX_CHOSEN:
        said = f"{best} by logit, softmax over these"
    elif routing.score == SPARSE_MIXER:
        said = f"{best} by logit one after the other, each by softmax over those near it"
    else:
        said = f"{best} by {'the sigmoid of each' if routing.score == SIGMOID else 'softmax over all'}"
    if moe.choice_bias:
        said += ", with a bias that weights do not see"
    if routing.num_groups > 1:
        by = "best two" if routing.group_score == 2 else "best one"
        said += f", from the {routing.top_groups} best of {routing.num_groups} groups by their {by}"
    said += ", weights divided by their sum" if routing.normalise and routing.score != SOFTMAX_CHOSEN else ""
    return said + (f", times {routing.scale:g}" if routing.scale != 1 else "")


def as_json(found: ModelSummary, path: str) -> dict[str, Any]:
    """The whole of a model_summary; sizes in bytes."""
    config = found.config
    facts: dict[str, Any] = {
        "model": path,
        "architecture": config.architecture,
        "num_parameters": found.num_parameters,
        "num_active_parameters": found.num_active_parameters,
        "num_layers": config.num_layers,
        "width": config.width,
        "vocab_size": config.vocab_size,
        "max_context": config.max_context,
        "weights_bytes": found.packed_bytes,
        "weights_bytes_read_per_token": found.bytes_read(),
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "parts": [
            {
                "part": group.part,
                "stored": group.stored,
                "packed": group.packed,
                "num_tensors": group.num_tensors,
                "num_values": group.num_values,
                "stored_bytes": group.stored_bytes,
                "packed_bytes": group.packed_bytes,
            }
            for group in found.groups
        ],
    }
    if isinstance(config, EncoderConfig):
        return facts
    facts["attention"] = "latent" if config.latent is not None else "heads"
    facts["shape"] = shape_facts(config)
    moe = config.moe
    if moe is not None:
        routing = moe.routing
        facts["experts"] = {
            "num_experts": routing.num_experts,
            "experts_per_token": routing.top_k,
            "expert_width": moe.expert_width,
            "shared_width": moe.shared_width,
            "layers": [index for index, layer in enumerate(config.layers) if layer.is_moe],
            "router": router_words(moe),
        }
    return facts


_KERNELS = {
    "f32": "float32 products",
    "f16": "float16 weights, float32 products",
    "bf16": "bfloat16 weights, float32 products",
    "q2_k": "2-bit codes by 8-bit activations, factors of a scale and of a minimum for 16",
    "q3_k": "3-bit codes by 8-bit activations, factors of a scale for 16",
    "q5_0": "5-bit codes by 8-bit activations, a scale for 32",
    "q5_k": "5-bit codes by 8-bit activations, factors of a scale and of a minimum for 32",
    "q6_k": "6-bit codes by 8-bit activations, factors of a scale for 16",
    "q4_0": "4-bit codes by 8-bit activations, a scale for 32",
    "q4_1": "4-bit codes by 8-bit activations, a scale and a minimum for 32",
    "q4_k": "4-bit codes by 8-bit activations, factors of a scale and of a minimum for 32",
    "iq4_nl": "4-bit codes of a table by 8-bit activations, a scale for 32",
    "mxfp4": "4-bit floats by 8-bit activations, a power of two for 32",
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
    checkpoint = checkpoint if is_whole else imagine(checkpoint)
    replaced = {} if available() is not None else replaced_kinds()
    kv_dtype = KV_CACHE_DTYPES[args.kv_cache_dtype]
    found = model_summary(checkpoint, quantization=quantization, kv_dtype=kv_dtype, replaced=replaced)
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
    for note in model_warnings(checkpoint, quantization):
        print(f"{NOTE:<14} {note}")
    print()
    for line in _table(found):
        print(line)
    print()
    options = given_options(EngineOptions, args)
    drafter = _drafter(checkpoint, options) if is_whole else None
    facts_here = model_facts(checkpoint, pooling, options, drafter)
    for name, value in _memory(found, facts_here, options, drafter):
        print(f"{name:<14} {value}")
    check(checkpoint)
    checkpoint.close()
    return 0


def _drafter(checkpoint: Checkpoint, options: EngineOptions) -> Checkpoint | None:
    """What `open_drafter` gives. Raises ConfigError where that would have to be fetched."""
    speculation, _ = read_speculation(options.speculative_config)
    if speculation is not None and speculation.model:
        local_model(speculation.model)
    return open_drafter(checkpoint, options)


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
    ropes = dict.fromkeys(layer.rope for layer in config.layers if layer.attends)
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


def _planned(
    config: ModelConfig, settings: EngineSettings, facts: ModelFacts, weights_bytes: int, drafter: Checkpoint | None
) -> tuple[tuple[str, int], ...]:
    """As `serve` plans it."""
    server, base_bytes = ServerConfig(model_names=("model",)), private_bytes()
    on_disk = settings.spec.expert_memory is not None or settings.spec.weight_memory is not None
    weights_bytes = min(weights_bytes, facts.weights_bytes) if on_disk else weights_bytes
    return (
        *planned_memory(config, settings, weights_bytes, queued_bytes(server), drafter),
        ("engine", base_bytes),
        *memory_beside(server, base_bytes, config.vocab_size),
    )


def _memory(
    found: ModelSummary, facts: ModelFacts, options: EngineOptions, drafter: Checkpoint | None
) -> Iterator[tuple[str, str]]:
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
        if isinstance(found.config, EncoderConfig) or settings.spec.gives_vectors:
            yield "served here", f"{format_parts((('weights', weights), ('KV', kv)))} and what calls take"
        else:
            yield "served here", f"at most {format_parts(_planned(found.config, settings, facts, weights, drafter))}"
        if kv:
            yield "", f"the KV pool fills as it is used ({reason})"
        yield "", f"at most {settings.config.max_num_seqs} sequences at once, of at most {length:,} tokens"
    per_token, one = found.kv_bytes_per_token, found.kv_bytes(length)
    if not per_token:
        yield "KV", "none: an input runs whole in one step"
        return
    shown, left = format_bytes(per_token), per_token
    for group in found.kv_groups:
        if group.window and group.bytes_per_token:
            left -= group.bytes_per_token
            shown += f" up to {group.window:,} tokens, {format_bytes(left)} beyond"
    yield "KV per token", shown
    if found.state_bytes:
        yield (
            "state",
            f"{format_bytes(found.state_bytes)} a sequence, and as much for each one that is kept to go on from",
        )
    yield "read per token", f"{format_bytes(found.bytes_read())} of weights, and the KV of what it sees"
    saved = per_token * length - one
    instead = f", {format_bytes(one + saved)} if layers kept what they no longer see" if saved else ""
    yield "one sequence", f"{format_bytes(one)} of KV at {length:,} tokens{instead}"
