"""A model's shape from GGUF keys and from config.json, and the refusals."""

from __future__ import annotations

import dataclasses

import pytest

from tiny import tiny_checkpoint, tiny_config
from tokenmill.core.errors import BadCheckpoint
from tokenmill.models.config import RopeConfig, config_from_checkpoint


@pytest.mark.parametrize("kind", ["gguf", "hf"])
@pytest.mark.parametrize("tied", [False, True])
def test_reads_both_formats(kind, tied):
    """Every field arrives from either format, tied embeddings included."""
    config = config_from_checkpoint(tiny_checkpoint(kind=kind, tied=tied))
    assert config == tiny_config(tied=tied, interleaved=kind == "gguf")
    assert config.heads.width == (4 + 2 * 2) * 16


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 4.0}},
            RopeConfig(5.0, "linear", 4.0),
        ),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(7.0, "linear", 2.0)),
        ({"rope_theta": 7.0, "rope_scaling": None}, RopeConfig(7.0)),
        (
            {
                "rope_theta": 7.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            RopeConfig(7.0, "llama3", 8.0, 1.0, 4.0, 64),
        ),
    ],
)
def test_reads_rope_of_config_json(given, expected):
    """The new and the old spelling of RoPE settings mean the same."""
    checkpoint = tiny_checkpoint()
    del checkpoint.metadata["rope_parameters"]
    checkpoint.metadata |= given
    assert config_from_checkpoint(checkpoint).layers[0].rope == expected


def test_reads_gguf_head_size_and_linear_rope():
    """attention.key_length overrides width / heads; linear scaling has its factor."""
    checkpoint = tiny_checkpoint(kind="gguf")
    checkpoint.metadata |= {
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
    }
    config = config_from_checkpoint(checkpoint)
    assert (config.head_dim, config.layers[0].rope) == (32, RopeConfig(10000.0, "linear", 2.0))


def test_windows_by_layer():
    """Every layer of a Mistral has the window, every second of a Gemma 2; a list of layer types decides otherwise."""
    checkpoint = tiny_checkpoint()

    def windows(**given):
        return [layer.window for layer in config_from_checkpoint(replace_metadata(checkpoint, **given)).layers]

    assert windows(sliding_window=100) == [0, 0], "a Llama has no windows"
    assert windows(architectures=["MistralForCausalLM"], sliding_window=100) == [100, 100]
    assert windows(architectures=["MistralForCausalLM"], sliding_window=None) == [0, 0]
    assert windows(architectures=["Gemma2ForCausalLM"], sliding_window=8) == [8, 0]
    assert windows(architectures=["Gemma2ForCausalLM"], layer_types=["full_attention", "sliding_attention"]) == [
        0,
        4096,
    ]
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 1}
    assert windows(**qwen) == [0, 0]
    assert windows(**qwen, use_sliding_window=True) == [0, 8]


def replace_metadata(checkpoint, **given):
    return dataclasses.replace(checkpoint, metadata=checkpoint.metadata | given)


@pytest.mark.parametrize(
    ("kind", "given", "named"),
    [
        ("gguf", {"general.architecture": "mamba"}, "'mamba' is not supported; docs/use/models.md"),
        ("gguf", {"general.architecture": "gpt2"}, "'gpt2' is not supported: it needs learned positions; docs"),
        ("gguf", {"llama.expert_count": 8}, "llama.expert_used_count must be"),
        ("gguf", {"llama.rope.dimension_count": 7}, "RoPE on 7 of 16 channels"),
        ("gguf", {"llama.rope.scaling.type": "su"}, "'su'"),
        ("gguf", {"llama.block_count": 0}, "llama.block_count must be a positive integer, got 0"),
        ("gguf", {"llama.feed_forward_length": [96, 96]}, "llama.feed_forward_length must be a positive integer"),
        ("gguf", {"llama.rope.freq_base": "x"}, "llama.rope.freq_base must be a number"),
        (
            "hf",
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported: it needs learned positions",
        ),
        ("hf", {"architectures": []}, "'' is not supported: nearest is LlamaForCausalLM"),
        ("hf", {"architectures": None, "model_type": "t5"}, "'t5' is not supported: it needs an encoder beside"),
        ("hf", {"architectures": ["OddModel"], "is_encoder_decoder": True}, "'OddModel' .* it needs an encoder beside"),
        ("hf", {"model_type": "mistral"}, "LlamaForCausalLM does not go with model_type 'mistral'"),
        ("hf", {"model_type": "bert"}, "LlamaForCausalLM does not go with model_type 'bert'"),
        ("hf", {"is_causal": False}, "sees ahead"),
        ("hf", {"per_layer_config": {"0": {}}}, "layers of different shapes are not supported"),
        ("hf", {"layer_types": ["sliding_attention"] * 2}, "layer_types of a Llama"),
        ("hf", {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "sees ahead"),
        ("hf", {"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window must be a positive"),
        ("hf", {"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        (
            "hf",
            {"architectures": ["PhiForCausalLM"], "qk_layernorm": True},
            "norms of each head are not supported",
        ),
        ("hf", {"hidden_act": "relu"}, "activation 'relu'"),
        ("hf", {"rope_parameters": {"rope_type": "proportional", "factor": 2}}, "'proportional' is not"),
        ("hf", {"num_key_value_heads": 3}, "4 heads do not divide into 3 KV heads"),
        ("hf", {"head_dim": 15}, "head size 15 must be even"),
        ("hf", {"hidden_size": None}, "hidden_size must not be null"),
    ],
)
def test_refuses_by_name(kind, given, named):
    """What cannot be run right is refused, naming the key or architecture."""
    checkpoint = tiny_checkpoint(kind=kind)
    checkpoint.metadata |= given
    with pytest.raises(BadCheckpoint, match=named):
        config_from_checkpoint(checkpoint)


HYBRID = {
    "embedding_length": 64, "block_count": 2, "context_length": 128, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": [0, 2], "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.time_step_rank": 4, "ssm.inner_size": 128,
    "rope.dimension_count": 16, "rope.scaling.finetuned": False,
}  # fmt: skip
"""Of a small Granite 4 in GGUF, under its architecture."""


def hybrid_in_gguf(**changes):
    checkpoint = tiny_checkpoint(kind="gguf")
    keys = {f"granitehybrid.{key}": value for key, value in (HYBRID | changes).items()}
    return dataclasses.replace(checkpoint, metadata={"general.architecture": "granitehybrid", **keys})


def test_reads_which_layers_keep_a_state_in_gguf():
    """Those without heads of keys; where the file says that RoPE was not trained, no layer has positions."""
    config = config_from_checkpoint(hybrid_in_gguf())
    assert [layer.keeps_state for layer in config.layers] == [True, False] and config.num_kv_heads == 2
    assert [layer.rope for layer in config.layers] == [None, None]
    config = config_from_checkpoint(hybrid_in_gguf(**{"rope.scaling.finetuned": True}))
    assert [layer.rope is None for layer in config.layers] == [True, False]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope.dimension_count": 8}, r"granitehybrid\.rope\.dimension_count = 8 is not supported"),
        ({"attention.head_count_kv": [0, 0]}, r"head_count_kv = \[0, 0\] is not supported"),
        ({"attention.head_count_kv": [2, 1]}, r"head_count_kv = \[2, 1\] is not supported"),
        ({"attention.head_count_kv": 2}, "which of 2 layers attend is not listed"),
        ({"attention.head_count_kv": [2]}, "which of 2 layers attend is not listed"),
        ({"ssm.inner_size": 130}, "4 heads in 1 groups are not 130 channels"),
        ({"ssm.conv_kernel": 17}, "a convolution over 17 positions"),
    ],
)
def test_refuses_hybrids_in_gguf_by_name(changes, named):
    with pytest.raises(BadCheckpoint, match=named):
        config_from_checkpoint(hybrid_in_gguf(**changes))
