"""The native backend gives the values that the numpy reference defines: one table of op x shape x kind.

Tolerances are absolute, times the largest magnitude of the expected array; each states what it leaves room for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import pytest
from ops_cases import KINDS, Sequences, activations, raw_tensor, whole_blocks
from ops_latent_cases import latent_cases
from ops_moe_cases import ffn_cases, route_cases
from ops_stack_cases import column_cases, linear_heads_cases
from ops_state_cases import state_cases

from tokenmill.core.block import KV_DTYPES, KVGroup
from tokenmill.ops.api import HeadGeometry
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import INTEGER_KINDS, ISAS, TILE_ISAS, available_isas
from tokenmill.ops.reference import ReferenceOps

SUM_ORDER = 3e-6  # float32 sums of up to a few thousand terms in another order
ROUNDED_ONCE = 3e-7  # a handful of float32 operations
FIFTEEN_BITS = 2e-4  # queries as whole numbers up to 2^14 move a score by about this, weights of values by less
INTEGERS = 0.04  # weights of 8 bits with one scale for hundreds, against int8 activations with one for 32
BF16_FACTORS = 4e-3  # queries and weights of values rounded to 8 bits
INNER_CODES = 5e-3  # an inner value at the border of two codes, where sums differ in their last bit
EQUAL = 0.0


@dataclass(frozen=True)
class Case:
    name: str
    tolerance: float
    run: Callable[[Any], np.ndarray]
    on_tiles: float | None = None  # the tolerance there, where it is another


def _linear_cases() -> Iterator[Case]:
    for kind in KINDS:
        for num_rows, num_cols, num_tokens in ((16, 32, 1), (37, 96, 13), (100, 576, 30), (7, 1536, 2), (33, 64, 70)):
            num_cols = whole_blocks(kind, num_cols)
            seed = num_rows * num_cols + num_tokens

            def run(ops: Any, kind=kind, shape=(num_rows, num_cols), num_tokens=num_tokens, seed=seed) -> np.ndarray:
                rng = np.random.default_rng(seed)
                weight = ops.pack([raw_tensor(rng, kind, *shape)])
                x = activations(rng, num_tokens, shape[1])
                scale = np.abs(x).max(axis=1, keepdims=True)
                return ops.linear(x, weight) / scale

            on_tiles = INTEGERS if kind in INTEGER_KINDS else None
            yield Case(f"linear {kind} {num_rows}x{num_cols} T={num_tokens}", SUM_ORDER, run, on_tiles)
    for kind in ("f32", "f16", "bf16"):  # columns that are no multiple of 32

        def run_odd(ops: Any, kind=kind) -> np.ndarray:
            rng = np.random.default_rng(5)
            return ops.linear(
                rng.standard_normal((9, 45)).astype(np.float32), ops.pack([raw_tensor(rng, kind, 21, 45)])
            )

        yield Case(f"linear {kind} 21x45 T=9", SUM_ORDER, run_odd)

    def run_stacked(ops: Any) -> np.ndarray:
        rng = np.random.default_rng(6)
        kinds = ("q4_1", "q4_1", "f16", "q8_0", "q4_0")
        weight = ops.pack(
            [raw_tensor(rng, kind, rows, 96) for kind, rows in zip(kinds, (5, 16, 33, 17, 1), strict=True)]
        )
        assert (weight.num_rows, weight.num_cols) == (72, 96)
        return ops.linear(rng.standard_normal((11, 96)).astype(np.float32), weight)

    yield Case("linear of five stacked matrices of four kinds", SUM_ORDER, run_stacked, INTEGERS)


def _row_cases() -> Iterator[Case]:
    for kind in KINDS:

        def run_embed(ops: Any, kind=kind) -> np.ndarray:
            rng = np.random.default_rng(1)
            width = whole_blocks(kind, 96)
            return ops.embed(ops.pack([raw_tensor(rng, kind, 53, width)]), rng.integers(0, 53, 40).astype(np.int32))

        yield Case(f"embed {kind}", EQUAL, run_embed, INTEGERS if kind in INTEGER_KINDS else None)
    for width in (1, 15, 64, 577):

        def run_norm(ops: Any, width=width) -> np.ndarray:
            rng = np.random.default_rng(width)
            weight = ops.vector(rng.standard_normal(width))
            return ops.rms_norm(activations(rng, 9, width), weight, 1e-5)

        def run_silu(ops: Any, width=width) -> np.ndarray:
            return ops.silu(np.random.default_rng(width).normal(0, 20, (9, width)).astype(np.float32))

        def run_silu_mul(ops: Any, width=width) -> np.ndarray:
            return ops.silu_mul(np.random.default_rng(width).normal(0, 20, (9, 2 * width)).astype(np.float32))

        def run_add(ops: Any, width=width) -> np.ndarray:
            rng = np.random.default_rng(width)
            return ops.add(activations(rng, 9, width), activations(rng, 9, width))

        def run_layer_norm(ops: Any, width=width) -> np.ndarray:
            rng = np.random.default_rng(width)
            weight, bias = (ops.vector(rng.standard_normal(width)) for _ in range(2))
            return ops.layer_norm(rng.normal(3, 1, (9, width)).astype(np.float32), weight, bias, 1e-5)

        def run_gelu(ops: Any, width=width) -> np.ndarray:
            return ops.gelu(np.random.default_rng(width).normal(0, 4, (9, width)).astype(np.float32))

        def run_gelu_erf(ops: Any, width=width) -> np.ndarray:
            return ops.gelu_erf(np.random.default_rng(width).normal(0, 4, (9, width)).astype(np.float32))

        def run_relu2(ops: Any, width=width) -> np.ndarray:
            return ops.relu2(np.random.default_rng(width).normal(0, 4, (9, width)).astype(np.float32))

        def run_gelu_mul(ops: Any, width=width) -> np.ndarray:
            return ops.gelu_mul(np.random.default_rng(width).normal(0, 4, (9, 2 * width)).astype(np.float32))

        def run_gelu_erf_mul(ops: Any, width=width) -> np.ndarray:
            return ops.gelu_erf_mul(np.random.default_rng(width).normal(0, 4, (9, 2 * width)).astype(np.float32))

        def run_soft_cap(ops: Any, width=width) -> np.ndarray:
            rng = np.random.default_rng(width)
            return ops.soft_cap((rng.standard_normal((9, width)) * 10.0 ** rng.uniform(-6, 3)).astype(np.float32), 30.0)

        def run_scale(ops: Any, width=width) -> np.ndarray:
            return ops.scale(activations(np.random.default_rng(width), 9, width), 0.3)

        def run_bias(ops: Any, width=width) -> np.ndarray:
            rng = np.random.default_rng(width)
            return ops.add_bias(activations(rng, 9, width), ops.vector(rng.standard_normal(width)))

        yield Case(f"layer_norm D={width}", 1e-6, run_layer_norm)
        yield Case(f"gelu F={width}", 4 * ROUNDED_ONCE, run_gelu)
        yield Case(f"gelu_erf F={width}", 4 * ROUNDED_ONCE, run_gelu_erf)
        yield Case(f"relu2 F={width}", EQUAL, run_relu2)
        yield Case(f"gelu_mul F={width}", 4 * ROUNDED_ONCE, run_gelu_mul)
        yield Case(f"gelu_erf_mul F={width}", 4 * ROUNDED_ONCE, run_gelu_erf_mul)
        yield Case(f"soft_cap D={width}", 2 * ROUNDED_ONCE, run_soft_cap)
        yield Case(f"scale D={width}", EQUAL, run_scale)
        yield Case(f"add_bias D={width}", EQUAL, run_bias)
        yield Case(f"rms_norm D={width}", 2 * ROUNDED_ONCE, run_norm)
        yield Case(f"silu F={width}", 2 * ROUNDED_ONCE, run_silu)
        yield Case(f"silu_mul F={width}", 2 * ROUNDED_ONCE, run_silu_mul)
        yield Case(f"add D={width}", EQUAL, run_add)
    for heads in (HeadGeometry(3, 1, 6), HeadGeometry(4, 2, 64), HeadGeometry(2, 2, 80)):

        def run_rope(ops: Any, heads=heads) -> np.ndarray:
            rng = np.random.default_rng(heads.width)
            table = ops.vector(rng.uniform(-1, 1, (50, heads.head_dim)))
            qkv = rng.standard_normal((9, heads.width)).astype(np.float32)
            return ops.rope(qkv, rng.integers(0, 50, 9).astype(np.int32), table, heads)

        def run_partial_rope(ops: Any, heads=heads) -> np.ndarray:
            rng = np.random.default_rng(heads.width)
            table = ops.vector(rng.uniform(-1, 1, (50, heads.head_dim // 3 * 2)))
            qkv = rng.standard_normal((9, heads.width)).astype(np.float32)
            return ops.rope(qkv, rng.integers(0, 50, 9).astype(np.int32), table, heads)

        def run_norm_heads(ops: Any, heads=heads, together=False) -> np.ndarray:
            rng = np.random.default_rng(heads.width)
            sizes = (heads.num_heads, heads.num_kv_heads) if together else (1, 1)
            q_weight, k_weight = (ops.vector(rng.standard_normal(size * heads.head_dim)) for size in sizes)
            qkv = rng.standard_normal((9, heads.width)).astype(np.float32)
            return ops.norm_heads(qkv, q_weight, k_weight, heads, 1e-5)

        name = f"{heads.num_heads}/{heads.num_kv_heads} C={heads.head_dim}"
        yield Case(f"rope {name}", ROUNDED_ONCE, run_rope)
        yield Case(f"rope of part of {name}", ROUNDED_ONCE, run_partial_rope)
        yield Case(f"norm_heads {name}", 2 * ROUNDED_ONCE, run_norm_heads)
        yield Case(f"norm_heads together {name}", 2 * ROUNDED_ONCE, partial(run_norm_heads, together=True))

    def run_gather(ops: Any) -> np.ndarray:
        rng = np.random.default_rng(2)
        return ops.gather_rows(rng.standard_normal((9, 40)).astype(np.float32), np.array([8, 0, 0, 3], np.int32))

    def run_store(ops: Any) -> np.ndarray:
        array = np.full((12, 40), 7, np.float32)
        ops.store_rows(activations(np.random.default_rng(3), 9, 40), array)
        return array

    def run_load(ops: Any) -> np.ndarray:
        return ops.load_rows(activations(np.random.default_rng(4), 12, 40), np.zeros(9, np.int32))

    def run_spread(ops: Any) -> np.ndarray:
        places = np.random.default_rng(5).permutation(100)[:37].astype(np.int32)
        return ops.spread_columns(activations(np.random.default_rng(6), 9, 37), places, 100, -7.0)

    yield Case("spread_columns", EQUAL, run_spread)
    yield Case("gather_rows", EQUAL, run_gather)
    yield Case("store_rows", EQUAL, run_store)
    yield Case("load_rows", EQUAL, run_load)


@cache
def _attended(heads: HeadGeometry, block_size: int) -> tuple[int, Any, Any]:
    """(number of blocks, batch and rows that are written, batch and rows that attend to them): for every KV type, limit
    and instruction set the same."""
    rng = np.random.default_rng(heads.width + block_size)
    lengths = (3, 530, 270, 1)
    sequences = Sequences.scatter(rng, list(lengths), block_size)
    steps = []
    for rows in (
        [(s, [0] * length, 0) for s, length in enumerate(lengths)],
        [(2, [0] * 270, 250), (1, [0] * 530, 529), (0, [0] * 3, 0), (3, [0], 0)],
    ):
        batch = sequences.batch(rows)
        qkv = rng.standard_normal((len(batch.tokens_T), heads.width)).astype(np.float32)
        qkv.flags.writeable = False
        steps.append((batch, qkv))
    return sequences.num_blocks, *steps


def _attention_cases() -> Iterator[Case]:
    geometries = [
        (HeadGeometry(9, 3, 64), 16),
        (HeadGeometry(4, 4, 32), 16),
        (HeadGeometry(8, 2, 128), 32),
        (HeadGeometry(8, 1, 80), 16),
        (HeadGeometry(4, 1, 96), 48),
        (HeadGeometry(32, 2, 32), 16),
        (HeadGeometry(2, 1, 8), 16),
        (HeadGeometry(6, 2, 18), 5),
        (HeadGeometry(3, 3, 64), 1),
        (HeadGeometry(13, 1, 32), 8),
        (HeadGeometry(2, 1, 320), 16),
    ]
    for heads, block_size in geometries:
        for dtype in KV_DTYPES:

            def prepare(ops: Any, heads=heads, block_size=block_size, dtype=dtype) -> tuple[Any, np.ndarray]:
                num_blocks, (batch, qkv), _ = _attended(heads, block_size)
                group = KVGroup("full", 2, heads.num_kv_heads, heads.head_dim, block_size, dtype)
                pool = np.zeros((num_blocks, group.bytes_per_block), np.uint8)
                kv = ops.bind_kv(pool, group)
                ops.write_kv(kv, 1, qkv, batch, heads)
                return kv, pool

            def run_write(ops: Any, prepare=prepare) -> np.ndarray:
                return prepare(ops)[1].astype(np.float32)

            def run_attention(
                ops: Any, prepare=prepare, heads=heads, block_size=block_size, **limits: Any
            ) -> np.ndarray:
                kv, _ = prepare(ops)
                _, _, (batch, qkv) = _attended(heads, block_size)
                if limits.pop("sinks", False):
                    limits["sinks_H"] = ops.vector(np.linspace(-3, 9, heads.num_heads))
                return ops.paged_attention(kv, 1, qkv, batch, heads, heads.head_dim**-0.5, **limits)

            name = f"H={heads.num_heads} G={heads.num_kv_heads} C={heads.head_dim} block={block_size} {dtype}"
            yield Case(f"write_kv {name}", EQUAL, run_write)
            tolerance = {"int8": FIFTEEN_BITS, "bf16": BF16_FACTORS}.get(dtype, SUM_ORDER)
            limits: list[tuple[str, dict[str, Any]]] = [("", {}), (" whole", {"causal": False})]
            if dtype == "f32":  # that of encoders
                limits += [(f" whole window={w}", {"causal": False, "window": w}) for w in (1, 7, 65, 300)]
            else:
                limits += [(f" window={window}", {"window": window}) for window in (1, 7, 256)]
                limits += [(f" chunk={chunk}", {"window": -chunk}) for chunk in (1, 7, 256, 300)]
                limits += [(" window=300 soft_cap=0.5", {"window": 300, "soft_cap": 0.5})]
                limits += [(" sinks", {"sinks": True}), (" window=300 sinks", {"window": 300, "sinks": True})]
            for what, kwargs in limits:
                run = partial(run_attention, **kwargs)
                yield Case(f"paged_attention{what} {name}", tolerance, run)


def _stack_cases() -> Iterator[Case]:
    for name, run in column_cases():
        yield Case(name, 4 * ROUNDED_ONCE if name.startswith("gate_rows") else EQUAL, run)
    for name, run in linear_heads_cases():
        yield Case(name, SUM_ORDER, run)
    for name, run in route_cases():
        yield Case(name, ROUNDED_ONCE, run)  # of ids, which are equal then
    for name, run in ffn_cases():
        yield Case(name, INNER_CODES, run)


def _latent_cases() -> Iterator[Case]:
    tolerances = {"project": SUM_ORDER, "norm": SUM_ORDER, "write": EQUAL, "attend": BF16_FACTORS}
    for what, name, run in latent_cases():
        yield Case(name, tolerances[what], run)


def _state_cases() -> Iterator[Case]:
    tolerances = {"conv": SUM_ORDER, "gates": 2e-6, "scan": 1e-5, "row": ROUNDED_ONCE * 4}
    for what, name, run in state_cases():
        yield Case(name, tolerances[what], run)


CASES: dict[str, list[Case]] = {}
"""By the name of the operation."""
for _case in (*_linear_cases(), *_row_cases(), *_attention_cases(), *_stack_cases(), *_latent_cases(), *_state_cases()):
    CASES.setdefault(_case.name.split()[0], []).append(_case)


@lru_cache(maxsize=1)  # the instruction sets of an operation follow each other
def _defined(op: str) -> list[np.ndarray]:
    """What numpy gives in each case."""
    reference = ReferenceOps()
    return [case.run(reference) for case in CASES[op]]


@pytest.mark.parametrize("isa", (*ISAS, *TILE_ISAS))
@pytest.mark.parametrize("op", CASES)
def test_native_gives_the_values_numpy_defines(op: str, isa: str) -> None:
    """Every row of the table, within its tolerance, on every instruction set that can run here."""
    if available() is not None:
        pytest.skip(f"{len(CASES[op])} cases: {available()}")
    if isa not in available_isas((isa,)):
        pytest.skip(f"{len(CASES[op])} cases: this processor has no {isa}")
    native = NativeOps(2, isa)
    wrong = []
    for case, expected in zip(CASES[op], _defined(op), strict=True):
        got = case.run(native)
        assert got.dtype == np.float32 and got.shape == expected.shape, (case.name, got.shape, expected.shape)
        tolerance = case.on_tiles if case.on_tiles and isa in TILE_ISAS else case.tolerance
        bound = tolerance * float(np.abs(expected).max())
        error = float(np.abs(got - expected).max())
        if not error <= bound:
            wrong.append(f"{case.name}: {error:.2e} > {bound:.2e}")
    native.close()
    assert not wrong, "\n".join(wrong)
