"""The families that have layers with a state beside those that attend; see families.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ops.api import SIGMOID, SOFTMAX_CHOSEN
from .families_moe import DEEPSEEK_MOE, GRANITE_MOE, GRANITE_NAMES, SHARED_EXPERT_NAMES
from .family import NO_HEADS, Family
from .mixer import GATED_DELTA, MAMBA, MAMBA2, SHORT_CONV
from .moe import MoeFamily

_QKV = ("q", "k", "v")
_ATTENTION_BIAS = {"attention_bias": (*_QKV, "output")}
_MAMBA_NAMES = {
    "mixer_in": "model.layers.{}.mamba.in_proj",
    "conv": "model.layers.{}.mamba.conv1d",
    "dt_bias": "model.layers.{}.mamba.dt_bias",
    "a_log": "model.layers.{}.mamba.A_log",
    "skip": "model.layers.{}.mamba.D",
    "mixer_norm": "model.layers.{}.mamba.norm",
    "mixer_out": "model.layers.{}.mamba.out_proj",
}

_BACKBONE = "backbone.layers.{}."
_BACKBONE_NAMES = {
    "embed": "backbone.embeddings",
    "final_norm": "backbone.norm_f",
    "attn_norm": f"{_BACKBONE}norm",
    **{role: name.replace("model.layers.{}.mamba", f"{_BACKBONE}mixer") for role, name in _MAMBA_NAMES.items()},
}
_LFM2 = Family(
    "LFM2",
    qk_norm="head",
    activation="silu",
    mixer=SHORT_CONV,
    mixer_layers="conv",
    bias_keys={"conv_bias": ("mixer_in", "conv", "mixer_out")},
    names={
        "final_norm": "model.embedding_norm",
        "attn_norm": "model.layers.{}.operator_norm",
        "q_norm": "model.layers.{}.self_attn.q_layernorm",
        "k_norm": "model.layers.{}.self_attn.k_layernorm",
        "output": "model.layers.{}.self_attn.out_proj",
        "ffn_norm": "model.layers.{}.ffn_norm",
        "gate": "model.layers.{}.feed_forward.w1",
        "up": "model.layers.{}.feed_forward.w3",
        "down": "model.layers.{}.feed_forward.w2",
        "router": "model.layers.{}.feed_forward.gate",
        "choice_bias": "model.layers.{}.feed_forward.expert_bias",
        "expert_gate": "model.layers.{}.feed_forward.experts.{e}.w1",
        "expert_up": "model.layers.{}.feed_forward.experts.{e}.w3",
        "expert_down": "model.layers.{}.feed_forward.experts.{e}.w2",
        "mixer_in": "model.layers.{}.conv.in_proj",
        "conv": "model.layers.{}.conv.conv",
        "mixer_out": "model.layers.{}.conv.out_proj",
    },
)
_QWEN3_5 = Family(
    "Qwen3.5, Qwen3.6",
    norm_offset=1.0,
    qk_norm="head",
    gated_attention=True,
    mixer=GATED_DELTA,
    bias_keys=_ATTENTION_BIAS,
    unread=("mtp.",),
    names=SHARED_EXPERT_NAMES,
)

_FFN = ("gate", "up", "down")
_FEED_FORWARD_NAMES = {
    "final_norm": "model.final_layernorm",
    "ffn_norm": "model.layers.{}.pre_ff_layernorm",
    **{role: f"model.layers.{{}}.feed_forward.{role}_proj" for role in _FFN},
}


def _scan_names(prefix: str) -> dict[str, str]:
    """Of a selective scan."""
    norms = {f"mixer_{part}_norm": f"{prefix}{part}_layernorm" for part in ("dt", "b", "c")}
    return {"mixer_x": f"{prefix}x_proj", "mixer_dt": f"{prefix}dt_proj", **norms}


_MAMBA = Family(
    "Mamba",
    attention=NO_HEADS,
    activation="silu",
    mixer=MAMBA,
    one_sublayer=True,
    rope=False,
    biases=("mixer_dt",),
    bias_keys={"use_conv_bias": ("conv",), "use_bias": ("mixer_in", "mixer_out")},
    names={**_BACKBONE_NAMES, **_scan_names(f"{_BACKBONE}mixer.")},
)

HYBRID_HF_FAMILIES: Mapping[str, Family] = {
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(_LFM2, title="LFM2-MoE", moe=MoeFamily((SIGMOID,), floor=1e-6)),
    "Qwen3NextForCausalLM": replace(
        _QWEN3_5, title="Qwen3-Next", moe=MoeFamily(shared_mix=True), fused=("mixer_qkvz", "mixer_ba")
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": replace(
        _QWEN3_5, title="Qwen3.5-MoE, Qwen3.6-MoE", moe=MoeFamily(normalise=True, shared_mix=True)
    ),
    "BambaForCausalLM": Family(
        "Bamba",
        mixer=MAMBA2,
        bias_keys={
            **_ATTENTION_BIAS,
            "mlp_bias": ("gate", "up", "down"),
            "mamba_conv_bias": ("conv",),
            "mamba_proj_bias": ("mixer_in", "mixer_out"),
        },
        names={
            **_MAMBA_NAMES,
            **_FEED_FORWARD_NAMES,
        },
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "Granite 4",
        mixer=MAMBA2,
        moe=GRANITE_MOE,
        fused=("gate_up", "shared_gate_up"),
        bias_keys={**_ATTENTION_BIAS, "mamba_conv_bias": ("conv",), "mamba_proj_bias": ("mixer_in", "mixer_out")},
        rope_if=("position_embedding_type", "rope"),
        names={
            **GRANITE_NAMES,
            **_MAMBA_NAMES,
            "gate_up": "model.layers.{}.shared_mlp.input_linear",
            "down": "model.layers.{}.shared_mlp.output_linear",
        },
    ),
    "FalconH1ForCausalLM": Family(
        "Falcon-H1",
        mixer=MAMBA2,
        mixer_beside=True,
        bias_keys={
            **_ATTENTION_BIAS,
            "mlp_bias": ("gate", "up", "down"),
            "mamba_conv_bias": ("conv",),
            "mamba_proj_bias": ("mixer_in",),
            "projectors_bias": ("mixer_out",),
        },
        names={**_MAMBA_NAMES, **_FEED_FORWARD_NAMES},
    ),
    "JambaForCausalLM": Family(
        "Jamba",
        mixer=MAMBA,
        rope=False,
        moe=MoeFamily(normalise=False),
        biases=("mixer_dt",),
        bias_keys={"mamba_conv_bias": ("conv",), "mamba_proj_bias": ("mixer_in", "mixer_out")},
        names={
            **_MAMBA_NAMES,
            **_FEED_FORWARD_NAMES,
            **_scan_names("model.layers.{}.mamba."),
            "router": "model.layers.{}.feed_forward.router",
            **{f"expert_{each}": f"model.layers.{{}}.feed_forward.experts.{{e}}.{each}_proj" for each in _FFN},
        },
    ),
    "MambaForCausalLM": _MAMBA,
    "FalconMambaForCausalLM": replace(_MAMBA, title="Falcon Mamba"),
    "Mamba2ForCausalLM": Family(
        "Mamba-2, Mamba-Codestral",
        attention=NO_HEADS,
        activation="silu",
        mixer=MAMBA2,
        one_sublayer=True,
        rope=False,
        bias_keys={"use_conv_bias": ("conv",), "use_bias": ("mixer_in", "mixer_out")},
        names=_BACKBONE_NAMES,
    ),
    "NemotronHForCausalLM": Family(
        "Nemotron-H, Nemotron Nano 2 and 3",
        gated=False,
        mixer=MAMBA2,
        one_sublayer=True,
        rope=False,
        moe=DEEPSEEK_MOE,
        bias_keys={
            "mlp_bias": ("up", "down", "shared_up", "shared_down"),
            "use_conv_bias": ("conv",),
            "use_bias": ("mixer_in", "mixer_out"),
        },
        refused=(
            ("attention_bias", "biases"),
            ("sliding_window", "windows"),
            ("moe_latent_size", "experts of fewer channels"),
        ),
        unread=("mtp.",),
        names={
            **_BACKBONE_NAMES,
            "ffn_norm": f"{_BACKBONE}norm",
            **{role: f"{_BACKBONE}mixer.{role}_proj" for role in ("q", "k", "v", "up", "down")},
            "output": f"{_BACKBONE}mixer.o_proj",
            "router": f"{_BACKBONE}mixer.gate",
            "choice_bias": f"{_BACKBONE}mixer.gate.e_score_correction_bias",
            "expert_up": f"{_BACKBONE}mixer.experts.{{e}}.up_proj",
            "expert_down": f"{_BACKBONE}mixer.experts.{{e}}.down_proj",
            "shared_up": f"{_BACKBONE}mixer.shared_experts.up_proj",
            "shared_down": f"{_BACKBONE}mixer.shared_experts.down_proj",
        },
    ),
}

_LFM2_GGUF = Family(
    "LFM2",
    qk_norm="head",
    mixer=SHORT_CONV,
    window_every=0,
    names={
        "final_norm": "token_embd_norm",
        "mixer_in": "blk.{}.shortconv.in_proj",
        "conv": "blk.{}.shortconv.conv",
        "mixer_out": "blk.{}.shortconv.out_proj",
    },
)
_QWEN3_5_GGUF = Family(
    "Qwen3.5, Qwen3.6",
    qk_norm="head",
    gated_attention=True,
    mixer=GATED_DELTA,
    tiled_values=True,
    names={"ffn_norm": "blk.{}.post_attention_norm"},
)
_QWEN_EXPERTS = MoeFamily(normalise=True, shared_mix=True)

HYBRID_GGUF_FAMILIES: Mapping[str, Family] = {
    "lfm2": _LFM2_GGUF,
    "lfm2moe": replace(
        _LFM2_GGUF, title="LFM2-MoE", moe=MoeFamily((SIGMOID,), normalise=True, floor=1e-6, choice_bias=True)
    ),
    "qwen3next": replace(_QWEN3_5_GGUF, title="Qwen3-Next", tiled_values=False, moe=_QWEN_EXPERTS, fused=("mixer_ba",)),
    "qwen35": _QWEN3_5_GGUF,
    "qwen35moe": replace(_QWEN3_5_GGUF, title="Qwen3.5-MoE, Qwen3.6-MoE", moe=_QWEN_EXPERTS),
    "granitehybrid": Family(
        "Granite 4",
        interleaved_heads=True,
        mixer=MAMBA2,
        moe=MoeFamily((SOFTMAX_CHOSEN,), normalise=False),
        rope_if=("rope.scaling.finetuned", True),
    ),
}
