"""The families of encoder that can be read, and an encoder's shape from its config.json.

A family says how its files name things; the forward pass is one. What a file says that it cannot express is refused by
name. `...Model` and `...ForMaskedLM` checkpoints give hidden states, `...ForSequenceClassification` ones with a single
label give a score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..ops.api import HeadGeometry
from .config import MAX_LAYERS
from .fields import Fields

ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu"}
"""Names in config.json -> what the forward pass calls them."""

_LAYER = "encoder.layer.{}."
_BERT_NAMES = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "q": _LAYER + "attention.self.query",
    "k": _LAYER + "attention.self.key",
    "v": _LAYER + "attention.self.value",
    "output": _LAYER + "attention.output.dense",
    "attn_norm": _LAYER + "attention.output.LayerNorm",
    "up": _LAYER + "intermediate.dense",
    "down": _LAYER + "output.dense",
    "ffn_norm": _LAYER + "output.LayerNorm",
}
_DISTIL_LAYER = "transformer.layer.{}."
_DISTIL_NAMES = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "q": _DISTIL_LAYER + "attention.q_lin",
    "k": _DISTIL_LAYER + "attention.k_lin",
    "v": _DISTIL_LAYER + "attention.v_lin",
    "output": _DISTIL_LAYER + "attention.out_lin",
    "attn_norm": _DISTIL_LAYER + "sa_layer_norm",
    "up": _DISTIL_LAYER + "ffn.lin1",
    "down": _DISTIL_LAYER + "ffn.lin2",
    "ffn_norm": _DISTIL_LAYER + "output_layer_norm",
}


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """title      what people call it
    prefix     of the encoder's tensors where the file holds a head beside it
    names      role -> tensor name, less '.weight' and '.bias'
    head       names of the classifier's two linears, with the pooler or dense one first; () for none known
    from_pad   positions count from pad_token_id + 1, not from 0
    keys       our name of a config key -> the family's, where it differs
    """

    title: str
    prefix: str
    names: Mapping[str, str]
    head: tuple[str, ...] = ()
    from_pad: bool = False
    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


_BERT = EncoderFamily("BERT", "bert.", _BERT_NAMES, ("bert.pooler.dense", "classifier"))
_ROBERTA = EncoderFamily("RoBERTa", "roberta.", _BERT_NAMES, ("classifier.dense", "classifier.out_proj"), from_pad=True)
_DISTIL = EncoderFamily(
    "DistilBERT",
    "distilbert.",
    _DISTIL_NAMES,
    keys={
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "hidden_act": "activation",
    },
)
FAMILIES: Mapping[str, EncoderFamily] = {
    "Bert": _BERT,
    "Roberta": _ROBERTA,
    "XLMRoberta": replace(_ROBERTA, title="XLM-RoBERTa"),
    "Camembert": replace(_ROBERTA, title="CamemBERT"),
    "DistilBert": _DISTIL,
}
"""By what comes before Model, ForMaskedLM or ForSequenceClassification in the name of the architecture."""

_WITHOUT_HEAD = ("Model", "ForMaskedLM")
_CLASSIFIER = "ForSequenceClassification"
_IDENTITY = "Identity"


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """num_places: positions there are, for each of `num_types` types of text in a pair. first_position: row of the
    position table that belongs to the first token. prefix: of the tensors' names in this file. has_head: the model
    scores; score_activation is then what its makers put behind the score ("sigmoid" or "")."""

    architecture: str
    family: EncoderFamily
    prefix: str
    num_layers: int
    width: int
    ffn_width: int
    vocab_size: int
    num_heads: int
    head_dim: int
    norm_eps: float
    num_places: int
    num_types: int
    first_position: int
    activation: str
    has_head: bool
    score_activation: str

    @property
    def heads(self) -> HeadGeometry:
        return HeadGeometry(self.num_heads, self.num_heads, self.head_dim)

    @property
    def max_context(self) -> int:
        return self.num_places

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
    fields = Fields({**given, **renamed}, str(checkpoint.path), {"hidden_act": "gelu", "layer_norm_eps": 1e-12})
    _refuse(fields, family, has_head)
    width, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if width % num_heads or (width // num_heads) % 2:
        raise BadCheckpoint(f"{fields.where}: {num_heads} heads do not divide a width of {width} evenly.")
    first = fields.count("pad_token_id", 1, least=0) + 1 if family.from_pad else 0
    num_positions = fields.count("max_position_embeddings")
    if num_positions <= first:
        raise BadCheckpoint(f"{fields.where}: max_position_embeddings = {num_positions} leaves no position.")
    name = f"{family.names['embed']}.weight"
    return EncoderConfig(
        architecture=architecture,
        family=family,
        prefix="" if name in checkpoint.tensors else family.prefix,
        num_layers=fields.count("num_hidden_layers", most=MAX_LAYERS),
        width=width,
        ffn_width=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        num_heads=num_heads,
        head_dim=width // num_heads,
        norm_eps=fields.number("layer_norm_eps"),
        num_places=num_positions - first,
        num_types=fields.count("type_vocab_size", 1) if "types" in family.names else 1,
        first_position=first,
        activation=ACTIVATIONS[fields.text("hidden_act", "gelu")],
        has_head=has_head,
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


def _refuse(fields: Fields, family: EncoderFamily, has_head: bool) -> None:
    positions = fields.text("position_embedding_type", "absolute")
    if positions != "absolute":
        raise BadCheckpoint(f"{fields.where}: position_embedding_type {positions!r} is not supported.")
    if fields.get("is_decoder") or fields.get("add_cross_attention"):
        raise BadCheckpoint(f"{fields.where}: a {family.title} made to decode is not supported.")
    activation = fields.text("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise BadCheckpoint(
            f"{fields.where}: activation {activation!r} is not supported (supported: {', '.join(ACTIVATIONS)})."
        )
    if has_head and not family.head:
        raise BadCheckpoint(f"{fields.where}: classifiers of {family.title} are not supported.")
    labels = fields.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else fields.get("num_labels", 2)
    if has_head and num_labels != 1:
        raise BadCheckpoint(
            f"{fields.where}: a classifier of {num_labels} labels is not supported; one that scores has one label."
        )


def _score_activation(given: Mapping[str, Any]) -> str:
    """What sentence-transformers puts behind a score: the sigmoid, unless the file says that there is nothing."""
    newer = given.get("sentence_transformers")
    name = newer.get("activation_fn") if isinstance(newer, dict) else None
    name = name or given.get("sbert_ce_default_activation_function") or ""
    return "" if str(name).endswith(_IDENTITY) else "sigmoid"
