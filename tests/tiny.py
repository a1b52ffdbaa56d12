"""A random Llama of a few thousand weights, as an open checkpoint of either format, with no file behind it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.formats.tensor import Tensor
from tokenmill.models.config import LayerConfig, ModelConfig, RopeConfig
from tokenmill.models.families import GGUF_FAMILIES, HF_FAMILIES
from tokenmill.models.loader import load_model
from tokenmill.models.roles import expected_shapes
from tokenmill.ops.api import StepBatch
from tokenmill.ops.reference import ReferenceOps

VOCAB_SIZE = 96


def tiny_config(
    *, tied: bool = False, interleaved: bool = False, rope: RopeConfig | None = None, num_layers: int = 2
) -> ModelConfig:
    architecture = "llama" if interleaved else "LlamaForCausalLM"
    return ModelConfig(
        architecture=architecture,
        family=(GGUF_FAMILIES | HF_FAMILIES)[architecture],
        layers=(LayerConfig(0, rope or RopeConfig(10000.0)),) * num_layers,
        width=64,
        ffn_width=96,
        vocab_size=VOCAB_SIZE,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rotary_dim=16,
        norm_eps=1e-5,
        max_context=256,
        tied_embeddings=tied,
        attention_scale=0.25,
    )


def tensor(name: str, values: np.ndarray) -> Tensor:
    values = np.ascontiguousarray(values, np.float32)
    return Tensor(name, "f32", values.shape, memoryview(values.reshape(-1).view(np.uint8)))


def tiny_checkpoint(*, kind: str = "hf", tied: bool = False, seed: int = 0, num_layers: int = 2) -> Checkpoint:
    """Weights are a function of the seed and of their names. In GGUF, q and k rows count as interleaved."""
    config = tiny_config(tied=tied, interleaved=kind == "gguf", num_layers=num_layers)
    tensors = {}
    for index, (name, shape) in enumerate(sorted(expected_shapes(kind, config).items())):
        rng = np.random.default_rng([seed, index])
        is_norm = len(shape) == 1
        values = 1 + 0.1 * rng.normal(size=shape) if is_norm else rng.normal(size=shape) * shape[-1] ** -0.5 * 2
        tensors[name] = tensor(name, values)
    return Checkpoint(kind, Path(f"tiny-{kind}"), _metadata(kind, config), tensors)


def logits_of(checkpoint: Checkpoint, num_tokens: int = 13) -> np.ndarray:
    """Of the reference, for each of so many tokens, at most 16."""
    ops = ReferenceOps()
    batch = StepBatch(
        tokens_T=np.arange(3, 3 + num_tokens, dtype=np.int32),
        positions_T=np.arange(num_tokens),
        row_starts_S1=np.array([0, num_tokens], np.int32),
        context_lens_S=np.array([num_tokens], np.int32),
        block_tables_SB=np.array([[0, 1]], np.int32),
        logit_rows_L=np.arange(num_tokens, dtype=np.int32),
    )
    model = load_model(checkpoint, ops, max_model_len=64, block_size=8, kv_dtype="f32")
    pool = ops.new_pool(model.kv_group, 2)
    try:
        return model.forward(ops, pool.kv, batch)
    finally:
        pool.close()


def _metadata(kind: str, config: ModelConfig) -> dict[str, object]:
    if kind == "hf":
        return {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": config.width,
            "intermediate_size": config.ffn_width,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "rms_norm_eps": config.norm_eps,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_context,
            "tie_word_embeddings": config.tied_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
    return {
        "general.architecture": "llama",
        "llama.embedding_length": config.width,
        "llama.feed_forward_length": config.ffn_width,
        "llama.block_count": config.num_layers,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": config.head_dim,
        "llama.context_length": config.max_context,
    }
