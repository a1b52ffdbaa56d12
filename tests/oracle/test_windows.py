"""Families with windows, served by the engine: layers with a window on a pool of their own follow transformers.

Prompts and answers many times as long as the window run through the engine core and a worker whose window pool holds
little more than what one query sees, so that blocks are given back, reused by other sequences and found again by prefix
hits. Greedy tokens must be those of transformers, which keeps everything.
"""

from __future__ import annotations

import numpy as np
import pytest
from families import CASES, SHAPE, Case
from test_families import BACKENDS, make_model

from tokenmill.core.block import full_groups, window_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.events import Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.core import EngineCore
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.models.config import config_from_checkpoint
from workers import build_worker

torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle needs transformers")

BLOCK_SIZE, WINDOW = 4, 8
MAX_MODEL_LEN, NUM_OUTPUT = 120, 24
TITLES = (
    "Mistral, sliding window",
    "Ministral 3, no YaRN, sliding window",
    "Qwen2, sliding window",
    "Gemma 2",
    "Gemma 3",
)


@pytest.fixture(params=TITLES, scope="module")
def saved(request, tmp_path_factory):
    """(folder, transformers' model, prompts of which the first two share a prefix)"""
    case: Case = next(case for case in CASES if case.title == request.param)
    folder = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(4)
    first, other = (rng.integers(3, SHAPE["vocab_size"], length).tolist() for length in (80, 55))
    return folder, make_model(case, folder), [first, first[:62] + other[:9], other]


@pytest.mark.parametrize("make_ops", BACKENDS)
def test_served_greedy_tokens(saved, make_ops, tmp_path):
    """All prompts at once on a pool that none of them fits without giving blocks back."""
    folder, theirs, prompts = saved
    num_window_blocks = 14
    checkpoint = open_checkpoint(folder)
    every_layer = all(layer.window for layer in config_from_checkpoint(checkpoint).layers)
    local = window_group(num_window_blocks, WINDOW)
    groups = (local,) if every_layer else (*full_groups(80), local)
    worker = build_worker(
        checkpoint,
        make_ops(),
        max_model_len=MAX_MODEL_LEN,
        groups=groups,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        block_size=BLOCK_SIZE,
        kv_dtype="f32",
        cache_dir=tmp_path,
    )
    assert worker.kv_groups[-1].window == WINDOW and -(-len(prompts[0]) // BLOCK_SIZE) > num_window_blocks
    core = EngineCore(
        EngineConfig(
            groups=worker.config.groups,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            numerics_id=worker.config.numerics_id,
        )
    )
    greedy = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT)
    got: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        got[str(index)] = []
        request = Request(str(index), tuple(prompt), greedy, NUM_OUTPUT, 0)
        assert not core.handle(Submit((request,)), 0.0).outputs
    while core.has_work:
        plan = core.plan(0.0)
        assert plan is not None
        for output in core.commit(worker.executor.execute_now(plan), 0.0).outputs:
            got[output.request_id] += output.tokens
        core.check()
    worker.executor.close()
    for prompt, answer in zip(prompts, got.values(), strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert answer == logits.argmax(-1).tolist()
