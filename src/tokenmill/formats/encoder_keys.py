"""The keys of config.json of encoders; see config_keys.py."""

from __future__ import annotations

from collections.abc import Mapping

from .config_key import DERIVED, REQUIRED, Keys, OrNull, ends, keys

_BERT = {
    "vocab_size": 30_522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "is_decoder": False, "add_cross_attention": False, "pad_token_id": OrNull(0),
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_NOMIC = {
    "type_vocab_size": 2, "head_dim": None, "rope_parameters": None, "rope_scaling": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_ROPE = {
    "vocab_size": 250_048, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 8192, "type_vocab_size": 1,
    "layer_norm_eps": 1e-12, "head_dim": DERIVED, "rope_parameters": None, "rope_scaling": None,
    "rope_theta": 160_000.0,
    "pad_token_id": OrNull(1), "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_ROBERTA = {**_BERT, **ends(0, 2), "pad_token_id": 1}

ENCODER_KEYS: Mapping[str, Keys] = {
    "bert": keys(**_BERT),
    "roberta": keys(**_ROBERTA | {"vocab_size": 50_265}),
    "xlm-roberta": keys(**_ROBERTA),
    "camembert": keys(**_ROBERTA),
    "electra": keys(
        **_BERT | {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}, embedding_size=128
    ),
    "gte": keys(**_ROPE),
    "new": keys(**_ROPE | {"vocab_size": 30_528, "max_position_embeddings": 2048, "rope_theta": 10_000.0}),
    "jina_embeddings_v3": keys(
        **_ROPE
        | {"vocab_size": 250_002, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"intermediate_size": 4096, "max_position_embeddings": 8194, "layer_norm_eps": 1e-5, "rope_theta": 20_000.0}
        | ends(0, 2)
    ),
    "distilbert": keys(
        vocab_size=30_522,
        max_position_embeddings=512,
        dim=768,
        hidden_dim=3072,
        n_layers=6,
        n_heads=12,
        activation="gelu",
        pad_token_id=OrNull(0),
        bos_token_id=None,
        eos_token_id=None,
    ),
    "modernbert": keys(
        **ends(50_281, 50_282),
        vocab_size=50_368,
        hidden_size=768,
        intermediate_size=1152,
        num_hidden_layers=22,
        num_attention_heads=12,
        head_dim=None,
        hidden_activation="gelu",
        max_position_embeddings=8192,
        norm_eps=1e-5,
        norm_bias=False,
        attention_bias=False,
        mlp_bias=False,
        layer_types=None,
        global_attn_every_n_layers=3,
        local_attention=128,
        rope_parameters=None,
        rope_scaling=None,
        global_rope_theta=160_000.0,
        local_rope_theta=10_000.0,
        classifier_pooling="cls",
        classifier_bias=False,
        classifier_activation="gelu",
        pad_token_id=OrNull(50_283),
    ),
    "nomic_bert": keys(
        **_NOMIC,
        vocab_size=30_528,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        hidden_act="silu",
        max_position_embeddings=2048,
        layer_norm_eps=1e-12,
        rope_theta=1000.0,
        pad_token_id=0,
    ),
}  # fmt: skip

NOMIC_OWN_KEYS = keys(
    **_NOMIC,
    vocab_size=50_257,
    n_embd=768,
    n_inner=REQUIRED,
    n_layer=12,
    n_head=12,
    activation_function="gelu_new",
    n_positions=1024,
    layer_norm_epsilon=1e-5,
    qkv_proj_bias=True,
    mlp_fc1_bias=True,
    mlp_fc2_bias=True,
    rotary_emb_base=10_000.0,
    rotary_emb_fraction=0.0,
    rotary_scaling_factor=None,
    max_trained_positions=2048,
)
"""Of a Nomic BERT as its makers spell it, by GPT-2's names and with their class's defaults; `n_embd` tells it."""

ENCODER_TYPES: dict[str, str] = {
    "Bert": "bert",
    "Roberta": "roberta",
    "XLMRoberta": "xlm-roberta",
    "Camembert": "camembert",
    "DistilBert": "distilbert",
    "ModernBert": "modernbert",
    "NomicBert": "nomic_bert",
    "Electra": "electra",
    "Gte": "gte",
    "New": "new",
    "JinaEmbeddingsV3": "jina_embeddings_v3",
}
"""What the name of an encoder's architecture begins with -> its `model_type`."""
