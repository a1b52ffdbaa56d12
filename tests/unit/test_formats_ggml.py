"""Decoding ggml blocks: equal, bit for bit, to the gguf package's reference on random blocks of every kind."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats import ggml
from tokenmill.formats.tensor import BLOCK_LAYOUT

KINDS = [
    *("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs"),
    *("mxfp4", "nvfp4", "tq1_0", "tq2_0"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_reference(kind: str) -> None:
    """All bit patterns are legal blocks, so random bytes reach every code and every scale."""
    gguf = pytest.importorskip("gguf")
    from gguf.quants import dequantize

    block_values, block_bytes = BLOCK_LAYOUT[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (2000, block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(blocks, gguf.GGMLQuantizationType[kind.upper()])
        got = ggml.dequantise(kind, memoryview(blocks.tobytes()), 2000 * block_values)
    assert got.dtype == np.float32 and got.shape == (2000 * block_values,)
    assert np.array_equal(got, expected.astype(np.float32).reshape(-1), equal_nan=True)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding a few blocks at a time gives what decoding all at once gives."""
    blocks = np.random.default_rng(2).integers(0, 120, (37, 144), dtype=np.uint8)
    whole = ggml.dequantise("q4_k", blocks, 37 * 256)
    monkeypatch.setattr(ggml, "_CHUNK_BYTES", 1000)
    assert np.array_equal(ggml.dequantise("q4_k", blocks, 37 * 256), whole)


def test_hand_made_blocks() -> None:
    """Two blocks whose values can be worked out on paper."""
    scale, minimum = np.float16(0.5).tobytes(), np.float16(-1).tobytes()
    codes = bytes(i | (15 - i) << 4 for i in range(16))
    q4_1 = ggml.dequantise("q4_1", scale + minimum + codes, 32)
    assert q4_1.tolist() == [0.5 * i - 1 for i in range(16)] + [0.5 * (15 - i) - 1 for i in range(16)]
    q8_0 = ggml.dequantise("q8_0", scale + np.arange(-16, 16, dtype=np.int8).tobytes(), 32)
    assert q8_0.tolist() == [0.5 * i for i in range(-16, 16)]


@pytest.mark.parametrize("kind", ["q1_0", "nonsense"])
def test_unsupported_kinds_are_named(kind: str) -> None:
    with pytest.raises(BadCheckpoint, match=kind):
        ggml.dequantise(kind, b"", 0)


def test_wrong_sizes_are_programmer_errors() -> None:
    with pytest.raises(AssertionError):
        ggml.dequantise("q4_0", bytes(17), 32)
    with pytest.raises(AssertionError):
        ggml.dequantise("q4_0", bytes(18), 33)
