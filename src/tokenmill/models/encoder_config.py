"""An encoder's shape, from its config.json.

What a file says that the forward pass cannot express is refused by name. `...Model` and `...ForMaskedLM` checkpoints
give hidden states, `...ForSequenceClassification` ones with a single label give a score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.config_keys import keys_of, named_architecture
from ..formats.encoder_keys import ENCODER_TYPES
from ..ops.api import HeadGeometry
from .config import MAX_LAYERS, LayerConfig
from .config_json import ROPE_KEYS, read_object
from .encoder_families import ACTIVATIONS, FAMILIES, EncoderFamily, encoder_family
from .fields import Fields
from .heads import CLASSIFIER, one_label
from .rope import RopeConfig
from .unsupported_keys import refuse

_WITHOUT_HEAD = ("Model", "ForMaskedLM")

_FULL, _SLIDING = "full_attention", "sliding_attention"
_MODERN_BIASES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("qkv", "output"),
    "mlp_bias": ("gate_up", "down"),
    "norm_bias": ("embed_norm", "attn_norm", "ffn_norm", "final_norm", "head_norm"),
    "classifier_bias": ("head",),
}
_NOMIC_BIASES: Mapping[str, tuple[str, ...]] = {
    "qkv_proj_bias": ("qkv", "output"),
    "mlp_fc1_bias": ("gate", "up"),
    "mlp_fc2_bias": ("down",),
}
"""Config key -> roles that have a bias where it is on. Of Nomic's makers; transformers' has none."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """layers: window (how far a token sees to each side, itself included; 0 for all) and RoPE of each. biases: roles
    with a bias, norms among them. max_context: most tokens of a sequence. num_places: rows of the place table for each
    of `num_types` types of text in a pair: one for each position, 1 where RoPE tells positions, 0 for no table.
    first_position: row of the position table that belongs to the first token. prefix: of the tensors' names in this
    file. has_head: the model scores, from the "cls" or the "mean" of its states as score_pooling says, with
    head_activation between its two linears."""

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
    return checkpoint.kind == "hf" and _split(named_architecture(checkpoint.metadata)) is not None


def encoder_config(checkpoint: Checkpoint) -> EncoderConfig:
    """The shape of the encoder in `checkpoint`. Raises BadCheckpoint naming the key at fault."""
    architecture = named_architecture(checkpoint.metadata)
    found = _split(architecture)
    assert found is not None, architecture
    name, has_head = found
    given = checkpoint.metadata
    kind = given.get("model_type", ENCODER_TYPES[name])
    if kind != ENCODER_TYPES[name]:
        raise BadCheckpoint(f"{checkpoint.path}: {architecture} does not go with model_type {kind!r}.")
    family = encoder_family(given)
    assert family is not None, kind
    if family.no_types and given.get("type_vocab_size") == 0:
        family = replace(family, names={role: each for role, each in family.names.items() if role != "types"})
    renamed = {theirs: given[alias] for alias, theirs in family.aliases.items() if alias in given}
    fields = Fields({**given, **renamed}, str(checkpoint.path), keys_of(given))
    fields.check_nulls()
    activation = fields.text(family.key("hidden_act"), "")
    _refuse(fields, family, has_head, activation)
    width, num_heads = fields.count(family.key("hidden_size")), fields.count(family.key("num_attention_heads"))
    head_dim = fields.count("head_dim", width // num_heads)
    if head_dim * num_heads != width or head_dim % 2:
        raise BadCheckpoint(f"{fields.where}: {num_heads} heads do not divide a width of {width} evenly.")
    first = fields.count("pad_token_id", least=0) + 1 if family.from_pad else 0
    num_positions = _num_positions(fields, family, first)
    num_layers = fields.count(family.key("num_hidden_layers"), most=MAX_LAYERS)
    layers = _layers(fields, family, name, num_layers, head_dim)
    biases = frozenset(family.names) - {"embed", "positions", "types", *family.unbiased} | {"head"}
    if name == "ModernBert":
        biases = _named_biases(fields, _MODERN_BIASES)
    elif name == "NomicBert":
        biases = _named_biases(fields, _NOMIC_BIASES) | {"embed_norm", "attn_norm", "ffn_norm", "head"}
        if fields.get("rotary_scaling_factor"):  # beyond, angles would depend on the length
            num_positions = min(num_positions, fields.count("max_trained_positions"))
    table = f"{family.names['embed']}.weight"
    prefixes = [prefix for prefix in ("", *family.prefixes) if prefix + table in checkpoint.tensors]
    return EncoderConfig(
        architecture=architecture,
        family=family,
        prefix=prefixes[0] if prefixes else family.prefixes[0],
        layers=layers,
        biases=biases,
        width=width,
        ffn_width=fields.count(family.key("intermediate_size")),
        vocab_size=fields.count("vocab_size"),
        num_heads=num_heads,
        head_dim=head_dim,
        norm_eps=fields.number(family.key("layer_norm_eps"), 1e-12),
        max_context=num_positions,
        num_places=num_positions if "positions" in family.names else int("types" in family.names),
        num_types=fields.count("type_vocab_size") if "types" in family.names else 1,
        first_position=first,
        activation=family.activations[activation],
        has_head=has_head,
        score_pooling=fields.text("classifier_pooling", "cls") if has_head else "",
        head_activation=_head_activation(fields, family) if has_head else "",
    )


def _num_positions(fields: Fields, family: EncoderFamily, first: int) -> int:
    """Of tokens, where the first has position `first` of the table."""
    longest = family.key("max_position_embeddings")
    num_positions = fields.count(longest) - first
    if num_positions < 1:
        raise BadCheckpoint(f"{fields.where}: {longest} = {fields.get(longest)} leaves no position.")
    return num_positions


def _split(architecture: str) -> tuple[str, bool] | None:
    """(name of the family, whether there is a classifier)"""
    for suffix in (*_WITHOUT_HEAD, CLASSIFIER):
        name = architecture.removesuffix(suffix)
        if name in FAMILIES and architecture.endswith(suffix):
            return name, suffix == CLASSIFIER
    return None


def _layers(
    fields: Fields, family: EncoderFamily, name: str, num_layers: int, head_dim: int
) -> tuple[LayerConfig, ...]:
    rope = None
    if name == "ModernBert":
        return _modern_layers(fields, num_layers)
    if fields.reads(family.key("rope_theta")):
        rope = _fixed_ntk(fields, head_dim) if family.fixed_ntk else None
        rope = rope or _rope(fields, read_object(fields, "rope_parameters"), family.key("rope_theta"))
    return (LayerConfig(0, rope),) * num_layers


def _modern_layers(fields: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Every third layer sees all; the others see half of `local_attention` to each side, with angles of their own."""
    kinds = fields.get("layer_types")
    if kinds is None:
        every = fields.count("global_attn_every_n_layers")
        kinds = [_SLIDING if layer % every else _FULL for layer in range(num_layers)]
    ropes = read_object(fields, "rope_parameters")
    if not ropes.keys() <= {_FULL, _SLIDING} or not all(isinstance(rope, Mapping) for rope in ropes.values()):
        raise BadCheckpoint(f"{fields.where}: rope_parameters must hold objects called {_FULL} and {_SLIDING}.")
    window = fields.count("local_attention") // 2 + 1
    by_kind = {
        _FULL: LayerConfig(0, _rope(fields, ropes.get(_FULL, {}), "global_rope_theta")),
        _SLIDING: LayerConfig(window, _rope(fields, ropes.get(_SLIDING, {}), "local_rope_theta")),
    }
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= by_kind.keys():
        raise BadCheckpoint(f"{fields.where}: layer_types must name {num_layers} of {', '.join(by_kind)}.")
    return tuple(by_kind[kind] for kind in kinds)


def _rope(fields: Fields, given: Mapping[str, Any], base_key: str) -> RopeConfig:
    """base_key: what tells the base where `given` does not."""
    rope = Fields(given, f"{fields.where} (rope)", ROPE_KEYS)
    kind = rope.text("rope_type", rope.text("type", ""))
    if kind != "default" or fields.get("rope_scaling"):
        raise BadCheckpoint(f"{rope.where}: rope_type {kind!r} or rope_scaling is not supported for encoders.")
    return RopeConfig(rope.number("rope_theta", fields.number(base_key), positive=True))


def _named_biases(fields: Fields, roles_of: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    return frozenset(role for key, roles in roles_of.items() if fields.flag(key) for role in roles)


def _fixed_ntk(fields: Fields, head_dim: int) -> RopeConfig | None:
    """Of `rope_scaling` of the type ntk, as GTE's makers compute it (https://kexue.fm/archives/9706): base and angles
    both scaled, so that the slowest pair turns as much more slowly as the factor says."""
    given = read_object(fields, "rope_scaling")
    if given.get("type") != "ntk" or not given.keys() <= {"type", "factor"}:
        return None
    factor = Fields(given, f"{fields.where} (rope_scaling)").number("factor", positive=True)
    return RopeConfig(fields.number("rope_theta", positive=True) * factor, "linear", factor ** (2 / head_dim))


def _head_activation(fields: Fields, family: EncoderFamily) -> str:
    """Between the two linears of a classifier: what config.json names, or what is usual for the family."""
    named = fields.reads("classifier_activation")
    return ACTIVATIONS[fields.text("classifier_activation", "")] if named else family.head_act


def _refuse(fields: Fields, family: EncoderFamily, has_head: bool, activation: str) -> None:
    given = fields.metadata
    for key, value in family.required:
        if given.get(key, value) != value:
            raise BadCheckpoint(f"{fields.where}: {key} {given[key]!r} is not supported (must be {value!r}).")
    width = fields.count(family.key("hidden_size"))
    if fields.reads("embedding_size") and fields.count("embedding_size") != width:
        raise BadCheckpoint(f"{fields.where}: embedding_size must be the width, {width}: narrower is not supported.")
    for key in ("is_decoder", "add_cross_attention"):
        if fields.flag(key) or given.get(key):
            raise BadCheckpoint(f"{fields.where}: a {family.title} made to decode is not supported.")
    if activation not in family.activations:
        raise BadCheckpoint(
            f"{fields.where}: activation {activation!r} is not supported (supported: {', '.join(family.activations)})."
        )
    refuse(fields, family.refused)
    if fields.number("rotary_emb_fraction", 1.0) != 1:
        raise BadCheckpoint(f"{fields.where}: rotary_emb_fraction must be 1.")
    if fields.text("classifier_pooling", "cls") not in ("cls", "mean"):
        raise BadCheckpoint(f"{fields.where}: classifier_pooling must be cls or mean.")
    if not has_head:
        return
    if not family.head:
        raise BadCheckpoint(f"{fields.where}: classifiers of {family.title} are not supported.")
    if fields.text("classifier_activation", "gelu") not in ACTIVATIONS:
        raise BadCheckpoint(f"{fields.where}: classifier_activation is not supported ({', '.join(ACTIVATIONS)}).")
    one_label(given, fields.where)
