"""Mixtures of experts on the native backend: a row's bits depend on no other row, and bad input harms only its own row.

T tokens  E experts  D width  k experts of a row
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from ops_moe_cases import ROUTINGS, SWIGLU, experts_of, ffn_cases, route_cases, routes_of
from ops_stack_cases import raw_stack

from tokenmill.ops.api import SOFTMAX_CHOSEN, Experts, Routing, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.direct import batch_of
from tokenmill.ops.native.library import ISAS, TILE_ISAS, available_isas
from tokenmill.ops.native.library import KINDS as NUMBERS
from tokenmill.ops.reference import ReferenceOps

pytestmark = [
    pytest.mark.exact,
    pytest.mark.skipif(available() is not None, reason=str(available())),
]

FAMILIES = pytest.mark.parametrize("family", [ISAS, TILE_ISAS], ids=["lanes", "tiles"])
KINDS = [("q4_0", "q4_0"), ("q8_h", "q5_0"), ("bf16", "bf16"), ("q4_1", "f16")]


@pytest.fixture(params=[None, "scalartiles"], ids=["lanes", "tiles"])
def ops(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    made = NativeOps(2, request.param)
    yield made
    made.close()


def bits(values: np.ndarray) -> list[int]:
    return np.ascontiguousarray(values).view(np.int32).ravel().tolist()


def a_layer(ops: Any, kinds: tuple[str, str], routing: Routing, max_tokens: int) -> Any:
    """Router and experts as one program over embedded tokens, of which row t is token t's."""
    rng = np.random.default_rng(7)
    width, num_experts = 64, routing.num_experts
    table = ops.pack(raw_stack(rng, "f32", 1, 211, width)[0])
    router = ops.pack(raw_stack(rng, "f32", 1, num_experts, width)[0])
    experts = experts_of(ops, rng, kinds, (num_experts, width, 96), SWIGLU, True)

    def forward(recorder: Any, batch: Any) -> Any:
        x = recorder.scale(recorder.embed(table, batch.tokens_T), 10.0)
        return recorder.moe_ffn(x, recorder.moe_route(recorder.linear(x, router), routing), experts)

    return ops.compile(forward, StepLimits(max_tokens, 1, 1, 0))


def run(program: Any, tokens: list[int]) -> np.ndarray:
    return program(batch_of(len(tokens), tokens_T=np.array(tokens, np.int32))).copy()


@pytest.mark.parametrize("kinds", KINDS, ids="/".join)
def test_a_row_has_the_bits_it_has_alone(ops: NativeOps, kinds: tuple[str, str]) -> None:
    """Random mixes of rows, in any number and order."""
    program = a_layer(ops, kinds, Routing(16, 4), 230)
    rng = np.random.default_rng(3)
    alone = [bits(run(program, [token])) for token in range(60)]
    for size in (2, 3, 13, 60, 230):
        tokens = rng.integers(0, 60, size).tolist()
        for token, row in zip(tokens, run(program, tokens), strict=True):
            assert bits(row) == alone[token], (size, token)


@FAMILIES
def test_instruction_sets_agree(family: tuple[str, ...]) -> None:
    """Every case of the table, bit for bit."""
    found: dict[str, tuple[str, list[int]]] = {}
    for isa in available_isas(family):
        ops = NativeOps(2, isa)
        for name, case in (*route_cases(), *ffn_cases()):
            other, expected = found.setdefault(name, (isa, bits(case(ops))))
            assert bits(case(ops)) == expected, (name, isa, other)
        ops.close()


def test_experts_are_added_in_ascending_order_each_by_one_fused_step(ops: NativeOps) -> None:
    """As a chain of exact steps, rounded once each, says; the opposite order would differ."""
    rng = np.random.default_rng(5)
    experts = experts_of(ops, rng, ("q4_0", "q4_0"), (6, 64, 96))
    x = rng.standard_normal((3, 64)).astype(np.float32)
    weights = rng.uniform(0.05, 1, 4).astype(np.float32)
    ids = [0, 2, 3, 5]

    def route(ids: list[int], weights: list[float]) -> np.ndarray:
        return np.array([ids + weights] * 3, np.float32)

    parts = [ops.moe_ffn(x, route([e], [1.0]), experts) for e in ids]
    got = ops.moe_ffn(x, route(ids, weights.tolist()), experts)

    def chain(order: list[int]) -> np.ndarray:
        total = np.zeros_like(got)
        for i in order:
            for at in np.ndindex(*got.shape):
                exact = Fraction(float(weights[i])) * Fraction(float(parts[i][at])) + Fraction(float(total[at]))
                total[at] = nearest(exact)
        return total

    assert bits(got) == bits(chain([0, 1, 2, 3]))
    assert bits(got) != bits(chain([3, 2, 1, 0]))
    shuffled = ops.moe_ffn(x, route([5, 0, 3, 2], [weights[i] for i in (3, 0, 2, 1)]), experts)
    assert bits(shuffled) == bits(got)  # whatever the order they are named in


def nearest(value: Fraction) -> np.float32:
    """Rounded once. A float64 next to it decides but for ties, which exact values settle."""
    near = np.float32(float(value))
    candidates = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - value), int(c.view(np.int32)) & 1))


@pytest.mark.parametrize("name", ROUTINGS)
def test_ties_go_to_the_lower_expert(ops: NativeOps, name: str) -> None:
    """Rows of equal logits, and of pairs of equal ones: the experts that numpy chooses."""
    routing = ROUTINGS[name]
    logits = np.random.default_rng(1).integers(0, 3, (40, routing.num_experts)).astype(np.float32)
    logits[0] = 1
    got, expected = (one.moe_route(logits, routing)[:, : routing.top_k] for one in (ops, ReferenceOps()))
    assert got.tolist() == expected.tolist()
    if not routing.min_share:
        assert got[0].tolist() == list(range(routing.top_k))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_its_own_affair(ops: NativeOps, bad: float) -> None:
    rng = np.random.default_rng(2)
    experts = experts_of(ops, rng, ("q4_0", "q4_0"), (6, 64, 96))
    x = rng.standard_normal((7, 64)).astype(np.float32)
    logits = rng.standard_normal((7, 6)).astype(np.float32)
    routing = Routing(6, 2, SOFTMAX_CHOSEN, normalise=False)
    good = ops.moe_ffn(x, ops.moe_route(logits, routing), experts)
    logits[4, 3] = bad
    routes = ops.moe_route(logits, routing)
    assert routes[4, :2].tolist() == [0, 1] and np.isnan(routes[4, 2:]).all()
    got = ops.moe_ffn(x, routes, experts)
    assert np.isnan(got[4]).all()
    others = [row for row in range(7) if row != 4]
    assert bits(got[others]) == bits(good[others])


def test_every_row_may_choose_one_expert(ops: NativeOps) -> None:
    """More rows than are gathered at once, as many as a program takes; the tally counts them, and no other expert's."""
    rng = np.random.default_rng(4)
    tally = np.zeros(5, np.int64)
    experts = experts_of(ops, rng, ("q8_0", "q4_0"), (5, 64, 96), tally=tally)
    x = rng.standard_normal((230, 64)).astype(np.float32)
    routes = np.tile(np.array([3, 1], np.float32), (230, 1))
    got = ops.moe_ffn(x, routes, experts)
    assert tally.tolist() == [0, 0, 0, 230, 0]
    assert bits(got[117]) == bits(ops.moe_ffn(x[117:118], routes[:1], experts))
    routes[:, 0] = -1
    assert not ops.moe_ffn(x, routes, experts).any()
    assert tally.tolist() == [0, 0, 0, 231, 0]


def test_ids_of_no_expert_are_left_out(ops: NativeOps) -> None:
    rng = np.random.default_rng(6)
    experts = experts_of(ops, rng, ("q4_0", "q4_0"), (6, 64, 96))
    x = rng.standard_normal((9, 64)).astype(np.float32)
    routes = routes_of(rng, 9, 6, 4)
    expected = ops.moe_ffn(x, routes, experts)
    routes[routes == -1] = np.resize(np.array([6, 1e30, np.nan, -np.inf, -7, np.inf], np.float32), (routes == -1).sum())
    assert bits(ops.moe_ffn(x, routes, experts)) == bits(expected)


def test_unequal_stacks_are_refused(ops: NativeOps) -> None:
    """At the border, whatever the recorder would have said."""
    rng = np.random.default_rng(8)
    good = experts_of(ops, rng, ("q4_0", "q4_0"), (6, 64, 96))
    x = rng.standard_normal((2, 64)).astype(np.float32)
    routes = routes_of(rng, 2, 6, 2)

    def attempt(change: dict[str, int], stack: str = "gate_up") -> str:
        experts = Experts(good.gate_up, good.down, good.activation)
        struct: Any = getattr(experts, stack).struct
        before = type(struct).from_buffer_copy(struct)
        try:
            for name, value in change.items():
                setattr(struct, name, value)
            with pytest.raises(AssertionError) as refused:
                ops.moe_ffn(x, routes, experts)
            return str(refused.value)
        finally:
            ctypes.memmove(ctypes.addressof(struct), ctypes.addressof(before), ctypes.sizeof(struct))

    assert "experts in one stack" in attempt({"num_matrices": 5})
    assert "bytes of a matrix" in attempt({"num_rows": 1 << 20})
    assert "bytes of a matrix" in attempt({"num_cols": 1 << 20}, "down")
    assert "no stack" in attempt({"data": 0})
    assert "integer kind" in attempt({"kind": NUMBERS["w4"]})
    assert "bytes of a matrix" in attempt({"kind": 99})
    assert "inner values" in attempt({"num_cols": 64}, "down")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("top_k", 0, "experts of a row"),
        ("top_k", 7, "experts of a row"),
        ("num_groups", 4, "bad groups"),
        ("top_groups", 0, "bad groups"),
        ("group_score", 3, "score for a group"),
        ("score", 9, "unknown score"),
        ("min_share", 2.0, "bad weights"),
        ("floor", float("nan"), "bad weights"),
        ("num_experts", 0, "experts"),
    ],
)
def test_bad_routings_are_refused(
    ops: NativeOps, field: str, value: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the border, whatever Routing itself says."""
    from tokenmill.ops.native import record

    def spoilt(routing: Routing, bias: Any) -> Any:
        struct = whole(routing, bias)
        setattr(struct, field, value)
        return struct

    whole = record.routing_struct
    monkeypatch.setattr(record, "routing_struct", spoilt)
    with pytest.raises(AssertionError, match=said):
        ops.moe_route(np.zeros((2, 6), np.float32), Routing(6, 2))
