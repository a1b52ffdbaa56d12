"""Every family and RoPE scaling: small random models, saved by transformers and loaded by us.

Logits are compared at every position, in two chunks over scattered blocks, and greedy tokens one by one. Tolerance:
both sides compute in float32 with different orders of summation; on these widths and depths logits of order 1 differ by
some 1e-6 and are held to 1e-5 of the largest, doubled where soft caps or windows add steps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from families import CASES, SHAPE, Case

from tokenmill.core.block import full_groups
from tokenmill.core.request import SamplingParams
from tokenmill.core.step import Introduction, PlanRow, StepPlan
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.registry import load_model
from tokenmill.ops.api import StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from workers import build_worker

torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

LENGTH, NUM_GREEDY = 40, 12
PROMPT = 11
TOLERANCE = 2e-5

NATIVE_REASON = available()
BACKENDS = [
    pytest.param(lambda: ReferenceOps(exact_activations=True), id="numpy"),
    pytest.param(
        NativeOps, id="native", marks=pytest.mark.skipif(NATIVE_REASON is not None, reason=str(NATIVE_REASON))
    ),
]


def make_model(case: Case, folder):
    """Save a random model of the case, seeded; what transformers makes of the file, in float32."""
    name = {"Gemma3": "Gemma3Text"}.get(case.family, case.family)
    config = getattr(transformers, f"{name}Config")(**SHAPE | case.options)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim == 2 else 1).add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(params=CASES, ids=[case.title.replace(" ", "_") for case in CASES], scope="module")
def saved(request, tmp_path_factory):
    """(case, folder, a prompt and its greedy continuation, logits of a text), the last two by transformers."""
    folder = tmp_path_factory.mktemp("model")
    theirs = make_model(request.param, folder)
    tokens = random_tokens(3, PROMPT).tolist()
    for _ in range(NUM_GREEDY):
        tokens.append(int(their_logits(theirs, np.array(tokens))[-1].argmax()))
    return request.param, folder, tokens, their_logits(theirs, random_tokens(2, LENGTH))


def our_logits(ops, folder, max_model_len: int, tokens: np.ndarray) -> np.ndarray:
    """Logits of every position, computed in two chunks."""
    model = load_model(open_checkpoint(folder), ops, max_model_len=max_model_len, block_size=16, kv_dtype="f32")
    pool = ops.new_pool(model.kv_group, 16)
    kv = pool.kv
    num_blocks = -(-len(tokens) // 16)
    limits = StepLimits(len(tokens), 4, num_blocks, len(tokens))
    program = ops.compile(lambda recorder, batch: model.forward(recorder, kv, batch), limits)
    table = np.random.default_rng(0).permutation(16)[None, :num_blocks].astype(np.int32)
    ours = []
    for first, end in ((0, 27), (27, len(tokens))):
        batch = StepBatch(
            tokens_T=tokens[first:end],
            positions_T=np.arange(first, end, dtype=np.int32),
            row_starts_S1=np.array([0, end - first], np.int32),
            context_lens_S=np.array([end], np.int32),
            block_tables_SB=table,
            logit_rows_L=np.arange(end - first, dtype=np.int32),
        )
        ours.append(program(batch).copy())
    return np.concatenate(ours)


def their_logits(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()


def random_tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, SHAPE["vocab_size"], count).astype(np.int32)


@pytest.mark.parametrize("make_ops", BACKENDS)
def test_logits(saved, make_ops):
    """All positions against one forward of transformers."""
    case, folder, _, expected = saved
    ops = make_ops()
    ours = our_logits(ops, folder, case.max_model_len, random_tokens(2, LENGTH))
    ops.close()
    largest = np.abs(expected).max()
    assert largest > 0.1, "the oracle's logits must say something"
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * largest)


@pytest.mark.parametrize("make_ops", BACKENDS)
def test_greedy_tokens(saved, make_ops, tmp_path):
    """A worker fed its own draws follows transformers, step by step."""
    case, folder, tokens, _ = saved
    prompt = tokens[:PROMPT]
    worker = build_worker(
        open_checkpoint(folder),
        make_ops(),
        max_model_len=case.max_model_len,
        groups=full_groups(4),
        kv_dtype="f32",
        cache_dir=tmp_path,
    )
    execute = worker.executor.execute_now
    intro = Introduction(tuple(prompt), (), SamplingParams(temperature=0), 0, 0, ())
    got = [
        *execute(StepPlan(0, (PlanRow(0, 0, tuple(prompt), blocks=(2, 0), intro=intro, sample=True),))).rows[0].tokens
    ]
    for step in range(1, NUM_GREEDY):
        row = PlanRow(0, len(prompt) + step - 1, (), from_step=step - 1, sample=True)
        got += execute(StepPlan(step, (row,))).rows[0].tokens
    worker.executor.close()
    assert got == tokens[len(prompt) :]


LONG = [
    Case(
        "Llama, dynamic NTK RoPE, beyond its context",
        "Llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    *(replace(case, max_model_len=200) for case in CASES if "longrope" in case.title),
]


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.title.replace(" ", "_"))
def test_length_dependent_rope_is_that_of_the_longest_context(case, tmp_path):
    """transformers changes these factors as a sequence grows; we use from the start those it uses at the longest
    context served, so a sequence that long agrees everywhere."""
    theirs = make_model(case, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    longest = min(
        case.max_model_len if case.max_model_len > 64 else 128, config_from_checkpoint(checkpoint).max_context
    )
    tokens = random_tokens(4, longest)
    ours = our_logits(ReferenceOps(exact_activations=True), tmp_path, longest, tokens)
    expected = their_logits(theirs, tokens)
    np.testing.assert_allclose(ours, expected, atol=5e-5 * np.abs(expected).max())
