"""Latent attention, and Step-3: small random models, their logits, greedy tokens and choices of experts.

Numpy computes in float32 as transformers does, though in the absorbed form: 2e-5 of the largest logit. The native
kernels round queries, latents and the weights of values to bf16, which random models feel: they are compared with numpy
that rounds queries and latents, to 1e-2, and their first choices with those of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import Case
from families_latent import LATENT_CASES
from test_families import (
    LENGTH,
    NATIVE_REASON,
    NUM_GREEDY,
    PROMPT,
    TOLERANCE,
    make_model,
    our_logits,
    random_tokens,
    their_logits,
)

from tokenmill.ops.api import Routing
from tokenmill.ops.native import NativeOps
from tokenmill.ops.native.record import Recorder
from tokenmill.ops.reference import ReferenceOps

torch = pytest.importorskip("torch", reason="the oracle needs torch")

import step3  # noqa: E402
from latent_gguf import GGUF_NAMES, convert_latent  # noqa: E402

NATIVE_TOLERANCE = 1e-2
needs_native = pytest.mark.skipif(
    NATIVE_REASON is not None or not (hasattr(Recorder, "moe_ffn") and hasattr(Recorder, "latent_attention")),
    reason=f"no native experts and latents: {NATIVE_REASON}",
)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1) >> 16) << 16).astype(np.uint32).view(np.float32)


class Rounding(ReferenceOps):
    """Rounds what the native kernels do, but for the weights of values."""

    def latent_attention(self, kv: Any, layer: int, q_TX: Any, *more: Any) -> Any:
        return super().latent_attention(kv, layer, to_bf16(q_TX), *more)

    def write_latent(self, kv: Any, layer: int, c_TX: Any, *more: Any) -> None:
        super().write_latent(kv, layer, to_bf16(c_TX), *more)


class Choosing(ReferenceOps):
    """Keeps which experts rows chose, call after call."""

    def __init__(self) -> None:
        super().__init__(exact_activations=True)
        self.chosen: list[list[set[int]]] = []

    def moe_route(self, logits_TE: Any, routing: Routing, bias_E: Any = None, scales_E: Any = None) -> Any:
        routes = super().moe_route(logits_TE, routing, bias_E, scales_E)
        self.chosen.append([set(row[: routing.top_k].astype(int).tolist()) for row in routes])
        return routes


def their_choices(model: Any, tokens: np.ndarray) -> list[list[set[int]]]:
    """Of each layer with experts, each token's."""
    chosen: list[list[set[int]]] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out: chosen.append([set(row.tolist()) for row in out[2]]))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    their_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return chosen


def of_both_chunks(chosen: list[list[set[int]]]) -> list[list[set[int]]]:
    """our_logits computes in two chunks."""
    half = len(chosen) // 2
    return [first + rest for first, rest in zip(chosen[:half], chosen[half:], strict=True)]


def name_of(case: Case) -> str:
    return case.title.replace(" ", "_")


@pytest.fixture(params=LATENT_CASES, ids=name_of, scope="module")
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return request.param, folder, make_model(request.param, folder)


@pytest.mark.sampled(1 / 3)
def test_numpy(saved, tmp_path):
    """Logits, the experts that each token chose, greedy tokens; from GGUF too, in both forms."""
    _, folder, theirs = saved
    tokens = random_tokens(2, LENGTH)
    expected = their_logits(theirs, tokens)
    largest = np.abs(expected).max()
    assert largest > 0.1
    ops = Choosing()
    np.testing.assert_allclose(our_logits(ops, folder, 64, tokens), expected, atol=TOLERANCE * largest)
    assert of_both_chunks(ops.chosen) == their_choices(theirs, tokens)
    greedy = random_tokens(3, PROMPT).tolist()
    for _ in range(NUM_GREEDY):
        greedy.append(int(their_logits(theirs, np.array(greedy))[-1].argmax()))
    ours = our_logits(ReferenceOps(exact_activations=True), folder, 64, np.array(greedy + greedy[:6], np.int32))
    assert ours[PROMPT - 1 : len(greedy) - 1].argmax(axis=1).tolist() == greedy[PROMPT:]


GGUF_CASES = [
    case
    for case in LATENT_CASES
    if case.family in GGUF_NAMES and "half-split" not in case.title and "longrope" not in case.title
]


@pytest.mark.parametrize("case", GGUF_CASES, ids=name_of)
def test_gguf(case, tmp_path):
    """Files of both ages: the logits of transformers, and the same ones."""
    theirs = make_model(case, tmp_path)
    tokens = random_tokens(2, LENGTH)
    expected = their_logits(theirs, tokens)
    ours = []
    for absorbed in (True, False):
        path = convert_latent(tmp_path, tmp_path / f"{absorbed}.gguf", absorbed=absorbed)
        ours.append(our_logits(ReferenceOps(exact_activations=True), path, 64, tokens))
    np.testing.assert_allclose(ours[0], expected, atol=TOLERANCE * np.abs(expected).max())
    np.testing.assert_array_equal(*ours)


@needs_native
def test_native(saved):
    _, folder, theirs = saved
    tokens = random_tokens(2, LENGTH)
    expected = their_logits(theirs, tokens)
    ops = NativeOps()
    ours = our_logits(ops, folder, 64, tokens)
    ops.close()
    rounded = our_logits(Rounding(exact_activations=True), folder, 64, tokens)
    off_T = np.abs(ours - rounded).max(axis=1) / np.abs(expected).max()
    assert (off_T < NATIVE_TOLERANCE).mean() >= 0.9, (
        off_T
    )  # a row or two may choose another expert of nearly equal ones
    assert (ours.argmax(axis=1) == expected.argmax(axis=1)).mean() >= 0.9


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("backend", ["numpy", pytest.param("native", marks=needs_native)])
def test_step3(backend: str, normalise: bool, tmp_path: Path) -> None:
    """Logits, choices, greedy tokens of the published equations."""
    config, weights = step3.save(tmp_path, norm_expert_weight=normalise)
    tokens = random_tokens(2, LENGTH)
    expected, chosen = step3.logits(config, weights, tokens)
    largest = np.abs(expected).max()
    assert largest > 0.1
    ops = Choosing() if backend == "numpy" else NativeOps()
    ours = our_logits(ops, tmp_path, 64, tokens)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * largest)
    assert (ours.argmax(axis=1) == expected.argmax(axis=1)).all()
    if isinstance(ops, Choosing):
        assert of_both_chunks(ops.chosen) == chosen
    ops.close()
