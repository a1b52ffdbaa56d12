"""Random models with latent attention of some ten thousand weights, as open checkpoints with no file behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tiny import VOCAB_SIZE, tensor
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.roles import expected_shapes

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "V2": {
        **_COMMON, **_EXPERTS, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
    },
    "V3": {
        **_COMMON, **_EXPERTS, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 32, "n_group": 4, "topk_group": 2, "kv_lora_rank": 48, "qk_rope_head_dim": 8, "v_head_dim": 24,
    },
    "MiniCPM3": {
        **_COMMON, "model_type": "minicpm3", "architectures": ["MiniCPM3ForCausalLM"], "q_lora_rank": 32,
        "scale_emb": 3, "dim_model_base": 48, "qk_nope_head_dim": 16,
    },
}  # fmt: skip
"""config.json of each."""


def latent_checkpoint(name: str = "V2", *, seed: int = 0) -> Checkpoint:
    """Weights are a function of the seed and of their names."""
    config = config_from_checkpoint(Checkpoint("hf", Path("tiny"), MODELS[name], {}))
    tensors = {}
    for index, (each, shape) in enumerate(sorted(expected_shapes("hf", config).items())):
        rng = np.random.default_rng([seed, index])
        values = rng.normal(size=shape) * shape[-1] ** -0.5 * 2
        if len(shape) == 1:
            values = (
                0.2 * rng.normal(size=shape) if each.endswith("correction_bias") else 1 + 0.1 * rng.normal(size=shape)
            )
        tensors[each] = tensor(each, values)
    return Checkpoint("hf", Path(f"tiny-{name}"), dict(MODELS[name]), tensors)
