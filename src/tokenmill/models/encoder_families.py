"""The families of encoder that can be read: how their files name things, and what the forward pass does differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ..formats.config_keys import keys_of, model_type_of
from ..formats.encoder_keys import ENCODER_TYPES, NOMIC_OWN_KEYS

ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu"}
"""Names in config.json -> what the forward pass calls them."""

_GATING = MappingProxyType({**ACTIVATIONS, "silu": "silu"})
"""The same where they gate."""

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
_MODERN_LAYER = "layers.{}."
_MODERN_NAMES = {
    "embed": "embeddings.tok_embeddings",
    "embed_norm": "embeddings.norm",
    "attn_norm": _MODERN_LAYER + "attn_norm",
    "qkv": _MODERN_LAYER + "attn.Wqkv",
    "output": _MODERN_LAYER + "attn.Wo",
    "ffn_norm": _MODERN_LAYER + "mlp_norm",
    "gate_up": _MODERN_LAYER + "mlp.Wi",
    "down": _MODERN_LAYER + "mlp.Wo",
    "final_norm": "final_norm",
}
_NOMIC_LAYER = "encoder.layers.{}."
_NOMIC_NAMES = {
    "embed": "embeddings.word_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embed_norm": "emb_ln",
    "qkv": _NOMIC_LAYER + "attn.Wqkv",
    "output": _NOMIC_LAYER + "attn.out_proj",
    "attn_norm": _NOMIC_LAYER + "norm1",
    "gate": _NOMIC_LAYER + "mlp.fc12",
    "up": _NOMIC_LAYER + "mlp.fc11",
    "down": _NOMIC_LAYER + "mlp.fc2",
    "ffn_norm": _NOMIC_LAYER + "norm2",
}
_GTE_NAMES = {
    "embed": "embeddings.word_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "qkv": _LAYER + "attention.qkv_proj",
    "output": _LAYER + "attention.o_proj",
    "attn_norm": _LAYER + "attn_ln",
    "up_gate": _LAYER + "mlp.up_gate_proj",
    "down": _LAYER + "mlp.down_proj",
    "ffn_norm": _LAYER + "mlp_ln",
}
_JINA_NAMES = {
    "embed": "embeddings.word_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embed_norm": "emb_ln",
    "qkv": _NOMIC_LAYER + "mixer.Wqkv",
    "output": _NOMIC_LAYER + "mixer.out_proj",
    "attn_norm": _NOMIC_LAYER + "norm1",
    "up": _NOMIC_LAYER + "mlp.fc1",
    "down": _NOMIC_LAYER + "mlp.fc2",
    "ffn_norm": _NOMIC_LAYER + "norm2",
}


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """title        what people call it
    prefixes     of the encoder's tensors where the file holds a head beside it
    names        role -> tensor name, less '.weight' and '.bias'
    head         names of the classifier's two linears, with the pooler or dense one first, which may begin with the
                 encoder's prefix; () for none known
    head_norm    name of the norm between them, or ""
    head_act     between them, where config.json has no key for it
    unbiased     roles of linears without a bias
    no_types     there may be no types of text: type_vocab_size is 0
    from_pad     positions count from pad_token_id + 1, not from 0
    pre_norm     norms come before attention and FFN, and not where layer 0 begins; else after the additions
    activations  config.json's names -> the forward pass's, which gate where there is a gate
    keys         transformers' usual name of a config key -> the family's, where it differs
    aliases      names that a file may say instead -> the family's
    fixed_ntk    rope_scaling may be of the type ntk: the same scaled angles at every length
    required     (config key, what it must be where it is there)
    refused      (config key that must be off, what it would ask for)
    """

    title: str
    prefixes: tuple[str, ...]
    names: Mapping[str, str]
    head: tuple[str, ...] = ()
    head_norm: str = ""
    head_act: str = "tanh"
    unbiased: tuple[str, ...] = ()
    no_types: bool = False
    from_pad: bool = False
    pre_norm: bool = False
    activations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(ACTIVATIONS))
    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    fixed_ntk: bool = False
    required: tuple[tuple[str, Any], ...] = (("position_embedding_type", "absolute"),)
    refused: tuple[tuple[str, str], ...] = ()

    def key(self, usual: str) -> str:
        """The family's name of a config key."""
        return self.keys.get(usual, usual)

    @property
    def gated(self) -> bool:
        return any(role in self.names for role in ("gate", "gate_up", "up_gate"))


_BERT = EncoderFamily("BERT", ("bert.",), _BERT_NAMES, ("{}pooler.dense", "classifier"))
_ROBERTA = EncoderFamily(
    "RoBERTa", ("roberta.",), _BERT_NAMES, ("classifier.dense", "classifier.out_proj"), from_pad=True
)
_MODERN = EncoderFamily(
    "ModernBERT",
    ("model.",),
    _MODERN_NAMES,
    ("head.dense", "classifier"),
    head_norm="head.norm",
    pre_norm=True,
    activations=_GATING,
    keys={"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
)
_NOMIC = EncoderFamily(
    "Nomic BERT",
    ("bert.", "nomic_bert."),
    _NOMIC_NAMES,
    ("{}pooler.dense", "classifier"),
    activations=MappingProxyType({"silu": "silu"}),
    refused=(
        ("causal", "encoders that see what came before alone"),
        ("moe_every_n_layers", "experts"),
        ("num_experts", "experts"),
        ("parallel_block", "parallel residuals"),
        ("prenorm", "norms before attention and FFN"),
        ("rotary_emb_interleaved", "interleaved angles"),
        ("rotary_emb_scale_base", "angles with scales"),
        ("scale_attn_by_inverse_layer_idx", "scales of each layer"),
        ("use_rms_norm", "RMS norms"),
    ),
)
NOMIC_OWN = replace(
    _NOMIC,
    activations=MappingProxyType({"swiglu": "silu", "silu": "silu"}),
    keys={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
        "rope_theta": "rotary_emb_base",
    },
)
"""Nomic BERT as its makers' config.json spells it."""
_DISTIL = EncoderFamily(
    "DistilBERT",
    ("distilbert.",),
    _DISTIL_NAMES,
    keys={
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "hidden_act": "activation",
    },
    aliases={"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
)
_GTE = EncoderFamily(
    "GTE",
    ("new.", "gte."),
    _GTE_NAMES,
    ("{}pooler.dense", "classifier"),
    unbiased=("up_gate",),
    no_types=True,
    activations=_GATING,
    required=(("position_embedding_type", "rope"), ("layer_norm_type", "layer_norm"), ("pack_qkv", True)),
    refused=(("logn_attention_scale", "queries that grow with the length"),),
)
_JINA = EncoderFamily("Jina Embeddings 3", ("roberta.",), _JINA_NAMES, ("classifier.dense", "classifier.out_proj"))
_ELECTRA = EncoderFamily(
    "ELECTRA", ("electra.",), _BERT_NAMES, ("classifier.dense", "classifier.out_proj"), head_act="gelu_erf"
)
FAMILIES: Mapping[str, EncoderFamily] = {
    "Bert": _BERT,
    "Roberta": _ROBERTA,
    "XLMRoberta": replace(_ROBERTA, title="XLM-RoBERTa"),
    "Camembert": replace(_ROBERTA, title="CamemBERT"),
    "DistilBert": _DISTIL,
    "ModernBert": _MODERN,
    "NomicBert": _NOMIC,
    "Electra": _ELECTRA,
    "Gte": _GTE,
    "New": replace(_GTE, title="GTE, as its makers have it", fixed_ntk=True),
    "JinaEmbeddingsV3": _JINA,
}
"""By what comes before Model, ForMaskedLM or ForSequenceClassification in the name of the architecture."""


def encoder_family(config: Mapping[str, Any]) -> EncoderFamily | None:
    """The family of a config.json's type, as the file spells it; None for what is no encoder's."""
    if keys_of(config) is NOMIC_OWN_KEYS:
        return NOMIC_OWN
    kind = model_type_of(config)
    return next((FAMILIES[name] for name, its in ENCODER_TYPES.items() if its == kind), None)
