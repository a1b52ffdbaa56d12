"""Notes say what has no effect, and are silent otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tiny import tiny_checkpoint
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.node.model_warnings import model_warnings


def test_a_quantization_that_changes_nothing_says_so() -> None:
    checkpoint = tiny_checkpoint(kind="gguf")
    assert list(model_warnings(checkpoint, None)) == list(model_warnings(checkpoint, "q4_0")) == []
    packed = {
        name: replace(tensor, kind="q8_0") if len(tensor.shape) == 2 else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    (note,) = model_warnings(replace(checkpoint, tensors=packed), "q4_0")
    assert note.startswith("--quantization q4_0 changes nothing")
    assert list(model_warnings(replace(checkpoint, tensors=packed), None)) == []


@pytest.mark.parametrize(("quantization", "warns"), [("q4_0", True), ("q4_1", True), ("q8_0", False), (None, False)])
def test_encoders_of_four_bits_are_warned_of(quantization: str | None, warns: bool) -> None:
    checkpoint = tiny_checkpoint()
    encoder = replace(checkpoint, metadata={"architectures": ["BertModel"], "model_type": "bert"})
    assert [("cosine" in note) for note in model_warnings(encoder, quantization)] == [True] * warns


def test_unknown_keys_of_a_config_are_named() -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.metadata |= {"head_scale": 2.0, "use_cache": True, "attention_dropout": None}
    (note,) = model_warnings(checkpoint, None)
    assert "head_scale" in note and "use_cache" not in note


def test_a_context_that_is_cut_is_told_of() -> None:
    """Where an indexer would choose among more positions than are served."""
    config = {"model_type": "glm_moe_dsa", "index_topk": 2048, "max_position_embeddings": 4096}
    (note,) = model_warnings(Checkpoint("hf", Path("x"), config, {}), None)
    assert "2048 tokens of 4096" in note
    assert list(model_warnings(Checkpoint("hf", Path("x"), config | {"index_topk": 4096}, {}), None)) == []
