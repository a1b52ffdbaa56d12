"""The numpy backend against plainer statements of the same functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tokenmill.core.block import KV_DTYPES, KVGroup
from tokenmill.ops.api import NEVER, HeadGeometry, RawTensor, SampleBatch, StepBatch
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_sample import race_words
from tokenmill.ops.reference_weights import dequantise, round_activations

RNG = np.random.default_rng(0)


def _half(value: float) -> bytes:
    return np.float16(value).tobytes()


def _raw(kind: str, rows: list[bytes], num_cols: int) -> RawTensor:
    return RawTensor(kind, len(rows), num_cols, np.frombuffer(b"".join(rows), np.uint8))


def _dense(values: np.ndarray) -> RawTensor:
    values = np.ascontiguousarray(values, np.float32)
    return RawTensor("f32", *values.shape, values.reshape(-1).view(np.uint8))


def _q8_0(values: np.ndarray) -> RawTensor:
    rows = []
    for row in values:
        blocks = row.reshape(-1, 32)
        scales = np.abs(blocks).max(axis=1) / 127
        rows.append(
            b"".join(_half(d) + np.rint(b / d).astype(np.int8).tobytes() for d, b in zip(scales, blocks, strict=True))
        )
    return _raw("q8_0", rows, values.shape[1])


def test_dequantise_4_bit_blocks():
    """Byte j of a block holds value j low and value j + 16 high, with each kind's own offset."""
    nibbles = RNG.integers(0, 16, 32)
    packed = bytes(int(nibbles[j] | nibbles[j + 16] << 4) for j in range(16))
    q4_0 = dequantise(_raw("q4_0", [_half(0.5) + packed], 32))
    q4_1 = dequantise(_raw("q4_1", [_half(0.5) + _half(-3.0) + packed], 32))
    assert q4_0.tolist() == [[0.5 * (q - 8) for q in nibbles]]
    assert q4_1.tolist() == [[0.5 * q - 3 for q in nibbles]]


def test_dequantise_dense_and_q8_0():
    """Dense kinds widen exactly; q8_0 is scale times signed byte."""
    values = np.array([[1.5, -2.25, 0.0, 384.0]], np.float32)
    assert dequantise(_dense(values)).tolist() == values.tolist()
    assert dequantise(_raw("f16", [values.astype(np.float16).tobytes()], 4)).tolist() == values.tolist()
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert dequantise(_raw("bf16", [bf16.tobytes()], 4)).tolist() == values.tolist()
    signed = np.arange(-16, 16, dtype=np.int8)
    assert dequantise(_raw("q8_0", [_half(0.25) + signed.tobytes()], 32)).tolist() == [(signed * 0.25).tolist()]


def test_round_activations():
    """Groups of 32 round to multiples of their own max / 127, half to even; a zero or vanishing group is zero."""
    x = RNG.normal(size=(3, 64)).astype(np.float32)
    x[1, :32] = 0
    x[2, 32:] *= 1e-35
    rounded = round_activations(x)
    for row in range(3):
        for first in (0, 32):
            group, out = x[row, first : first + 32], rounded[row, first : first + 32]
            scale = np.abs(group).max() / 127
            if scale < 1e-30:
                assert not out.any()
            else:
                np.testing.assert_allclose(out / scale, np.rint(out / scale), atol=1e-4)
                assert np.abs(out - group).max() <= scale * 0.5001
    halves = np.zeros((1, 32), np.float32)
    halves[0, :4] = [127, 0.5, 1.5, 2.5]
    assert round_activations(halves)[0, :4].tolist() == [127, 0, 2, 2]


def test_linear_mixes_kinds_and_rounds_only_for_quantised_rows():
    """A stack of parts gives each part's product; int8 rounding touches quantised parts and can be switched off."""
    x = RNG.normal(size=(5, 64)).astype(np.float32)
    dense, quantised = _dense(RNG.normal(size=(3, 64))), _q8_0(RNG.normal(size=(2, 64)))
    expected_dense = x @ dequantise(dense).T
    for exact in (False, True):
        ops = ReferenceOps(exact_activations=exact)
        out = ops.linear(x, ops.pack([dense, quantised, dense]))
        rounded = x if exact else round_activations(x)
        expected = np.concatenate([expected_dense, rounded @ dequantise(quantised).T, expected_dense], axis=1)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_small_functions():
    """embed, rms_norm, add, silu_mul and gather_rows against one-element-at-a-time Python."""
    ops = ReferenceOps()
    x, y = RNG.normal(size=(2, 4, 6)).astype(np.float32)
    weight = ops.vector(RNG.normal(size=6))
    assert ops.embed(ops.pack([_dense(x)]), np.array([3, 0], np.int32)).tolist() == x[[3, 0]].tolist()
    for row, out in zip(x, ops.rms_norm(x, weight, 1e-5), strict=True):
        root = math.sqrt(sum(float(v) ** 2 for v in row) / 6 + 1e-5)
        np.testing.assert_allclose(out, [v / root * w for v, w in zip(row, weight, strict=True)], rtol=1e-5)
    assert np.array_equal(ops.add(x, y), x + y)
    expected = [[g / (1 + math.exp(-g)) * u for g, u in zip(row[:3], row[3:], strict=True)] for row in x]
    np.testing.assert_allclose(ops.silu_mul(x), expected, rtol=1e-5)
    assert ops.silu_mul(np.array([[-200.0, 5.0]], np.float32)).tolist() == [[0.0]]
    assert ops.gather_rows(x, np.array([2, 2, 1])).tolist() == x[[2, 2, 1]].tolist()


def test_rope_rotates_pairs_half_a_head_apart():
    """Pair (i, i + C/2) of q and k turns by its angle at the token's position; v stays; the input is not modified."""
    heads = HeadGeometry(num_heads=2, num_kv_heads=1, head_dim=4)
    angles = np.outer(np.arange(10), [1.0, 0.1])
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    qkv = RNG.normal(size=(3, heads.width)).astype(np.float32)
    before, positions = qkv.copy(), np.array([0, 7, 9], np.int32)
    out = ReferenceOps().rope(qkv, positions, table, heads)
    assert np.array_equal(qkv, before)
    for row, position in enumerate(positions):
        for head in range(3):
            for i in range(2):
                pair = complex(qkv[row, head * 4 + i], qkv[row, head * 4 + i + 2])
                turned = pair * np.exp(1j * angles[position, i])
                np.testing.assert_allclose(out[row, head * 4 + i], turned.real, atol=1e-6)
                np.testing.assert_allclose(out[row, head * 4 + i + 2], turned.imag, atol=1e-6)
    assert np.array_equal(out[:, 12:], qkv[:, 12:])


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_paged_attention_equals_contiguous(dtype):
    """Chunks of several sequences over scattered blocks give the rows of plain causal attention over all tokens."""
    heads = HeadGeometry(num_heads=6, num_kv_heads=2, head_dim=8)
    group = KVGroup("full", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
    ops = ReferenceOps()
    pool = np.zeros((12, group.bytes_per_block), np.uint8)
    kv = ops.bind_kv(pool, group)
    lengths, tables = [11, 5], [[7, 2, 9], [4, 1]]
    qkv = [RNG.normal(size=(length, heads.width)).astype(np.float32) for length in lengths]
    done, got = [0, 0], [[], []]
    for chunk in ([4, 0], [1, 5], [6, 0]):
        rows = [s for s in (0, 1) if chunk[s]]
        ranges = [np.arange(done[s], done[s] + chunk[s]) for s in rows]
        batch = StepBatch(
            tokens_T=np.zeros(sum(chunk), np.int32),
            positions_T=np.concatenate(ranges).astype(np.int32),
            row_starts_S1=np.cumsum([0] + [chunk[s] for s in rows]).astype(np.int32),
            context_lens_S=np.array([done[s] + chunk[s] for s in rows], np.int32),
            block_tables_SB=np.array([(tables[s] + [0])[:3] for s in rows], np.int32),
            logit_rows_L=np.zeros(0, np.int32),
        )
        step = np.concatenate([qkv[s][positions] for s, positions in zip(rows, ranges, strict=True)])
        ops.write_kv(kv, 1, step, batch, heads)
        out = ops.paged_attention(kv, 1, step, batch, heads, 0.35)
        for i, s in enumerate(rows):
            got[s].append(out[batch.row_starts_S1[i] : batch.row_starts_S1[i + 1]])
            done[s] += chunk[s]
    tolerance = {"f16": 5e-3, "bf16": 4e-2, "f32": 1e-5, "int8": 4e-2}[dtype]
    for s, length in enumerate(lengths):
        x = qkv[s].astype(np.float64).reshape(length, -1, 8)
        for h in range(6):
            q, k, v = x[:, h], x[:, 6 + h // 3], x[:, 8 + h // 3]
            scores = np.where(np.tril(np.ones((length, length), bool)), q @ k.T * 0.35, -np.inf)
            weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            np.testing.assert_allclose(np.concatenate(got[s])[:, h * 8 : h * 8 + 8], weights @ v, atol=tolerance)
    assert not pool[:, : group.bytes_per_layer_block].any(), "layer 0 must stay untouched"


def _how(rows: list[dict]) -> SampleBatch:
    def column(name, default, dtype):
        return np.array([row.get(name, default) for row in rows], dtype)

    return SampleBatch(
        column("temperature", 1.0, np.float32),
        column("top_k", 0, np.int32),
        column("top_p", 1.0, np.float32),
        column("min_p", 0.0, np.float32),
        column("seed", 0, np.uint64),
        column("choice", 0, np.int32),
        column("position", 0, np.int32),
    )


def _sample_slowly(logits, row: dict) -> int:
    """The definition, token by token in plain Python."""
    temperature = row.get("temperature", 1.0)
    if temperature == 0:
        return max(range(len(logits)), key=lambda t: (logits[t], -t))
    weights = {t: math.exp((float(v) - float(max(logits))) / temperature) for t, v in enumerate(logits)}
    falling = sorted(weights, key=lambda t: (-weights[t], t))
    if row.get("top_k", 0) > 0:
        falling = falling[: row["top_k"]]
    if row.get("top_p", 1.0) < 1:
        total, kept, reached = sum(weights[t] for t in falling), [], 0.0
        for t in falling:
            kept.append(t)
            reached += weights[t]
            if reached >= row["top_p"] * total:
                break
        falling = kept
    kept = sorted(t for t in falling if weights[t] >= row.get("min_p", 0.0))
    seed, choice, position = row.get("seed", 0), row.get("choice", 0), row.get("position", 0)
    words = race_words(seed, choice, position, len(logits)).tolist()
    return min(kept, key=lambda t: (-math.log1p(-(words[t] + 0.5) / 2**32) / weights[t] if weights[t] else math.inf, t))


def test_sample_equals_the_definition():
    """Rows of every mixture of settings, in one call, draw what the slow definition draws."""
    rng = np.random.default_rng(5)
    rows = [
        {
            "temperature": float(np.float32(rng.choice([0.0, 0.3, 1.0, 2.5]))),
            "top_k": int(rng.choice([-1, 0, 1, 5, 100])),
            "top_p": float(np.float32(rng.choice([1.0, 0.9, 0.5, 0.01]))),
            "min_p": float(np.float32(rng.choice([0.0, 0.05, 0.5, 1.0]))),
            "seed": int(rng.integers(0, 2**64, dtype=np.uint64)),
            "choice": int(rng.integers(0, 4)),
            "position": position,
        }
        for position in range(200)
    ]
    logits = rng.normal(size=(200, 50)).astype(np.float32) * 3
    logits[::3] = np.rint(logits[::3])  # many ties
    logits[::7, :20] = NEVER
    assert ReferenceOps().sample(logits, _how(rows)).tolist() == [
        _sample_slowly(*pair) for pair in zip(logits, rows, strict=True)
    ]


def test_sample_follows_the_distribution():
    """Over many positions the frequencies are the softmax at that temperature."""
    count = 4000
    logits = np.tile(np.array([0.0, 1.0, 2.0, -1.0], np.float32), (count, 1))
    rows = [{"temperature": 1.5, "seed": 9, "position": position} for position in range(count)]
    drawn = np.bincount(ReferenceOps().sample(logits, _how(rows)), minlength=4) / count
    expected = np.exp(logits[0] / 1.5) / np.exp(logits[0] / 1.5).sum()
    np.testing.assert_allclose(drawn, expected, atol=0.03)


def test_sample_breaks_ties_by_lower_id():
    """Equal logits: greedy, top_k and top_p all prefer the lower id."""
    logits = np.zeros((3, 8), np.float32)
    rows = [{"temperature": 0.0}, {"top_k": 1, "seed": 3}, {"top_p": 0.01, "seed": 4}]
    assert ReferenceOps().sample(logits, _how(rows)).tolist() == [0, 0, 0]


def test_top_p_stops_as_soon_as_it_is_reached():
    """Of two equal tokens one already holds half the mass, so top_p 0.5 keeps just the lower id."""
    rows = [{"top_p": 0.5, "seed": seed} for seed in range(20)]
    assert not ReferenceOps().sample(np.zeros((20, 2), np.float32), _how(rows)).any()


def test_token_logprobs():
    """Log softmax, ranks and top ids agree with a full sort, ties going to the lower id."""
    logits = np.rint(RNG.normal(size=(6, 40)) * 3).astype(np.float32)
    logits[2, 5] = NEVER
    tokens = RNG.integers(0, 40, 6)
    tokens[2] = 5
    logprob, rank, top, top_logprob = ReferenceOps().token_logprobs(logits, tokens, 7)
    for row in range(6):
        values = [float(v) for v in logits[row]]
        total = math.log(sum(math.exp(v) for v in values))
        order = sorted(range(40), key=lambda t: (-values[t], t))
        np.testing.assert_allclose(logprob[row], values[tokens[row]] - total, rtol=1e-5)
        assert rank[row] == order.index(tokens[row]) + 1
        assert top[row].tolist() == order[:7]
        np.testing.assert_allclose(top_logprob[row], [values[t] - total for t in order[:7]], rtol=1e-5)
    logprob, _, top, top_logprob = ReferenceOps().token_logprobs(logits[:0], tokens[:0], 0)
    assert logprob.shape == (0,) and top.shape == top_logprob.shape == (0, 0)
