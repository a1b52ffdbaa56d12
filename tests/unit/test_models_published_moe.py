"""The config.json of mixtures of experts as they were published, with keys that transformers lacks: each is read, and
what it says of experts, positions and context is what the model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.config import ModelConfig, config_from_checkpoint
from tokenmill.ops.api import SIGMOID, SOFTMAX, SPARSE_MIXER

MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attn_type_list": [1] * 62, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
    "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
    "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
    "sliding_window": None, "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True,
    "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
HUNYUAN_A13B: dict[str, Any] = {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "attention_bias": False,
    "attention_head_dim": 128, "cla_share_factor": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 3072, "max_position_embeddings": 32768, "mlp_bias": False, "moe_drop_tokens": False,
    "moe_intermediate_size": [3072] * 32, "moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": False,
    "moe_topk": [8] * 32, "num_attention_heads": 32, "num_experts": 64, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_shared_expert": [1] * 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "tie_word_embeddings": True, "use_cla": False, "use_mixed_mlp_moe": True, "use_qk_norm": True, "vocab_size": 128167,
}  # fmt: skip
PHI_3_5_MOE: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "attention_bias": True, "hidden_act": "silu",
    "hidden_size": 4096, "input_jitter_noise": 0.01, "intermediate_size": 6400, "lm_head_bias": True,
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 16, "original_max_position_embeddings": 4096,
    "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "router_aux_loss_coef": 0.0,
    "router_jitter_noise": 0.01, "sliding_window": 131072, "tie_word_embeddings": False, "vocab_size": 32064,
    "rope_scaling": {
        "long_factor": [1.0 + 0.5 * index for index in range(64)], "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": 4096, "short_factor": [1.0] * 64, "short_mscale": 1.243163121016122,
        "type": "longrope",
    },
}  # fmt: skip
K_EXAONE: dict[str, Any] = {
    "architectures": ["ExaoneMoEForCausalLM"], "model_type": "exaone_moe", "first_k_dense_replace": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 18432, "is_moe_layer": [False] + [True] * 47,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12, "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "num_shared_experts": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "vocab_size": 153600,
}  # fmt: skip
TRINITY_MINI: dict[str, Any] = {
    "architectures": ["AfmoeForCausalLM"], "model_type": "afmoe", "global_attn_every_n_layers": 4, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "load_balance_coeff": 0.001,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1024, "mup_enabled": True, "n_group": 1,
    "num_attention_heads": 32, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 4, "num_limited_groups": 1,
    "num_shared_experts": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000, "route_norm": True,
    "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048, "tie_word_embeddings": False,
    "topk_group": 1, "use_grouped_mm": True, "vocab_size": 200192,
}  # fmt: skip
DEEPSEEK_V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "attention_bias": False, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 2048, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "v_head_dim": 128, "vocab_size": 129280,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
ROUTES = [
    (MINIMAX_M2, SIGMOID, 8, 1.0, 62, 196608, 64),
    (HUNYUAN_A13B, SOFTMAX, 8, 1.0, 32, 32768, 128),
    (PHI_3_5_MOE, SPARSE_MIXER, 2, 1.0, 32, 131072, 128),
    (K_EXAONE, SIGMOID, 8, 2.5, 47, 262144, 128),
    (TRINITY_MINI, SIGMOID, 8, 2.826, 30, 131072, 128),
    (DEEPSEEK_V32, SIGMOID, 8, 2.5, 58, 2048, 64),
]


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return config_from_checkpoint(Checkpoint("hf", Path("config.json"), config | changes, {}))


@pytest.mark.parametrize(
    ("config", "score", "top_k", "scale", "num_moe", "context", "turned"),
    ROUTES,
    ids=[r[0]["model_type"] for r in ROUTES],
)
def test_it_is_read(
    config: dict[str, Any], score: str, top_k: int, scale: float, num_moe: int, context: int, turned: int
) -> None:
    model = read(config)
    assert model.moe is not None
    routing = model.moe.routing
    assert (routing.score, routing.top_k, routing.scale) == (score, top_k, scale)
    assert (sum(layer.is_moe for layer in model.layers), model.max_context, model.rotary_dim) == (
        num_moe,
        context,
        turned,
    )


def test_what_else_it_says() -> None:
    """Margins, layers without positions, scales of embeddings, stretched bases, and tensors that are not read."""
    moe = read(PHI_3_5_MOE).moe
    assert moe is not None and moe.routing.margin == 0.02
    assert [layer.rope is None for layer in read(K_EXAONE).layers[:4]] == [False, False, False, True]
    assert read(TRINITY_MINI).embed_scale == 2048**0.5
    rope = read(HUNYUAN_A13B).layers[0].rope
    assert rope is not None and (rope.scaling, rope.factor) == ("ntk", 1000.0)
    assert read(MINIMAX_M2).unread == ("model.layers.62.", "model.layers.63.", "model.layers.64.")
    unread = read(DEEPSEEK_V32).unread
    assert unread[:2] == ("model.layers.61.", "model.layers.0.self_attn.indexer.") and len(unread) == 62


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (MINIMAX_M2, {"scoring_func": "softmax"}, "scoring_func"),
        (HUNYUAN_A13B, {"moe_topk": [8] * 31 + [4]}, "moe_topk"),
        (HUNYUAN_A13B, {"moe_intermediate_size": [1024] * 32}, "moe_intermediate_size"),
        (HUNYUAN_A13B, {"num_shared_expert": [2] * 32}, "num_shared_expert"),
        (PHI_3_5_MOE, {"num_experts_per_tok": 1}, "sparse mixer"),
        (PHI_3_5_MOE, {"rope_scaling": PHI_3_5_MOE["rope_scaling"] | {"long_mscale": 1.5}}, "long_mscale"),
        (K_EXAONE, {"is_moe_layer": [True] * 48}, "is_moe_layer"),
        (TRINITY_MINI, {"num_expert_groups": 4}, "num_expert_groups"),
        (TRINITY_MINI, {"score_func": "softmax"}, "score_func"),
        (DEEPSEEK_V32, {"topk_method": "greedy"}, "topk_method"),
    ],
)
def test_what_would_choose_experts_otherwise_is_refused(
    config: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadCheckpoint, match=named):
        read(config, **changes)
