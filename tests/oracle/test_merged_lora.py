"""LoRA on several families: logits with an adapter loaded against logits of the weights it is merged into.

Both sides compute in float32; the merged weights are rounded once more and summed in another order, which on these
models moves logits by some 1e-6 of the largest, and by more where it stays in states: they are held to 6e-5. Where PEFT
is installed, its own adapters, made and applied by it, are the second opinion.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import CASES, SHAPE, Case
from families_hybrid import HYBRID_CASES
from hybrid_gguf import convert_hybrid
from test_families import LENGTH, make_model, random_tokens

from adapters import merged, random_magnitudes, random_pairs, write_adapter
from tokenmill.formats.adapter import open_adapter
from tokenmill.formats.checkpoint import Checkpoint, open_checkpoint
from tokenmill.models.loader import load_model
from tokenmill.models.lora import Base, LoraLimits, changes_of, fill_slot
from tokenmill.ops.api import StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps

torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle needs transformers")

TITLES = ("Llama 3 (grouped queries)", "Llama, wide heads, biases", "SmolLM2", "Qwen2, Qwen2.5", "Qwen3", "Gemma",
          "Gemma 3", "Phi-3", "OLMo 2", "StarCoder2", "Helium", "GLM-4", "LFM2",
          "Qwen3.5, four heads of values on two of keys", "Bamba, two groups", "Granite 4, dense", "Mamba-2",
          "Nemotron-H")  # fmt: skip
EMBEDDINGS = "backbone.embeddings"
"""A name that no adapter finds them under."""
LIMITS = LoraLimits(1, 8)
TOLERANCE = 6e-5
BACKENDS = [
    pytest.param(lambda: ReferenceOps(exact_activations=True), id="numpy"),
    pytest.param(NativeOps, id="native", marks=pytest.mark.skipif(available() is not None, reason=str(available()))),
]


def logits(ops: Any, checkpoint: Checkpoint, case: Case, folder: Path | None) -> np.ndarray:
    """Of every position of a text, computed whole, with the adapter in `folder` where one is given."""
    lora = None if folder is None else LIMITS
    model = load_model(checkpoint, ops, max_model_len=case.max_model_len, block_size=16, kv_dtype="f32", lora=lora)
    if folder is not None:
        changes = changes_of(open_adapter(folder), Base(checkpoint, model.config, ops), LIMITS)
        assert fill_slot(model.weights, ops, 1, changes) > 0
    pools = [ops.new_pool(group, 4) for group in model.kv_groups]
    kvs, limits = tuple(pool.kv for pool in pools), StepLimits(LENGTH, 1, 4, LENGTH)
    program = ops.compile(lambda recorder, batch: model.forward(recorder, kvs, batch), limits)
    batch = StepBatch(
        tokens_T=random_tokens(2, LENGTH),
        positions_T=np.arange(LENGTH, dtype=np.int32),
        row_starts_S1=np.array([0, LENGTH], np.int32),
        context_lens_S=np.array([LENGTH], np.int32),
        block_tables_SB=np.arange(3, dtype=np.int32)[None].repeat(len(pools), 0),
        logit_rows_L=np.arange(LENGTH, dtype=np.int32),
        adapters_T=None if folder is None else np.ones(LENGTH, np.int32),
    )
    made = program(batch).copy()
    ops.close()
    return made


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())


def case_of(title: str) -> Case:
    return next(case for case in (*CASES, *HYBRID_CASES) if case.title == title)


@pytest.mark.parametrize("make_ops", BACKENDS)
@pytest.mark.parametrize("title", TITLES)
def test_logits_are_those_of_merged_weights(title: str, make_ops: Any, tmp_path: Path) -> None:
    """Every linear of the family adapted, the head too where it is not the embeddings."""
    case = case_of(title)
    make_model(case, tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    pairs = random_pairs(checkpoint, seed=1, rank=4)
    folder = write_adapter(tmp_path / "adapter", {name: pairs[name] for name in pairs if name != EMBEDDINGS})
    ours = logits(make_ops(), checkpoint, case, folder)
    expected = logits(make_ops(), merged(checkpoint, folder), case, None)
    base = logits(make_ops(), checkpoint, case, None)
    assert np.abs(expected - base).max() > 0.05 * np.abs(base).max(), "the adapter must say something"
    close(ours, expected)


MIXED = ("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "lm_head")


@pytest.mark.parametrize(
    ("title", "modules", "is_gguf"),
    [
        ("Qwen3-Next (queries, keys, values and gates by head of keys)", MIXED, False),
        ("Qwen3.5, four heads of values on two of keys", (), True),
    ],
)
def test_dora_where_rows_are_moved(title: str, modules: tuple[str, ...], is_gguf: bool, tmp_path: Path) -> None:
    """Parts of each head of keys, gated queries, and of a GGUF file heads of values in turns: what the adapter changes
    is moved as the weights are, and so are their rows' lengths."""
    case = case_of(title)
    make_model(case, tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    pairs = random_pairs(checkpoint, seed=1, modules=modules)
    folder = write_adapter(tmp_path / "adapter", pairs, magnitudes=random_magnitudes(pairs))
    changed = open_checkpoint(convert_hybrid(tmp_path / "model", tmp_path / "m.gguf")) if is_gguf else checkpoint
    ops = [ReferenceOps(exact_activations=True) for _ in range(2)]
    close(logits(ops[0], changed, case, folder), logits(ops[1], merged(checkpoint, folder), case, None))


@pytest.mark.parametrize("title", ["Llama 3 (grouped queries)", "Qwen2, Qwen2.5", "Gemma", "Phi-3", "Helium"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"o_proj": 3, r"layers\.[1-9]\.mlp\..*": 5}},
        {"use_dora": True},
        {"target_modules": ["lm_head", "embed_tokens"]},
        {"target_modules": ["lm_head", "embed_tokens", "down_proj"], "use_dora": True},
    ],
    ids=["plain", "patterns", "dora", "ends", "dora of ends"],
)
def test_peft_agrees(title: str, options: dict[str, Any], tmp_path: Path) -> None:
    """An adapter that PEFT made, and the logits that PEFT gives with it."""
    peft = pytest.importorskip("peft", reason="the second opinion needs PEFT")
    case = case_of(title)
    theirs = make_model(case, tmp_path / "model")
    torch.manual_seed(2)
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False} | options
    config = peft.LoraConfig(**options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that deprecate each other
        adapted = peft.get_peft_model(theirs, config).eval()
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(0.5 + torch.rand_like(parameter))
        adapted.save_pretrained(tmp_path / "adapter")
        expected = adapted(torch.tensor(random_tokens(2, LENGTH)[None].astype(np.int64))).logits[0].numpy()
    checkpoint = open_checkpoint(tmp_path / "model")
    close(logits(ReferenceOps(exact_activations=True), checkpoint, case, tmp_path / "adapter"), expected)
    assert SHAPE["vocab_size"] == expected.shape[1]
