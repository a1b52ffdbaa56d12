"""Requests that go from one worker to another with their KV give the bits they give in one: by reading of memory and
over TCP, at any step, also where the KV is damaged on its way or the other worker goes away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tiny import VOCAB_SIZE, tiny_checkpoint
from tokenmill.core.block import KVGroupSpec, full_groups, window_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.events import FINISH_MOVED, Abort, Drain, StepOutputs, Submit
from tokenmill.core.moves import Continue, KVSource, Moved, Offer, PullBlocks, Release, SendBlocks, Staged, Yield
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.build import LocalFrontEnd, build_engine, local_link
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.kv.connector.worker.moves import PeerMoves
from tokenmill.kv.transfer.peer import client
from tokenmill.models import loader as registry
from tokenmill.net.system import MonotonicClock
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.build import Worker, build_worker
from tokenmill.worker.spec import WorkerSpec

SIZE = 8
FULL = full_groups(40)
WINDOWS = (FULL[0], window_group(40, 21))
WINDOW = WINDOWS[1:]
OPS = NativeOps if available() is None else ReferenceOps
MAX_TOKENS = 20


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    read = registry.config_from_checkpoint

    def read_with_windows(checkpoint: Any) -> Any:
        config = read(checkpoint)
        layers = tuple(replace(config.layers[0], window=window) for window in checkpoint.metadata["windows"])
        return replace(config, layers=layers)

    monkeypatch.setattr(registry, "config_from_checkpoint", read_with_windows)
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")


def checkpoint_for(groups: tuple[KVGroupSpec, ...]) -> Checkpoint:
    checkpoint = tiny_checkpoint(num_layers=len(groups))
    checkpoint.metadata["windows"] = tuple(group.window for group in groups)
    return checkpoint


def new_worker(groups: tuple[KVGroupSpec, ...], kv_dtype: str) -> Worker:
    config = EngineConfig(groups, 128, block_size=SIZE, max_num_seqs=4, max_num_batched_tokens=32)
    return build_worker(checkpoint_for(groups), OPS(), WorkerSpec(config, kv_dtype))


@dataclass
class Side:
    """An engine open to its peers; `heard` has what its front end was told."""

    worker: Worker
    name: str
    front: LocalFrontEnd
    moves: PeerMoves
    address: str
    running: asyncio.Task[None]
    shell: Any
    heard: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def source(self, ticket: str) -> KVSource:
        return KVSource(self.name, f"life of {self.name}", self.address, "here", ticket)

    async def listen(self) -> None:
        while True:
            message = await self.front.receive()
            for each in message.outputs if isinstance(message, StepOutputs) else (message,):
                self.heard.put_nowait(each)


def start(worker: Worker, name: str, is_remote: bool) -> tuple[Side, asyncio.Task[None]]:
    engine_end, front = local_link()
    moves = PeerMoves(worker.pools, SIZE, f"life of {name}", "here", may_read=not is_remote)
    address = moves.start()
    worker.executor.reach_peers(moves)
    shell = build_engine(worker.config, worker.executor, engine_end, MonotonicClock())
    side = Side(worker, name, front, moves, address, asyncio.create_task(shell.run()), shell)
    return side, asyncio.create_task(side.listen())


def request_of(rng: random.Random, name: str, length: int) -> Request:
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        logprobs=2,
        repetition_penalty=rng.choice([1.0, 1.2]),
    )
    prompt = tuple(rng.choices(range(3, VOCAB_SIZE), k=length))
    return Request(name, prompt, sampling, MAX_TOKENS, rng.getrandbits(63))


@dataclass
class Answer:
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] = ()
    num_pulled: int = -1


async def run_alone(side: Side, request: Request) -> Answer:
    answer = Answer()
    await side.front.send(Submit((request,)))
    while True:
        output = await asyncio.wait_for(side.heard.get(), 30)
        answer = Answer(answer.tokens + output.tokens, answer.logprobs + output.logprobs)
        if output.finish_reason is not None:
            assert not output.error, output
            return answer


async def run_moved(one: Side, other: Side, request: Request, after: int, hurt: Callable[[], None]) -> Answer:
    """It yields after its first token (after 0), or moves when so many have come; `hurt` is called as it yields."""
    ticket = f"ticket of {request.id}"
    answer = Answer()
    moved = replace(request, attempt=1, is_resumed=True, source=one.source(ticket))
    num_known = 0
    if after == 0:
        await one.front.send(Submit((replace(request, yields=ticket),)))
        await other.front.send(Submit((moved,)))
        hurt()
    else:
        await one.front.send(Submit((request,)))
    has_ended = False
    while not has_ended:
        output = await asyncio.wait_for(one.heard.get(), 30)
        answer = Answer(answer.tokens + output.tokens, answer.logprobs + output.logprobs)
        has_ended = output.finish_reason is not None
        if not num_known and 0 < after <= len(answer.tokens):
            num_known = len(answer.tokens)
            await one.front.send(Offer(ticket, request.id))
            await other.front.send(Submit((replace(moved, output_tokens=answer.tokens),)))
            staged = await asyncio.wait_for(other.heard.get(), 30)
            assert isinstance(staged, (Staged, Moved)), staged
            hurt()
            await one.front.send(Yield(ticket, request.id))
    if output.finish_reason != FINISH_MOVED:
        await one.front.send(Release(ticket))
        await other.front.send(Abort((request.id,)))
        while getattr(await asyncio.wait_for(other.heard.get(), 30), "finish_reason", None) is None:
            pass
        return answer
    await other.front.send(Continue(request.id, 1, answer.tokens[num_known:]))
    while True:
        message = await asyncio.wait_for(other.heard.get(), 30)
        if isinstance(message, Moved):
            answer.num_pulled = max(answer.num_pulled, message.num_tokens)
        elif not isinstance(message, Staged):
            answer = Answer(answer.tokens + message.tokens, answer.logprobs + message.logprobs, answer.num_pulled)
            if message.finish_reason is not None:
                assert not message.error, message
                await one.front.send(Release(ticket))
                return answer


def compare(
    groups: tuple[KVGroupSpec, ...], kv_dtype: str, *, is_remote: bool, hurt: Callable[[Side], None], seed: int
) -> list[int]:
    """Move requests to and fro; how many tokens each brought with it."""
    rng = random.Random(seed)
    workers = [new_worker(groups, kv_dtype) for _ in range(3)]

    async def run() -> list[int]:
        started = [start(worker, f"w{place}", is_remote) for place, worker in enumerate(workers)]
        alone, one, other = (side for side, _ in started)
        pulled = []
        for number, after in enumerate((0, 0, 1, 3, 9, rng.randint(1, MAX_TOKENS - 2))):
            request = request_of(rng, f"r{number}", rng.choice([5, 16, 33, 61]))
            expected = await run_alone(alone, request)
            source, target = (one, other) if number % 2 else (other, one)
            answer = await run_moved(source, target, request, after, lambda source=source: hurt(source))  # type: ignore[misc]
            assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs), request
            pulled.append(answer.num_pulled)
        for side, listening in started:
            await side.front.send(Drain())
            await asyncio.wait_for(side.running, 30)
            assert side.shell.core.stats().num_held_blocks == 0
            listening.cancel()
        return pulled

    try:
        return asyncio.run(run())
    finally:
        for worker in workers:
            worker.executor.close()


@pytest.mark.parametrize("is_remote", [False, True], ids=["memory", "tcp"])
@pytest.mark.parametrize(("groups", "kv_dtype"), [(FULL, "f32"), (WINDOWS, "f32"), (WINDOW, "f32"), (FULL, "int8")])
def test_moved_is_what_it_is_alone(groups: tuple[KVGroupSpec, ...], kv_dtype: str, is_remote: bool) -> None:
    """KV of all but the last token comes along."""
    for seed in range(2):
        pulled = compare(groups, kv_dtype, is_remote=is_remote, hurt=lambda side: None, seed=seed)
        assert all(num > 0 for num in pulled if num >= 0) and max(pulled) > 60, pulled


def test_memory_that_may_not_be_read_comes_over_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(pid: int, ranges: Any) -> None:
        raise client.MayNotRead("not permitted")

    monkeypatch.setattr(client, "read_memory", refuse)
    pulled = compare(FULL, "f32", is_remote=False, hurt=lambda side: None, seed=0)
    assert max(pulled) > 30
    assert sum("over TCP from now on" in message for message in caplog.messages) <= 2, "said once by each worker"
    assert "over TCP from now on" in caplog.text


@pytest.mark.parametrize("is_remote", [False, True], ids=["memory", "tcp"])
def test_a_source_that_goes_away_costs_a_pause(is_remote: bool) -> None:
    """What did not come is computed."""
    compare(FULL, "f32", is_remote=is_remote, hurt=lambda side: side.moves._server.close(), seed=3)


def test_a_pull_that_is_cancelled_ends_though_its_source_waits() -> None:
    workers = [new_worker(FULL, "f32") for _ in range(2)]
    one, other = (PeerMoves(worker.pools, SIZE, f"life {place}", "here") for place, worker in enumerate(workers))

    async def run() -> None:
        source = KVSource("w0", "life 0", one.start(), "here", "ticket")
        await one.send(SendBlocks(0, "ticket", (), 0))
        pulling = asyncio.create_task(other.pull(PullBlocks(0, source, 0, ((1,),))))
        while not one._board._offers["ticket"].reader:
            await asyncio.sleep(0.01)
        pulling.cancel()
        try:
            await asyncio.wait_for(asyncio.to_thread(other.close), 30)
        finally:
            one.close()

    try:
        asyncio.run(run())
    finally:
        for worker in workers:
            worker.executor.close()


@pytest.mark.parametrize("is_remote", [False, True], ids=["memory", "tcp"])
def test_damage_on_the_way_is_found(is_remote: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit flips after a block has come: it is not used."""
    sum_of = client.zlib.crc32
    monkeypatch.setattr(client, "zlib", type("Zlib", (), {"crc32": staticmethod(lambda data: _flipped(sum_of, data))}))
    pulled = compare(FULL, "f32", is_remote=is_remote, hurt=lambda side: None, seed=4)
    assert max(pulled) <= 0, pulled


def _flipped(sum_of: Callable[[Any], int], data: Any) -> int:
    data[3] ^= 64
    return sum_of(data)
