"""A model's shape from GGUF keys and from config.json, and the refusals."""

from __future__ import annotations

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
    assert config_from_checkpoint(checkpoint).rope == expected


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
    assert (config.head_dim, config.rope) == (32, RopeConfig(10000.0, "linear", 2.0))


def test_sliding_window_bounds_the_context():
    """Within its window, windowed attention is full attention; beyond it the model is not offered."""
    checkpoint = tiny_checkpoint()
    checkpoint.metadata |= {"architectures": ["MistralForCausalLM"], "sliding_window": 100}
    assert config_from_checkpoint(checkpoint).max_context == 100
    checkpoint.metadata["sliding_window"] = None
    assert config_from_checkpoint(checkpoint).max_context == 256


@pytest.mark.parametrize(
    ("kind", "given", "named"),
    [
        ("gguf", {"general.architecture": "mamba"}, "'mamba' is not supported .supported: llama"),
        ("gguf", {"llama.expert_count": 8}, "llama.expert_count = 8: experts"),
        ("gguf", {"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8"),
        ("gguf", {"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ("gguf", {"llama.block_count": 0}, "llama.block_count must be a positive integer, got 0"),
        ("gguf", {"llama.feed_forward_length": [96, 96]}, "llama.feed_forward_length must be a positive integer"),
        ("gguf", {"llama.rope.freq_base": "x"}, "llama.rope.freq_base must be a number"),
        ("hf", {"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported"),
        ("hf", {"architectures": []}, "'' is not supported"),
        ("hf", {"attention_bias": True}, "attention biases are not supported"),
        ("hf", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("hf", {"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic' is not supported"),
        ("hf", {"num_key_value_heads": 3}, "4 heads do not divide into 3 KV heads"),
        ("hf", {"head_dim": 15}, "head size 15 must be even"),
        ("hf", {"hidden_size": None}, "hidden_size must be a positive integer, got None"),
    ],
)
def test_refuses_by_name(kind, given, named):
    """What cannot be run right is refused, naming the key or architecture."""
    checkpoint = tiny_checkpoint(kind=kind)
    checkpoint.metadata |= given
    with pytest.raises(BadCheckpoint, match=named):
        config_from_checkpoint(checkpoint)
