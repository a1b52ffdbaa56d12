"""What config.json of models with latent attention says beyond transformers' classes: routers and layers that are
refused by name, types that it has no class for, layers that are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.formats.config_keys import CONFIG_KEYS
from tokenmill.models.config import ModelConfig, config_from_checkpoint
from tokenmill.models.kv_groups import kv_groups
from tokenmill.models.unsupported_keys import unread_keys
from tokenmill.ops.api import SIGMOID, SOFTMAX

ABSENT = object()

KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "auto_map": {"AutoConfig": "x.y"},
    "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 163584,
    "eos_token_id": 163585, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
    "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
    "vocab_size": 163840, "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
STEP3: dict[str, Any] = {
    "architectures": ["Step3TextForCausalLM"], "model_type": "step3_text", "hidden_size": 7168,
    "intermediate_size": 18432, "num_hidden_layers": 61, "max_seq_len": 65536, "vocab_size": 128815,
    "num_attention_heads": 64, "num_attention_groups": 1, "head_dim": 256, "share_q_dim": 2048,
    "norm_expert_weight": False, "moe_layers_enum": ",".join(map(str, range(4, 60))), "moe_num_experts": 48,
    "moe_top_k": 3, "moe_intermediate_size": 5120, "share_expert_dim": 5120, "max_position_embedding": 65536,
    "rope_theta": 500000,
}  # fmt: skip


def read(config: dict[str, Any], **changes: Any) -> ModelConfig:
    changed = {key: value for key, value in (config | changes).items() if value is not ABSENT}
    return config_from_checkpoint(Checkpoint("hf", Path("config.json"), changed, {}))


def test_kimi_k2() -> None:
    """The published file: read as DeepSeek-V3's, with nothing left over. A latent takes 1,152 bytes a layer."""
    assert CONFIG_KEYS["kimi_k2"] == CONFIG_KEYS["deepseek_v3"]
    model = read(KIMI_K2)
    assert unread_keys(Checkpoint("hf", Path("x"), KIMI_K2, {})) == ()
    assert model.latent is not None and model.moe is not None
    assert (model.head_dim, model.rotary_dim, model.latent.key_dim, model.query_rank) == (192, 64, 576, 1536)
    assert model.attention_scale == pytest.approx(192**-0.5 * (1 + 0.1 * 3.4657359) ** 2)
    routing = model.moe.routing
    assert (routing.num_experts, routing.top_k, routing.score, routing.scale) == (384, 8, SIGMOID, 2.827)
    assert model.moe.choice_bias and routing.normalise and routing.floor == 1e-20
    assert [index for index, layer in enumerate(model.layers) if layer.is_moe] == list(range(1, 61))
    (group,) = kv_groups(model)
    assert group.bytes_per_token == 61 * 1152
    (group,) = kv_groups(model, dtype="int8")
    assert group.bytes_per_token == 61 * 580


def test_step3() -> None:
    model = read(STEP3)
    assert unread_keys(Checkpoint("hf", Path("x"), STEP3, {})) == ()
    assert model.moe is not None and model.latent is None
    assert (model.query_rank, model.num_kv_heads, model.head_dim, model.inner_eps) == (2048, 1, 256, None)
    assert (model.moe.routing.score, model.moe.routing.normalise, model.moe.shared_width) == (SOFTMAX, False, 5120)
    assert [index for index, layer in enumerate(model.layers) if layer.is_moe] == list(range(4, 60))
    assert read(STEP3, moe_layers_enum=list(range(4, 60))) == model
    for key in STEP3.keys() - {"architectures", "model_type", "moe_layers_enum", "intermediate_size", "max_seq_len"}:
        assert read(STEP3, **{key: ABSENT}) == model, f"the default of {key} is the published model's"
        if key not in ("share_q_dim",):
            with pytest.raises(BadCheckpoint, match=key):
                read(STEP3, **{key: None})
    assert read(STEP3, share_q_dim=None).query_rank == 256


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (STEP3, {"moe_layers_enum": ABSENT}, "moe_layers_enum"),
        (STEP3, {"moe_layers_enum": "4,x"}, "moe_layers_enum"),
        (STEP3, {"moe_layers_enum": "4,61"}, "moe_layers_enum"),
        (STEP3, {"moe_layers_enum": 4}, "moe_layers_enum"),
        (STEP3, {"num_attention_groups": 8}, "num_attention_groups"),
        (STEP3, {"moe_top_k": 49}, "49 experts"),
        (STEP3, {"moe_router_activation": "sigmoid"}, "moe_router_activation"),
        (KIMI_K2, {"scoring_func": "softmax"}, "scoring_func"),
        (KIMI_K2, {"topk_method": "greedy"}, "topk_method"),
        (KIMI_K2, {"topk_method": "hashed"}, "topk_method"),
        (KIMI_K2, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (KIMI_K2, {"num_key_value_heads": 8}, "num_key_value_heads"),
        (KIMI_K2, {"num_experts_per_tok": 385}, "385 experts"),
        (KIMI_K2, {"n_group": 5}, "5 groups"),
        (KIMI_K2, {"n_group": 8, "topk_group": 9}, "8 groups"),
        (KIMI_K2, {"n_group": 384, "topk_group": 8}, "384 groups"),
        (KIMI_K2, {"kv_lora_rank": 0}, "kv_lora_rank"),
        (KIMI_K2, {"q_lora_rank": 0}, "q_lora_rank"),
        (KIMI_K2, {"qk_rope_head_dim": 63}, "must be even|RoPE on"),
        (KIMI_K2, {"head_dim": 128}, "head_dim"),
        (KIMI_K2, {"router_bias_mode": "add"}, "router_bias_mode"),
        (
            KIMI_K2,
            {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy"}
            | {"scoring_func": "softmax"},
            "norm_topk_prob",
        ),
    ],
)
def test_refused_by_name(config: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadCheckpoint, match=named):
        read(config, **changes)


def gguf(**changes: Any) -> dict[str, Any]:
    keys = {
        "embedding_length": 64, "block_count": 2, "context_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 1, "attention.key_length": 40,
        "attention.value_length": 32, "attention.key_length_mla": 24, "attention.value_length_mla": 24,
        "attention.kv_lora_rank": 32, "attention.q_lora_rank": 0, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 8, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32,
        "expert_shared_count": 1, "leading_dense_block_count": 1,
    }  # fmt: skip
    return {
        "general.architecture": "deepseek2",
        **{f"deepseek2.{key}": value for key, value in (keys | changes).items()},
    }


def test_gguf_keys() -> None:
    """A rank of 0 for queries is none; groups of a softmax go by their best; sizes that do not fit are named."""
    import numpy as np

    from tiny import tensor

    def shape(**changes: Any) -> ModelConfig:
        shapes = {
            "token_embd.weight": (160, 64), "blk.0.attn_k_b.weight": (4, 32, 16), "blk.1.ffn_gate_inp.weight": (8, 64),
            "blk.1.ffn_gate_exps.weight": (8, 32, 64), "blk.1.ffn_down_shexp.weight": (64, 32),
        }  # fmt: skip
        if changes.pop("biased", False):
            shapes["blk.1.exp_probs_b.bias"] = (8,)
        tensors = {name: tensor(name, np.zeros(shape)) for name, shape in shapes.items()}
        return config_from_checkpoint(Checkpoint("gguf", Path("x.gguf"), gguf(**changes), tensors))

    model = shape(expert_group_count=4, expert_group_used_count=2)
    assert model.latent is not None and model.moe is not None
    assert (model.query_rank, model.is_absorbed, model.latent.nope_dim, model.latent.value_dim) == (0, True, 16, 24)
    assert (model.moe.routing.group_score, model.moe.routing.score) == (1, SOFTMAX)
    model = shape(expert_gating_func=2, expert_weights_norm=True, biased=True, expert_group_count=2)
    assert model.moe is not None and model.moe.choice_bias
    assert (model.moe.routing.group_score, model.moe.routing.score) == (2, SIGMOID)
    for changes, named in (
        ({"attention.key_length": 41}, "key_length"),
        ({"attention.value_length": 33}, "value_length"),
        ({"attention.key_length_mla": 8}, "key_length_mla"),
        ({"attention.head_count_kv": 2}, "head_count_kv"),
        ({"expert_gating_func": 3}, "expert_gating_func"),
        ({"biased": True}, "expert_gating_func"),
        ({"expert_weights_norm": True}, "expert_weights_norm"),
        ({"expert_group_scale": 0.5}, "expert_group_scale"),
        ({"attention.temperature_scale": 0.1}, "temperature_scale"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn_log_multiplier"),
    ):
        with pytest.raises(BadCheckpoint, match=named):
            shape(**changes)
