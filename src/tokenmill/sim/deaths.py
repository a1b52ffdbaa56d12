"""Engines that die under a gateway: the live one, before real engine shells, on virtual time.

One to three engines serve a seeded scenario. Each life ends at a step or a moment drawn from the seed, until as many
have ended as the seed wants, and is followed by another after a while; in some runs there is a poison request, which
ends every engine that is given a row of it. Checked are

    each request    ends once, with the tokens, log probabilities and reason of its solo run, whatever died under it
    poison          ends with its own error, after a bounded number of deaths; nobody else ends with one
    each event      leaves the gateway's books consistent (Gateway.check)
    at the end      the books are empty

`python -m tokenmill.sim.deaths --seed N` repeats one seed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cluster.events import GatewayEvent, GivenUp, Joined, Left, Opened, Stepped
from ..cluster.gateway import Gateway
from ..core.effects import Job
from ..core.errors import EngineFailed
from ..core.events import FINISH_ABORT, Abort, Ready, StepOutputs, Submit, ToEngine
from ..core.request import Request
from ..core.step import StepPlan, StepResult
from ..engine.build import build_engine
from ..engine.link import LocalFrontEnd, local_link
from ..sched.admission import max_running, refusal
from .check import ClientStream, check_saved, check_stream
from .executor import ToyExecutor
from .loop import VirtualLoop
from .workload import VOCAB_SIZE, Arrival, Scenario, make_scenario

_LIMIT_S = 20.0
_POISON_SEED = 2**63 + 7


@dataclass(frozen=True, slots=True)
class Deaths:
    """num_engines  that serve at once
    num_chosen   deaths that the seed wants
    is_shared    whether choices have places in turn
    poison       id of the request that ends engines; "": there is none
    """

    scenario: Scenario
    num_engines: int
    num_chosen: int
    is_shared: bool
    poison: str = ""


@dataclass(frozen=True, slots=True)
class DeathReport:
    """`ends`: (finish reason or error kind, number of requests), sorted."""

    num_deaths: int
    num_resumed: int
    num_poisoned: int
    num_exported: int
    ends: tuple[tuple[str, int], ...]
    duration_s: float


def make_deaths(seed: int) -> Deaths:
    rng = random.Random(f"deaths {seed}")
    scenario = replace(make_scenario(seed), failure_rate=0.0)
    poison = ""
    lasting = [request for request in scenario.requests if refusal(request, scenario.config, 0) is None]
    if lasting and rng.random() < 0.3:
        poison = rng.choice(lasting).id
        scenario = replace(scenario, arrivals=tuple(_poisoned(arrival, poison) for arrival in scenario.arrivals))
    num_chosen = rng.choice([0, 0, 1]) if poison else rng.choice([1, 2, 3, 3, 10])
    return Deaths(scenario, rng.choice([1, 1, 2, 3]), num_chosen, rng.random() < 0.7, poison)


def _poisoned(arrival: Arrival, request_id: str) -> Arrival:
    requests = (replace(each, seed=_POISON_SEED) if each.id == request_id else each for each in arrival.requests)
    return Arrival(arrival.at_s, tuple(requests))


class _MortalExecutor:
    """A toy executor whose engine dies with its step number `last_step`, or of a row of the poison request."""

    def __init__(self, executor: ToyExecutor, last_step: int, die: asyncio.Event) -> None:
        self._executor = executor
        self._last_step = last_step
        self._die = die

    async def execute(self, plan: StepPlan) -> StepResult:
        has_poison = any(row.intro is not None and row.intro.seed == _POISON_SEED for row in plan.rows)
        if has_poison or plan.step == self._last_step:
            self._die.set()
            await asyncio.get_running_loop().create_future()
        # A step that has begun ends, and nobody hears of it.
        return await asyncio.shield(self._executor.execute(plan))

    async def run(self, job: Job) -> str:
        return await self._executor.run(job)


class _Front:
    """The gateway's shell, and its clients."""

    def __init__(self, deaths: Deaths, loop: VirtualLoop, rng: random.Random) -> None:
        self.gateway = Gateway()
        self.gateway.is_shared = deaths.is_shared
        self.streams = {request.id: ClientStream(request) for request in deaths.scenario.requests}
        self.done = asyncio.Event()
        self.num_deaths = self.num_resumed = self.num_poisoned = self.num_exported = 0
        self._deaths = deaths
        self._stored = dict(deaths.scenario.stored or {})  # outlives engines, and they share it
        self._loop = loop
        self._rng = rng
        self._num_chosen_left = deaths.num_chosen
        self._num_ended = 0
        self._num_links = 0
        self._outboxes: dict[int, asyncio.Queue[ToEngine]] = {}

    async def serve(self) -> None:
        """One engine after the other."""
        config, scenario, rng = self._deaths.scenario.config, self._deaths.scenario, self._rng
        while True:
            number, self._num_links = self._num_links, self._num_links + 1
            engine_end, front_end = local_link()
            die = asyncio.Event()
            executor = ToyExecutor(config, self._loop, vocab_size=VOCAB_SIZE, costs=scenario.costs)
            chosen = rng.choice([-1, 0, 1, 2, rng.randint(3, 40), rng.randint(3, 40)])
            last_step = chosen if self._num_chosen_left else -1
            mortal = _MortalExecutor(executor, last_step, die)
            shell = build_engine(config, mortal, engine_end, self._loop)
            if scenario.stored is not None:
                executor.store.blocks = self._stored
                shell.hear(executor.store.opened())
            running = self._loop.create_task(shell.run(), name=f"engine {number}")
            outbox = self._outboxes[number] = asyncio.Queue()
            writing = self._loop.create_task(self._write(front_end, outbox), name=f"write {number}")
            reading = self._loop.spawn(self._read(number, front_end), f"read {number}")
            await engine_end.send(_ready(self._deaths))
            if self._num_chosen_left and last_step < 0:
                self._loop.call_later(rng.uniform(0.0, 0.3), die.set)
            await die.wait()
            self._num_chosen_left -= self._num_chosen_left > 0
            running.cancel()
            engine_end.close()
            await reading
            writing.cancel()
            await asyncio.sleep(rng.uniform(0.0, 0.1))

    async def call(self) -> None:
        for arrival in self._deaths.scenario.arrivals:
            await asyncio.sleep(max(0.0, arrival.at_s - self._loop.time()))
            self._handle(Opened(arrival.requests, f"client {len(arrival.requests) % 3}"))

    async def cancel(self) -> None:
        for cancellation in self._deaths.scenario.cancellations:
            await asyncio.sleep(max(0.0, cancellation.at_s - self._loop.time()))
            self.streams[cancellation.request_id].is_cancelled = True
            self._handle(GivenUp(cancellation.request_id, FINISH_ABORT))

    async def _write(self, link: LocalFrontEnd, outbox: asyncio.Queue[ToEngine]) -> None:
        while True:
            await link.send(await outbox.get())

    async def _read(self, number: int, link: LocalFrontEnd) -> None:
        while True:
            try:
                message = await link.receive()
            except EOFError:
                self.num_deaths += 1
                self._handle(Left(number))
                return
            if isinstance(message, Ready):
                self._handle(Joined(number, message))
            elif isinstance(message, StepOutputs):
                self._handle(Stepped(number, message))

    def _handle(self, event: GatewayEvent) -> None:
        effects = self.gateway.handle(event, self._loop.time())
        self.gateway.check()
        self.num_resumed += effects.resumed
        self.num_poisoned += effects.poisoned
        for link, request_id in effects.aborts:
            self._outboxes[link].put_nowait(Abort((request_id,)))
        for link, request in effects.submits:
            self._outboxes[link].put_nowait(Submit((request,)))
        for output in effects.outputs:
            self.streams[output.request_id].take(output)
            if output.finish_reason is not None:
                check_saved(self.streams[output.request_id], self._deaths.scenario, self._stored)
                self.num_exported += output.is_saved
        for ended in effects.ended:
            self._num_ended += 1
            stream = self.streams[ended.request.id]
            assert (stream.end is None) == (ended.reason == FINISH_ABORT), ended
            if self._num_ended == len(self.streams):
                self.done.set()


def _ready(deaths: Deaths) -> Ready:
    config = deaths.scenario.config
    return Ready(
        "toy", config.max_model_len, VOCAB_SIZE, (), config.numerics_id, config.block_size, 1,
        max_num_seqs=max_running(config), max_num_batched_tokens=config.max_num_batched_tokens,
    )  # fmt: skip


def run_deaths(deaths: Deaths, seed: int) -> DeathReport:
    """Run to the end of every request and check everything; an AssertionError or a Violation tells what is wrong."""
    loop = VirtualLoop(limit_s=_LIMIT_S)
    front = _Front(deaths, loop, random.Random(f"lives {seed}"))

    async def main() -> None:
        for number in range(deaths.num_engines):
            loop.spawn(front.serve(), f"serve {number}")
        loop.spawn(front.call(), "call")
        loop.spawn(front.cancel(), "cancel")
        await front.done.wait()

    loop.run(main())
    assert not front.gateway.num_open and not front.gateway.desk.num_tokens and not front.gateway.desk.num_waiting
    ends: dict[str, int] = {}
    for stream in front.streams.values():
        end = _check(stream, deaths)
        ends[end] = ends.get(end, 0) + 1
    if not deaths.num_chosen:
        assert front.num_deaths <= 5, f"{front.num_deaths} engines died of one request"
    counts = front.num_deaths, front.num_resumed, front.num_poisoned, front.num_exported
    return DeathReport(*counts, tuple(sorted(ends.items())), loop.time())


def _check(stream: ClientStream, deaths: Deaths) -> str:
    request: Request = stream.request
    if stream.end is None:
        assert stream.is_cancelled, f"{request.id} was never answered"
        return FINISH_ABORT
    if stream.end.error_kind == EngineFailed.kind:
        # With more deaths a request may have been unlucky as often as a poison one would be.
        assert request.id == deaths.poison or deaths.num_chosen > 3, f"{request.id}: {stream.end.error}"
    assert not (stream.end.error_kind == "overloaded_error" and stream.tokens), f"{request.id} was refused when resumed"
    return check_stream(stream, deaths.scenario, 1)


def run_seed(seed: int) -> DeathReport:
    return run_deaths(make_deaths(seed), seed)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tokenmill.sim.deaths", description="Let engines die.")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="number of seeds")
    options = parser.parse_args(arguments)
    logging.getLogger("tokenmill").addHandler(logging.NullHandler())
    for seed in range(options.seed, options.seed + options.count):
        report = run_seed(seed)
        print(
            f"seed {seed}: {report.num_deaths} deaths, {report.num_resumed} resumed, {report.num_poisoned} given up, "
            f"{report.duration_s:.3f} s virtual; " + ", ".join(f"{number} {end}" for end, number in report.ends)
        )


if __name__ == "__main__":
    main()
