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

from ..core.block import num_hidden_blocks
from ..core.config import EVICTION_POLICY, SCHEDULING_POLICY
from ..core.effects import JobEnded, Relax
from ..core.errors import EngineFailed, Overloaded
from ..core.events import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    Abort,
    Drain,
    EngineStats,
    Output,
    StepOutputs,
    Submit,
)
from ..core.ports import FrontEnd
from ..core.request import EXPORT, Request
from ..core.step import StepPlan, TokenLogprob
from ..engine.build import build_engine, local_link
from ..engine.journal import Committed, Entry, Handled, Planned, read_journal
from ..engine.replay import Difference, Replayed, replay
from ..kv.blocks.eviction import EVICTIONS
from ..sched.admission import refusal
from ..sched.policies import ORDERS
from .executor import Failures, ToyExecutor
from .loop import VirtualLoop
from .store import Stored, keys_of
from .toy_model import SoloAnswer, solo_answer
from .workload import VOCAB_SIZE, Scenario, known_blocks, make_scenario


@dataclass(slots=True, eq=False)
class ClientStream:
    """What a client has seen of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Output | None = None
    is_cancelled: bool = False

    def take(self, output: Output) -> None:
        """An output has come; counts must be those of what has been seen."""
        assert self.end is None, f"{output.request_id} went on after its end: {output}"
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        num_new = len(self.tokens) + (output.stop_token is not None)
        assert output.num_output == len(self.request.output_tokens) + num_new, output
        if output.finish_reason is not None:
            self.end = output


def check_stream(stream: ClientStream, scenario: Scenario, num_failures: int) -> str:
    """Compare one stream with its solo run; returns how it ended."""
    request, end = stream.request, stream.end
    assert end is not None
    answer = solo_answer(request, VOCAB_SIZE)
    tokens = tuple(stream.tokens)
    assert tokens == answer.tokens[: len(tokens)], f"{request.id}: {tokens} instead of {answer.tokens}"
    wants = request.sampling.logprobs is not None
    assert len(stream.logprobs) == (len(tokens) if wants else 0), f"{request.id}: {stream.logprobs}"
    if wants:
        assert all(entry.token == token for entry, token in zip(stream.logprobs, tokens, strict=True)), request.id
    if tokens or end.stop_token is not None:
        assert tuple(stream.prompt_logprobs) == answer.prompt_logprobs, f"{request.id}: prompt logprobs"
    if end.finish_reason == FINISH_ABORT:
        assert stream.is_cancelled, f"{request.id} was aborted by nobody"
        return FINISH_ABORT
    if end.finish_reason == FINISH_ERROR:
        _check_error(end, request, scenario, num_failures)
        return end.error_kind
    _check_whole(stream, end, answer)
    return str(end.finish_reason)


def check_saved(stream: ClientStream, scenario: Scenario, stored: Stored) -> None:
    """To be asked as the stream's end has come: whether the KV that was promised lies in the store."""
    request, end, config = stream.request, stream.end, scenario.config
    assert end is not None
    if not end.is_saved:
        has_ended = end.finish_reason in (FINISH_STOP, FINISH_LENGTH)
        assert request.handoff != EXPORT or not has_ended or scenario.failure_rate, f"{request.id} was not saved"
        return
    assert request.handoff == EXPORT, f"{request.id} was saved unasked"
    num_computed = len(request.prompt_tokens) + end.num_output - 1
    keys = keys_of(request, stream.tokens, config)[: num_computed // config.block_size]
    for number, group in enumerate(config.groups):
        # Rows that were in flight when it ended may have moved a window on.
        hidden = num_hidden_blocks(num_computed + config.steps_in_flight, group.window, config.block_size)
        missing = [index for index, key in enumerate(keys) if index >= hidden and (number, key) not in stored]
        assert not missing, f"{request.id}: blocks {missing} of group {number} were said to be saved"


def _check_error(end: Output, request: Request, scenario: Scenario, num_failures: int) -> None:
    lasting = refusal(request, scenario.config, 0)
    if end.error_kind == EngineFailed.kind:
        assert num_failures > 0, f"{request.id}: {end.error}"
    elif end.error_kind == Overloaded.kind:
        assert scenario.config.max_num_waiting < len(scenario.requests), f"{request.id}: {end.error}"
    else:
        assert lasting is not None and end.error == lasting.message, f"{request.id}: {end.error}"


def _check_whole(stream: ClientStream, end: Output, answer: SoloAnswer) -> None:
    name = stream.request.id
    assert tuple(stream.tokens) == answer.tokens, f"{name}: {stream.tokens} instead of {answer.tokens}"
    assert (end.finish_reason, end.stop_token) == (answer.finish_reason, answer.stop_token), f"{name}: {end}"
    timing = end.timing
    assert timing is not None, name
    # A timer may fire a clock resolution early.
    assert timing.arrival_s < timing.scheduled_s + 1e-6, f"{name}: {timing}"
    assert timing.scheduled_s < timing.first_token_s <= timing.finished_s, f"{name}: {timing}"


def replay_file(path: str) -> tuple[str, bool]:
    """What is to be printed, and whether all plans are equal. Raises ValueError where `path` is no journal, OSError
    where it cannot be read."""
    with open(path, encoding="utf8") as file:
        num_steps, difference = replay(*read_journal(file))
    if difference is None:
        return f"{path}: all {num_steps} steps are planned as recorded", True
    return "\n".join((f"{path}: step {num_steps} differs from the recorded one", *_sides(difference))), False


def _sides(difference: Difference) -> list[str]:
    """Both plans, row by row; a row that is in both in the same place is told once."""
    recorded, replayed = map(_rows, difference)
    lines = []
    for index in range(max(len(recorded), len(replayed))):
        left, right = (rows[index] if index < len(rows) else "nothing" for rows in (recorded, replayed))
        lines += [f"  both      {left}"] if left == right else [f"  recorded  {left}", f"  replayed  {right}"]
    return lines


def _rows(plan: StepPlan | None) -> list[str]:
    if plan is None:
        return ["no step"]
    return [f"step {plan.step}, released {plan.released}", *map(str, plan.rows)]


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
        drafter=scenario.drafter,
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
