"""What `inspect` says of a decoder's layers, in words and as JSON: attention, FFN, experts and their router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..models.config import ModelConfig
from ..models.encoder_config import EncoderConfig
from ..models.moe import MoeConfig
from ..models.summary import ModelSummary
from ..ops.api import SIGMOID, SOFTMAX_CHOSEN
from ..plan.config import shape_facts


def layer_facts(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """(name, value) of each line."""
    num_moe = sum(layer.is_moe for layer in config.layers)
    if config.moe is None or num_moe < config.num_layers:
        where = "" if config.moe is None else f" in {config.num_layers - num_moe} of them"
        yield "shape", f"{config.num_layers} layers of {config.width}, FFN {config.ffn_width}{where}"
    else:
        yield "shape", f"{config.num_layers} layers of {config.width}"
    yield "heads", _heads(config)
    if config.moe is not None:
        yield "experts", _experts(config.moe, num_moe)
        yield "router", router_words(config.moe)


def _heads(config: ModelConfig) -> str:
    through = f", queries through {config.query_rank} channels" if config.query_rank else ""
    latent = config.latent
    if latent is None:
        return f"{config.num_heads} of {config.head_dim} on {config.num_kv_heads} KV heads{through}"
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
    """The whole of a summary; sizes in bytes."""
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
