"""Random hybrid models of some ten thousand weights, as open checkpoints with no file behind them: layers that keep a
state beside one that attends."""

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
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "LFM2": {
        **_COMMON, "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "conv_bias": True,
        "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"],
    },
    "Qwen3.5": {
        **_COMMON, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 32,
        "linear_key_head_dim": 16, "linear_value_head_dim": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "full_attention_interval": 3,
    },
    "Qwen3-Next": {
        **_COMMON, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "head_dim": 32,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "full_attention_interval": 3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "mlp_only_layers": [1],
    },
    "Bamba": {
        **_COMMON, "model_type": "bamba", "architectures": ["BambaForCausalLM"], "attn_layer_indices": [1],
        "mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2,
    },
    "Granite 4": {
        **_COMMON, "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_heads": 4,
        "mamba_d_state": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
        "shared_intermediate_size": 64,
    },
    "Falcon-H1": {
        **_COMMON, "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 96,
        "mamba_n_heads": 6, "mamba_d_state": 12, "mamba_n_groups": 2, "ssm_multipliers": [0.5, 0.9, 1.2, 1.1, 0.7],
        "mlp_multipliers": [0.7, 1.3],
    },
    "Jamba": {
        **_COMMON, "model_type": "jamba", "architectures": ["JambaForCausalLM"], "attn_layer_period": 3,
        "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 32,
    },
    "Mamba-2": {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"], "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2,
    },
    "Nemotron-H": {
        **{key: value for key, value in _COMMON.items() if key != "num_hidden_layers"},
        "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-*EM",
        "head_dim": 32, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2,
        "n_routed_experts": 4, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 32,
    },
}  # fmt: skip
"""config.json of each."""


def hybrid_checkpoint(name: str = "Qwen3.5", *, seed: int = 0) -> Checkpoint:
    """States forget within some tens of positions."""
    return random_checkpoint(name, MODELS[name], seed)


def random_checkpoint(name: str, settings: dict[str, Any], seed: int) -> Checkpoint:
    """Of these settings. Weights are a function of the seed and of their names."""
    config = config_from_checkpoint(Checkpoint("hf", Path("tiny"), settings, {}))
    tensors = {}
    for index, (each, shape) in enumerate(sorted(expected_shapes("hf", config).items())):
        rng = np.random.default_rng([seed, index])
        values = rng.normal(size=shape) * (shape[-1] ** -0.5 * 2 if len(shape) == 2 else 1)
        if len(shape) == 1:
            values = 1 + 0.1 * rng.normal(size=shape)
        if each.endswith("A_log"):
            values = rng.uniform(-3, 0, size=shape)
        tensors[each] = tensor(each, values)
    return Checkpoint("hf", Path(f"tiny-{name}"), dict(settings), tensors)
