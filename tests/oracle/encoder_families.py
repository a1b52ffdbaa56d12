"""The encoder families that the oracle tests run, and the generated page lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SHAPE = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_DISTIL = {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0}


@dataclass(frozen=True)
class EncoderCase:
    """family and suffix together are transformers' name of the class."""

    title: str
    family: str
    suffix: str = "Model"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def has_types(self) -> bool:
        has = self.family in ("Bert", "NomicBert", "Electra", "Gte")
        return has and self.options.get("type_vocab_size", SHAPE["type_vocab_size"]) > 1


_ONE_LABEL = {"num_labels": 1}
_MODERN = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
_ELECTRA = {"embedding_size": SHAPE["hidden_size"]}
_ROPE = {"rope_type": "default", "rope_theta": 50.0}
_PAD = {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 514}

CASES = (
    EncoderCase("BERT", "Bert"),
    EncoderCase("BERT, tanh GELU, wide heads", "Bert", options={"hidden_act": "gelu_new", "num_attention_heads": 2}),
    EncoderCase("BERT, scores of pairs", "Bert", "ForSequenceClassification", _ONE_LABEL),
    EncoderCase("RoBERTa", "Roberta", options=_PAD),
    EncoderCase("RoBERTa, scores of pairs", "Roberta", "ForSequenceClassification", _PAD | _ONE_LABEL),
    EncoderCase("XLM-RoBERTa", "XLMRoberta", options=_PAD),
    EncoderCase("XLM-RoBERTa, scores of pairs", "XLMRoberta", "ForSequenceClassification", _PAD | _ONE_LABEL),
    EncoderCase("CamemBERT", "Camembert", options=_PAD),
    EncoderCase("DistilBERT", "DistilBert", options=_DISTIL),
    EncoderCase("ModernBERT", "ModernBert", options=_MODERN),
    EncoderCase(
        "ModernBERT, biases, small windows, tanh GELU",
        "ModernBert",
        options=_MODERN
        | {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "local_attention": 6}
        | {"hidden_activation": "gelu_pytorch_tanh", "num_attention_heads": 2, "num_hidden_layers": 4},
    ),
    EncoderCase("ModernBERT, scores of pairs", "ModernBert", "ForSequenceClassification", _MODERN | _ONE_LABEL),
    EncoderCase(
        "ModernBERT, scores of means",
        "ModernBert",
        "ForSequenceClassification",
        _MODERN | _ONE_LABEL | {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    ),
    EncoderCase("Nomic BERT", "NomicBert"),
    EncoderCase(
        "Nomic BERT, other angles, wide heads",
        "NomicBert",
        options={"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "num_attention_heads": 2},
    ),
    EncoderCase("Nomic BERT, scores of pairs", "NomicBert", "ForSequenceClassification", _ONE_LABEL),
    EncoderCase("ELECTRA", "Electra", options=_ELECTRA),
    EncoderCase("ELECTRA, scores of pairs", "Electra", "ForSequenceClassification", _ELECTRA | _ONE_LABEL),
    EncoderCase("GTE", "Gte"),
    EncoderCase(
        "GTE, no types, other angles, tanh GELU",
        "Gte",
        options={"type_vocab_size": 0, "rope_parameters": _ROPE, "hidden_act": "gelu_new"},
    ),
    EncoderCase("GTE, scores of pairs", "Gte", "ForSequenceClassification", _ONE_LABEL),
    EncoderCase("Jina Embeddings 3", "JinaEmbeddingsV3", options={"type_vocab_size": 1}),
    EncoderCase(
        "Jina, scores of pairs",
        "JinaEmbeddingsV3",
        "ForSequenceClassification",
        _ONE_LABEL | {"type_vocab_size": 1, "rope_parameters": _ROPE},
    ),
)

CLASSIFIERS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2")
"""Decoders, less 'ForSequenceClassification', whose scores are compared with those of transformers."""
