"""Memory that engines give back while they serve: blocks that nobody needs, whose bytes are gone after that."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tiny import tiny_checkpoint
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import GiveBack, JobEnded, Relax
from tokenmill.core.events import Drain, StepOutputs, Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.build import build_engine, local_link
from tokenmill.engine.journal import Handled
from tokenmill.kv.blocks.manager import BlockManager
from tokenmill.net.system import MonotonicClock
from tokenmill.ops.reference import ReferenceOps
from tokenmill.sim.run import Report, run_scenario
from tokenmill.sim.workload import make_scenario
from tokenmill.worker import build
from tokenmill.worker.build import build_worker
from tokenmill.worker.spec import WorkerSpec

NUM_SEEDS = 40


def given(report: Report) -> int:
    """Blocks, each as often as it was."""
    ends = {
        entry.event.job.number: entry.event.job
        for entry in report.journal
        if isinstance(entry, Handled) and isinstance(entry.event, JobEnded) and isinstance(entry.event.job, GiveBack)
    }
    return sum(len(blocks) for job in ends.values() for blocks in job.blocks)


def test_what_is_given_back_changes_no_answer() -> None:
    """At random times and amounts, with and without the prefix cache, beside stores, failures and preemption: every
    request gets what it gets alone, no block is lost, and a replay of the journal plans the same."""
    num_given, num_without, num_all = 0, 0, 0
    for seed in range(NUM_SEEDS):
        report = run_scenario(make_scenario(seed), failure_seed=seed, relax_rate=0.3)
        num_given += given(report)
        num_all += 1
        num_without += not given(report)
    assert num_given > 5 * NUM_SEEDS and num_without < num_all / 4, (num_given, num_without)


def test_a_pool_that_gave_its_memory_back_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real pool: the same tokens, computed anew where the prefix cache was given up."""
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    config = EngineConfig(full_groups(40), 128, block_size=8, max_num_seqs=4, max_num_batched_tokens=64)
    with contextlib.closing(
        build_worker(tiny_checkpoint(), ReferenceOps(), WorkerSpec(config, "f32")).executor
    ) as executor:

        async def run() -> list[list[int]]:
            engine_end, front_end = local_link()
            shell = build_engine(config, executor, engine_end, MonotonicClock())
            engine = asyncio.create_task(shell.run())
            answers = []
            for relaxes in (None, Relax(1 << 40), Relax(1 << 40, True)):
                while relaxes is not None and (shell.core.memory_reclaim.has_spare(relaxes.evicts) or shell.num_jobs):
                    shell.hear(relaxes)
                    await asyncio.sleep(0.001)
                sampling = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
                prompt = tuple(range(5, 66))
                await front_end.send(Submit((Request("a", prompt, sampling, 12, 7),)))
                tokens: list[int] = []
                cached = None
                while cached is None:
                    message = await front_end.receive()
                    for output in message.outputs if isinstance(message, StepOutputs) else ():
                        tokens += output.tokens
                        cached = output.num_cached if output.finish_reason is not None else None
                answers.append([cached, *tokens])
            await front_end.send(Drain())
            await engine
            return answers

        first, second, third = asyncio.run(run())
    assert first[1:] == second[1:] == third[1:] and len(first) == 13
    assert (first[0], second[0], third[0]) == (0, 56, 0)


def test_giving_back_what_is_needed_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation notices a pool that lends what its prefix cache still offers."""

    def lend(self: BlockManager, most: int, evicts: bool) -> list[int]:
        cached = [block for _, block in self.published() if self._tree.is_unreferenced(block)]
        self._allocator._num_lent += len(cached)
        return cached

    monkeypatch.setattr(BlockManager, "lend", lend)
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(20):
            run_scenario(make_scenario(seed), failure_seed=seed, relax_rate=0.3)
