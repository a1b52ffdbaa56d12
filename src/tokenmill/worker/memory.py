"""What a worker will hold at most, by purpose, as it is printed at start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.block import KVGroup
from ..core.units import MiB, format_bytes
from ..models.config import ModelConfig
from ..models.encoder_config import EncoderConfig
from ..ops.api import StepLimits
from .sampler import SLICE

LOGITS_BYTES = 128 * MiB
"""Aim for the logits buffer: rows beyond what it holds run as further pieces of the step."""

MIN_LOGIT_ROWS = 16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes. `pools`: each KV group with the blocks in its pool, committed page by page as they are first written;
    `queue` bounds what waiting requests hold, `adapters` what LoRA adapters take; `grammars` is about what the first
    grammar and those after it take. `experts` and `layers`: for weights that are kept on disk. draft_weights, draft_kv:
    of a draft model; what it computes with is in `scratch`. draft_index: of what was written, to draft from."""

    weights: int
    pools: tuple[tuple[KVGroup, int], ...]
    scratch: int
    logits: int
    queue: int
    adapters: int = 0
    grammars: int = 0
    experts: int = 0
    layers: int = 0
    draft_weights: int = 0
    draft_kv: int = 0
    draft_index: int = 0

    @property
    def draft_model(self) -> int:
        return self.draft_weights + self.draft_kv

    @property
    def kv(self) -> int:
        return sum(group.bytes_per_block * num_blocks for group, num_blocks in self.pools)

    @property
    def total(self) -> int:
        on_disk = self.experts + self.layers
        used = self.weights + self.kv + self.scratch + self.logits
        return on_disk + used + self.draft_model + self.draft_index + self.queue + self.adapters + self.grammars

    def lines(self) -> list[str]:
        """One line each, then the sum."""
        return [
            f"weights  {format_bytes(self.weights)}",
            *([f"experts  {format_bytes(self.experts)}, the others on disk"] if self.experts else []),
            *([f"layers   {format_bytes(self.layers)}, the others on disk"] if self.layers else []),
            *(_pool_line(group, num_blocks) for group, num_blocks in self.pools),
            *(
                [f"drafts   {format_bytes(self.draft_model)} (KV {format_bytes(self.draft_kv)})"]
                if self.draft_model
                else []
            ),
            f"scratch  {format_bytes(self.scratch)}",
            f"logits   {format_bytes(self.logits)}",
            f"queue    {format_bytes(self.queue)}",
            f"adapters {format_bytes(self.adapters)}",
            f"grammars {format_bytes(self.grammars)}",
            *([f"drafters {format_bytes(self.draft_index)}"] if self.draft_index else []),
            f"in all   {format_bytes(self.total)}",
        ]


def _pool_line(group: KVGroup, num_blocks: int) -> str:
    if group.state_values:
        size = format_bytes(group.bytes_per_block)
        return f"states   {format_bytes(num_blocks * group.bytes_per_block)} ({num_blocks} of {size})"
    blocks = f"{num_blocks} blocks, {num_blocks * group.block_size} tokens"
    sees = f"; {group.num_layers} layers that see {group.window}" if group.window else ""
    return f"KV pool  {format_bytes(num_blocks * group.bytes_per_block)} ({blocks}{sees})"


def step_limits(
    config: ModelConfig,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    block_size: int,
    num_drafts: int = 0,
) -> StepLimits:
    """Buffer sizes of the compiled forward. num_drafts: most that a step verifies; one row may have them all."""
    fitting = max(MIN_LOGIT_ROWS, LOGITS_BYTES // (4 * config.vocab_size))
    return StepLimits(
        max_tokens=max_num_batched_tokens,
        max_seqs=max_num_seqs,
        max_blocks_per_seq=-(-max_model_len // block_size),
        max_logit_rows=max(1 + num_drafts, min(fitting, max(max_num_seqs, MIN_LOGIT_ROWS) + num_drafts)),
    )


def _values_per_token(config: ModelConfig | EncoderConfig) -> int:
    """Of one layer: the widest there is. An expert's values exist for each of a row's experts at once, as every row of
    a step may choose the same ones."""
    attention, ffn, inputs = 2 * config.heads.width, 3 * config.ffn_width, 0
    if isinstance(config, ModelConfig):
        layers = range(config.num_layers)
        attention = 2 * max(config.heads_of(layer).width for layer in layers)
        ffn = 3 * max(config.ffn_width_of(layer) for layer in layers)
        inputs = 2 * config.num_layers * config.input_width
    if isinstance(config, ModelConfig) and config.latent is not None:
        latent = config.latent
        heads = latent.query_dim + latent.key_dim + latent.latent_dim + latent.value_dim
        attention = config.query_rank + latent.num_heads * heads + 2 * latent.key_dim
    if isinstance(config, ModelConfig) and config.mixer is not None:
        attention = max(attention, 3 * sum(config.mixer.widths))
    if isinstance(config, ModelConfig) and config.moe is not None:
        moe, routing = config.moe, config.moe.routing
        own = routing.num_experts + routing.top_k * (2 + 3 * moe.expert_width + config.width)
        ffn = max(ffn, own + 3 * moe.shared_width + config.width)
    return 4 * config.width + attention + ffn + inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes that are known without a plan. queue: what admission lets waiting requests hold. step_pool: an encoder's
    pool for the length of a step. experts, layers: see `Ops.disk_memory_bytes`. draft_...: what a draft model takes."""

    weights: int
    queue: int = 0
    step_pool: int = 0
    adapters: int = 0
    grammars: int = 0
    experts: int = 0
    layers: int = 0
    draft_weights: int = 0
    draft_kv: int = 0
    draft_scratch: int = 0
    draft_index: int = 0


def plan_memory(
    config: ModelConfig | EncoderConfig,
    groups: Sequence[KVGroup],
    limits: StepLimits,
    held: HeldBytes,
    *,
    sizes: Sequence[int],
    program_bytes: int | None,
    output_width: int | None = None,
) -> MemoryPlan:
    """sizes: blocks in the pool of each group. program_bytes: what the compiled forward holds, logits included; None:
    estimated as the values of one layer of a full step, in float32. The rest of scratch is the block tables of plan and
    worker and the sampler's copies. output_width: values of a row that the forward gives; None: logits of the
    vocabulary."""
    output_width = output_width or config.vocab_size
    logits = limits.max_logit_rows * output_width * 4
    if program_bytes is None:
        program_bytes = logits + limits.max_tokens * _values_per_token(config) * 4
    tables = 2 * len(groups) * limits.max_seqs * limits.max_blocks_per_seq * 4
    copies = 4 * SLICE * output_width * 4
    return MemoryPlan(
        weights=held.weights,
        pools=tuple(zip(groups, sizes, strict=True)),
        scratch=max(0, program_bytes - logits) + tables + copies + held.step_pool + held.draft_scratch,
        logits=logits,
        queue=held.queue,
        adapters=held.adapters,
        grammars=held.grammars,
        experts=held.experts,
        layers=held.layers,
        draft_weights=held.draft_weights,
        draft_kv=held.draft_kv,
        draft_index=held.draft_index,
    )
