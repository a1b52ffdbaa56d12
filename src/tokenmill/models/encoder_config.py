"""An encoder's shape, from its config.json.

What a file says that the forward pass cannot express is refused by name. `...Model` and `...ForMaskedLM` checkpoints
give hidden states, `...ForSequenceClassification` ones with a single label give a score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..ops.api import HeadGeometry
from .config import MAX_LAYERS, LayerConfig, RopeConfig
from .encoder_families import ACTIVATIONS, FAMILIES, EncoderFamily
from .fields import Fields

_WITHOUT_HEAD = ("Model", "ForMaskedLM")
_CLASSIFIER = "ForSequenceClassification"
_IDENTITY = "Identity"
_NOMIC_PLAIN: Mapping[str, Any] = {
    "causal": False, "moe_every_n_layers": 0, "num_experts": 0, "parallel_block": False, "prenorm": False,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "scale_attn_by_inverse_layer_idx": False,
    "use_rms_norm": False,
}  # fmt: skip
"""Switches of Nomic's own configs that would ask for another forward pass."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """layers: window (how far a token sees to each side, itself included; 0 for all) and RoPE of each. biases: roles
    with a bias, norms among them. max_context: most tokens of a sequence. num_places: rows of the place table for each
    of `num_types` types of text in a pair: one for each position, 1 where RoPE tells positions, 0 for no table.
    first_position: row of the position table that belongs to the first token. prefix: of the tensors' names in this
    file. has_head: the model scores, from the "cls" or the "mean" of its states as score_pooling says, with
    head_activation between its two linears; score_activation is what its makers put behind the score ("sigmoid" or
    "")."""

    architecture: str
    family: EncoderFamily
    prefix: str
    layers: tuple[LayerConfig, ...]
    biases: frozenset[str]
    width: int
    ffn_width: int
    vocab_size: int
    num_heads: int
    head_dim: int
    norm_eps: float
    max_context: int
    num_places: int
    num_types: int
    first_position: int
    activation: str
    has_head: bool
    score_pooling: str
    head_activation: str
    score_activation: str

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> HeadGeometry:
        return HeadGeometry(self.num_heads, self.num_heads, self.head_dim)

    @property
    def output_width(self) -> int:
        return 1 if self.has_head else self.width


def is_encoder(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is of a known encoder family."""
    return checkpoint.kind == "hf" and _split(_architecture(checkpoint)) is not None


def encoder_config(checkpoint: Checkpoint) -> EncoderConfig:
    """The shape of the encoder in `checkpoint`. Raises BadCheckpoint naming the key at fault."""
    architecture = _architecture(checkpoint)
    found = _split(architecture)
    assert found is not None, architecture
    family, has_head = found
    given = checkpoint.metadata
    renamed = {ours: given[theirs] for ours, theirs in family.keys.items() if theirs in given}
    is_modern, is_nomic = family is FAMILIES["ModernBert"], family is FAMILIES["NomicBert"]
    defaults = {"hidden_act": "silu" if is_nomic else "gelu", "layer_norm_eps": 1e-5 if is_modern else 1e-12}
    fields = Fields({**given, **renamed}, str(checkpoint.path), defaults)
    _refuse(fields, family, has_head)
    width, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", width // num_heads)
    if head_dim * num_heads != width or head_dim % 2:
        raise BadCheckpoint(f"{fields.where}: {num_heads} heads do not divide a width of {width} evenly.")
    first = fields.count("pad_token_id", 1, least=0) + 1 if family.from_pad else 0
    num_positions = fields.count("max_position_embeddings") - first
    if num_positions < 1:
        raise BadCheckpoint(f"{fields.where}: max_position_embeddings leaves no position.")
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    layers = (LayerConfig(0, None),) * num_layers
    biases = frozenset(family.names) - {"embed", "positions", "types"} | {"head"}
    if is_modern:
        layers = _modern_layers(fields, num_layers)
        biases = _modern_biases(fields)
    elif is_nomic:
        layers = (LayerConfig(0, _nomic_rope(fields)),) * num_layers
        biases = _nomic_biases(fields)
        if fields.get("rotary_scaling_factor"):  # beyond, angles would depend on the length
            num_positions = min(num_positions, fields.count("max_trained_positions", 2048))
    name = f"{family.names['embed']}.weight"
    prefixes = [prefix for prefix in ("", *family.prefixes) if prefix + name in checkpoint.tensors]
    return EncoderConfig(
        architecture=architecture,
        family=family,
        prefix=prefixes[0] if prefixes else family.prefixes[0],
        layers=layers,
        biases=biases,
        width=width,
        ffn_width=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        num_heads=num_heads,
        head_dim=head_dim,
        norm_eps=fields.number("layer_norm_eps"),
        max_context=num_positions,
        num_places=num_positions if "positions" in family.names else int("types" in family.names),
        num_types=fields.count("type_vocab_size", 2 if is_nomic else 1) if "types" in family.names else 1,
        first_position=first,
        activation=family.activations[fields.text("hidden_act", "gelu")],
        has_head=has_head,
        score_pooling=fields.text("classifier_pooling", "cls") if is_modern else "cls",
        head_activation=ACTIVATIONS[fields.text("classifier_activation", "gelu")] if is_modern else "tanh",
        score_activation=_score_activation(given),
    )


def _architecture(checkpoint: Checkpoint) -> str:
    names = checkpoint.metadata.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _split(architecture: str) -> tuple[EncoderFamily, bool] | None:
    """(family, whether there is a classifier)"""
    for suffix in (*_WITHOUT_HEAD, _CLASSIFIER):
        family = FAMILIES.get(architecture.removesuffix(suffix))
        if family is not None and architecture.endswith(suffix):
            return family, suffix == _CLASSIFIER
    return None


def _modern_layers(fields: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Every third layer sees all; the others see half of `local_attention` to each side, with angles of their own."""
    every = fields.count("global_attn_every_n_layers", 3)
    kinds = fields.get("layer_types") or [
        "sliding_attention" if number % every else "full_attention" for number in range(num_layers)
    ]
    window = fields.count("local_attention", 128) // 2 + 1
    ropes = fields.get("rope_parameters") or {}
    by_kind = {
        "full_attention": LayerConfig(0, _modern_rope(fields, ropes, "full_attention", "global_rope_theta", 160_000.0)),
        "sliding_attention": LayerConfig(
            window, _modern_rope(fields, ropes, "sliding_attention", "local_rope_theta", 10_000.0)
        ),
    }
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= by_kind.keys():
        raise BadCheckpoint(f"{fields.where}: layer_types must name {num_layers} of {', '.join(by_kind)}.")
    return tuple(by_kind[kind] for kind in kinds)


def _modern_rope(fields: Fields, ropes: Any, kind: str, key: str, default: float) -> RopeConfig:
    own = ropes.get(kind) if isinstance(ropes, Mapping) else None
    rope = Fields(own or {}, f"{fields.where}: rope_parameters of {kind}")
    _refuse_scaling(rope, fields)
    return RopeConfig(rope.number("rope_theta", fields.number(key, default), positive=True))


def _nomic_rope(fields: Fields) -> RopeConfig:
    rope = Fields(fields.get("rope_parameters") or {}, f"{fields.where}: rope_parameters")
    _refuse_scaling(rope, fields)
    return RopeConfig(rope.number("rope_theta", fields.number("rotary_emb_base", 1000.0), positive=True))


def _refuse_scaling(rope: Fields, fields: Fields) -> None:
    kind = rope.text("rope_type", "default")
    if kind != "default" or fields.get("rope_scaling"):
        raise BadCheckpoint(f"{rope.where}: rope_type {kind!r} or rope_scaling is not supported for encoders.")


def _modern_biases(fields: Fields) -> frozenset[str]:
    found: set[str] = set()
    for key, roles in (
        ("attention_bias", ("qkv", "output")),
        ("mlp_bias", ("gate_up", "down")),
        ("norm_bias", ("embed_norm", "attn_norm", "ffn_norm", "final_norm", "head_norm")),
        ("classifier_bias", ("head",)),
    ):
        if fields.get(key, False):
            found.update(roles)
    return frozenset(found)


def _nomic_biases(fields: Fields) -> frozenset[str]:
    """Nomic's own configs name them, and have them where they do not say; those of transformers have none."""
    found = {"embed_norm", "attn_norm", "ffn_norm", "head"}
    is_own = "n_embd" in fields.metadata
    for key, roles in (
        ("qkv_proj_bias", ("qkv", "output")),
        ("mlp_fc1_bias", ("gate", "up")),
        ("mlp_fc2_bias", ("down",)),
    ):
        if fields.get(key, is_own):
            found.update(roles)
    return frozenset(found)


def _refuse(fields: Fields, family: EncoderFamily, has_head: bool) -> None:
    positions = fields.text("position_embedding_type", "absolute")
    if positions != "absolute":
        raise BadCheckpoint(f"{fields.where}: position_embedding_type {positions!r} is not supported.")
    if fields.get("is_decoder") or fields.get("add_cross_attention"):
        raise BadCheckpoint(f"{fields.where}: a {family.title} made to decode is not supported.")
    activation = fields.text("hidden_act", "gelu")
    if activation not in family.activations:
        raise BadCheckpoint(
            f"{fields.where}: activation {activation!r} is not supported (supported: {', '.join(family.activations)})."
        )
    if family is FAMILIES["NomicBert"]:
        for key, plain in _NOMIC_PLAIN.items():
            if fields.get(key, plain) not in (plain, False, None):
                raise BadCheckpoint(f"{fields.where}: {key} = {fields.get(key)!r} is not supported.")
        if "n_embd" in fields.metadata and fields.number("rotary_emb_fraction", 0.0) != 1:
            raise BadCheckpoint(f"{fields.where}: rotary_emb_fraction must be 1.")
        if family.activations[activation] != "silu":
            raise BadCheckpoint(f"{fields.where}: activation {activation!r} is not supported (swiglu, silu).")
    if not has_head:
        return
    if not family.head:
        raise BadCheckpoint(f"{fields.where}: classifiers of {family.title} are not supported.")
    if fields.text("classifier_pooling", "cls") not in ("cls", "mean"):
        raise BadCheckpoint(f"{fields.where}: classifier_pooling must be cls or mean.")
    if fields.text("classifier_activation", "gelu") not in ACTIVATIONS:
        raise BadCheckpoint(f"{fields.where}: classifier_activation is not supported ({', '.join(ACTIVATIONS)}).")
    labels = fields.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else fields.get("num_labels", 2)
    if num_labels != 1:
        raise BadCheckpoint(
            f"{fields.where}: a classifier of {num_labels} labels is not supported; one that scores has one label."
        )


def _score_activation(given: Mapping[str, Any]) -> str:
    """What sentence-transformers puts behind a score: the sigmoid, unless the file says that there is nothing."""
    newer = given.get("sentence_transformers")
    name = newer.get("activation_fn") if isinstance(newer, dict) else None
    name = name or given.get("sbert_ce_default_activation_function") or ""
    return "" if str(name).endswith(_IDENTITY) else "sigmoid"
