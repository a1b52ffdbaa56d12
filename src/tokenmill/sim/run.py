"""Runs a seeded scenario through the real engine shell on virtual time, and checks what every client saw.

    each request    ends exactly once; its tokens, logprobs and finish reason are those of its solo run, or a prefix of
                    them where it was cancelled or its step failed; a refusal has a reason
    each entry      leaves every block free, cached or held (EngineCore.check)
    at the end      no block is held, and a replay of the recorded events gives the same plans
    liveness        a hang is a Deadlock, a run that goes on for ever a TimeLimit (sim.loop)

`python -m tokenmill.sim.run --seed N` repeats one seed, `--replay FILE` what a live engine did. The digest of a run
covers every plan and output with its time; it is equal on every machine and under every PYTHONHASHSEED.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from ..core.config import EVICTION_POLICY, SCHEDULING_POLICY
from ..core.effects import JobEnded, Relax
from ..core.events import Abort, Drain, EngineStats, Output, StepOutputs, Submit
from ..core.ports import FrontEnd
from ..engine.build import build_engine, local_link
from ..engine.journal import Committed, Entry, Handled, Planned
from ..engine.replay import Replayed, replay
from ..kv.blocks.eviction import EVICTIONS
from ..sched.policies import ORDERS
from .check import ClientStream, check_saved, check_stream
from .executor import Failures, ToyExecutor
from .loop import VirtualLoop
from .replay import replay_file
from .store import Stored
from .workload import VOCAB_SIZE, Scenario, known_blocks, make_scenario

_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did. `ends`: (finish reason or error kind, number of requests), sorted. `num_fetched`: blocks that
    came from the store; `num_exported`: requests whose KV was handed over; `stored`: what the store holds after it,
    where there is one."""

    digest: str
    stats: EngineStats
    ends: tuple[tuple[str, int], ...]
    num_failures: int
    duration_s: float
    journal: list[Entry] = field(repr=False)
    num_fetched: int = 0
    num_exported: int = 0
    stored: Stored | None = field(default=None, repr=False)


class _Clients:
    """All clients of one scenario behind one front end."""

    def __init__(self, scenario: Scenario, link: FrontEnd, digest: blake2b, stored: Stored) -> None:
        self._scenario = scenario
        self._stored = stored
        self.num_exported = 0
        self._link = link
        self._digest = digest
        self.streams = {request.id: ClientStream(request) for request in scenario.requests}
        self._num_open = len(self.streams)
        self.done = asyncio.Event()

    async def submit(self) -> None:
        loop = asyncio.get_running_loop()
        for arrival in self._scenario.arrivals:
            await asyncio.sleep(max(0.0, arrival.at_s - loop.time()))
            await self._link.send(Submit(arrival.requests))

    async def cancel(self) -> None:
        loop = asyncio.get_running_loop()
        for cancellation in self._scenario.cancellations:
            await asyncio.sleep(max(0.0, cancellation.at_s - loop.time()))
            self.streams[cancellation.request_id].is_cancelled = True
            await self._link.send(Abort((cancellation.request_id,)))

    async def receive(self) -> None:
        while True:
            message = await self._link.receive()
            assert isinstance(message, StepOutputs), message
            for output in message.outputs:
                self._digest.update(f"{message.now_s!r} {output!r}\n".encode())
                self._take(output)

    def _take(self, output: Output) -> None:
        self.streams[output.request_id].take(output)
        if output.finish_reason is not None:
            check_saved(self.streams[output.request_id], self._scenario, self._stored)
            self.num_exported += output.is_saved
            self._num_open -= 1
            if self._num_open == 0:
                self.done.set()


def _new_executor(scenario: Scenario, loop: VirtualLoop, failure_seed: int) -> ToyExecutor:
    return ToyExecutor(
        scenario.config,
        loop,
        vocab_size=VOCAB_SIZE,
        costs=scenario.costs,
        most_drafts=scenario.most_drafts,
        failures=Failures(failure_seed, scenario.failure_rate),
        stored=scenario.stored,
    )


def run_scenario(scenario: Scenario, *, failure_seed: int = 0, relax_rate: float = 0.0) -> Report:
    """Run to the end of every request and check everything; an AssertionError or a Violation tells what is wrong.
    relax_rate: after how many of the steps memory is given back."""
    loop = VirtualLoop(limit_s=_LIMIT_S)
    digest = blake2b(digest_size=16)
    executor = _new_executor(scenario, loop, failure_seed)
    journal: list[Entry] = []
    rng = random.Random(f"ends of {failure_seed}")

    def record(entry: Entry) -> None:
        journal.append(entry)
        shell.core.check()
        if isinstance(entry, Planned) and entry.plan is not None:
            rows = [(row.seq, row.start, row.num_tokens, row.blocks) for row in entry.plan.rows]
            digest.update(f"{entry.now!r} {rows!r}\n".encode())
        if isinstance(entry, Handled) and isinstance(entry.event, JobEnded) and rng.random() < 0.1:
            loop.call_later(rng.choice([0.0, 0.01, 0.3]), shell.hear, entry.event)  # told once more
        if isinstance(entry, Committed) and relax_rate and rng.random() < relax_rate:
            loop.call_soon(shell.hear, Relax(rng.choice((5, 1 << 40)), rng.random() < 0.5))

    engine_end, front_end = local_link()
    shell = build_engine(scenario.config, executor, engine_end, loop, record)
    if scenario.stored is not None:
        shell.hear(executor.store.opened())

    async def main() -> _Clients:
        clients = _Clients(scenario, front_end, digest, executor.store.blocks)
        engine = loop.spawn(shell.run(), "engine")
        loop.spawn(clients.receive(), "receive")
        loop.spawn(clients.submit(), "submit")
        loop.spawn(clients.cancel(), "cancel")
        await clients.done.wait()
        await front_end.send(Drain())
        await engine
        return clients

    clients = loop.run(main())
    shell.core.check()
    _check_store(executor.store.blocks, scenario)
    _check_end(shell.core.stats(), journal, scenario)
    ends: dict[str, int] = {}
    for stream in clients.streams.values():
        end = check_stream(stream, scenario, executor.num_failures)
        ends[end] = ends.get(end, 0) + 1
    return Report(
        digest=digest.hexdigest(),
        stats=shell.core.stats(),
        ends=tuple(sorted(ends.items())),
        num_failures=executor.num_failures,
        duration_s=loop.time(),
        journal=journal,
        num_fetched=executor.store.num_fetched,
        num_exported=clients.num_exported,
        stored=None if scenario.stored is None else executor.store.blocks,
    )


def run_seed(seed: int, **settings: Any) -> Report:
    """Make and run the scenario of `seed`, with some of its engine's `settings` changed."""
    scenario = make_scenario(seed)
    return run_scenario(replace(scenario, config=replace(scenario.config, **settings)), failure_seed=seed)


def _check_end(stats: EngineStats, journal: list[Entry], scenario: Scenario) -> None:
    assert stats.num_running == stats.num_waiting == 0, stats
    num_steps = sum(1 for entry in journal if isinstance(entry, Planned) and entry.plan is not None)
    assert replay(scenario.config, journal) == Replayed(num_steps)


def _check_store(stored: Stored, scenario: Scenario) -> None:
    """Whatever was saved is what its key says."""
    if stored:
        known = known_blocks(scenario)
        for (group, key), slots in stored.items():
            assert known[group, key] == slots, f"group {group}: {slots} instead of {known[group, key]}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tokenmill.sim.run", description="Run seeded simulations.")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="number of seeds")
    parser.add_argument("--scheduling-policy", choices=ORDERS, default=SCHEDULING_POLICY, help="order of service")
    parser.add_argument("--eviction-policy", choices=EVICTIONS, default=EVICTION_POLICY, help="what is evicted")
    parser.add_argument("--replay", metavar="FILE", help="instead: replay the journal of a server (serve --journal)")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        try:
            text, is_equal = replay_file(options.replay)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        print(text)
        sys.exit(0 if is_equal else 1)
    policies = {"scheduling_policy": options.scheduling_policy, "eviction_policy": options.eviction_policy}
    logging.getLogger("tokenmill").addHandler(logging.NullHandler())
    for seed in range(options.seed, options.seed + options.count):
        report = run_seed(seed, **policies)
        stats = report.stats
        print(
            f"seed {seed}: {report.digest} {report.duration_s:.3f} s virtual, {stats.num_steps} steps, "
            f"{report.num_failures} failed, {stats.num_preemptions} preemptions, "
            f"{stats.prefix_hits}/{stats.prefix_queries} tokens from the cache, "
            f"{report.num_fetched} blocks fetched; " + ", ".join(f"{number} {end}" for end, number in report.ends)
        )


if __name__ == "__main__":
    main()
