"""What other tools quantised and stored reads as they themselves read it.

The goldens hold what each tool stored of a random matrix and what it made of it again (make_quantised_goldens.py), in
float16. Tolerance: scales and products are rounded to float16 on the way, by them or by us.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.ggml import dequantise
from tokenmill.formats.integers import IntegerMatrix, read_quantised
from tokenmill.formats.joining import join_quantised
from tokenmill.formats.quantised import QuantisedTensor
from tokenmill.formats.safetensors import open_safetensors
from tokenmill.formats.tensor import Tensor
from tokenmill.models.repack import packed_kind, raw_matrix
from tokenmill.ops.reference_weights import dequantise as dequantise_raw

GOLDENS = Path(__file__).with_name("quantised_goldens.safetensors")
TENSORS = open_safetensors(GOLDENS)
with safe_open(GOLDENS, "np") as _file:
    SETTINGS: dict[str, Any] = json.loads(_file.metadata()["settings"])


def parts_of(name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}/"): tensor for key, tensor in TENSORS.items() if key.startswith(f"{name}/")}


def joined(parts: dict[str, Tensor], settings: dict[str, Any]) -> QuantisedTensor:
    (one,) = join_quantised(parts, {"quantization_config": settings}).values()
    assert isinstance(one, QuantisedTensor)
    return one


@pytest.mark.parametrize("name", SETTINGS)
def test_form(name: str) -> None:
    parts = parts_of(name)
    stated = parts.pop("m.expected")
    expected = dequantise(stated.kind, stated.data, stated.num_values).reshape(stated.shape)
    matrix = joined(parts, SETTINGS[name])
    assert matrix.shape == stated.shape
    raw, read = raw_matrix(matrix), read_quantised(matrix)
    assert raw.kind in packed_kind(matrix)
    values = read.values() if isinstance(read, IntegerMatrix) else read
    largest = np.abs(expected).max()
    np.testing.assert_allclose(values, expected, atol=2.0**-10 * largest)
    np.testing.assert_allclose(dequantise_raw(raw), expected, atol=2.0**-10 * largest)


def test_older_settings_of_bitsandbytes_name_no_method() -> None:
    name = "bitsandbytes nf4"
    parts = parts_of(name)
    del parts["m.expected"]
    settings = {key: value for key, value in SETTINGS[name].items() if key != "quant_method"}
    assert joined(parts, settings).kind == "bitsandbytes nf4"


STATE = {"quant_type": "nf4", "blocksize": 32, "shape": [24, 360]}


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("bitsandbytes nf4", {"weight.absmax": None}, "'weight.absmax' of its bitsandbytes form is missing"),
        ("bitsandbytes nf4", {"weight.quant_state.bitsandbytes__nf4": None}, "quant_state.bitsandbytes__nf4' of its"),
        ("bitsandbytes nf4", {"state": STATE | {"shape": [25, 360]}}, "does not hold 9000 codes of 4 bits"),
        ("bitsandbytes nf4", {"state": STATE | {"blocksize": 0}}, r"offset \(\[24, 360\], 0, None, 0.0\)"),
        ("bitsandbytes nf4", {"state": STATE | {"shape": [24, 36, 10]}}, r"offset \(\[24, 36, 10\]"),
        ("bitsandbytes nf4", {"state": STATE | {"blocksize": 16}}, r"m.weight.absmax is f32 \(270,\) instead of"),
        ("bitsandbytes nf4", {"state": STATE | {"nested_blocksize": 0}}, r"360\], 32, 0, 0.0\)"),
        ("bitsandbytes nf4", {"state": [1]}, "does not hold a JSON object"),
        ("bitsandbytes nf4 with nested scales", {"weight.nested_quant_map": None}, "'weight.nested_quant_map' of its"),
        ("bitsandbytes 8-bit", {"weight_format": Tensor("f", "u8", (), memoryview(b"\2"))}, "weight_format"),
    ],
)
def test_damage_is_named(name: str, change: dict[str, Any], named: str) -> None:
    parts = parts_of(name)
    del parts["m.expected"]
    for suffix, part in change.items():
        if suffix == "state":
            text = json.dumps(part).encode()
            suffix = "weight.quant_state.bitsandbytes__nf4"
            part = Tensor(f"m.{suffix}", "u8", (len(text),), memoryview(text))
        parts.pop(f"m.{suffix}")
        if part is not None:
            parts[f"m.{suffix}"] = part
    with pytest.raises(BadCheckpoint, match=named):
        joined(parts, SETTINGS[name])
