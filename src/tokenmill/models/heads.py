"""What is computed of pooled states beyond the model itself: vectors of another width, or a score.

dense modules      of a sentence-transformers folder, behind the pooling
score              the linear of a decoder that classifies the state of a text's last token (`score.weight`)
logits of tokens   a language model whose logit of one token, less that of another, is the score (sentence-
                   transformers' LogitScore; Qwen3-Reranker's "yes" and "no", arXiv 2506.05176): the same as a
                   linear, whose row is the difference of two rows of its head
cls.output         the same in a GGUF file, which holds the two rows

S pooled sequences  D model width  N outputs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.config_keys import named_architecture
from ..formats.ggml import dequantise
from ..formats.quantised import QuantisedTensor
from ..formats.safetensors import open_safetensors
from ..formats.sentence_transformers import DenseModule, LogitScore, SentenceConfig
from ..formats.tensor import Tensor
from ..ops.api import Array, Ops, RawTensor
from ..ops.forward import ForwardOps
from .repack import DENSE_KINDS, raw_matrix
from .tensor_names import GLOBAL_NAMES
from .weights import Linear

CLASSIFIER = "ForSequenceClassification"
_SCORE = "score.weight"
_GGUF_ROWS = "cls.output.weight"
_IDENTITY = "Identity"


@dataclass(frozen=True, slots=True)
class Head:
    """layers: (linear, "" or "tanh") one upon the other, from the model's width to output_width. is_score: what comes
    out is a score, of the last token's state; else a vector, however states are pooled."""

    layers: tuple[tuple[Linear, str], ...]
    output_width: int
    is_score: bool
    num_bytes: int

    def __call__(self, ops: ForwardOps, pooled_SD: Array) -> Array:
        """[S, output_width]"""
        x = pooled_SD
        for linear, activation in self.layers:
            x = ops.linear(x, linear.weight)
            x = x if linear.bias is None else ops.add_bias(x, linear.bias)
            x = ops.soft_cap(x, 1.0) if activation == "tanh" else x
        return x


def scores_with(checkpoint: Checkpoint, sentence: SentenceConfig | None) -> str:
    """What makes a score of a decoder's states, in words; "" where the decoder gives none. Raises BadCheckpoint for a
    classifier that does something else."""
    if checkpoint.kind == "gguf":
        return "the file's classifier" if _GGUF_ROWS in checkpoint.tensors else ""
    if named_architecture(checkpoint.metadata).endswith(CLASSIFIER):
        one_label(checkpoint.metadata, str(checkpoint.path))
        return "a classifier"
    return "the model's modules.json" if sentence is not None and sentence.logit_score is not None else ""


def score_activation(metadata: Mapping[str, Any], sentence: SentenceConfig | None) -> str:
    """What sentence-transformers puts behind a score: the sigmoid, unless the model's files say that there is
    nothing."""
    newer = metadata.get("sentence_transformers")
    name = newer.get("activation_fn") if isinstance(newer, dict) else None
    name = name or metadata.get("sbert_ce_default_activation_function")
    name = name or ("" if sentence is None else sentence.activation)
    return "" if str(name).endswith(_IDENTITY) else "sigmoid"


def one_label(metadata: Mapping[str, Any], where: str) -> None:
    """Raises BadCheckpoint for a classifier of several labels, or none."""
    labels = metadata.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else metadata.get("num_labels", 2)
    if num_labels != 1:
        raise BadCheckpoint(
            f"{where}: a classifier of {num_labels} labels is not supported; one that scores has one label."
        )


def without_head(checkpoint: Checkpoint) -> Checkpoint:
    """The same without the tensors of a decoder's score."""
    tensors = {name: each for name, each in checkpoint.tensors.items() if name not in (_SCORE, _GGUF_ROWS)}
    return replace(checkpoint, tensors=tensors)


def load_head(checkpoint: Checkpoint, sentence: SentenceConfig | None, width: int, ops: Ops) -> Head | None:
    """The head behind a model of this width; of an encoder, one behind what the encoder itself has. Weights stay as
    they are stored. Raises BadCheckpoint."""
    if scores_with(checkpoint, sentence):
        row = ops.pack([_score_row(checkpoint, sentence, width)])
        return Head(((Linear(row, None), ""),), 1, True, row.num_bytes)
    if sentence is None or not sentence.dense:
        return None
    layers, num_bytes = [], 0
    for module in sentence.dense:
        if module.in_width != width:
            raise BadCheckpoint(f"{module.folder} takes {module.in_width} values, not the {width} that come.")
        linear = _dense(module, ops)
        num_bytes += linear.weight.num_bytes
        layers.append((linear, module.activation))
        width = module.out_width
    return Head(tuple(layers), width, False, num_bytes)


def _dense(module: DenseModule, ops: Ops) -> Linear:
    tensors = open_safetensors(module.folder)
    weight, bias = tensors.pop("linear.weight", None), tensors.pop("linear.bias", None)
    shape = (module.out_width, module.in_width)
    if weight is None or weight.shape != shape or tensors or (bias is None) == module.has_bias:
        raise BadCheckpoint(f"{module.folder} does not hold linear.weight of {shape} and what its config.json says.")
    if bias is None:
        return Linear(ops.pack([raw_matrix(weight, ops)]), None)
    values = dequantise(bias.kind, bias.data, bias.num_values)
    return Linear(ops.pack([raw_matrix(weight, ops)]), ops.vector(values))


def _score_row(checkpoint: Checkpoint, sentence: SentenceConfig | None, width: int) -> RawTensor:
    where, tensors = str(checkpoint.path), checkpoint.tensors
    if checkpoint.kind == "gguf":
        rows = tensors[_GGUF_ROWS]
        if tuple(rows.shape) != (2, width) or isinstance(rows, QuantisedTensor):
            raise BadCheckpoint(f"{where}: {_GGUF_ROWS} must be two rows of {width}, as of yes and no.")
        return _difference(rows, LogitScore(0, 1))
    if sentence is not None and sentence.logit_score is not None:
        names = [f"{GLOBAL_NAMES['hf'][role]}.weight" for role in ("head", "embed")]
        head = next((tensors[name] for name in names if name in tensors), None)
        if not isinstance(head, Tensor) or head.kind not in DENSE_KINDS or head.shape[1:] != (width,):
            raise BadCheckpoint(f"{where}: scores of logits need a head of {width} that is stored in 16 or 32 bits.")
        return _difference(head, sentence.logit_score)
    score = tensors.get(_SCORE)
    if score is None or tuple(score.shape) != (1, width):
        raise BadCheckpoint(f"{where} has no {_SCORE} of one row of {width}.")
    return raw_matrix(score)


def _difference(rows: Tensor, tokens: LogitScore) -> RawTensor:
    def row(token: int) -> np.ndarray:
        num_rows, width = rows.shape
        if token >= num_rows:
            raise BadCheckpoint(f"The token {token} of a score is beyond the vocabulary of {num_rows}.")
        size = len(rows.data) // num_rows
        return dequantise(rows.kind, rows.data[token * size : (token + 1) * size], width)

    values = row(tokens.true_token)
    if tokens.false_token is not None:
        values = values - row(tokens.false_token)
    return RawTensor("f32", 1, len(values), np.ascontiguousarray(values, np.float32).view(np.uint8))
