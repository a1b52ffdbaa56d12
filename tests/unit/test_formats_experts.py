"""The experts of a GPT-OSS folder are taken apart into what each of them computes with, dense or of 4-bit floats, and
tensors that do not fit each other are refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.quantization_config import join_quantised
from tokenmill.formats.tensor import Tensor
from tokenmill.models.repack import packed_kind, raw_matrix
from tokenmill.ops.reference_weights import dequantise

E, K, F = 3, 64, 5
CONFIG = {"model_type": "gpt_oss"}
MXFP4 = CONFIG | {"quantization_config": {"quant_method": "mxfp4"}}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def tensors(**values: np.ndarray) -> dict[str, Tensor]:
    kinds = {"f4": "f32", "u2": "bf16", "u1": "u8"}
    return {
        f"m.experts.{name}": Tensor(
            f"m.experts.{name}", kinds[array.dtype.str[1:]], array.shape, memoryview(array.tobytes())
        )
        for name, array in values.items()
    } | {"m.router.weight": Tensor("m.router.weight", "f32", (1,), memoryview(bytes(4)))}


def test_dense_experts_have_their_inputs_last() -> None:
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 1 << 15, (E, K, 2 * F)).astype("<u2")
    bias = rng.standard_normal((E, 2 * F), np.float32)
    joined = join_quantised(tensors(gate_up_proj=stored, gate_up_proj_bias=bias), CONFIG)
    assert len(joined) == 2 * E + 1
    for expert in range(E):
        matrix = joined[f"m.experts.{expert}.gate_up_proj.weight"]
        raw = raw_matrix(matrix)
        assert (raw.kind, matrix.shape) == ("bf16", (2 * F, K)) and packed_kind(matrix) == "bf16"
        assert np.array_equal(raw.data.view("<u2").reshape(2 * F, K), stored[expert].T)
        assert bytes(joined[f"m.experts.{expert}.gate_up_proj.bias"].data) == bias[expert].tobytes()


def test_experts_of_4_bit_floats_mean_what_their_codes_say() -> None:
    """Two codes a byte, the lower first, and a power of two for each 32."""
    rng = np.random.default_rng(1)
    codes, exponents = rng.integers(0, 16, (E, F, K)), rng.integers(120, 130, (E, F, K // 32))
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(E, F, K // 32, 16)
    scales = exponents.astype(np.uint8)
    joined = join_quantised(tensors(down_proj_scales=scales, down_proj_blocks=blocks), MXFP4)
    values = E2M1[codes] * np.exp2(exponents - 127.0).repeat(32, axis=-1)
    for expert in range(E):
        matrix = joined[f"m.experts.{expert}.down_proj.weight"]
        raw = raw_matrix(matrix)
        assert raw.kind == packed_kind(matrix) and np.array_equal(dequantise(raw), values[expert])


def test_what_does_not_fit_is_refused_and_other_types_are_left_alone() -> None:
    blocks, scales = np.zeros((E, F, 2, 16), np.uint8), np.zeros((E, F, 2), np.uint8)
    wrong = [
        {"down_proj_blocks": blocks},
        {"down_proj_scales": scales},
        {"down_proj_blocks": blocks, "down_proj_scales": scales[:, :, :1]},
        {"down_proj_blocks": blocks[..., :8], "down_proj_scales": scales},
        {"down_proj": np.zeros((E, F), np.float32)},
        {"down_proj": np.zeros((5000, 1, 1), np.float32)},
    ]
    for given in wrong:
        with pytest.raises(BadCheckpoint, match="down_proj"):
            join_quantised(tensors(**given), MXFP4)
    given = tensors(down_proj=np.zeros((E, F), np.float32))
    assert join_quantised(given, {"model_type": "llama"}) == given
