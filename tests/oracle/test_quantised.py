"""What other tools quantised and stored reads as they themselves read it.

The goldens hold what each tool stored of a random matrix and what it made of it again (make_quantised_goldens.py), in
float16. Tolerance: scales and products are rounded to float16 on the way, by them or by us.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import Case
from safetensors import safe_open
from test_families import TOLERANCE, make_model, our_logits, random_tokens, their_logits

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.ggml import dequantise
from tokenmill.formats.integers import IntegerMatrix, read_quantised
from tokenmill.formats.quantised import QuantisedTensor
from tokenmill.formats.quantization_config import join_quantised
from tokenmill.formats.safetensors import open_safetensors
from tokenmill.formats.tensor import BLOCK_LAYOUT, Tensor
from tokenmill.models.repack import packed_kind, raw_matrix
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_weights import dequantise as dequantise_raw

torch = pytest.importorskip("torch", reason="the oracle needs torch")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="the oracle needs safetensors")

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


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_algo": "W4A8_AWQ"},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m": {"quant_algo": "W4A8_AWQ"}}},
    ],
)
def test_other_algorithms_of_modelopt_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint, match=r"quant_algo 'W4A8_AWQ' is not supported .supported: FP8, .*NVFP4"):
        join_quantised({}, {"quantization_config": {"quant_method": "modelopt", **settings}})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"packing_format": "auto_round:llm_compressor"},
            "packing_format 'auto_round:llm_compressor' is not supported",
        ),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp' of AutoRound is not supported"),
        ({"act_bits": 8}, "act_bits 8 of AutoRound"),
        ({"rotation_config": {"hadamard_type": "hadamard"}}, "rotation_config: matrices that were rotated"),
    ],
)
def test_what_changes_the_meaning_of_auto_rounds_matrices_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(BadCheckpoint, match=named):
        join_quantised({}, {"quantization_config": {"quant_method": "auto-round", **settings}})


def test_older_settings_of_auto_round() -> None:
    """They name its maker, and the packing by another key; bits of a matrix are seen from its tensors."""
    name = "auto-round auto_round:auto_gptq 3-bit with zeros"
    parts = parts_of(name)
    del parts["m.expected"]
    older = {"quant_method": "intel/auto-round", "backend": "auto_round:auto_gptq", "bits": 4}
    assert np.array_equal(raw_matrix(joined(parts, older)).data, raw_matrix(joined(parts, SETTINGS[name])).data)


def test_a_folder_whose_config_does_not_tell_of_modelopt(tmp_path: Path) -> None:
    """hf_quant_config.json does. Scales of activations and of the KV cache are left alone."""
    case = Case("modelopt", "Llama", {"tie_word_embeddings": False})
    kind = type(make_model(case, tmp_path))
    file = tmp_path / "model.safetensors"
    weights = safetensors_torch.load_file(file)
    stored: dict[str, Any] = {}
    for name, values in weights.items():
        stored[name] = values
        if "_proj." in name:
            module, scale = name.removesuffix(".weight"), values.abs().max() / 448
            stored[name] = (values / scale).to(torch.float8_e4m3fn)
            weights[name] = (stored[name].float() * scale).half().float()
            stored |= {f"{module}.weight_scale": scale, f"{module}.input_scale": torch.tensor(0.5)}
            if module.endswith(("k_proj", "v_proj")):
                stored[f"{module}.{module[-6]}_scale"] = torch.tensor(0.5)
    safetensors_torch.save_file(weights, file, {"format": "pt"})
    theirs = kind.from_pretrained(tmp_path, dtype="float32", attn_implementation="eager").eval()
    tokens = random_tokens(2, 40)
    expected = their_logits(theirs, tokens)
    safetensors_torch.save_file(stored, file)
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    got = our_logits(ReferenceOps(exact_activations=True), tmp_path, 64, tokens)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE * np.abs(expected).max())


BLOCK_SCALES = Tensor("m.weight_scale", "f32", (1, 1, 3, 1), memoryview(bytes(12)))
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
        ("bitsandbytes nf4", {"state": b"[" * 200_000}, "m.weight: "),
        ("bitsandbytes nf4 with nested scales", {"weight.nested_quant_map": None}, "'weight.nested_quant_map' of its"),
        ("auto-round auto_round 2-bit with zeros", {"qzeros": None}, "'qzeros' of its auto-round form is missing"),
        ("modelopt FP8", {"weight_scale": None}, "'weight_scale' of its modelopt form is missing"),
        ("modelopt NVFP4", {"weight_scale_2": None}, "m.weight_scale is f8_e4m3"),
        ("modelopt FP8 in blocks", {"weight_scale": BLOCK_SCALES}, r"instead of \(1, 1, 2, 1\)"),
        ("bitsandbytes 8-bit", {"weight_format": Tensor("f", "u8", (), memoryview(b"\2"))}, "weight_format"),
    ],
)
def test_damage_is_named(name: str, change: dict[str, Any], named: str) -> None:
    parts = parts_of(name)
    del parts["m.expected"]
    for suffix, part in change.items():
        if suffix == "state":
            text = part if isinstance(part, bytes) else json.dumps(part).encode()
            suffix = "weight.quant_state.bitsandbytes__nf4"
            part = Tensor(f"m.{suffix}", "u8", (len(text),), memoryview(text))
        parts.pop(f"m.{suffix}")
        if part is not None:
            parts[f"m.{suffix}"] = part
    with pytest.raises(BadCheckpoint, match=named):
        joined(parts, SETTINGS[name])


def test_a_run_that_is_longer_than_its_matrix_costs_no_more_than_the_matrix() -> None:
    text = json.dumps(STATE | {"blocksize": 10**15}).encode()
    parts = parts_of("bitsandbytes nf4")
    del parts["m.expected"]
    parts["m.weight.quant_state.bitsandbytes__nf4"] = Tensor("s", "u8", (len(text),), memoryview(text))
    parts["m.weight.absmax"] = Tensor("a", "f32", (1,), memoryview(np.ones(1, np.float32).tobytes()))
    values = read_quantised(joined(parts, SETTINGS["bitsandbytes nf4"]))
    assert isinstance(values, np.ndarray) and np.abs(values).max() == 1


def fp8_parts() -> dict[str, Tensor]:
    scales = Tensor("m.weight_scale_inv", "f32", (1, 1), memoryview(np.ones(1, np.float32).tobytes()))
    return {"m.weight": Tensor("m.weight", "f8_e4m3", (2, 3), memoryview(b"\x38" * 6)), "m.weight_scale_inv": scales}


def test_squares_that_are_larger_than_their_matrix_cost_no_more_than_the_matrix() -> None:
    values = read_quantised(joined(fp8_parts(), {"quant_method": "fp8", "weight_block_size": [10**15, 10**15]}))
    assert np.array_equal(values, np.ones((2, 3)))


def test_bits_of_a_group_that_are_written_as_a_float_are_read() -> None:
    words = np.array([[0x76543210]], "<u4")
    scales = Tensor("m.weight_scale", "f32", (1, 1), memoryview(np.ones(1, np.float32).tobytes()))
    shape = Tensor("m.weight_shape", "i64", (2,), memoryview(np.array([1, 8], "<i8").tobytes()))
    packed = Tensor("m.weight_packed", "i32", (1, 1), memoryview(words.tobytes()))
    parts = {part.name: part for part in (packed, scales, shape)}
    groups = {"group_0": {"weights": {"num_bits": 4.0}}}
    matrix = joined(parts, {"quant_method": "compressed-tensors", "config_groups": groups})
    values = read_quantised(matrix)
    assert isinstance(values, IntegerMatrix) and values.values().tolist() == [[*map(float, range(-8, 0))]]


STRANGE = (
    None, True, -1, 0, 3, 128, 10**30, 10**310, 0.5, float("nan"), float("inf"), "x", "auto_round", [], [0],
    [3, 10**30], [None, None], [float("inf"), 1], {}, {"m": 1},
)  # fmt: skip
FP8 = "fp8 in blocks"


def damaged(parts: dict[str, Tensor], settings: dict[str, Any], draw: random.Random) -> None:
    """One part gone, of another shape or kind, or with other bytes; or a setting that is another."""
    name = draw.choice(sorted(parts))
    part = parts[name]
    size = part.data.nbytes
    if name.rpartition(".")[2].startswith("bitsandbytes__") and draw.random() < 0.8:
        state = json.loads(bytes(part.data))
        state[draw.choice(sorted(state))] = draw.choice(STRANGE)
        text = json.dumps(state).encode()
        parts[name] = Tensor(name, "u8", (len(text),), memoryview(text))
        return
    what = draw.choice(("part", "shape", "kind", "bytes", "setting"))
    if what == "part":
        del parts[name]
    elif what == "shape":
        shape = draw.choice(((*part.shape, 1), part.shape[::-1], (part.num_values,), part.shape[1:], ()))
        count = math.prod(shape) * size // max(part.num_values, 1)
        parts[name] = Tensor(name, part.kind, shape, part.data[:count])
    elif what == "kind":
        width = size // max(part.num_values, 1)
        kind = draw.choice([kind for kind, layout in BLOCK_LAYOUT.items() if layout == (1, width)])
        parts[name] = Tensor(name, kind, part.shape, part.data)
    elif what == "bytes":
        parts[name] = Tensor(name, part.kind, part.shape, memoryview(draw.randbytes(size)))
    else:
        settings[draw.choice([key for key in settings if key != "quant_method"])] = draw.choice(STRANGE)


@pytest.mark.parametrize("name", [*SETTINGS, FP8])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_whatever_is_damaged_is_read_or_refused(name: str) -> None:
    for seed in range(200):
        draw = random.Random(seed)
        if name == FP8:
            parts, settings = fp8_parts(), {"quant_method": "fp8", "weight_block_size": [2, 3]}
        else:
            parts, settings = parts_of(name), dict(SETTINGS[name])
            del parts["m.expected"]
        for _ in range(draw.choice((1, 1, 2))):
            if parts:
                damaged(parts, settings, draw)
        try:
            found = join_quantised(parts, {"quantization_config": settings})
            for one in found.values():
                if isinstance(one, QuantisedTensor):
                    raw_matrix(one)
        except BadCheckpoint:
            pass
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}") from error
