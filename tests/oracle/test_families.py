"""Every family and RoPE scaling: small random models, saved by transformers and loaded by us.

Logits are compared at every position, in two chunks over scattered blocks, and greedy tokens one by one. Tolerance:
both sides compute in float32 with different orders of summation; on these widths and depths logits of order 1 differ by
some 1e-6 and are held to 1e-5 of the largest, doubled where soft caps or windows add steps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from families import CASES, SHAPE, TEXT_CONFIGS, Case
from families_moe import MOE_CASES

from tokenmill.core.block import full_groups, window_group
from tokenmill.core.request import SamplingParams
from tokenmill.core.step import Introduction, PlanRow, StepPlan
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.formats.safetensors import open_safetensors
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.kv_groups import apart_windows
from tokenmill.models.loader import load_model
from tokenmill.ops.api import StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.record import Recorder
from tokenmill.ops.reference import ReferenceOps
from workers import build_worker

torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

LENGTH, NUM_GREEDY = 40, 12
PROMPT = 11
TOLERANCE = 2e-5


class WatchedOps(ReferenceOps):
    """Keeps what moe_route gives."""

    def __init__(self) -> None:
        super().__init__(exact_activations=True)
        self.routes: list[np.ndarray] = []

    def moe_route(self, logits_TE, routing, bias_E=None, scales_E=None):
        routes = super().moe_route(logits_TE, routing, bias_E, scales_E)
        self.routes.append(routes)
        return routes


NATIVE_REASON = available()
BACKENDS = [
    pytest.param(WatchedOps, id="numpy"),
    pytest.param(
        NativeOps, id="native", marks=pytest.mark.skipif(NATIVE_REASON is not None, reason=str(NATIVE_REASON))
    ),
]


def make_model(case: Case, folder):
    """Save a random model of the case, seeded; what transformers makes of the file, in float32."""
    name = TEXT_CONFIGS.get(case.family, case.family)
    config = getattr(transformers, f"{name}Config")(**SHAPE | case.options)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    named, auto = getattr(transformers, f"{case.family}ForCausalLM", None), transformers.AutoModelForCausalLM
    model = auto.from_config(config) if named is None else named(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim >= 2 else 1).add_(0.02 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "layer_scalar")):
                buffer.add_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return (named or auto).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


ALL_CASES = (*CASES, *MOE_CASES)


@pytest.fixture(params=ALL_CASES, ids=[case.title.replace(" ", "_") for case in ALL_CASES], scope="module")
def saved(request, tmp_path_factory):
    """(case, folder, a prompt and its greedy continuation, logits of a text, its experts), the last three by
    transformers."""
    folder = tmp_path_factory.mktemp("model")
    theirs = make_model(request.param, folder)
    tokens = random_tokens(3, PROMPT).tolist()
    for _ in range(NUM_GREEDY):
        tokens.append(int(their_logits(theirs, np.array(tokens))[-1].argmax()))
    routes = watch_routers(theirs)
    return request.param, folder, tokens, their_logits(theirs, random_tokens(2, LENGTH)), routes


def watch_routers(model) -> list[np.ndarray]:
    """What its routers choose from now on, one after the other: [T, 2k] as ops.moe_route has it."""
    seen: list[np.ndarray] = []

    def note(module, inputs, output):
        weights, ids = (part.numpy() for part in output[1:3])
        order = ids.argsort(axis=1)
        parts = [np.take_along_axis(part, order, axis=1) for part in (ids, weights)]
        seen.append(np.concatenate(parts, axis=1).astype(np.float32))

    for module in model.modules():
        if type(module).__name__.lower().endswith(("topkrouter", "tokenchoicerouter", "moev1gate", "gemma4textrouter")):
            module.register_forward_hook(note)
    return seen


def our_logits(ops, folder, max_model_len: int, tokens: np.ndarray) -> np.ndarray:
    """Logits of every position, computed in two chunks."""
    model = load_model(open_checkpoint(folder), ops, max_model_len=max_model_len, block_size=16, kv_dtype="f32")
    pools = [ops.new_pool(group, 16) for group in model.kv_groups]
    kvs = tuple(pool.kv for pool in pools)
    num_blocks = -(-len(tokens) // 16)
    limits = StepLimits(len(tokens), 4, num_blocks, len(tokens))
    program = ops.compile(lambda recorder, batch: model.forward(recorder, kvs, batch), limits)
    table = np.random.default_rng(0).permutation(16)[None, :num_blocks].repeat(len(pools), 0).astype(np.int32)
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
    """All positions against one forward of transformers, and there the choice of experts too."""
    case, folder, _, expected, routes = saved
    if case in MOE_CASES and make_ops is NativeOps and not hasattr(Recorder, "moe_ffn"):
        pytest.skip("not yet")
    ops = make_ops()
    ours = our_logits(ops, folder, case.max_model_len, random_tokens(2, LENGTH))
    ops.close()
    largest = np.abs(expected).max()
    assert largest > 0.1, "the oracle's logits must say something"
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * largest)
    if isinstance(ops, WatchedOps) and case.family != "Llama4":  # whose routers give scores of all experts
        check_routes(ops.routes, routes)


def check_routes(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Every token in every layer goes to the experts that transformers chooses, with their weights."""
    num = len(theirs)
    assert len(ours) == 2 * num, "two chunks"
    for layer, expected in enumerate(theirs):
        got, ids = np.concatenate([ours[layer], ours[num + layer]]), slice(0, expected.shape[1] // 2)
        assert np.array_equal(got[:, ids], expected[:, ids]), f"ids of MoE layer {layer}"
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make_ops", BACKENDS)
def test_greedy_tokens(saved, make_ops, tmp_path):
    """A worker fed its own draws follows transformers, step by step."""
    case, folder, tokens, *_ = saved
    if case in MOE_CASES and make_ops is NativeOps and not hasattr(Recorder, "moe_ffn"):
        pytest.skip("not yet")
    prompt, checkpoint = tokens[:PROMPT], open_checkpoint(folder)
    windows = sorted(apart_windows(config_from_checkpoint(checkpoint)))
    groups = (*full_groups(4), *(window_group(4, window) for window in windows))
    worker = build_worker(
        checkpoint,
        make_ops(),
        max_model_len=case.max_model_len,
        groups=groups,
        kv_dtype="f32",
        cache_dir=tmp_path,
    )
    execute = worker.executor.execute_now
    intro = Introduction(tuple(prompt), (), SamplingParams(temperature=0), 0, 0, ())
    got = [
        *execute(StepPlan(0, (PlanRow(0, 0, tuple(prompt), blocks=(2, 0) * len(groups), intro=intro, sample=True),)))
        .rows[0]
        .tokens
    ]
    for step in range(1, NUM_GREEDY):
        row = PlanRow(0, len(prompt) + step - 1, (), from_step=step - 1, sample=True)
        got += execute(StepPlan(step, (row,))).rows[0].tokens
    worker.executor.close()
    assert got == tokens[len(prompt) :]


@pytest.mark.parametrize("family", ["Mixtral", "Glm4Moe", "GraniteMoeShared", "Ernie4_5_Moe"])
def test_experts_as_transformers_holds_them(family, tmp_path):
    """What is saved without going back to the published names, gate and up of all experts as one tensor, is the same
    model, bit for bit."""
    theirs = make_model(next(case for case in MOE_CASES if case.family == family), tmp_path / "published")
    theirs.save_pretrained(tmp_path / "merged", save_original_format=False)
    assert any(name.endswith(".experts.gate_up_proj") for name in open_safetensors(tmp_path / "merged"))
    tokens = random_tokens(2, LENGTH)
    folders = [tmp_path / name for name in ("published", "merged")]
    logits = [our_logits(ReferenceOps(exact_activations=True), folder, 64, tokens) for folder in folders]
    np.testing.assert_array_equal(*logits)


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
