"""A whole service on virtual time: the live gateway, front ends, engine shells and cores, of which only steps, links
and storage are simulated (`timed`, `network`, `tier_store`). Clients open requests and hear outputs, as live ones do.

What is a client, what it asks for and what becomes of the outputs is for others: `scale`, and the command `simulate`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..cluster.admission import PREDICTED
from ..cluster.events import Effects, GatewayEvent, GivenUp
from ..cluster.gateway import Gateway
from ..core.effects import Event
from ..core.errors import Overloaded
from ..core.events import FINISH_ABORT, FINISH_ERROR, Output
from ..core.policy import Newcomer
from ..core.ports import Executor
from ..core.request import Request
from .deployment import Deployment, WorkerPlan
from .fast_forward.worker import FastForward
from .front import Front
from .loop import VirtualLoop
from .network import Network
from .parts import Parts
from .peers import ToyNetwork
from .timed import END_TOKEN, TimedExecutor, Trace
from .worker import Build, Worker

SAMPLE_S = 1.0
"""Queues are looked at no more often."""
_PARTS = 8
"""In which outputs of one step go to their clients at most, where that takes time."""


HearRun = Callable[[Output, Sequence[float]], None]


@dataclass(slots=True)
class ServiceReport:
    """What the service did, to be read at its end.

    busy_s, steps        of each worker
    reasons              why requests went where they went
    refused              why calls were turned away
    num_moved, num_unmoved   moves from worker to worker that succeeded, and that did not
    num_rerouted         requests that waited in one engine and were given to another
    num_resumed          requests of workers that died, which went on elsewhere
    num_fetched, num_spoilt  blocks from KV stores, and those that came with other bytes and were computed again
    faults               (when, kind, target), in order
    carried_bytes        of each link of the topology
    queues               (when, requests that wait for an engine, that wait in engines, that run)
    num_fast_forwarded   steps of decodes that were made in `fast_forward`
    num_draws            rows that drew where something drafts
    num_drafted, num_accepted   drafts that were verified, and that were right
    unseen               (rows, tokens) -> steps that the cost model of steps was not measured on
    """

    busy_s: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    num_moved: int = 0
    num_unmoved: int = 0
    num_rerouted: int = 0
    num_resumed: int = 0
    num_preemptions: int = 0
    num_fetched: int = 0
    num_spoilt: int = 0
    duration_s: float = 0.0
    faults: list[tuple[float, str, str]] = field(default_factory=list)
    carried_bytes: dict[str, int] = field(default_factory=dict)
    queues: list[tuple[float, int, int, int]] = field(default_factory=list)
    unseen: Counter[tuple[int, int]] = field(default_factory=Counter)
    num_fast_forwarded: int = 0
    num_draws: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class Service:
    """set_up: chooses policies of the gateway, before a worker joins. watch: is told of all that the gateway does,
    but for steps in fast forward, which only give tokens.
    trace, set before the start: of steps and transfers."""

    def __init__(
        self,
        deployment: Deployment,
        loop: VirtualLoop,
        *,
        seed: int = 0,
        set_up: Callable[[Gateway], None] = lambda gateway: None,
        watch: Callable[[GatewayEvent, Effects], None] = lambda event, effects: None,
        fast_path: bool = True,
    ) -> None:
        self.report = ServiceReport()
        self.workers: list[Worker] = []
        self.trace: Trace | None = None
        self._deployment = deployment
        self._loop = loop
        self._seed = seed
        self._watch = watch
        self._fast_path = fast_path
        self._hears: dict[str, Callable[[Output], None]] = {}
        self._hears_runs: dict[str, HearRun] = {}
        self._lengths: dict[int, int] = {}
        self._made: list[tuple[str, TimedExecutor]] = []
        self._present: dict[str, TimedExecutor] = {}
        self.parts = Parts(deployment.parts, [each.site for each in deployment.workers], loop, seed)
        self._front = Front(loop, self._hear, self._deliver_runs, is_checked=False)
        self._front.gateway.is_shared = True
        self._front.look, self._front.look_s = self._look, 0.0
        if deployment.gateway is not None:
            deployment.gateway.set_up(self._front.gateway)
        set_up(self._front.gateway)

    @property
    def gateway(self) -> Gateway:
        self._front.deferred.settle()
        return self._front.gateway

    # ---- its life ----

    async def start(self) -> None:
        """Returns when the first workers are ready; cold starts may go on."""
        loop, plan = self._loop, self._deployment
        network = Network(loop, plan.shape, random.Random(f"network {self._seed}"))
        peers = ToyNetwork(self._seed, delays=(plan.shape.latency_s,))
        for number, each in enumerate(plan.workers):
            build = self._build(each, network, peers)
            worker = Worker(each.name, each.pool, build, network, loop, random.Random(number), [self._front.attach])
            self.workers.append(worker)
            loop.spawn(self._live(worker, each.start_s), worker.name)
        await asyncio.sleep(min(each.start_s for each in plan.workers) + 0.01)
        if plan.parts.faults:
            loop.spawn(self._front.watch(), "watch for silent workers")
        self._faults = self.parts.strike(self.workers)

    async def stop(self) -> None:
        """Adds up what there is to report."""
        report = self.report
        report.duration_s = self._loop.time()
        for worker in self.workers:
            if worker.fast_forward is not None:
                worker.fast_forward.advance(report.duration_s)
                report.num_fast_forwarded += worker.fast_forward.num_fast_forwarded
        report.faults = [(each.at_s, each.kind, each.target) for each in self._faults.struck]
        if self.parts.shared_links is not None:
            report.carried_bytes = {use.name: round(use.carried_bytes) for use in self.parts.shared_links.use()}
        report.num_preemptions = sum(worker.num_preemptions for worker in self.workers)
        for name, executor in self._made:
            report.busy_s[name] = report.busy_s.get(name, 0.0) + executor.busy_s
            report.steps[name] = report.steps.get(name, 0) + executor.num_steps
            report.unseen += executor.unseen
            report.num_draws += executor.num_draws
            report.num_drafted += executor.num_drafted
            report.num_accepted += executor.num_accepted
            if executor.tiers is not None:
                report.num_fetched += executor.tiers.num_fetched
                report.num_spoilt += executor.tiers.num_bad

    async def _live(self, worker: Worker, start_s: float) -> None:
        if start_s:
            await asyncio.sleep(start_s)
        await worker.serve()

    async def _come_back(self, name: str) -> None:
        """Returns when a worker that has died can begin anew."""
        self._present[name].leave()
        await self.parts.cold.wait(name)

    # ---- clients ----

    def open(
        self,
        request: Request,
        client: str,
        hear: Callable[[Output], None],
        *,
        num_output: int = 0,
        refuse: Callable[[Overloaded], None] | None = None,
        hear_run: HearRun | None = None,
    ) -> None:
        """A call of one choice. `hear` gets its outputs as they reach the client; the last has a finish_reason.
        num_output: tokens that it draws, the end token among them; 0, or max_tokens: up to its limit. Where it is less,
        the request has END_TOKEN among its end tokens and a seed that no other open one has. refuse: gets the 429 of a
        call that may not enter; without it the call's one output has the error. hear_run: gets an output of several
        tokens and the time of each, where they are told late at once; without it `hear` gets one for each."""
        self._hears[request.id] = hear
        if hear_run is not None:
            self._hears_runs[request.id] = hear_run
        front, costs = self.parts.front, self._deployment.parts.cores.front
        enter = partial(self._enter, request, client, num_output, refuse)
        if front is not None and costs is not None:
            num_prompt = len(request.prompt_tokens)
            front.submit(costs.front_s(num_prompt), self._after(costs.front_delay_s(num_prompt), enter))
        else:
            enter()

    def _enter(
        self, request: Request, client: str, num_output: int, refuse: Callable[[Overloaded], None] | None
    ) -> None:
        """The front end has read the call."""
        hear = self._hears.get(request.id)
        if hear is None:
            return  # its client has left
        plan = self._deployment.gateway
        if plan is not None and plan.terms:
            request = replace(request, terms=plan.terms_of(request.terms))
        self._front.expect_call()
        now, num_prompt = self._loop.time(), len(request.prompt_tokens)
        since_s = max(0.0, now - request.arrival_s)
        newcomer = Newcomer(client, request.priority, num_prompt, 1, num_prompt, request.terms, since_s)
        verdict = self._front.gateway.judge(newcomer, now)
        refusal = verdict.refusal
        if refusal is not None and plan is not None and plan.admission == "shadow" and refusal.reason in PREDICTED:
            refusal = None
        if refusal is not None:
            self._forget(request.id)
            self.report.refused[refusal.reason] += 1
            retry_s = max(1, math.ceil(refusal.retry_s))  # Retry-After is in whole seconds
            message = f"{refusal.message}; retry in {retry_s} s."
            error = Overloaded(message, retry_after_s=retry_s, reason=refusal.reason)
            if refuse is not None:
                refuse(error)
            else:
                hear(Output(request.id, finish_reason=FINISH_ERROR, error=message, error_kind=error.kind))
            return
        if 0 < num_output < request.max_tokens:
            assert END_TOKEN in request.eos_token_ids, request.id
            assert request.seed not in self._lengths, request.seed
            self._lengths[request.seed] = num_output
        self._front.open((request,), client, verdict)

    def give_up(self, request_id: str) -> None:
        """Its client wants no more of it, and hears no more."""
        self._front.deferred.settle()
        if self._forget(request_id):
            self._front.handle(GivenUp(request_id, FINISH_ABORT))

    def _forget(self, request_id: str) -> bool:
        """Nobody hears of it any more; whether somebody did."""
        self._hears_runs.pop(request_id, None)
        return self._hears.pop(request_id, None) is not None

    def _hear(self, event: GatewayEvent, effects: Effects) -> None:
        report = self.report
        if effects.outputs:
            self._send(effects.outputs)
        for moved in effects.moved:
            report.num_moved += not moved.error
            report.num_unmoved += bool(moved.error)
        report.num_rerouted += effects.rerouted
        report.num_resumed += effects.resumed
        for _, _, reason in effects.routes:
            report.reasons[reason] += 1
        for ended in effects.ended:
            self._lengths.pop(ended.request.seed, None)
        if self._loop.time() >= self._front.look_s:
            self._look()
        self._watch(event, effects)

    def _look(self) -> None:
        """At the queues."""
        now = self._loop.time()
        self._front.look_s = now + SAMPLE_S
        stats = self.gateway.totals.stats
        self.report.queues.append((now, self.gateway.num_waiting, stats.num_waiting, stats.num_running))

    def _send(self, outputs: Sequence[Output]) -> None:
        """To the clients, through what front end and clients compute. Outputs of many rows go in parts: the first
        clients hear theirs while others are still written."""
        front, clients, plan = self.parts.front, self.parts.clients, self._deployment.parts.cores
        if front is None and clients is None:
            return self._deliver(outputs)
        size = -(-len(outputs) // _PARTS)
        for begin in range(0, len(outputs), size):
            some = outputs[begin : begin + size]
            deliver = partial(self._deliver, some)
            if clients is not None:
                deliver = partial(clients.submit, plan.client_s * len(some), deliver)
            if front is None or plan.front is None:
                deliver()
            else:
                before_s = plan.front.back_s(begin) if begin else 0.0
                then = self._after(plan.front.back_delay_s(), deliver)
                front.submit(max(0.0, plan.front.back_s(begin + len(some)) - before_s), then)
        if self.parts.ends is not None and plan.front is not None:
            end_s = plan.front.end_s() * sum(output.finish_reason is not None for output in outputs)
            if end_s:
                self.parts.ends.submit(end_s, _nothing)
        return None

    def _after(self, delay_s: float, then: Callable[[], object]) -> Callable[[], object]:
        """What makes `then` happen so much later than it is called."""
        return partial(self._loop.call_later, delay_s, then) if delay_s else then

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            hear = self._hears.get(output.request_id)
            if hear is not None:
                if output.finish_reason is not None:
                    self._forget(output.request_id)
                hear(output)

    def _deliver_runs(self, outputs: Sequence[Output], times: Sequence[float]) -> None:
        """Each has a token of each of these times."""
        for output in outputs:
            hear, hear_run = self._hears.get(output.request_id), self._hears_runs.get(output.request_id)
            if hear_run is not None:
                hear_run(output, times)
            elif hear is not None:
                before = output.num_output - len(times)
                for place, (at_s, token) in enumerate(zip(times, output.tokens, strict=True), 1):
                    with self._loop.past(at_s):
                        hear(output._replace(tokens=(token,), num_output=before + place))

    # ---- what workers are made of ----

    def _build(self, plan: WorkerPlan, network: Network, peers: ToyNetwork) -> Build:
        config = plan.config

        def begin(address: str, incarnation: str) -> tuple[Executor, tuple[Event, ...]]:
            own, first = self.parts.store(address, incarnation)
            carrier, process = self.parts.shared_links or network, self.parts.steps(address)
            executor = TimedExecutor(
                config, plan.cost_model, self._lengths, self._loop, carrier, peers, address, incarnation, own, process
            )
            executor.trace, executor.acceptance = self.trace, plan.acceptance
            self._present[address] = executor
            self._made.append((address, executor))
            return executor, first

        return Build(
            config,
            begin,
            peers,
            check_rate=0.0,
            num_blocks=config.groups[0].num_blocks,
            stores=self.parts.watched(plan.name),
            tiers=self.parts.facts,
            come_back=self._come_back,
            is_sound=self._is_sound,
            fast_forward=self._new_fast_forward if self._fast_path and self._is_sound else None,
        )

    @property
    def _is_sound(self) -> bool:
        """Whether nothing befalls workers, they share no cores, and messages arrive when it is known that they will."""
        plan, shape = self._deployment, self._deployment.shape
        shared = plan.parts.faults or plan.parts.cores.cores or self.parts.front or self.parts.clients
        return not (shared or plan.parts.tiers or shape.jitter_s or shape.late_rate)

    def _new_fast_forward(self, executor: Executor) -> FastForward:
        assert isinstance(executor, TimedExecutor)
        return FastForward(executor, self._loop, self._front.deferred, -1, self._deployment.shape.latency_s)


def _nothing() -> None:
    pass
