"""Matrices into and out of a latent space from every form that checkpoints have; adapters; layers that are not read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_formats_quantised import tensor
from test_lora_model import Running, close
from test_models_experts import awq, fp8, gptq, values_of

from adapters import merged, random_pairs, write_adapter
from tiny_latent import MODELS, latent_checkpoint
from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.formats.ggml import dequantise
from tokenmill.formats.quantization_config import join_quantised
from tokenmill.formats.tensor import Tensor
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.weights import LatentWeights, load_weights
from tokenmill.ops.reference import ReferenceOps

HEADS, NOPE, VALUE, LATENT = 4, 32, 32, 64
NAME = "model.layers.0.self_attn.kv_b_proj"


def loaded(checkpoint: Checkpoint, **how: Any) -> LatentWeights:
    latent = load_weights(checkpoint, config_from_checkpoint(checkpoint), ReferenceOps(), **how).layers[0].latent
    assert latent is not None
    return latent


def check(latent: LatentWeights, kv_b: np.ndarray, atol: float) -> None:
    """kv_b: [H * (nope + value), latent]"""
    for head, both in enumerate(kv_b.reshape(HEADS, NOPE + VALUE, LATENT)):
        np.testing.assert_allclose(values_of(latent.k_up, head), both[:NOPE].T, rtol=0, atol=atol * np.abs(kv_b).max())
        np.testing.assert_allclose(values_of(latent.v_up, head), both[NOPE:], rtol=0, atol=atol * np.abs(kv_b).max())


def kinds(latent: LatentWeights) -> tuple[str, str]:
    return latent.k_up.matrices[0].runs[0][1], latent.v_up.matrices[0].runs[0][1]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_dense_ones_lose_nothing(kind: str) -> None:
    checkpoint = latent_checkpoint()
    stored = np.frombuffer(checkpoint.tensors[f"{NAME}.weight"].data, np.float32)
    if kind == "bf16":
        data = (stored.view(np.uint32) >> 16).astype(np.uint16)
    else:
        data = stored.astype(kind.replace("f", "float"))
    shape = checkpoint.tensors[f"{NAME}.weight"].shape
    held = Tensor(f"{NAME}.weight", kind, shape, memoryview(data.view(np.uint8)))
    checkpoint.tensors[held.name] = held
    latent = loaded(checkpoint)
    check(latent, dequantise(kind, held.data, held.num_values).reshape(shape), 0)
    quantised = loaded(checkpoint, quantization="q8_0")
    assert kinds(quantised) == ("int8", "int8")
    check(quantised, dequantise(kind, held.data, held.num_values).reshape(shape), 0.01)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q5_1"])
def test_blocks(kind: str) -> None:
    """Rows of values keep their codes; those of keys, turned round, are float16."""
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(1).normal(size=(HEADS * (NOPE + VALUE), LATENT)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()])
    checkpoint = latent_checkpoint()
    held = Tensor(f"{NAME}.weight", kind, values.shape, memoryview(data.reshape(-1)))
    checkpoint.tensors[held.name] = held
    latent = loaded(checkpoint)
    assert kinds(latent) == ("f32", "int8")
    check(latent, dequantise(kind, held.data, values.size).reshape(values.shape), 2.0**-10)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (gptq, {"quant_method": "gptq", "bits": 4, "desc_act": True}),
        (awq, {"quant_method": "awq", "bits": 4}),
        (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ],
)
def test_quantised_by_other_tools(make: Any, settings: dict[str, Any]) -> None:
    """With act-order, whose columns are put in the order of the latent; with scales for squares, which borders of heads
    cut."""
    checkpoint = latent_checkpoint()
    del checkpoint.tensors[f"{NAME}.weight"]
    parts, wanted = make(NAME, (HEADS * (NOPE + VALUE), LATENT), np.random.default_rng(3))
    joined = join_quantised({**checkpoint.tensors, **parts}, {"quantization_config": settings})
    check(loaded(replace(checkpoint, tensors=joined)), wanted, 2.0**-9)


def test_layers_that_guess_further_ahead_are_not_read() -> None:
    """As DeepSeek-V3 has one behind its last; without the key there is one, too; what is no such layer is refused."""
    checkpoint = latent_checkpoint("V3")
    extra = {
        name.replace("layers.2.", "layers.3."): each for name, each in checkpoint.tensors.items() if "layers.2." in name
    }
    extra |= {
        f"model.layers.3.{name}.weight": tensor("x", np.ones((64, 64), np.float32))
        for name in ("eh_proj", "embed_tokens", "shared_head.head", "enorm")
    }
    both = {name: replace(each, name=name) for name, each in (checkpoint.tensors | extra).items()}
    for metadata in (checkpoint.metadata, checkpoint.metadata | {"num_nextn_predict_layers": 1}):
        loaded(replace(checkpoint, metadata=metadata, tensors=both))
    with pytest.raises(BadCheckpoint, match=r"unexpected model\.layers\.3\."):
        loaded(replace(checkpoint, metadata=checkpoint.metadata | {"num_nextn_predict_layers": 0}, tensors=both))


@pytest.mark.parametrize("name", ["V2", "V3"])
def test_adapters_change_attention(name: str, tmp_path: Path) -> None:
    """Queries, latents and the output: as if the change were in the weights. What makes keys and values of latents is
    no matrix that can be changed: it is in the queries."""
    base = latent_checkpoint(name)
    running = Running(ReferenceOps(), base)
    modules = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    pairs = random_pairs(base, modules=modules)
    assert len(pairs) == 3 * (4 if name == "V3" else 3)
    got = running.logits([running.load(write_adapter(tmp_path / "a", pairs)), 0])
    want = Running(ReferenceOps(), merged(base, tmp_path / "a"), lora=None).logits([0])[0]
    plain = Running(ReferenceOps(), base, lora=None).logits([0])[0]
    close(got[0], want)
    close(got[1], plain)
    assert np.abs(want - plain).max() > 0.1
    with pytest.raises(BadCheckpoint, match="kv_b_proj"):
        running.load(write_adapter(tmp_path / "b", random_pairs(base, modules=("kv_b_proj",))))


@pytest.mark.parametrize("name", MODELS)
def test_damaged_files_are_refused_by_name(name: str) -> None:
    checkpoint = latent_checkpoint(name)
    for each, shape in (
        (f"{NAME}.weight", (HEADS * (NOPE + VALUE), LATENT + 1)),
        (f"{NAME}.weight", (HEADS, NOPE + VALUE, LATENT)),
        ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", (64, 64)),
        ("model.layers.1.self_attn.kv_a_layernorm.weight", (7,)),
    ):
        hurt = {**checkpoint.tensors, each: tensor(each, np.ones(shape, np.float32))}
        with pytest.raises(BadCheckpoint, match=f"misshaped {each}"):
            loaded(replace(checkpoint, tensors=hurt))
    without = {each: held for each, held in checkpoint.tensors.items() if "kv_b_proj" not in each}
    with pytest.raises(BadCheckpoint, match="kv_b_proj"):
        loaded(replace(checkpoint, tensors=without))
