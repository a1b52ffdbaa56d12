"""What may be asked of a node: each option of a model and its engine, declared once.

`tokenmill serve`, `generate`, `chat` and `bench` take them as flags, `LLM` as keyword arguments. None leaves a choice
to `resolve`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.block import KV_DTYPES
from ..core.config import (
    BLOCK_SIZE,
    EVICTION_POLICY,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    QUANTIZATIONS,
    SCHEDULING_POLICY,
    Kind,
)
from ..core.effects import WRITES
from ..core.options import check, option, size
from ..core.policy import Eviction, Order
from ..kv.blocks.eviction import EVICTIONS
from ..sched.policies import ORDERS, SCHEDULING_POLICIES
from .policy_file import take_own_policies
from .speculation import read_json, read_speculation

KV_SHARE = 0.4
"""Of usable memory, for the KV pool, where no size is given."""

EXPERTS = "experts and weights"
ADAPTERS = "LoRA adapters"
TIERS = "KV tiers"
"""The headings of what is about them, in the help."""

MAX_LORAS = 4
MAX_LORA_RANK = 16
BACKENDS = ("auto", "native", "numpy")
RUNNERS = ("auto", "generate", "pooling")
POOLINGS = ("last", "mean", "cls")
GENERATION_CONFIGS = ("auto", "vllm")
"""Values of vLLM's flag: 'auto' samples as the model recommends where a request names nothing, 'vllm' does not."""

DTYPES = {"auto": None, "half": "f16", "float16": "f16", "bfloat16": "bf16", "float": None, "float32": None}
"""vLLM's names of weights' types, and the quantisation that each is here: none, where weights stay as stored."""

WEIGHTS_PACKINGS = ("none", "lossless")
KV_CACHE_DTYPES = {
    "auto": "f16",  # or the other type of 16 bits, where kernels prefer it
    **{name: name for name in KV_DTYPES},
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "int8_per_token_head": "int8",
    "q8_0": "int8",
}
"""As asked, in our words, vLLM's or llama.cpp's -> the KV pool's."""

LATENT_DTYPE = "bf16"
"""What "auto" is for latents, whose products are of this type on all kernels."""

OWN_POLICIES = {"scheduling_policy": Kind("scheduling", Order), "eviction_policy": Kind("eviction", Eviction)}

_COUNT = re.compile(r"(\d+|\d*\.\d+(?=[kmgt]))([kKmMgGtT]?)")


def count(text: str) -> int | None:
    """A number as vLLM and llama.cpp take it: 8192, 8k (8,000), 8K (8,192); auto and -1: None."""
    if text in ("auto", "-1"):
        return None
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"must be a number such as 8192 or 8K, or auto, got {text!r}.")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[2].isupper() else 1000) ** power)


def _context(text: str) -> int | None:
    """As count; 0 is llama.cpp's word for the model's own."""
    return count(text) or None


def _summaries(policies: Mapping[str, Order] | Mapping[str, Eviction]) -> str:
    return "; ".join(f"{name}, {policy.summary}" for name, policy in policies.items())


def _override(text: str) -> dict[str, Any]:
    from .sampling import read_override

    return read_override(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the model is loaded and how its engine batches and caches. Raises ConfigError."""

    max_model_len: int | None = option(
        None,
        "longest sequence (default: the model's own, as far as its KV fits; in bench what it needs)",
        also="-c --ctx-size",
        read=_context,
        metavar="TOKENS",
    )
    max_num_seqs: int | None = option(
        None,
        f"most sequences at once (default: {MAX_NUM_SEQS}; in bench what it needs)",
        also="-np --parallel",
        read=count,
        metavar="N",
        least=1,
    )
    quantization: str | None = option(
        None,
        "turn matrices stored in 16 or 32 bits into this at load (default: as stored; q4 is q4_1, q8 is q8_0)",
        choices=QUANTIZATIONS,
    )
    weights_packing: str = option(
        "none",
        "lossless: matrices stored in bf16 take about 12 bits a value, with the same answers bit for bit"
        " (default: none; not with a matrix unit, nor for weights kept on disk)",
        choices=WEIGHTS_PACKINGS,
    )
    kv_cache_dtype: str = option(
        "auto",
        "how keys and values are kept: f16, bf16, f32, or int8 in half the memory (default: auto, which is f16,"
        " or bf16 where there is a matrix unit)",
        choices=KV_CACHE_DTYPES,
        metavar="TYPE",
    )
    dtype: str = option(
        "auto",
        "type of matrices stored in 16 or 32 bits, where --quantization names none; all is computed in 32 bits"
        " (default: auto, as stored)",
        choices=DTYPES,
    )
    max_num_batched_tokens: int | None = option(
        None,
        f"most tokens of a step (default: {MAX_NUM_BATCHED_TOKENS}, or what the model needs)",
        read=count,
        metavar="N",
        least=1,
    )
    block_size: int | None = option(None, f"tokens per KV block (default: {BLOCK_SIZE})", metavar="TOKENS", least=1)
    mamba_block_size: int | None = option(
        None,
        "of models whose layers keep states, tokens from one state that stays to the next, rounded up to blocks"
        " (default: such that these take a fifth of the KV)",
        read=count,
        metavar="TOKENS",
        least=1,
    )
    kv_cache_memory_bytes: int | None = option(
        None, f"KV pool, such as 2GiB (default: {KV_SHARE:.0%} of free memory)", read=size, metavar="SIZE"
    )
    enable_prefix_caching: bool = option(True, "share KV of equal prefixes (default: on)")
    scheduling_policy: str = option(
        SCHEDULING_POLICY,
        f"who of equal priority is served next: {_summaries(ORDERS)}; priority (vLLM's name), as fcfs"
        f" (default: {SCHEDULING_POLICY})",
        choices=SCHEDULING_POLICIES,
        takes_own=True,
    )
    eviction_policy: str = option(
        EVICTION_POLICY,
        f"what leaves the prefix cache first: {_summaries(EVICTIONS)} (default: {EVICTION_POLICY})",
        choices=EVICTIONS,
        takes_own=True,
    )
    expert_min_share: float | None = option(
        None,
        "of a mixture of experts: drop those that a token weighs below this share of its best one, such as 0.1. Faster,"
        " not the same answers (default: none is dropped)",
        least=0,
        metavar="SHARE",
        group=EXPERTS,
    )
    kv_save: str | None = option(
        None,
        "save the prefix cache here when the server stops, and use what is saved: the folder holds what prompts"
        " became, and is as secret as they are (default: not saved)",
        metavar="FOLDER",
    )
    kv_store: str | None = option(
        None,
        "use the KV store that serves at this socket (tokenmill kv serve), as other servers of the machine may"
        " (default: none, or one of its own where --kv-host, --kv-disk, --kv-remote or --kv-peers asks for it)",
        metavar="SOCKET",
        group=TIERS,
    )
    kv_write: str | None = option(
        None,
        "when KV goes to the KV store: write-through, once it is computed; write-back, before it leaves the pool;"
        " selective, once a second request uses it (default: write-through)",
        choices=WRITES,
        group=TIERS,
    )
    expert_memory: int | None = option(
        None,
        "keep the routed experts of a mixture on disk, packed once into the cache folder, and in memory as many of them"
        " as fit into this, such as 8GiB (default: all)",
        read=size,
        metavar="SIZE",
        least=1,
        group=EXPERTS,
    )
    weight_memory: int | None = option(
        None,
        "likewise the other weights of layers; embeddings, head and norms stay in memory (default: all)",
        read=size,
        metavar="SIZE",
        least=1,
        group=EXPERTS,
    )
    threads: int | None = option(
        None,
        "kernel threads (default: one per core, or what steps timed at start choose)",
        also="-t",
        read=count,
        metavar="N",
        least=1,
    )
    speculative_config: Mapping[str, Any] | None = option(
        None,
        'draft tokens and verify several in a step, such as {"method": "suffix"}, "ngram" or, with a "model" that has'
        ' the same tokenizer, "draft_model", or that is a head for it, "eagle3", and vLLM\'s other keys;'
        " the same answers, in fewer steps (default: nothing is drafted)",
        also="-sc",
        read=read_json,
        metavar="JSON",
    )
    enable_lora: bool = option(False, "take LoRA adapters (PEFT format)", group=ADAPTERS)
    max_loras: int | None = option(
        None, f"most adapters loaded at once (default: {MAX_LORAS})", metavar="N", least=1, group=ADAPTERS
    )
    max_lora_rank: int | None = option(
        None, f"highest rank of an adapter (default: {MAX_LORA_RANK})", metavar="R", least=1, group=ADAPTERS
    )
    runner: str = option(
        "auto",
        "generate: the model gives tokens; pooling: vectors or scores (default: what the model was made for)",
        choices=RUNNERS,
    )
    pooling: str | None = option(
        None,
        "how hidden states become one vector; implies --runner pooling (default: as the model says)",
        choices=POOLINGS,
    )
    backend: str = option("auto", "kernels (default: native if it loads)", choices=BACKENDS)

    def __post_init__(self) -> None:
        take_own_policies(self, OWN_POLICIES)
        check(self)
        read_speculation(self.speculative_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How requests are read: what they sample with where they name nothing, and how messages become a prompt. Raises
    ConfigError."""

    generation_config: str = option(
        "auto",
        "sampling where none is asked for: auto, what the model recommends; vllm, temperature 1 (default: auto)",
        choices=GENERATION_CONFIGS,
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        'settings where none are asked for, such as {"temperature": 0.7}; before --generation-config',
        read=_override,
        metavar="JSON",
    )
    chat_template: str | None = option(
        None, "Jinja2 template to use instead of the model's own, or the template itself", metavar="FILE"
    )
    tool_call_parser: str = option(
        "auto",
        "family of models in whose form calls of tools are read: auto, what the chat template shows, or one of"
        " hermes, llama3_json, mistral, granite, deepseek_v3, ..., or a plug-in's (default: auto)",
        metavar="NAME",
    )
    reasoning_parser: str = option(
        "auto",
        "how reasoning is told from answers: auto, what the chat template shows, none, or one of think, mistral,"
        " granite, seed_oss, or a plug-in's (default: auto)",
        metavar="NAME",
    )
    loop_guard: bool = option(
        False,
        "end an answer that repeats itself: whose last 512 tokens have a period of at most 64; a request may say"
        " otherwise by loop_guard (default: on in chat, off elsewhere)",
        has_no=True,
    )
    allow_special_in_content: bool = option(
        False, "special tokens that messages spell count as such (default: they are plain text)"
    )

    def __post_init__(self) -> None:
        check(self)
