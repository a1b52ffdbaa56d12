"""Counts and sizes of the summary of a checkpoint, and what `inspect` prints of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tiny import tiny_checkpoint
from tiny_moe import CONFIG, gpt_oss_config, moe_checkpoint, moe_config
from tokenmill.cli.inspect import as_json, layer_facts, router_words
from tokenmill.core.experts import touched
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.models import summary as surveying
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.moe import MERGED
from tokenmill.models.roles import active_share
from tokenmill.models.summary import model_summary
from tokenmill.models.weights import load_weights
from tokenmill.ops.api import SIGMOID, Routing
from tokenmill.ops.native import NativeOps, available


@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("tied", [False, True])
def test_counts_every_parameter_once(kind: str, tied: bool) -> None:
    checkpoint = tiny_checkpoint(kind=kind, tied=tied)
    found = model_summary(checkpoint)
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
    assert model_summary(checkpoint, quantization=quantization).packed_bytes == weights.num_bytes
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
    assert model_summary(checkpoint).num_parameters == model_summary(whole).num_parameters > 0
    assert checkpoint.tensors.keys() == whole.tensors.keys()


def test_a_mixture_of_experts_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token goes through 3 of 8 experts, a step of many rows through nearly all; the rest is read whole."""
    monkeypatch.setattr(surveying, "config_from_checkpoint", lambda checkpoint: checkpoint.metadata[CONFIG])
    config, paired = moe_config(shared_width=32), gpt_oss_config()
    checkpoint = moe_checkpoint(config)
    found = model_summary(checkpoint)
    routed = 2 * 8 * 3 * 32 * 64  # layers, experts, matrices, FFN, width
    total = sum(tensor.num_values for tensor in checkpoint.tensors.values())
    parts = {group.part: group.num_values for group in found.groups}
    assert parts["experts"] == routed and parts["shared experts"] == 2 * 3 * 32 * 64 and parts["router"] == 2 * 8 * 64
    assert found.num_parameters == total
    assert found.num_active_parameters == total - routed * 5 // 8
    assert active_share(config) == pytest.approx(found.num_active_parameters / total, rel=1e-3)
    assert active_share(paired) == pytest.approx(active_share(replace(paired, moe=replace(paired.moe, form=MERGED))))
    embeddings = 96 * 64
    for num_rows in (1, 16):
        share = touched(8, 3, num_rows) / 8
        read = total - embeddings + embeddings * num_rows / 96 - routed * (1 - share)
        assert found.bytes_read(num_rows) == pytest.approx(4 * read, abs=1)
    quantised = model_summary(checkpoint, quantization="q4_0")
    assert {group.part: group.packed for group in quantised.groups}["router"] == "f32", "it decides too much"
    body = as_json(found, "a path")
    assert body["num_active_parameters"] == found.num_active_parameters and body["experts"]["layers"] == [1, 2]
    assert json.loads(json.dumps(body)) == body


def test_layers_are_told_in_words() -> None:
    routing = Routing(256, 8, SIGMOID, num_groups=8, top_groups=4, group_score=2, scale=2.5)
    config = moe_config(routing, shared_width=64, choice_bias=True)
    facts = dict(layer_facts(config))
    assert facts["shape"] == "3 layers of 64, FFN 96 in 1 of them"
    assert facts["experts"] == "256 of FFN 32 in each of 2 layers, 8 for a token, and shared ones of 64 together"
    assert config.moe is not None and facts["router"] == router_words(config.moe)
    assert facts["router"] == (
        "the best 8 by the sigmoid of each, with a bias that weights do not see, from the 4 best of 8 groups by their"
        " best two, weights divided by their sum, times 2.5"
    )


@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_foretells_what_is_packed_of_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what pages take that each expert begins on."""
    monkeypatch.setattr(surveying, "config_from_checkpoint", lambda checkpoint: checkpoint.metadata[CONFIG])
    config = moe_config()
    checkpoint, ops = moe_checkpoint(config), NativeOps(1, "scalar")
    weights = load_weights(checkpoint, config, ops, quantization="q8_0")
    foretold = model_summary(checkpoint, quantization="q8_0").packed_bytes
    assert foretold <= weights.num_bytes <= foretold + 2 * 2 * 8 * 4096 + 2 * 2 * 4096
    ops.close()
