"""What a user should know of a model before it answers: what of its files or of a setting has no effect, or costs.

A warning is no error: the model runs as it should. `serve` prints warnings with the plan, `generate` on standard error,
`inspect` with the model's facts.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..formats.checkpoint import Checkpoint
from ..formats.tensor import Tensor
from ..models.encoder_config import is_encoder
from ..models.repack import DENSE_KINDS
from ..models.unsupported_keys import positions_left_out, unread_keys

NOTE = "note"
"""The name of a warning among facts."""

_FOUR_BITS = ("q4_0", "q4_1")


def model_warnings(checkpoint: Checkpoint, quantization: str | None) -> Iterator[str]:
    """Sentences without a full stop, most important first. quantization: the kind that was asked for."""
    if quantization is not None and not _is_any_dense(checkpoint):
        yield f"--quantization {quantization} changes nothing: no matrix of this model is stored in 16 or 32 bits"
    elif quantization in _FOUR_BITS and is_encoder(checkpoint):
        yield f"with {quantization} the vectors of an encoder move (cosine near 0.95 to its own); q8_0 keeps them"
    left_out = positions_left_out(checkpoint)
    if left_out is not None:
        yield (
            "the longest context is {} tokens of {}: an indexer that chooses among more is not supported, and up to"
            " there it chooses all".format(*left_out)
        )
    unread = unread_keys(checkpoint)
    if unread:
        yield f"config.json says {', '.join(unread)}, which models of its type do not read: without effect"


def _is_any_dense(checkpoint: Checkpoint) -> bool:
    return any(
        isinstance(tensor, Tensor) and len(tensor.shape) == 2 and tensor.kind in DENSE_KINDS
        for tensor in checkpoint.tensors.values()
    )
