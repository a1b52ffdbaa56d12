"""The families with latent attention, and Step-3; see families.py."""

from __future__ import annotations

from collections.abc import Mapping

from ..ops.api import SIGMOID, SOFTMAX
from .family import LATENT_HEADS, LOW_RANK, Family
from .moe import STACKED, MoeFamily

_BIASES = {"attention_bias": ("q_a", "kv_a", "output")}
_FFN_BIASES = {"mlp_bias": ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")}

LATENT_HF_FAMILIES: Mapping[str, Family] = {
    "DeepseekV2ForCausalLM": Family(
        "DeepSeek-V2",
        attention=LATENT_HEADS,
        moe=MoeFamily(group_score=1),
        interleaved_heads=True,
        bias_keys={**_BIASES, **_FFN_BIASES},
    ),
    "DeepseekV3ForCausalLM": Family(
        "DeepSeek-V3, R1; Kimi-K2",
        attention=LATENT_HEADS,
        moe=MoeFamily((SIGMOID,), floor=1e-20, choice_bias=True),
        interleaved_heads=True,
        bias_keys=_BIASES,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "GLM-4.7-Flash",
        attention=LATENT_HEADS,
        moe=MoeFamily((SIGMOID,), floor=1e-20, choice_bias=True),
        interleaved_heads=True,
        bias_keys=_BIASES,
    ),
    "YoutuForCausalLM": Family("Youtu-LLM", attention=LATENT_HEADS, interleaved_heads=True, bias_keys=_BIASES),
    "MiniCPM3ForCausalLM": Family("MiniCPM3", attention=LATENT_HEADS, bias_keys={**_BIASES, **_FFN_BIASES}),
    "Step3TextForCausalLM": Family(
        "Step-3",
        attention=LOW_RANK,
        moe=MoeFamily(form=STACKED),
        names={
            "q_a": "model.layers.{}.self_attn.q_proj",
            "q_a_norm": "model.layers.{}.self_attn.inter_norm",
            "q_b": "model.layers.{}.self_attn.wq",
            "router": "model.layers.{}.moe.gate",
            "expert_gate": "model.layers.{}.moe.gate_proj",
            "expert_up": "model.layers.{}.moe.up_proj",
            "expert_down": "model.layers.{}.moe.down_proj",
            "shared_gate": "model.layers.{}.share_expert.gate_proj",
            "shared_up": "model.layers.{}.share_expert.up_proj",
            "shared_down": "model.layers.{}.share_expert.down_proj",
        },
    ),
}

LATENT_GGUF_FAMILIES: Mapping[str, Family] = {
    "deepseek2": Family(
        "DeepSeek-V2, V3, R1; Kimi-K2",
        attention=LATENT_HEADS,
        moe=MoeFamily((SOFTMAX, SIGMOID), floor=1e-20, choice_bias=True),
        interleaved_heads=True,
        refused=(("deepseek2.attention.temperature_scale", "scores that depend on the position"),),
    ),
    "minicpm3": Family("MiniCPM3", attention=LATENT_HEADS),
}
