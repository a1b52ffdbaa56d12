"""Queues on virtual time: the real client, engine shell and core, and steps that take what a cost model says.

A `Replay` submits calls at their times and notes, for each request, when its first token came and when it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenmill.cluster.request_queue import newcomer
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import Job
from tokenmill.core.errors import Overloaded
from tokenmill.core.events import Ready
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import PlanRow, RowResult, StepPlan, StepResult
from tokenmill.core.terms import USUAL, Terms
from tokenmill.engine.build import build_engine, local_link
from tokenmill.sched.admission import max_running
from tokenmill.sched.policies import ORDERS
from tokenmill.server.client import EngineClient
from tokenmill.server.config import ServerConfig
from tokenmill.server.limits import Limits
from tokenmill.sim.loop import VirtualLoop

CONFIG = EngineConfig(groups=full_groups(20_000), max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=576)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step: fixed, for each row that decodes, and for each token of a prompt."""

    fixed_s: float = 0.008
    per_row_s: float = 0.0004
    per_token_s: float = 0.0002

    def of(self, plan: StepPlan) -> float:
        num_rows = sum(row.num_tokens == 1 for row in plan.rows)
        return self.fixed_s + self.per_row_s * num_rows + self.per_token_s * (plan.num_tokens - num_rows)


class Paced:
    """An Executor that draws token 7 for ever, a step at a time."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._turn: asyncio.Future[None] | None = None
        self.busy_s = 0.0

    async def run(self, job: Job) -> str:
        raise NotImplementedError

    async def execute(self, plan: StepPlan) -> StepResult:
        before, self._turn = self._turn, asyncio.get_running_loop().create_future()
        turn = self._turn
        if before is not None:
            await before
        duration_s = self._costs.of(plan)
        await asyncio.sleep(duration_s)
        self.busy_s += duration_s
        turn.set_result(None)
        return StepResult(plan.step, tuple(map(self._row, plan.rows)), duration_s)

    @staticmethod
    def _row(row: PlanRow) -> RowResult:
        return RowResult(row.seq, (7,) if row.sample else ())


@dataclass(slots=True)
class Seen:
    """What a client saw of one request; times are since the call."""

    call: str
    at_s: float
    num_prompt: int
    ttft_s: float = -1.0
    end_s: float = -1.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A call to come: one prompt, so many times. `returns`: when it is refused, as it is told to."""

    at_s: float
    num_prompt: int
    max_tokens: int
    num_choices: int = 1
    name: str = ""
    client: str = ""
    priority: int = 0
    returns: bool = False
    terms: Terms = USUAL


@dataclass(slots=True)
class Replay:
    """One engine and its clients. `seen` fills as the run goes on, `refused` holds (time, ask, error)."""

    config: EngineConfig = CONFIG
    costs: Costs = field(default_factory=Costs)
    seen: list[Seen] = field(default_factory=list)
    is_shared: bool = True
    max_queue_s: float = 1e9
    refused: list[tuple[float, Ask, Overloaded]] = field(default_factory=list)
    busy_s: float = 0.0
    duration_s: float = 0.0

    def run(self, asks: Iterable[Ask]) -> Replay:
        loop = VirtualLoop()
        loop.run(self._main(loop, sorted(asks, key=lambda ask: ask.at_s)))
        self.duration_s = loop.time()
        return self

    async def _main(self, loop: VirtualLoop, asks: Sequence[Ask]) -> None:
        engine_end, front_end = local_link()
        executor = Paced(self.costs)
        client = EngineClient(patience=ORDERS[self.config.scheduling_policy].patience)
        client.gateway.is_shared = self.is_shared
        limits = Limits(ServerConfig(("m",), max_queue_s=self.max_queue_s), client, loop)
        client.attach(front_end)
        engine = loop.spawn(build_engine(self.config, executor, engine_end, loop).run(), "engine")
        await engine_end.send(make_ready(self.config))
        while client.ready is None:
            await asyncio.sleep(0)
        calls = []
        for number, ask in enumerate(asks):
            await asyncio.sleep(max(0.0, ask.at_s - loop.time()))
            calls.append(loop.create_task(self._call(client, limits, loop, f"{ask.name or 'c'}{number}", ask)))
        await asyncio.gather(*calls)
        self.busy_s = executor.busy_s
        client.close("over")
        front_end.close()
        await engine

    async def _call(self, client: EngineClient, limits: Limits, loop: VirtualLoop, name: str, ask: Ask) -> None:
        start_s = loop.time()
        sampling = SamplingParams(max_tokens=ask.max_tokens)
        head = hash_of(name)
        prompt = (*head, *(1 + i % 61 for i in range(ask.num_prompt - len(head))))[: ask.num_prompt]
        requests = [
            Request(
                f"{name}-{choice}", prompt, sampling, ask.max_tokens, 0, choice=choice, priority=ask.priority,
                terms=ask.terms,
                arrival_s=start_s,
            )
            for choice in range(ask.num_choices)
        ]  # fmt: skip
        seen = {request.id: Seen(name, start_s, ask.num_prompt) for request in requests}
        try:
            limits.admit(newcomer(ask.client, requests))
            stream = client.open(requests, ask.client)
        except Overloaded as error:
            self.refused.append((start_s, ask, error))
            if not ask.returns:
                return
            await asyncio.sleep(error.retry_after_s)
            return await self._call(client, limits, loop, name, ask)
        self.seen += seen.values()
        num_open = len(requests)
        while num_open:
            for delta in await stream.take():
                each = seen[delta.request_id]
                if each.ttft_s < 0 and delta.tokens:
                    each.ttft_s = loop.time() - start_s
                if delta.finish_reason is not None:
                    each.end_s = loop.time() - start_s
                    num_open -= 1


def make_ready(config: EngineConfig) -> Ready:
    return Ready(
        "m", config.max_model_len, 1000, (2,), "id", config.block_size, config.groups[0].num_blocks,
        max_num_seqs=max_running(config), max_num_batched_tokens=config.max_num_batched_tokens,
    )  # fmt: skip


def hash_of(name: str) -> tuple[int, ...]:
    """Tokens that begin no other prompt."""
    return tuple(100 + byte for byte in name.encode())


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
