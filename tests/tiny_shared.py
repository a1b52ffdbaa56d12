"""Random models of some ten thousand weights whose layers are unlike each other, as open checkpoints with no file
behind them: heads of two sizes, keys and values that several layers see, inputs of each layer's own."""

from __future__ import annotations

from typing import Any

from tiny import VOCAB_SIZE
from tiny_hybrid import random_checkpoint
from tokenmill.formats.checkpoint import Checkpoint

WINDOW = 21
_FULL, _SLIDING = "full_attention", "sliding_attention"
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
_GEMMA4 = {
    **_COMMON, "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "sliding_window": WINDOW,
    "global_head_dim": 64, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB_SIZE,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Gemma 4": {
        **_GEMMA4, "num_hidden_layers": 5, "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    },
    "Gemma 4, keys that are values": {
        **_GEMMA4, "num_hidden_layers": 3, "layer_types": [_SLIDING, _FULL, _FULL], "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "Gemma 4, experts": {
        **_GEMMA4, "num_hidden_layers": 2, "layer_types": [_SLIDING, _FULL], "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
    "Llama 4": {
        **_COMMON, "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 3,
        "attention_chunk_size": WINDOW, "no_rope_layer_interval": 3, "interleave_moe_layer_step": 2,
        "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
        "floor_scale": 16, "attn_scale": 0.3,
    },
}  # fmt: skip
"""config.json of each."""


def shared_checkpoint(name: str = "Gemma 4", *, seed: int = 0) -> Checkpoint:
    return random_checkpoint(name, MODELS[name], seed)
