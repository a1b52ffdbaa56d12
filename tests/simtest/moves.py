"""Requests that move between simulated engines at random moments, while steps fail, KV is lost and clients go away.

    each request    as in `run`: what its client saw, through whatever engines, is its solo run
    each engine     blocks, sequences and offers agree after every entry; at the end nothing is held or offered, and a
                    replay gives the same plans

The front end here decides by a seed and follows the vocabulary of `core.moves`; no policy is involved. Some requests
begin in one engine and go on in another after their first token, some move once they run, some do both; offers of
others are never made, and moves are broken off at any point.
`PYTHONPATH=tests python -m simtest.moves --seed N` repeats one seed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenmill.core.block import BlockKey
from tokenmill.core.effects import JobEnded
from tokenmill.core.events import (
    FINISH_ABORT,
    FINISH_MOVED,
    Abort,
    Drain,
    FromEngine,
    Output,
    StepOutputs,
    Submit,
    ToEngine,
)
from tokenmill.core.moves import Continue, KVSource, Moved, Offer, Prefetch, Prefetched, Release, Staged, Yield
from tokenmill.core.request import Request
from tokenmill.engine.build import LocalFrontEnd, build_engine, local_link
from tokenmill.engine.journal import Entry, Handled
from tokenmill.engine.replay import replay
from tokenmill.engine.shell import EngineShell
from tokenmill.kv.blocks.hashing import extend_keys, root_key
from tokenmill.sim.executor import Failures, ToyExecutor
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.peers import ToyNetwork
from tokenmill.sim.run import ClientStream, check_stream
from tokenmill.sim.workload import VOCAB_SIZE, Scenario, make_scenario

_LIMIT_S = 3600.0
_PATIENCE_S = 1.0
"""So long a destination has to say that it is ready, before the move is broken off or made all the same."""

_OTHER_LIFE = "another life"


@dataclass(slots=True)
class Report:
    """ends: reason -> number of requests. num_moves: sequences that went on elsewhere; num_warm: of these, with KV that
    was pulled; num_pulled, num_lost: blocks that came, pulls that failed; num_prefetched: blocks, without a request."""

    ends: dict[str, int] = field(default_factory=dict)
    num_moves: int = 0
    num_warm: int = 0
    num_pulled: int = 0
    num_lost: int = 0
    num_prefetched: int = 0
    num_preemptions: int = 0


@dataclass(slots=True, eq=False)
class _Engine:
    place: int
    shell: EngineShell
    front: LocalFrontEnd
    executor: ToyExecutor
    journal: list[Entry]

    @property
    def source(self) -> tuple[str, str, str, str]:
        return (f"w{self.place}", f"life {self.place}", f"address {self.place}", "host")


@dataclass(slots=True, eq=False)
class _Move:
    """A move of one request; `num_known`: tokens that the destination was submitted with."""

    to: int
    attempt: int
    ticket: str
    num_known: int
    is_yielding: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Life:
    """One request: where it runs, the attempt that counts, and the move that is going on."""

    request: Request
    stream: ClientStream
    at: int = -1
    attempt: int = 0
    last_attempt: int = 0
    move: _Move | None = None
    moves_at: set[int] = field(default_factory=set)


class _Front:
    def __init__(self, scenario: Scenario, engines: list[_Engine], rng: random.Random, loop: VirtualLoop) -> None:
        self._engines = engines
        self._rng = rng
        self._loop = loop
        self._scenario = scenario
        self.lives = {request.id: _Life(request, ClientStream(request)) for request in scenario.requests}
        self.report = Report()
        self._num_open = len(self.lives)
        self._num_tickets = 0
        self._dangling: set[str] = set()
        self.done = asyncio.Event()

    async def submit(self) -> None:
        for arrival in self._scenario.arrivals:
            await asyncio.sleep(max(0.0, arrival.at_s - self._loop.time()))
            for request in arrival.requests:
                self._begin(self.lives[request.id])

    async def cancel(self) -> None:
        for cancellation in self._scenario.cancellations:
            await asyncio.sleep(max(0.0, cancellation.at_s - self._loop.time()))
            life = self.lives[cancellation.request_id]
            life.stream.is_cancelled = True
            if life.at >= 0 and life.stream.end is None:
                self._tell(life.at, Abort((cancellation.request_id,)))

    async def receive(self, engine: _Engine) -> None:
        while True:
            self._take(engine.place, await engine.front.receive())

    def _tell(self, place: int, message: ToEngine) -> None:
        self._engines[place].front._outbound.put_nowait(message)

    def _ticket(self) -> str:
        self._num_tickets += 1
        return f"ticket {self._num_tickets}"

    def _source(self, place: int, ticket: str) -> KVSource:
        worker, life, address, host = self._engines[place].source
        return KVSource(worker, _OTHER_LIFE if self._rng.random() < 0.03 else life, address, host, ticket)

    def _begin(self, life: _Life) -> None:
        rng = self._rng
        life.at = rng.randrange(len(self._engines))
        longest = max(1, life.request.max_tokens)
        life.moves_at = {rng.randint(0, longest) for _ in range(rng.choice([0, 1, 1, 2, 5]))}
        request = life.request
        if rng.random() < 0.4:
            ticket = self._ticket()
            request = replace(request, yields=ticket)
            self._tell(life.at, Submit((request,)))
            self._send_on(life, ticket, is_offered=True)
        else:
            self._tell(life.at, Submit((request,)))
            if 0 in life.moves_at:
                self._loop.call_later(rng.choice([0.0, 0.01]), self._start_move, life)

    def _start_move(self, life: _Life) -> None:
        if life.move is None and life.stream.end is None and life.at >= 0:
            self._send_on(life, self._ticket(), is_offered=False)

    def _send_on(self, life: _Life, ticket: str, *, is_offered: bool) -> None:
        """Submit it to another engine, which waits for Continue."""
        rng, source = self._rng, life.at
        to = rng.choice([place for place in range(len(self._engines)) if place != source])
        life.last_attempt += 1
        tokens = (*life.request.output_tokens, *life.stream.tokens)
        move = life.move = _Move(to, life.last_attempt, ticket, len(tokens), is_yielding=is_offered)
        if not is_offered and rng.random() < 0.95:
            self._tell(source, Offer(ticket, life.request.id))
        request = replace(
            life.request,
            output_tokens=tokens,
            is_resumed=True,
            attempt=move.attempt,
            source=self._source(source, ticket),
        )
        self._tell(to, Submit((request,)))
        self._loop.call_later(_PATIENCE_S, self._lose_patience, life, move)

    def _lose_patience(self, life: _Life, move: _Move) -> None:
        if life.move is not move or move.is_over:
            return
        if not move.is_yielding:
            self._go_or_break_off(life, move)
        else:  # engines may wait for each other in a circle
            move.is_over = True
            self._tell(move.to, Abort((life.request.id,)))

    def _go_or_break_off(self, life: _Life, move: _Move) -> None:
        if self._rng.random() < 0.6:
            move.is_yielding = True
            self._tell(life.at, Yield(move.ticket, life.request.id, life.attempt))
        else:
            self._break_off(life, move)

    def _break_off(self, life: _Life, move: _Move) -> None:
        life.move = None
        self._tell(move.to, Abort((life.request.id,)))
        self._tell(life.at, Release(move.ticket))

    def _take(self, place: int, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            for output in message.outputs:
                self._take_output(self.lives[output.request_id], place, output)
        elif isinstance(message, Staged):
            life = self.lives[message.request_id]
            move = life.move
            if move is not None and message.attempt == move.attempt and not move.is_yielding:
                self._go_or_break_off(life, move)
        elif isinstance(message, Moved):
            self._take_moved(self.lives[message.request_id], message)
        elif isinstance(message, Prefetched):
            self.report.num_prefetched += message.num_blocks

    def _take_moved(self, life: _Life, message: Moved) -> None:
        move = life.move
        if message.error:
            if move is not None and message.attempt == move.attempt and not move.is_yielding:
                self._go_or_break_off(life, move)
            return
        self.report.num_moves += 1
        self.report.num_warm += message.num_tokens > 0

    def _take_output(self, life: _Life, place: int, output: Output) -> None:
        move = life.move
        if move is not None and (place, output.attempt) == (move.to, move.attempt):
            move.is_over = True
            if not move.is_yielding:
                self._break_off(life, move)
            return
        if (place, output.attempt) != (life.at, life.attempt) or life.stream.end is not None:
            return
        if output.finish_reason == FINISH_MOVED:
            assert move is not None and move.is_yielding, output
            life.stream.take(output._replace(finish_reason=None))
            tokens = (*life.request.output_tokens, *life.stream.tokens)
            source = life.at
            life.at, life.attempt, life.move = move.to, move.attempt, None
            if move.is_over:
                life.attempt = life.last_attempt = life.last_attempt + 1
                again = replace(life.request, output_tokens=tokens, is_resumed=True, attempt=life.attempt)
                self._tell(life.at, Submit((again,)))
            else:
                self._tell(life.at, Continue(life.request.id, move.attempt, tokens[move.num_known :]))
            delay_s = self._rng.choice([0.0, 0.5, 60.0])
            self._loop.call_later(delay_s, self._tell, source, Release(move.ticket))
            self._dangling.add(move.ticket)
            if life.stream.is_cancelled:
                self._tell(life.at, Abort((life.request.id,)))
            return
        life.stream.take(output)
        if output.finish_reason is None:
            if len(life.stream.tokens) in life.moves_at:
                self._start_move(life)
            return
        if move is not None:
            self._break_off(life, move)
        if self._rng.random() < 0.2 and output.finish_reason != FINISH_ABORT:
            self._prefetch(life, place)
        self._num_open -= 1
        if not self._num_open:
            self.done.set()

    def _prefetch(self, life: _Life, source: int) -> None:
        """Copy what is cached of it to another engine."""
        config, request = self._scenario.config, life.request
        tokens = [*request.prompt_tokens, *request.output_tokens, *life.stream.tokens]
        if len(tokens) < config.block_size:
            return
        chain: list[BlockKey] = []
        root = root_key(config.numerics_id, request.adapter, request.cache_salt)
        extend_keys(chain, root, tokens, config.block_size, request.embeds)
        keys = tuple(chain[: self._rng.randint(1, len(chain))])
        ticket = self._ticket()
        self._tell(source, Offer(ticket, "", keys))
        to = self._rng.choice([place for place in range(len(self._engines)) if place != source])
        self._tell(to, Prefetch(1, keys, self._source(source, ticket)))
        self._loop.call_later(5.0, self._tell, source, Release(ticket))


def run_moves(seed: int, num_engines: int = 3, scenario: Scenario | None = None) -> Report:
    """Run a scenario (None: the seed's) to its end and check all. An AssertionError or a Violation tells what is
    wrong."""
    scenario = scenario or make_scenario(seed)
    arrivals = tuple(
        replace(each, requests=tuple(replace(request, handoff="") for request in each.requests))
        for each in scenario.arrivals
    )
    scenario = replace(scenario, stored=None, arrivals=arrivals)
    rng = random.Random(f"moves of {seed}")
    loop = VirtualLoop(limit_s=_LIMIT_S)
    network = ToyNetwork(seed, rng.choice([0.0, 0.0, 0.05, 0.3]), lambda one, other: rng.random() < 0.01)
    engines = [_engine(scenario, place, network, loop, rng, seed) for place in range(num_engines)]

    async def main() -> _Front:
        front = _Front(scenario, engines, rng, loop)
        shells = [loop.spawn(engine.shell.run(), f"engine {engine.place}") for engine in engines]
        for engine in engines:
            loop.spawn(front.receive(engine), "receive")
        loop.spawn(front.submit(), "submit")
        loop.spawn(front.cancel(), "cancel")
        await front.done.wait()
        await asyncio.sleep(61.0)
        for engine in engines:
            await engine.front.send(Drain())
        for shell in shells:
            await shell
        return front

    front = loop.run(main())
    report = front.report
    num_failures = sum(engine.executor.num_failures for engine in engines)
    for life in front.lives.values():
        end = check_stream(life.stream, scenario, num_failures)
        report.ends[end] = report.ends.get(end, 0) + 1
    for engine in engines:
        engine.shell.core.check()
        stats = engine.shell.core.stats()
        assert stats.num_held_blocks == stats.num_running == stats.num_waiting == 0, stats
        assert not engine.shell.core.open_tickets
        replay(scenario.config, engine.journal)
        report.num_preemptions += stats.num_preemptions
    report.num_pulled, report.num_lost = network.num_pulled, network.num_lost
    return report


def _engine(
    scenario: Scenario, place: int, network: ToyNetwork, loop: VirtualLoop, rng: random.Random, seed: int
) -> _Engine:
    executor = ToyExecutor(
        scenario.config,
        loop,
        vocab_size=VOCAB_SIZE,
        costs=scenario.costs,
        drafter=scenario.drafter,
        failures=Failures(seed + place, scenario.failure_rate),
        peers=(network, f"address {place}"),
        incarnation=f"life {place}",
    )
    journal: list[Entry] = []

    def record(entry: Entry) -> None:
        journal.append(entry)
        shell.core.check()
        if isinstance(entry, Handled) and isinstance(entry.event, JobEnded) and rng.random() < 0.1:
            loop.call_later(rng.choice([0.0, 0.01, 0.3]), shell.hear, entry.event)  # told once more

    engine_end, front_end = local_link()
    shell = build_engine(scenario.config, executor, engine_end, loop, record)
    return _Engine(place, shell, front_end, executor, journal)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m simtest.moves", description="Move requests by seed.")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="number of seeds")
    options = parser.parse_args(arguments)
    logging.getLogger("tokenmill").addHandler(logging.NullHandler())
    for seed in range(options.seed, options.seed + options.count):
        print(f"seed {seed}: {run_moves(seed)}")


if __name__ == "__main__":
    main()
