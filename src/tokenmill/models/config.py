"""A model's shape, read from a checkpoint's metadata, and the families that can be read.

A family is a small declared difference from the common decoder (pre-norm, RoPE, grouped-query attention, SwiGLU, no
biases). Whatever a family would need beyond that is refused here by name, so that no model runs almost right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..ops.api import HeadGeometry


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Angles of rotary embeddings: pair i of C/2 turns by position * base^(-2i/C), scaled.

    scaling 'none'; 'linear' divides every frequency by `factor`; 'llama3' divides the low ones, keeps the high ones and
    blends between, by wavelength against `original_context` / (low, high)_freq_factor.
    """

    base: float
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """interleaved_heads: rows of the checkpoint's q and k matrices are ordered for RoPE pairs (2i, 2i + 1)."""

    architecture: str
    num_layers: int
    width: int
    ffn_width: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_context: int
    tied_embeddings: bool
    interleaved_heads: bool

    @property
    def heads(self) -> HeadGeometry:
        return HeadGeometry(self.num_heads, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs. `refused`: keys that must be absent or falsy, and what they would mean."""

    interleaved_heads: bool = False
    refused: tuple[tuple[str, str], ...] = ()


GGUF_FAMILIES = {
    "llama": Family(interleaved_heads=True, refused=(("llama.expert_count", "experts"),)),
}
_HF_BIASES = (("attention_bias", "attention biases"), ("mlp_bias", "FFN biases"))
HF_FAMILIES = {
    "LlamaForCausalLM": Family(refused=_HF_BIASES),
    "MistralForCausalLM": Family(refused=_HF_BIASES),
}


def config_from_checkpoint(checkpoint: Checkpoint) -> ModelConfig:
    """The shape of the model in `checkpoint`. Raises BadCheckpoint, naming the architecture or key at fault."""
    return _from_gguf(checkpoint) if checkpoint.kind == "gguf" else _from_hf(checkpoint)


def _from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    fields = _Fields(checkpoint.metadata, str(checkpoint.path))
    architecture = fields.text("general.architecture", "")
    family = _family(GGUF_FAMILIES, architecture, fields)
    table = checkpoint.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise BadCheckpoint(f"{fields.where} has no matrix token_embd.weight.")

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    width = fields.count(key("embedding_length"))
    num_heads = fields.count(key("attention.head_count"))
    head_dim = fields.count(key("attention.key_length"), width // num_heads)
    fields.must_equal(key("attention.value_length"), head_dim)
    fields.must_equal(key("rope.dimension_count"), head_dim)
    max_context = fields.count(key("context_length"))
    scaling = fields.text(key("rope.scaling.type"), "none")
    if scaling not in ("none", "linear"):
        raise BadCheckpoint(f"{fields.where}: RoPE scaling {scaling!r} is not supported (supported: none, linear).")
    factor = fields.number(key("rope.scaling.factor"), 1.0) if scaling == "linear" else 1.0
    return _checked(
        ModelConfig(
            architecture=architecture,
            num_layers=fields.count(key("block_count")),
            width=width,
            ffn_width=fields.count(key("feed_forward_length")),
            vocab_size=table.shape[0],
            num_heads=num_heads,
            num_kv_heads=fields.count(key("attention.head_count_kv"), num_heads),
            head_dim=head_dim,
            norm_eps=fields.number(key("attention.layer_norm_rms_epsilon")),
            rope=RopeConfig(fields.number(key("rope.freq_base"), 10000.0), scaling, factor),
            max_context=max_context,
            tied_embeddings="output.weight" not in checkpoint.tensors,
            interleaved_heads=family.interleaved_heads,
        ),
        fields,
    )


def _from_hf(checkpoint: Checkpoint) -> ModelConfig:
    fields = _Fields(checkpoint.metadata, str(checkpoint.path))
    names = checkpoint.metadata.get("architectures") or [""]
    architecture = str(names[0])
    family = _family(HF_FAMILIES, architecture, fields)
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise BadCheckpoint(f"{fields.where}: activation {activation!r} is not supported (supported: silu).")
    width, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    max_context = fields.count("max_position_embeddings")
    window = fields.count("sliding_window", max_context)  # up to the window, windowed attention is full attention
    return _checked(
        ModelConfig(
            architecture=architecture,
            num_layers=fields.count("num_hidden_layers"),
            width=width,
            ffn_width=fields.count("intermediate_size"),
            vocab_size=fields.count("vocab_size"),
            num_heads=num_heads,
            num_kv_heads=fields.count("num_key_value_heads", num_heads),
            head_dim=fields.count("head_dim", width // num_heads),
            norm_eps=fields.number("rms_norm_eps"),
            rope=_hf_rope(fields, max_context),
            max_context=min(max_context, window),
            tied_embeddings=bool(checkpoint.metadata.get("tie_word_embeddings", False)),
            interleaved_heads=family.interleaved_heads,
        ),
        fields,
    )


def _hf_rope(fields: _Fields, max_context: int) -> RopeConfig:
    """`rope_parameters` holds everything; older files have `rope_theta` beside an optional `rope_scaling`."""
    given = fields.metadata.get("rope_parameters") or fields.metadata.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise BadCheckpoint(f"{fields.where}: rope_parameters must be an object, got {type(given).__name__}.")
    rope = _Fields(given, f"{fields.where} (rope)")
    base = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    scaling = rope.text("rope_type", rope.text("type", "default"))
    if scaling == "default":
        return RopeConfig(base)
    if scaling == "linear":
        return RopeConfig(base, scaling, rope.number("factor"))
    if scaling == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        original = rope.count("original_max_position_embeddings", max_context)
        return RopeConfig(base, scaling, rope.number("factor"), low, high, original)
    raise BadCheckpoint(f"{rope.where}: scaling {scaling!r} is not supported (supported: default, linear, llama3).")


def _family(families: Mapping[str, Family], architecture: str, fields: _Fields) -> Family:
    family = families.get(architecture)
    if family is None:
        known = ", ".join(sorted(families))
        raise BadCheckpoint(f"{fields.where}: architecture {architecture!r} is not supported (supported: {known}).")
    for key, meaning in family.refused:
        if fields.metadata.get(key):
            raise BadCheckpoint(f"{fields.where}: {key} = {fields.metadata[key]!r}: {meaning} are not supported.")
    return family


def _checked(config: ModelConfig, fields: _Fields) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise BadCheckpoint(
            f"{fields.where}: {config.num_heads} heads do not divide into {config.num_kv_heads} KV heads."
        )
    if config.head_dim < 2 or config.head_dim % 2:
        raise BadCheckpoint(f"{fields.where}: head size {config.head_dim} must be even for RoPE.")
    if config.rope.base <= 0 or config.rope.factor <= 0 or config.norm_eps < 0:
        raise BadCheckpoint(f"{fields.where}: RoPE base and factor must be positive and the norm epsilon not negative.")
    return config


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to metadata; every error names the file and the key. A null counts as absent."""

    metadata: Mapping[str, Any]
    where: str

    def text(self, key: str, default: str) -> str:
        value = self.metadata.get(key)
        return default if value is None else str(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(key, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadCheckpoint(f"{self.where}: {key} must be a number, got {value!r}.")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise BadCheckpoint(f"{self.where}: {key} must be a positive integer, got {value!r}.")
        return value

    def must_equal(self, key: str, expected: int) -> None:
        if self.count(key, expected) != expected:
            raise BadCheckpoint(f"{self.where}: {key} = {self.metadata[key]} is not supported (must be {expected}).")
