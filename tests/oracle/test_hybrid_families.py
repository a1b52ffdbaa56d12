"""Hybrid models: small random ones, saved by transformers and loaded by us. Logits of all positions are compared, in
chunks whose borders are anywhere, with states kept at some borders of blocks alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import SHAPE, TEXT_CONFIGS, Case
from families_hybrid import HYBRID_CASES
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hybrid_gguf import HYBRID_GGUF_NAMES, convert_hybrid, tiled

from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.models.loader import load_model
from tokenmill.ops.api import StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps

torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

LENGTH, CHUNKS, SIZE = 75, ((0, 37), (37, 64), (64, 65), (65, 75)), 16
TABLE, STATES = [3, 1, 4, 2, 0], [-1, -1, 3, 0, 1]
TOLERANCE = 2e-5
Q8_0 = GGMLQuantizationType.Q8_0
BACKENDS = [
    pytest.param(lambda: ReferenceOps(exact_activations=True), id="numpy"),
    pytest.param(NativeOps, id="native", marks=pytest.mark.skipif(available() is not None, reason=str(available()))),
]


_SKIPPED = {
    "LFM2": "llama.cpp's has no biases",
    "LFM2-MoE, no bias, weights as they are": "llama.cpp's has no biases, and weights of sum 1",
    "Qwen3-Next, weights as they are, one head of values on each of keys": "llama.cpp's has weights of sum 1",
}
"""Cases that GGUF has no keys for."""


@pytest.fixture(params=HYBRID_CASES, ids=[case.title.replace(" ", "_") for case in HYBRID_CASES], scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path, Any, Any]:
    """(case, the folder of a random model, tokens, and log probabilities by transformers)"""
    case: Case = request.param
    folder = tmp_path_factory.mktemp("model")
    tokens, expected = make_model(case, folder)
    return case, folder, tokens, expected


def make_model(case: Case, folder: Path, change: Callable[[Any], None] = lambda model: None) -> tuple[Any, Any]:
    """Save a random model of the case, seeded; tokens, and what transformers makes of them. change: of the model's
    parameters, before."""
    own = TEXT_CONFIGS.get(case.family, case.family)
    config = getattr(transformers, f"{own}Config")(**SHAPE | case.options)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim >= 2 else 1).add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
        change(model)
        tokens = torch.randint(3, SHAPE["vocab_size"], (1, LENGTH))
        logits = model(tokens).logits[0].double()
    model.save_pretrained(folder)
    return tokens[0].numpy().astype(np.int32), torch.log_softmax(logits, -1).numpy()


def check_logits(ops: Any, path: Path, tokens: np.ndarray, expected: np.ndarray) -> None:
    """What we make of the tokens in four chunks is what transformers makes of them."""
    model = load_model(open_checkpoint(path), ops, block_size=SIZE, kv_dtype="f32")
    pools = [ops.new_pool(group, 5) for group in model.kv_groups]
    kvs, limits = tuple(pool.kv for pool in pools), StepLimits(LENGTH, 1, len(TABLE), LENGTH)
    program = ops.compile(lambda recorder, batch: model.forward(recorder, kvs, batch), limits)
    ours = []
    for first, end in CHUNKS:
        batch = StepBatch(
            tokens_T=tokens[first:end],
            positions_T=np.arange(first, end, dtype=np.int32),
            row_starts_S1=np.array([0, end - first], np.int32),
            context_lens_S=np.array([end], np.int32),
            block_tables_SB=np.array([TABLE, STATES], np.int32),
            logit_rows_L=np.arange(end - first, dtype=np.int32),
        )
        ours.append(program(batch).astype(np.float64))
    logits = torch.log_softmax(torch.tensor(np.concatenate(ours)), -1).numpy()
    ops.close()
    for pool in pools:
        pool.close()
    assert expected.std() > 0.1, "the oracle's logits must say something"
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("make_ops", BACKENDS)
def test_logits(saved: tuple[Case, Path, Any, Any], make_ops: Callable[[], Any]) -> None:
    _, folder, tokens, expected = saved
    check_logits(make_ops(), folder, tokens, expected)


def test_logits_from_gguf(saved: tuple[Case, Path, Any, Any], tmp_path: Path) -> None:
    """Converted as llama.cpp's converters do, and of Qwen3-Next as the first of them did."""
    case, folder, tokens, expected = saved
    if case.title in _SKIPPED or case.family not in HYBRID_GGUF_NAMES:
        pytest.skip(_SKIPPED.get(case.title, "GGUF files of this family are not read"))
    for is_early in (False, True) if case.family == "Qwen3Next" else (False,):
        path = convert_hybrid(folder, tmp_path / f"{is_early}.gguf", is_early=is_early)
        ops = ReferenceOps(exact_activations=True) if available() is not None else NativeOps()
        check_logits(ops, path, tokens, expected)


def test_heads_in_turns_may_be_smaller_than_blocks(tmp_path: Path) -> None:
    """Of a file whose blocks of 32 columns reach over two heads of values, that are not neighbours: as of the model
    with those rounded weights."""
    case = next(case for case in HYBRID_CASES if case.family == "Qwen3_5")
    case = replace(case, options={**case.options, "linear_value_head_dim": 16, "linear_num_value_heads": 6})

    def round_weights(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and parameter.shape[1] % 32 == 0:
                values = parameter.numpy()
                values = tiled(values, 2, 6, axis=1) if name.endswith("linear_attn.out_proj.weight") else values
                rounded = dequantize(quantize(np.ascontiguousarray(values), Q8_0), Q8_0)
                rounded = tiled(rounded, 3, 6, axis=1) if name.endswith("linear_attn.out_proj.weight") else rounded
                parameter.copy_(torch.from_numpy(rounded))

    tokens, expected = make_model(case, tmp_path / "model", round_weights)
    path = convert_hybrid(tmp_path / "model", tmp_path / "model.gguf", is_quantised=True)
    check_logits(ReferenceOps(exact_activations=True), path, tokens, expected)
