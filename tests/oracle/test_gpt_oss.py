"""GPT-OSS beside transformers: the experts that each token chooses and their weights, and a folder of 4-bit experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families_moe import MOE_CASES
from safetensors.numpy import load_file, save_file
from test_families import LENGTH, TOLERANCE, make_model, our_logits, random_tokens, their_logits

from tokenmill.ops.reference import ReferenceOps

torch = pytest.importorskip("torch", reason="the oracle needs torch")

CASE = next(case for case in MOE_CASES if case.title == "GPT-OSS")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Noting(ReferenceOps):
    """Keeps the routes of each call."""

    def __init__(self) -> None:
        super().__init__(exact_activations=True)
        self.routes: list[np.ndarray] = []

    def moe_route(self, *args: Any) -> Any:
        self.routes.append(super().moe_route(*args))
        return self.routes[-1]


def test_tokens_choose_the_same_experts(tmp_path: Path) -> None:
    theirs = make_model(CASE, tmp_path)
    expected: list[np.ndarray] = []

    def note(module: Any, given: Any, out: Any) -> None:
        ids, weights = out[2].numpy(), out[1].numpy()
        order = ids.argsort(axis=1)
        expected.append(np.concatenate([np.take_along_axis(part, order, 1) for part in (ids, weights)], axis=1))

    hooks = [layer.mlp.router.register_forward_hook(note) for layer in theirs.model.layers]
    tokens, ops = random_tokens(2, LENGTH), Noting()
    their_logits(theirs, tokens)
    for hook in hooks:
        hook.remove()
    our_logits(ops, tmp_path, CASE.max_model_len, tokens)
    ours = np.concatenate([np.stack(ops.routes[:4]), np.stack(ops.routes[4:])], axis=1)  # two chunks
    k = ours.shape[-1] // 2
    assert np.array_equal(ours[..., :k], np.stack(expected)[..., :k]) and len(np.unique(ours[..., :k])) > k
    np.testing.assert_allclose(ours[..., k:], np.stack(expected)[..., k:], atol=1e-5)


def test_experts_of_4_bits(tmp_path: Path) -> None:
    """Blocks and scales mean what transformers computes with the values that they stand for."""
    theirs = make_model(CASE, tmp_path)
    rng = np.random.default_rng(5)
    stored = load_file(tmp_path / "model.safetensors")
    for layer, block in enumerate(theirs.model.layers):
        for matrix in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{matrix}"
            experts, inputs, outputs = stored.pop(name).shape
            codes = rng.integers(0, 16, (experts, outputs, inputs))
            exponents = rng.integers(118, 123, (experts, outputs, inputs // 32))
            shape = (experts, outputs, inputs // 32, 16)
            stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(shape)
            stored[f"{name}_scales"] = exponents.astype(np.uint8)
            values = E2M1[codes] * np.exp2(exponents - 127.0).repeat(32, axis=-1).astype(np.float32)
            getattr(block.mlp.experts, matrix).data = torch.tensor(values.swapaxes(1, 2).copy())
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = random_tokens(2, LENGTH)
    expected = their_logits(theirs, tokens)
    ours = our_logits(ReferenceOps(exact_activations=True), tmp_path, CASE.max_model_len, tokens)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * np.abs(expected).max())
