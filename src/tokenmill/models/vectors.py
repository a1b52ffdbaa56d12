"""Models that give vectors or scores: encoders, and decoders that are asked for their last hidden states instead of
logits.

A decoder keeps its KV in blocks like any other and loads without its head. An encoder, and a decoder whose tokens see
ahead, needs a pool too, of one layer and for the length of a step.

Checkpoints of bare decoders (`Qwen3Model`), and of decoders that classify (`Qwen3ForSequenceClassification`), are read
as those of the language model they are the body of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.block import KVGroup
from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.config_keys import named_architecture
from ..formats.sentence_transformers import SentenceConfig, read_sentence_config
from ..ops.api import Array, Ops
from ..ops.forward import ForwardOps
from . import decoder, encoder
from .config import ModelConfig, config_from_checkpoint
from .encoder import load_encoder_weights
from .encoder_config import EncoderConfig, encoder_config, is_encoder
from .families import HF_FAMILIES, hf_family
from .heads import CLASSIFIER, load_head, scores_with, without_head
from .kv_groups import LayerKV, layer_kvs
from .loader import load_model, load_ropes
from .rope import rope_frequencies, rope_table
from .tensor_names import GLOBAL_NAMES
from .weights import Progress, load_weights

STEP_BLOCK = 16
"""Tokens of a block of an encoder's pool."""

_CAUSAL = "ForCausalLM"
_CAUSAL_KEY = "is_causal"


@dataclass(frozen=True, slots=True)
class VectorModel:
    """forward      (ops, bound pools, batch) -> hidden states [L, D] of the batch's logit rows
    head         of a model that scores, or whose vectors are made of pooled states: (ops, pooled states [S, D]) ->
                 [S, vector_size]; else None
    head_pools   how states are pooled for a score: "cls", "mean" or "last"
    keeps_kv     False: every sequence runs whole in one step, and the pool is for its length
    num_places   rows of the place table for each type of text: one for each position, 1 where a place is a type alone,
                 0 where the batch needs no places
    num_types    types of text that a pair's two may have
    kv_groups    one, of which the pool is
    """

    config: ModelConfig | EncoderConfig
    forward: Callable[[ForwardOps, Any, Any], Array]
    vector_size: int
    kv_groups: tuple[KVGroup, ...]
    num_bytes: int
    rope_digest: str = ""
    num_places: int = 0
    num_types: int = 1
    keeps_kv: bool = True
    head: Callable[[ForwardOps, Array], Array] | None = None
    head_pools: str = "cls"


def vector_config(checkpoint: Checkpoint) -> ModelConfig | EncoderConfig:
    """The shape of a model that is to give vectors. Raises BadCheckpoint."""
    if is_encoder(checkpoint):
        return encoder_config(checkpoint)
    config = config_from_checkpoint(body_of(checkpoint))
    said = [key for key in _sees_ahead_keys(checkpoint) if checkpoint.metadata.get(key) is (key != _CAUSAL_KEY)]
    if not said:
        return config
    windows = any(layer.window for layer in config.layers) and said == [_CAUSAL_KEY]
    own = any(layer.heads is not None or layer.kv_layer is not None for layer in config.layers)
    if config.latent is not None or config.mixer is not None or windows or own:
        raise BadCheckpoint(
            f"{checkpoint.path}: {said[0]} does not go with latent attention, states, windows or layers of own heads."
        )
    layers = (replace(layer, window=layer.window // 2 + 1 if layer.window else 0) for layer in config.layers)
    return replace(config, is_causal=False, layers=tuple(layers))


def is_bare_decoder(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is the body of a known decoder without a language head, with a classifier or without."""
    if checkpoint.kind != "hf":
        return bool(scores_with(checkpoint, None))
    return _whole(checkpoint) not in (None, named_architecture(checkpoint.metadata))


def load_vector_model(
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    max_model_len: int,
    block_size: int = 16,
    kv_dtype: str = "f16",
    quantization: str | None = None,
    progress: Progress | None = None,
) -> VectorModel:
    """As registry.load_model, of a model that is to give vectors."""
    sentence = read_sentence_config(checkpoint.path) if checkpoint.kind == "hf" else None
    if is_encoder(checkpoint):
        return _load_encoder(checkpoint, ops, max_model_len, quantization, progress, sentence)
    config = vector_config(checkpoint)
    assert isinstance(config, ModelConfig), config
    if not config.is_causal:
        return _load_seeing_ahead(checkpoint, config, ops, max_model_len, quantization, progress, sentence)
    model = load_model(
        body_of(checkpoint),
        ops,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_dtype=kv_dtype,
        quantization=quantization,
        progress=progress,
    )

    def forward(ops: ForwardOps, pools: Sequence[Any], batch: Any) -> Array:
        kvs = layer_kvs(model.kv_groups, pools, model.config)
        return decoder.hidden(ops, model.config, model.weights, model.ropes, kvs, batch)

    head = load_head(checkpoint, sentence, model.config.width, ops)
    return VectorModel(
        model.config,
        forward,
        model.config.width if head is None else head.output_width,
        model.kv_groups,
        model.num_bytes + (0 if head is None else head.num_bytes),
        rope_digest=model.rope_digest,
        head=head,
        head_pools="last",
    )


def _load_seeing_ahead(
    checkpoint: Checkpoint,
    config: ModelConfig,
    ops: Ops,
    max_model_len: int,
    quantization: str | None,
    progress: Progress | None,
    sentence: SentenceConfig | None,
) -> VectorModel:
    weights = load_weights(body_of(checkpoint), config, ops, quantization=quantization, progress=progress)
    ropes, rope_digest, table_bytes = load_ropes(config, ops, max_model_len)
    head = load_head(checkpoint, sentence, config.width, ops)

    def forward(ops: ForwardOps, pools: Sequence[Any], batch: Any) -> Array:
        return decoder.hidden(ops, config, weights, ropes, [LayerKV((pools[0], 0))] * config.num_layers, batch)

    return VectorModel(
        config,
        forward,
        config.width if head is None else head.output_width,
        (KVGroup("step", 1, config.num_kv_heads, config.head_dim, STEP_BLOCK, "f32"),),
        weights.num_bytes + table_bytes + (0 if head is None else head.num_bytes),
        rope_digest=rope_digest,
        keeps_kv=False,
        head=head,
        head_pools="last",
    )


def _load_encoder(
    checkpoint: Checkpoint,
    ops: Ops,
    max_model_len: int,
    quantization: str | None,
    progress: Progress | None,
    sentence: SentenceConfig | None,
) -> VectorModel:
    config = encoder_config(checkpoint)
    weights = load_encoder_weights(checkpoint, config, ops, quantization=quantization, progress=progress)
    tables = {
        rope: ops.vector(rope_table(rope_frequencies(rope, config.head_dim, max_model_len), max_model_len))
        for rope in dict.fromkeys(layer.rope for layer in config.layers)
        if rope is not None
    }
    ropes = [None if layer.rope is None else tables[layer.rope] for layer in config.layers]

    def forward(ops: ForwardOps, pools: Sequence[Any], batch: Any) -> Array:
        return encoder.hidden(ops, config, weights, ropes, pools[0], batch)

    def score(ops: ForwardOps, pooled_SD: Array) -> Array:
        return encoder.score(ops, config, weights, pooled_SD)

    dense = None if config.has_head else load_head(checkpoint, sentence, config.width, ops)
    return VectorModel(
        config,
        forward,
        config.output_width if dense is None else dense.output_width,
        (KVGroup("step", 1, config.num_heads, config.head_dim, STEP_BLOCK, "f32"),),
        weights.num_bytes + sum(table.nbytes for table in tables.values()) + (0 if dense is None else dense.num_bytes),
        num_places=config.num_places,
        num_types=config.num_types,
        keeps_kv=False,
        head=score if config.has_head else dense,
        head_pools=config.score_pooling,
    )


def body_of(checkpoint: Checkpoint) -> Checkpoint:
    """The decoder in `checkpoint` as a language model whose head is its embeddings: its own head is not needed."""
    checkpoint = without_head(checkpoint)
    if checkpoint.kind != "hf":
        head = f"{GLOBAL_NAMES['gguf']['head']}.weight"
        tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != head}
        return replace(checkpoint, tensors=tensors)
    metadata, tensors = dict(checkpoint.metadata), dict(checkpoint.tensors)
    for key in _sees_ahead_keys(checkpoint):
        metadata.pop(key, None)
    metadata["architectures"] = [_whole(checkpoint) or named_architecture(checkpoint.metadata)]
    tensors.pop(f"{GLOBAL_NAMES['hf']['head']}.weight", None)
    metadata["tie_word_embeddings"] = True
    return replace(checkpoint, metadata=metadata, tensors=tensors)


def _sees_ahead_keys(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Keys of its config.json by which a decoder's tokens may see ahead: `is_causal`, off, and its family's, on."""
    family = None if checkpoint.kind != "hf" else hf_family(_whole(checkpoint) or "")
    return () if family is None else tuple(filter(None, (_CAUSAL_KEY, family.sees_ahead_key)))


def _whole(checkpoint: Checkpoint) -> str | None:
    """The architecture of the language model that the checkpoint is, or is the body of."""
    architecture = named_architecture(checkpoint.metadata)
    whole = architecture.removesuffix(CLASSIFIER).removesuffix("Model").removesuffix("Text") + _CAUSAL
    names = (architecture, whole)
    ours = [name for name in names if name in HF_FAMILIES]
    return next((name for name in ours or names if hf_family(name) is not None), None)
