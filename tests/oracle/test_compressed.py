"""Every stored form of the compressed-tensors package reads as the package itself reads it.

The goldens hold what releases 0.10 and 0.20 stored and what they made of it again (make_compressed_goldens.py).
Tolerance: their scales and products are rounded to other types than ours on the way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import Case
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from test_families import TOLERANCE, make_model, our_logits, random_tokens, their_logits

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.integers import IntegerMatrix, expanded, read_quantised
from tokenmill.formats.quantised import QuantisedTensor
from tokenmill.formats.quantization_config import join_quantised
from tokenmill.formats.safetensors import open_safetensors
from tokenmill.formats.tensor import Tensor
from tokenmill.models.repack import packed_kind, raw_matrix
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_weights import dequantise as dequantise_raw

GOLDENS = Path(__file__).with_name("compressed_goldens.safetensors")
TENSORS = open_safetensors(GOLDENS)
with safe_open(GOLDENS, "np") as _file:
    SETTINGS: dict[str, Any] = json.loads(_file.metadata()["settings"])


def parts_of(name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}/"): tensor for key, tensor in TENSORS.items() if key.startswith(f"{name}/")}


@pytest.mark.parametrize("name", SETTINGS)
def test_form(name: str) -> None:
    parts = parts_of(name)
    stated = parts.pop("m.expected")
    expected = np.frombuffer(stated.data, np.float32).reshape(stated.shape)
    (joined,) = join_quantised(parts, {"quantization_config": SETTINGS[name]}).values()
    assert isinstance(joined, QuantisedTensor)
    raw = raw_matrix(joined)
    assert raw.kind in packed_kind(joined)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(dequantise_raw(raw), expected, atol=2.0**-8 * largest)
    if joined.layout == "sparse":
        assert np.array_equal(dequantise_raw(raw), expected), "nothing is rounded"
        assert np.count_nonzero(expanded(joined)) <= expected.size
        return
    read = read_quantised(joined)
    values = read.values() if isinstance(read, IntegerMatrix) else read
    np.testing.assert_allclose(values, expected, atol=2.0**-8 * largest)


def test_a_sparse_folder_has_the_dense_models_logits(tmp_path: Path) -> None:
    """A small Llama pruned two of four, as transformers runs it dense and we from values and masks."""
    case = Case("pruned", "Llama", {"tie_word_embeddings": False})
    kind = type(make_model(case, tmp_path))
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    stored: dict[str, np.ndarray] = {}
    for name, values in weights.items():
        stored[name] = values
        if "_proj." not in name:
            continue
        order = np.abs(values).reshape(-1, 4).argsort(axis=1)
        there = np.zeros((values.size // 4, 4), bool)
        np.put_along_axis(there, order[:, 2:], True, axis=1)
        there = there.reshape(values.shape)
        weights[name] = np.where(there, values, 0)
        module = name.removesuffix(".weight")
        del stored[name]
        stored[f"{module}.compressed"] = values[there].reshape(len(values), -1)
        stored[f"{module}.bitmask"] = np.packbits(there, axis=1, bitorder="little")
        stored[f"{module}.shape"] = np.array(values.shape).reshape(2, 1)
    save_file(weights, file, {"format": "pt"})
    theirs = kind.from_pretrained(tmp_path, dtype="float32", attn_implementation="eager").eval()
    tokens = random_tokens(2, 40)
    expected = their_logits(theirs, tokens)
    save_file(stored, file)
    config = json.loads((tmp_path / "config.json").read_text())
    sparsity = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "sparsity_config": sparsity}
    (tmp_path / "config.json").write_text(json.dumps(config))
    got = our_logits(ReferenceOps(exact_activations=True), tmp_path, 64, tokens)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE * np.abs(expected).max())


def test_block_scales_are_not_taken_for_those_of_groups() -> None:
    """As many rows of scales as outputs would fit either way: the scheme tells."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 126, (1, 64)).astype(np.uint8)
    scales = rng.uniform(0.1, 1, (1, 2)).astype(np.float32)
    parts = {
        "m.weight": Tensor("m.weight", "f8_e4m3", (1, 64), memoryview(codes.tobytes())),
        "m.weight_scale": Tensor("m.weight_scale", "f32", (1, 2), memoryview(scales.tobytes())),
    }
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 48]}
    config = {"quantization_config": {"config_groups": {"group_0": {"weights": weights}}}}
    (joined,) = join_quantised(parts, config).values()
    one, other = (dequantise_raw(raw_matrix(joined))[0, columns] for columns in (slice(0, 48), slice(48, 64)))
    (plain,) = join_quantised(parts, {"quantization_config": {"format": "float-quantized"}}).values()
    grouped = dequantise_raw(raw_matrix(plain))[0]
    np.testing.assert_allclose(one[:32], grouped[:32], rtol=2e-3)
    np.testing.assert_allclose(one[32:], grouped[32:48] * scales[0, 0] / scales[0, 1], rtol=2e-3)
    np.testing.assert_allclose(other, grouped[48:], rtol=2e-3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        ({"sparsity_config": {"format": "marlin-24"}}, "'marlin-24'"),
        ({"format": "mxfp6-pack-quantized"}, "'mxfp6-pack-quantized' is not supported .supported: .*nvfp4"),
        ({"config_groups": {"group_0": {"format": "marlin-24"}}}, "'marlin-24'"),
    ],
)
def test_what_changes_the_meaning_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(BadCheckpoint, match=named):
        join_quantised({}, {"quantization_config": {"quant_method": "compressed-tensors", **settings}})


@pytest.mark.parametrize(
    "settings", [{"transform_config": {}}, {"sparsity_config": {"format": "dense"}}, {"format": "dense"}]
)
def test_what_says_nothing_is_not(settings: dict[str, Any]) -> None:
    assert join_quantised({}, {"quantization_config": {"quant_method": "compressed-tensors", **settings}}) == {}


@pytest.mark.parametrize(
    ("name", "drop", "named"),
    [
        ("sparse-bitmask", "m.bitmask", "'bitmask' of its compressed-tensors form is missing"),
        ("nvfp4-pack-quantized", "m.weight_scale", "'weight_scale' of its"),
        ("nvfp4-pack-quantized", "m.weight_global_scale", "instead of u8"),
        ("pack-quantized of 3 bits", "m.weight_shape", "'weight_shape' of its"),
    ],
)
def test_missing_parts_are_named(name: str, drop: str, named: str) -> None:
    parts = parts_of(name)
    del parts[drop], parts["m.expected"]
    with pytest.raises(BadCheckpoint, match=named):
        join_quantised(parts, {"quantization_config": SETTINGS[name]})


def test_a_mask_that_miscounts_is_refused() -> None:
    parts = parts_of("sparse-bitmask")
    mask = parts["m.bitmask"]
    parts["m.bitmask"] = Tensor(mask.name, mask.kind, mask.shape, memoryview(bytes(len(mask.data))))
    del parts["m.expected"]
    (joined,) = join_quantised(parts, {"quantization_config": SETTINGS["sparse-bitmask"]}).values()
    with pytest.raises(BadCheckpoint, match="its bitmask does not count the"):
        raw_matrix(joined)
