"""Small random Llamas, saved by transformers and loaded by us: the same logits and the same greedy tokens.

Tolerance: both sides compute in float32 with different orders of summation; on these widths and depths the logits,
which are of order 1, differ by some 1e-6 and are held to 1e-5 (with f16 KV, whose rounding shows: 5e-4 and 2e-3).
"""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.request import SamplingParams
from tokenmill.core.step import Introduction, PlanRow, StepPlan
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.models.loader import load_model
from tokenmill.ops.api import StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from workers import build_worker

torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

LENGTH = 40
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "grouped": {"num_key_value_heads": 2},
    "tied, one KV head": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "every head its own": {"num_key_value_heads": 4},
    "wide heads": {"num_key_value_heads": 2, "head_dim": 32},
    "linear rope": {"num_key_value_heads": 2, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {"num_key_value_heads": 2, "rope_scaling": LLAMA3},
    "bf16 weights": {"num_key_value_heads": 2, "dtype": "bfloat16"},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None, "family": "Mistral"},
}


@pytest.fixture(params=VARIANTS, ids=[name.replace(" ", "-") for name in VARIANTS], scope="module")
def saved(request, tmp_path_factory):
    """(folder, what transformers makes of it in float32) of one variant, seeded."""
    options = dict(VARIANTS[request.param])
    family, dtype = options.pop("family", "Llama"), options.pop("dtype", "float32")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        **options,
    )
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim == 2 else 1).add_(0.02 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("model")
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder, type(model).from_pretrained(folder, dtype=torch.float32).eval()


NATIVE_REASON = available()
BACKENDS = [
    pytest.param(lambda: ReferenceOps(exact_activations=True), id="numpy"),
    pytest.param(
        NativeOps, id="native", marks=pytest.mark.skipif(NATIVE_REASON is not None, reason=str(NATIVE_REASON))
    ),
]


@pytest.mark.parametrize("make_ops", BACKENDS)
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("f32", 1e-5), ("f16", 2e-3)])
def test_logits(saved, make_ops, kv_dtype, tolerance):
    """All positions of a sequence, computed in two chunks, against one forward of transformers. With bf16 weights the
    native backend rounds what it multiplies to bf16, 2^-9 of a value at most, in every linear."""
    folder, theirs = saved
    ops = make_ops()
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint, ops, max_model_len=64, block_size=16, kv_dtype=kv_dtype)
    pool = ops.new_pool(model.kv_group, 8)
    kv = pool.kv
    program = ops.compile(lambda recorder, batch: model.forward(recorder, kv, batch), StepLimits(64, 4, 4, 64))
    tokens = np.random.default_rng(2).integers(0, 160, LENGTH).astype(np.int32)
    ours = []
    for first, end in ((0, 27), (27, LENGTH)):
        count = end - first
        batch = StepBatch(
            tokens_T=tokens[first:end],
            positions_T=np.arange(first, end, dtype=np.int32),
            row_starts_S1=np.array([0, count], np.int32),
            context_lens_S=np.array([end], np.int32),
            block_tables_SB=np.array([[5, 0, 3]], np.int32),
            logit_rows_L=np.arange(count, dtype=np.int32),
        )
        ours.append(program(batch).copy())
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    assert np.abs(expected).max() > 0.5, "the oracle's logits must say something"
    if checkpoint.tensors["model.embed_tokens.weight"].kind == "bf16" and ops.name == "native":
        tolerance = 2e-2
    np.testing.assert_allclose(np.concatenate(ours), expected, atol=tolerance)
    print(f"largest difference {np.abs(np.concatenate(ours) - expected).max():.1e}")
    ops.close()


@pytest.mark.parametrize("make_ops", BACKENDS)
def test_greedy_tokens(saved, make_ops, tmp_path):
    """A worker fed its own draws follows transformers' generate."""
    folder, theirs = saved
    prompt = np.random.default_rng(3).integers(0, 160, 11).tolist()
    with torch.no_grad():
        generated = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    expected = generated[0, len(prompt) :].tolist()
    worker = build_worker(
        open_checkpoint(folder), make_ops(), max_model_len=64, groups=full_groups(4), kv_dtype="f32", cache_dir=tmp_path
    )
    execute = worker.executor.execute_now
    intro = Introduction(tuple(prompt), (), SamplingParams(temperature=0), 0, 0, ())
    row = PlanRow(0, 0, tuple(prompt), blocks=(2, 0, 3), intro=intro, sample=True)
    got = [*execute(StepPlan(0, (row,))).rows[0].tokens]
    for step in range(1, 24):
        row = PlanRow(0, len(prompt) + step - 1, (), from_step=step - 1, sample=True)
        got += execute(StepPlan(step, (row,))).rows[0].tokens
    assert got == expected
    worker.executor.close()
