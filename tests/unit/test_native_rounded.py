"""bf16 weights: near the exact product, and equal bits however rows meet, on any variant of a family."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from ops_cases import activations, raw_tensor

from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.direct import batch_of, run_forward
from tokenmill.ops.native.library import ISAS, TILE_ISAS, available_isas
from tokenmill.ops.reference import ReferenceOps

pytestmark = [pytest.mark.exact, pytest.mark.skipif(available() is not None, reason=str(available()))]

NUM_ROWS = 109
"""Panels of 32 rows, the last of them short."""
CUTS = [1, 3, 19, 52, 55]
SHAPES = [(16, 32), (24, 20), (48, 64), (33, 608), (80, 1217), (1536, 1090)]
"""Outputs that fill no tile, one, an odd number, and units of many; less than a group of inputs, some, several blocks,
an odd end."""


@pytest.fixture(scope="module", params=[ISAS, TILE_ISAS], ids=["lanes", "tiles"])
def backends(request: pytest.FixtureRequest) -> Iterator[list[NativeOps]]:
    made = [NativeOps(2, isa) for isa in available_isas(request.param)]
    yield made
    for ops in made:
        ops.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_alone_or_together_on_any_variant(backends: list[NativeOps], shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape[1])
    raw = raw_tensor(rng, "bf16", *shape)
    x_TK = activations(rng, NUM_ROWS, shape[1])
    together = []
    for ops in backends:
        weight = ops.pack([raw])
        together.append(ops.linear(x_TK, weight))
        parts = [ops.linear(rows, weight) for rows in np.split(x_TK, CUTS)]
        assert np.array_equal(np.concatenate(parts), together[-1]), ops.isa
    for other in together[1:]:
        assert np.array_equal(other, together[0])
    reference = ReferenceOps()
    wanted = reference.linear(x_TK, reference.pack([raw]))
    np.testing.assert_allclose(together[0], wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
def test_gates_and_residuals_joined(backends: list[NativeOps], gate: str) -> None:
    """A feed-forward part in one program gives the bits of its operations one by one."""
    rng = np.random.default_rng(7)
    gates, ups, down = (raw_tensor(rng, "bf16", *shape) for shape in ((96, 640), (96, 640), (640, 96)))
    x_TK = activations(rng, NUM_ROWS, 640)
    for ops in backends:
        both, last = ops.pack([gates, ups]), ops.pack([down])
        assert both.struct.num_parts == 1

        def part(rec: Any, batch: Any, x: Any, both: Any = both, last: Any = last) -> Any:
            return rec.add(x, rec.linear(getattr(rec, gate)(rec.linear(x, both)), last))

        wanted = x_TK + ops.linear(getattr(ops, gate)(ops.linear(x_TK, both)), last)
        for rows, expected in zip(np.split(x_TK, CUTS), np.split(wanted, CUTS), strict=True):
            assert np.array_equal(run_forward(ops, partial(part, x=rows), batch_of(len(rows))), expected), (
                ops.isa,
                len(rows),
            )


@pytest.mark.parametrize("alone", [True, False])
def test_inputs_rounded_where_they_are_made(backends: list[NativeOps], alone: bool) -> None:
    """Norms and gates write what the next linear multiplies, and their own values where something else reads those."""
    rng = np.random.default_rng(9)
    gates, ups, down = (raw_tensor(rng, "bf16", *shape) for shape in ((96, 96), (96, 96), (96, 96)))
    x_TK = activations(rng, 37, 96)
    scale = rng.standard_normal(96).astype(np.float32)
    for ops in backends:
        both, last = ops.pack([gates, ups]), ops.pack([down])

        def part(rec: Any, batch: Any, both: Any = both, last: Any = last) -> Any:
            normed = rec.rms_norm(x_TK, scale, 1e-5)
            gated = rec.silu_mul(rec.linear(normed, both))
            out = rec.linear(gated, last)
            return out if alone else rec.add(rec.add(out, normed), gated)

        normed = ops.rms_norm(x_TK, scale, 1e-5)
        gated = ops.silu_mul(ops.linear(normed, both))
        out = ops.linear(gated, last)
        assert np.array_equal(run_forward(ops, part, batch_of(37)), out if alone else out + normed + gated), ops.isa
