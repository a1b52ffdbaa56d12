"""`bench core`: the engine's Python around a step, with an executor that takes no time."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from ...bench.core import PARTS, CoreTimes, show
from ...core.block import full_groups
from ...core.config import EngineConfig
from ...core.effects import Job
from ...core.errors import ConfigError
from ...core.events import Drain, StepOutputs, Submit
from ...core.request import Request, SamplingParams
from ...core.step import RowResult, StepPlan, StepResult
from ...engine.build import build_engine, local_link
from ...engine.core import EngineCore
from ...engine.journal import Recorder, entry_line, header_line
from ...net.journal import journal_file
from ...net.system import MonotonicClock, run_event_loop

PROMPT_TOKENS = 256
LAST_S = 0.05
"""When a step ends that no other one follows."""

_TOLD_S = 0.02
_SPREAD = 16
"""Steps are told to have taken so long, and up to a fifth more in turn, so that they are learned from as real ones."""


def core(args: argparse.Namespace) -> int:
    found: list[CoreTimes] = []
    gc.freeze()  # as the engine process does once the model is loaded
    for rows in args.rows:
        times = _by_hand(rows, args.steps) | _by_shell(rows, args.steps)
        if min(map(len, times.values())) < 2:
            raise ConfigError(f"{args.steps} --steps are too few for {rows} --rows: they never decode all at once.")
        found += [CoreTimes(rows, part, [1e6 * seconds for seconds in times[part]]) for part in PARTS]
    return show(args, found)


def _config(rows: int, num_steps: int) -> EngineConfig:
    length = PROMPT_TOKENS + 16 + num_steps
    return EngineConfig(
        groups=full_groups(rows * (length // 16 + 1)),
        max_model_len=length,
        max_num_seqs=rows,
        max_num_batched_tokens=max(512, 2 * rows),
    )


def _submit(rows: int, num_steps: int) -> Submit:
    sampling = SamplingParams(max_tokens=num_steps, temperature=0.0, ignore_eos=True)
    return Submit(tuple(Request(str(number), _prompt(number), sampling, num_steps, number) for number in range(rows)))


def _prompt(number: int) -> tuple[int, ...]:
    """Of different lengths, so that each step has its share of blocks that begin and end."""
    return tuple(range(number, number + PROMPT_TOKENS + number % 16))


def _result(plan: StepPlan) -> StepResult:
    told_s = _TOLD_S * (1 + plan.step % _SPREAD / (5 * _SPREAD))
    return StepResult(plan.step, tuple([RowResult(row.seq, (7,) if row.sample else ()) for row in plan.rows]), told_s)


def _is_decode(plan: StepPlan, rows: int) -> bool:
    return len(plan.rows) == rows and all(row.from_step >= 0 for row in plan.rows)


def _by_hand(rows: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds of the core's calls. As in the running engine, a step is planned while another one computes."""
    engine = EngineCore(_config(rows, num_steps))
    engine.handle(_submit(rows, num_steps), 0.0)
    times: dict[str, list[float]] = {"plan": [], "commit": [], "plan + commit": []}
    in_flight: list[StepPlan] = []
    while engine.has_work:
        start_s = time.perf_counter()
        plan = engine.plan(0.0)
        planned_s = time.perf_counter()
        if plan is not None:
            in_flight.append(plan)
        if len(in_flight) < 2 and plan is not None:
            continue
        result = _result(in_flight.pop(0))
        commit_s = time.perf_counter()
        engine.commit(result, 0.0)
        ended_s = time.perf_counter()
        if plan is not None and _is_decode(plan, rows):
            times["plan"].append(planned_s - start_s)
            times["commit"].append(ended_s - commit_s)
            times["plan + commit"].append(planned_s - start_s + ended_s - commit_s)
    return times


def _by_shell(rows: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds from one message of a running engine to the next."""
    config = _config(rows, num_steps)
    plain: list[float] = []
    journalled: list[float] = []
    run_event_loop(_serve(config, rows, num_steps, None, plain))
    with _journal(config) as record:
        run_event_loop(_serve(config, rows, num_steps, record, journalled))
    return {"with shell": plain, "with journal": journalled}


@contextmanager
def _journal(config: EngineConfig) -> Iterator[Recorder]:
    """Without the warning of what it holds: these are nobody's prompts."""
    log = logging.getLogger("tokenmill.net.journal")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            journal_file(str(Path(folder) / "journal"), header_line(config), entry_line) as record,
        ):
            yield record
    finally:
        log.setLevel(level)


class _Instant:
    """An Executor that takes no time: a step ends once the next one is there, as where computing is what one waits for.
    The last ones end by themselves. `spent_s`: its own time."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._open: deque[tuple[asyncio.Future[StepResult], StepResult]] = deque()

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        start_s = time.perf_counter()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        self._open.append((future, _result(plan)))
        if len(self._open) > 1:
            loop.call_soon(self._end_oldest)
        loop.call_later(LAST_S, self._end, future)
        self.spent_s += time.perf_counter() - start_s
        return future

    def _end(self, future: asyncio.Future[StepResult]) -> None:
        while not future.done():
            self._end_oldest()

    def _end_oldest(self) -> None:
        if self._open:
            future, result = self._open.popleft()
            future.set_result(result)

    async def run(self, job: Job) -> str:
        raise NotImplementedError(job)


async def _serve(config: EngineConfig, rows: int, num_steps: int, record: Recorder | None, times: list[float]) -> None:
    engine_end, front_end = local_link()
    executor = _Instant()
    shell = asyncio.create_task(build_engine(config, executor, engine_end, MonotonicClock(), record).run())
    await front_end.send(_submit(rows, num_steps))
    stamps: list[tuple[int, float]] = []
    num_open = rows
    while num_open:
        message = await front_end.receive()
        assert isinstance(message, StepOutputs), message
        stamps.append((len(message.outputs), time.perf_counter() - executor.spent_s))
        num_open -= sum(output.finish_reason is not None for output in message.outputs)
    await front_end.send(Drain())
    await shell
    times += [after - before for (_, before), (count, after) in pairwise(stamps) if count == rows]
