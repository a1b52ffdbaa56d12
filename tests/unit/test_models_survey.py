"""Counts and sizes of a surveyed checkpoint, and what `inspect` prints of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tiny import tiny_checkpoint
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.survey import survey
from tokenmill.models.weights import load_weights
from tokenmill.ops.native import NativeOps, available


@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("tied", [False, True])
def test_counts_every_parameter_once(kind: str, tied: bool) -> None:
    checkpoint = tiny_checkpoint(kind=kind, tied=tied)
    found = survey(checkpoint)
    assert found.num_parameters == sum(tensor.num_values for tensor in checkpoint.tensors.values())
    assert found.packed_bytes == 4 * found.num_parameters
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2  # layers, k and v, heads, channels, float16
    parts = {"embeddings", "attention", "FFN", "norms and biases"} | (set() if tied else {"head"})
    assert {group.part for group in found.groups} == parts


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize("quantization", [None, "q4_1", "bf16"])
def test_foretells_what_is_packed(quantization: str | None) -> None:
    """The estimate is what the vector unit's kernels then hold (rows of these matrices fill whole tiles)."""
    checkpoint = tiny_checkpoint()
    ops = NativeOps(1, "scalar")
    weights = load_weights(checkpoint, config_from_checkpoint(checkpoint), ops, quantization=quantization)
    assert survey(checkpoint, quantization=quantization).packed_bytes == weights.num_bytes
    ops.close()


def test_a_body_without_its_prefix_is_counted_and_read_whole(tmp_path: Path) -> None:
    """Folders of vector models name a whole model and hold the tensors of its body."""
    whole = tiny_checkpoint(tied=True)
    tensors = {
        name.removeprefix("model."): np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
        for name, tensor in whole.tensors.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(whole.metadata))
    checkpoint = open_checkpoint(tmp_path)
    assert survey(checkpoint).num_parameters == survey(whole).num_parameters > 0
    assert checkpoint.tensors.keys() == whole.tensors.keys()
