"""A draft model changes no token: whatever it proposes, a request's tokens, logprobs and end are those of its run on a
worker that has none. As test_exactness.py, with its mixes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_drafts_exact import all_are_verified, drafted_mix  # noqa: F401, the first is a fixture
from test_exactness import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Mix,
    check_mix,
    no_digest,  # noqa: F401, a fixture
    run,
    windowed_checkpoint,
    windowed_groups,
)

from adapters import random_pairs, write_adapter
from tiny import VOCAB_SIZE, tiny_checkpoint
from tiny_latent import latent_checkpoint
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import GiveBack
from tokenmill.core.events import LoadAdapter
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.speculation import DRAFT_MODEL, SpeculationConfig
from tokenmill.core.step import Introduction, PlanRow, StepPlan, StepResult
from tokenmill.models.lora import LoraLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.build import Worker, load_drafter
from tokenmill.worker.draft_runs import DraftRunner
from tokenmill.worker.spec import WorkerSpec
from workers import build_worker

needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))
SEEDS = (31, 39, 46)
LIMITS = {"max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 8, "block_size": BLOCK_SIZE}
SPECULATION = SpeculationConfig((DRAFT_MODEL,), num_speculative_tokens=5, model="tiny")


class Counting:
    """An executor that counts what becomes of drafts."""

    def __init__(self, executor: Any, source: str = DRAFT_MODEL) -> None:
        self._executor = executor
        self._source = source
        self.num_rows = self.num_tokens = self.num_drafted = self.num_proposed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute_now(self, plan: StepPlan) -> StepResult:
        result = self._executor.execute_now(plan)
        for row, given in zip(plan.rows, result.rows, strict=True):
            self.num_rows += row.sample
            self.num_tokens += len(given.tokens)
            self.num_drafted += len(row.drafts)
            if given.drafts is not None:
                assert given.drafts.source == self._source and 1 <= len(given.drafts.tokens) <= 5
                assert all(0 < chance <= 1 for chance in given.drafts.chances)
                self.num_proposed += len(given.drafts.tokens)
        return result

    @property
    def accepted(self) -> float:
        return (self.num_tokens - self.num_rows) / self.num_drafted


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    made: list[Worker] = []

    def make(
        checkpoint: Any = None, drafter: Any = None, make_ops: Callable[[], Any] = NativeOps, **how: Any
    ) -> Worker:
        """drafter: its checkpoint; None: no model drafts."""
        ops = make_ops()
        how = {"groups": full_groups(NUM_BLOCKS), **LIMITS, "speculation": SPECULATION, **how}
        if drafter is not None:
            config = EngineConfig(how["groups"], **LIMITS, speculation=how["speculation"])
            spec = WorkerSpec(config, kv_dtype=how.get("kv_dtype", "f16"))
            how["drafter"] = load_drafter(drafter, ops, spec)
        made.append(build_worker(checkpoint or tiny_checkpoint(), ops, **how))
        return made[-1]

    yield make
    for worker in made:
        worker.executor.close()


def check(
    worker: Worker,
    plain: Worker,
    seeds: tuple[int, ...] = SEEDS,
    *,
    exact: bool = True,
    adapters: tuple[str, ...] = (),
    source: str = DRAFT_MODEL,
) -> Counting:
    """Mixes on `worker` equal runs alone on `plain`; what became of the drafts."""
    counting = Counting(worker.executor, source)
    preemptions = hits = 0
    for seed in seeds:
        rng = random.Random(seed)
        mix = drafted_mix(rng, adapters)
        drafts_on = replace(worker, executor=counting)
        core = check_mix(drafts_on, mix, rng, exact=exact, where=f"seed {seed}", plain=plain)
        preemptions += core.stats().num_preemptions
        hits += core.stats().prefix_hits
    assert preemptions and hits, "mixes that never preempt nor share a prefix prove too little"
    assert counting.num_drafted > 20
    return counting


def test_on_numpy(make_worker: Callable[..., Worker]) -> None:
    """A drafter of other weights is mostly wrong, and no token changes."""
    how = {"make_ops": ReferenceOps, "kv_dtype": "f32"}
    check(make_worker(drafter=tiny_checkpoint(seed=5), **how), make_worker(**how), SEEDS[2:3], exact=False)


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("kv_dtype", ["f16", "int8"])
def test_bit_for_bit(make_worker: Callable[..., Worker], kv_dtype: str) -> None:
    """Tokens and logprobs, drafted by other weights and by the same, which are right where nothing is adjusted."""
    plain = make_worker(kv_dtype=kv_dtype)
    wrong = check(make_worker(drafter=tiny_checkpoint(seed=5, num_layers=1), kv_dtype=kv_dtype), plain)
    right = check(make_worker(drafter=tiny_checkpoint(), kv_dtype=kv_dtype), plain)
    assert wrong.accepted < right.accepted


@pytest.mark.exact
@needs_native
def test_another_family_and_adapters(make_worker: Callable[..., Worker], tmp_path: Path) -> None:
    """The drafter keeps latents where the target keeps keys and values, and knows nothing of the target's adapters."""
    with_adapters = {"lora": LoraLimits(2, 8)}
    worker = make_worker(drafter=latent_checkpoint("V2"), **with_adapters)
    plain = make_worker(**with_adapters)
    folders = [write_adapter(tmp_path / str(seed), random_pairs(tiny_checkpoint(), seed=seed)) for seed in (1, 2)]
    for each in (worker, plain):
        adapters = tuple(asyncio.run(each.executor.run(LoadAdapter(0, str(folder)))) for folder in folders)
    check(worker, plain, adapters=adapters)


def requests(num: int, **how: Any) -> list[Request]:
    """With one prefix, drawn in different ways; choices of one prompt have its seed."""
    rng = random.Random(7)
    prefix = tuple(rng.randrange(VOCAB_SIZE) for _ in range(40))
    settings = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.9, logprobs=1),
        SamplingParams(temperature=1.3, top_k=20, min_p=0.02),
        SamplingParams(temperature=1.0, typical_p=0.8),
    ]
    return [
        Request(
            id=f"r{number}",
            prompt_tokens=(*prefix, *(rng.randrange(VOCAB_SIZE) for _ in range(number // 2))),
            sampling=settings[number % len(settings)],
            max_tokens=64,
            seed=number // 2,
            choice=number % 2,
            eos_token_ids=(),
            **how,
        )
        for number in range(num)
    ]


def run_all(worker: Worker, given: list[Request], **how: Any) -> tuple[Counting, Any]:
    counting = Counting(worker.executor)
    config = EngineConfig(**{"groups": full_groups(NUM_BLOCKS), **LIMITS, "speculation": SPECULATION, **how})
    streams, core = run(replace(worker, executor=counting), Mix(config, [(0, each) for each in given], {}))
    assert all(len(stream.tokens) == 64 for stream in streams.values())
    return counting, core


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize(("num_batched", "least"), [(16, 1.5), (128, 2.0)])
def test_the_same_weights_are_always_right(make_worker: Callable[..., Worker], num_batched: int, least: float) -> None:
    """A drafter races with the target's own times, so it draws the same tokens at every temperature where its weights
    are the target's: each draft is accepted, as many as a step has room for. Prompts come in chunks, have hits, and
    sequences are preempted."""
    worker = make_worker(drafter=tiny_checkpoint())
    for num_blocks in (NUM_BLOCKS, 17):
        how = {"groups": full_groups(num_blocks), "max_num_batched_tokens": num_batched}
        counting, core = run_all(worker, requests(8), **how)
        assert counting.accepted == 1.0 and counting.num_tokens > least * counting.num_rows
        assert core.stats().prefix_hits
        assert (core.stats().num_preemptions > 0) == (num_blocks < NUM_BLOCKS)


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("num_spare", [0, 3])
def test_drafts_go_on_behind_the_last_block(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, num_spare: int
) -> None:
    """Through several blocks that the sequence does not have yet, or has: all are right where the weights are the
    target's, step after step. What was drafted in blocks that it has is not computed again."""
    most, call, num_computed = 37, DraftRunner._call, list[int]()

    def count(self: DraftRunner, runs: Any, draws: Any) -> int:
        num_computed.append(call(self, runs, draws))
        return num_computed[-1]

    monkeypatch.setattr(DraftRunner, "_call", count)
    worker = make_worker(drafter=tiny_checkpoint(), speculation=replace(SPECULATION, num_speculative_tokens=most))
    (request,) = requests(1)
    prompt = request.prompt_tokens[:20]
    num_tokens, num_blocks, tokens, drafts = len(prompt), 0, prompt, ()
    for step in range(3):
        end = num_tokens + len(drafts)
        more = max(0, min(-(-end // BLOCK_SIZE) + num_spare, LIMITS["max_model_len"] // BLOCK_SIZE) - num_blocks)
        intro = None if step else Introduction(prompt, (), SamplingParams(temperature=0.8), 1, 0, ())
        blocks = tuple(range(num_blocks, num_blocks + more))
        row = PlanRow(0, num_tokens - len(tokens), tokens, -1, blocks, intro, sample=True, drafts=drafts)
        num_blocks += more
        (given,) = worker.executor.execute_now(StepPlan(step, (row,))).rows
        assert given.tokens[:-1] == drafts
        num_tokens, tokens = num_tokens + len(given.tokens), given.tokens[-1:]
        assert given.drafts is not None
        first, *others = num_computed
        assert set(others) <= {1} and (first == 2 or not step if num_spare else first > 2)
        num_computed.clear()
        drafts = given.drafts.tokens
        assert len(drafts) == min(most, LIMITS["max_model_len"] - num_tokens)


@pytest.mark.exact
@needs_native
@pytest.mark.usefixtures("no_digest")
def test_a_model_with_windows_is_drafted_by_the_blocks_of_its_other_layers(make_worker: Callable[..., Worker]) -> None:
    """Layers of the target with windows have tables of their own; all layers of the drafter go by the first."""
    windows = (0, 5, 21)
    checkpoint = windowed_checkpoint(windows, LIMITS["max_model_len"])
    worker = make_worker(checkpoint, checkpoint, groups=windowed_groups(windows))
    given = requests(4)
    counting, _ = run_all(worker, given, groups=windowed_groups(windows))
    assert counting.accepted == 1.0 and counting.num_tokens > 2 * counting.num_rows


@pytest.mark.exact
@needs_native
def test_blocks_whose_memory_was_given_back_are_computed_again(make_worker: Callable[..., Worker]) -> None:
    """What another sequence of the same tokens has computed in a block is used, as long as the block has its bytes."""
    worker = make_worker(drafter=tiny_checkpoint())
    drafter = worker.executor._draft_kv
    given = requests(2)
    for _ in range(2):
        counting, _ = run_all(worker, given)
        assert counting.accepted == 1.0
        kept = drafter._inputs_BP[:6].copy()
        asyncio.run(worker.executor.run(GiveBack(0, (tuple(range(NUM_BLOCKS)),))))
        assert (kept >= 0).any() and (drafter._inputs_BP < 0).all()
        assert not np.frombuffer(drafter.pool.copy_out(range(NUM_BLOCKS)), np.uint8).any()


def test_a_sequence_that_cannot_be_drafted_for_is_left_alone(make_worker: Callable[..., Worker]) -> None:
    """Where nothing that is proposed gets verified, the drafter is asked less and less."""
    worker = make_worker(drafter=tiny_checkpoint(seed=5), make_ops=ReferenceOps, kv_dtype="f32")
    (request,) = requests(1)
    prompt = request.prompt_tokens
    intro = Introduction(prompt, (), request.sampling, 1, 0, ())
    row = PlanRow(0, 0, prompt, blocks=tuple(range(8)), intro=intro, sample=True)
    proposed = [worker.executor.execute_now(StepPlan(0, (row,))).rows[0].drafts]
    for step in range(1, 80):
        row = PlanRow(0, len(prompt) + step - 1, (), from_step=step - 1, sample=True)
        proposed.append(worker.executor.execute_now(StepPlan(step, (row,))).rows[0].drafts)
    assert all(each is not None for each in proposed[:4])
    assert sum(each is not None for each in proposed[4:]) <= 9


def test_what_the_drafter_had_missed_is_told_apart(make_worker: Callable[..., Worker]) -> None:
    """A prompt takes time that steps with its drafts do not; what was drawn is not missed."""
    worker = make_worker(drafter=tiny_checkpoint(), make_ops=ReferenceOps, kv_dtype="f32")
    (request,) = requests(1)
    prompt = request.prompt_tokens
    intro = Introduction(prompt, (), request.sampling, 1, 0, ())
    row = PlanRow(0, 0, prompt, blocks=tuple(range(8)), intro=intro, sample=True)
    result = worker.executor.execute_now(StepPlan(0, (row,)))
    assert 0 < result.late_s < result.duration_s
    (given,) = result.rows
    row = PlanRow(0, len(prompt), given.tokens, sample=True, drafts=given.drafts.tokens)
    assert worker.executor.execute_now(StepPlan(1, (row,))).late_s == 0


def test_a_step_outlives_its_draft_model(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that fails drafts no more, and is heard of once; tokens are what they are without it."""
    how = {"make_ops": ReferenceOps, "kv_dtype": "f32"}
    worker, plain = make_worker(drafter=tiny_checkpoint(seed=5), **how), make_worker(**how)
    call, num_calls = DraftRunner._call, 0

    def fail(self: DraftRunner, *given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 20:
            raise MemoryError
        return call(self, *given)

    monkeypatch.setattr(DraftRunner, "_call", fail)
    rng = random.Random(SEEDS[0])
    check_mix(worker, drafted_mix(rng), rng, exact=False, where="", plain=plain)
    assert num_calls == 21 and len(caplog.records) == 1
