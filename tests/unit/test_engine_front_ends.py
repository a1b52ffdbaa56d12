"""Several front ends of one engine: each has its own names, answers and adapters, and hears nothing of the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.events import (
    FINISH_MOVED,
    Abort,
    AdapterLoaded,
    CacheShown,
    Drain,
    FromEngine,
    Leaving,
    LoadAdapter,
    Output,
    PoolChanged,
    SetPool,
    ShowCache,
    StepOutputs,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from tokenmill.core.kv_events import CLEARED, STORED, KVEvents, WatchKV
from tokenmill.core.moves import Offer, Release, Yield
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine import front_ends as attached
from tokenmill.engine.build import LocalEngineEnd, LocalFrontEnd, local_link
from tokenmill.engine.core import EngineCore
from tokenmill.engine.front_ends import FrontEnds
from tokenmill.engine.shell import EngineShell
from tokenmill.sim.executor import ToyExecutor
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.toy_model import solo_answer

CONFIG = EngineConfig(groups=full_groups(64), max_model_len=64, max_num_seqs=6)
VOCAB_SIZE = 64


def request(name: str, seed: int, max_tokens: int = 8, adapter: str = "") -> Request:
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    return Request(name, (seed % 50 + 3, 4, 5), sampling, max_tokens, seed=seed, adapter=adapter)


class Engine:
    """A worker's engine behind a front_ends, on virtual time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.front_ends = FrontEnds()
        self.core = EngineCore(CONFIG)
        self.executor = ToyExecutor(CONFIG, loop, vocab_size=VOCAB_SIZE)
        self.shell = EngineShell(self.core, self.executor, self.front_ends, loop)
        self.running = loop.spawn(self.shell.run(), "engine")
        self.serving: list[asyncio.Task[bool]] = []

    def join(self) -> LocalFrontEnd:
        """A new front end's end of its link."""
        end, front = local_link()
        self.serving.append(asyncio.ensure_future(self._serve(end, front)))
        return front

    async def _serve(self, end: LocalEngineEnd, front: LocalFrontEnd) -> bool:
        try:
            return await self.front_ends.serve(end, front.close)
        finally:
            end.close()

    async def end(self) -> None:
        """Serves nobody any more, and all has come back."""
        self.front_ends.drain()
        await self.running
        self.core.check()
        stats = self.core.stats()
        assert not self.core.has_work and stats.num_held_blocks == 0
        assert self.executor.adapters == ()
        assert (
            not self.front_ends._held
            and not self.front_ends._asked
            and not self.front_ends._inbox
            and not self.front_ends.num_attached
        )


def on_virtual_time(main: Callable[[Engine, VirtualLoop], Awaitable[None]]) -> None:
    loop = VirtualLoop(limit_s=1e4)

    async def run() -> None:
        engine = Engine(loop)
        await main(engine, loop)
        await engine.end()

    loop.run(run())


async def answers(front: LocalFrontEnd, of: type[FromEngine]) -> FromEngine:
    while not isinstance(message := await front.receive(), of):
        pass
    return message


async def story(front: LocalFrontEnd, number: int, rng: random.Random, requests: list[Request], leaves: bool) -> None:
    """Submit, abort some, read all; what comes must be what each gives alone. `leaves`: cut the link before the end."""
    tokens: dict[str, list[int]] = {}
    open_: dict[str, Request] = {}
    aborted: set[str] = set()
    left = list(requests)
    messages_until_end = rng.randrange(3, 30) if leaves else 10**9
    while left or open_:
        if left and (not open_ or rng.random() < 0.3):
            batch, left = left[:2], left[2:]
            open_ |= {each.id: each for each in batch}
            await front.send(Submit(tuple(batch)))
        if open_ and rng.random() < 0.05:
            aborted.add(name := rng.choice(sorted(open_)))
            await front.send(Abort((name, "never heard of")))
        message = await front.receive()
        messages_until_end -= 1
        if not messages_until_end:
            return front.close()
        assert isinstance(message, StepOutputs)
        for output in message.outputs:
            assert output.request_id in open_, f"front end {number} hears of another's {output.request_id}"
            tokens.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish_reason is not None:
                whole = solo_answer(open_.pop(output.request_id), VOCAB_SIZE).tokens
                said = tuple(tokens.pop(output.request_id))
                if output.request_id in aborted:
                    assert said == whole[: len(said)]
                else:
                    assert (said, output.finish_reason) == (whole, "length")
    await front.send(Drain())
    with pytest.raises(EOFError):
        while True:
            await front.receive()


@pytest.mark.parametrize("seed", range(60))
def test_front_ends_share_an_engine_and_hear_each_its_own(seed: int) -> None:
    """All use the same ids. Some cut their links and come again at once with the same ids."""
    rng = random.Random(seed)

    async def main(engine: Engine, loop: VirtualLoop) -> None:
        async def front_end(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            for life in range(rng.choice([1, 1, 2, 3])):
                if life or rng.random() < 0.5:
                    await asyncio.sleep(rng.uniform(0, 0.05))
                named = [
                    request(f"r{i}", rng.randrange(1000), rng.randrange(1, 20)) for i in range(rng.randrange(1, 9))
                ]
                await story(engine.join(), number, rng, named, leaves=rng.random() < 0.5)

        await asyncio.gather(*[front_end(number) for number in range(rng.choice([1, 2, 3]))])
        assert all(isinstance(each, bool) for each in await asyncio.gather(*engine.serving))

    on_virtual_time(main)


def test_who_drains_has_all_it_asked_for_and_the_others_go_on() -> None:
    async def main(engine: Engine, loop: VirtualLoop) -> None:
        first, second = engine.join(), engine.join()
        await first.send(Submit((request("a", 1),)))
        await second.send(Submit((request("a", 2, max_tokens=40),)))
        await first.send(Drain())
        said: list[int] = []
        with pytest.raises(EOFError):
            while True:
                message = await first.receive()
                assert isinstance(message, StepOutputs)
                said += [token for output in message.outputs for token in output.tokens]
        assert tuple(said) == solo_answer(request("a", 1), VOCAB_SIZE).tokens
        assert await engine.serving[0] is True
        assert engine.core.has_work and engine.front_ends.num_attached == 1
        engine.front_ends.leave()
        await answers(second, Leaving)
        await second.send(Drain())
        assert await engine.serving[1] is True

    on_virtual_time(main)


def test_a_lost_link_aborts_what_came_over_it_and_nothing_else() -> None:
    async def main(engine: Engine, loop: VirtualLoop) -> None:
        lost, stays = engine.join(), engine.join()
        for front in (lost, stays):
            await front.send(Submit((request("a", 1, max_tokens=55), request("b", 2, max_tokens=55))))
            await asyncio.sleep(0.02)
        assert engine.core.open_ids == ("a", "b", "a@1", "b@1")
        lost.close()
        await asyncio.sleep(0.02)
        assert engine.core.open_ids == ("a@1", "b@1")
        again = engine.join()
        await story(again, 2, random.Random(1), [request("a", 3), request("b", 4)], leaves=False)
        assert engine.core.open_ids == ("a@1", "b@1")
        stays.close()
        await asyncio.gather(*engine.serving)

    on_virtual_time(main)


def test_a_request_that_is_given_again_while_its_first_attempt_ends_is_heard_of() -> None:
    """As a gateway does that takes a request back: the same id at once, with another attempt."""

    async def main(engine: Engine, loop: VirtualLoop) -> None:
        front = engine.join()
        await front.send(Submit((request("a", 1, max_tokens=50),)))
        await asyncio.sleep(0.02)
        await front.send(Abort(("a",)))
        await front.send(Submit((request("a", 2),)))
        ends: list[Output] = []
        while len(ends) < 2:
            message = await front.receive()
            assert isinstance(message, StepOutputs)
            ends += [output for output in message.outputs if output.finish_reason is not None]
        assert [end.finish_reason for end in ends] == ["abort", "length"]
        front.close()
        await engine.serving[0]

    on_virtual_time(main)


def test_questions_are_answered_to_whoever_asked() -> None:
    """Both use the same numbers."""

    async def main(engine: Engine, loop: VirtualLoop) -> None:
        fronts = [engine.join(), engine.join()]
        for most, front in enumerate(fronts):
            await front.send(ShowCache(7, most))
        for front in fronts:
            answer = await front.receive()
            assert isinstance(answer, CacheShown) and answer.number == 7
            front.close()
        await asyncio.gather(*engine.serving)

    on_virtual_time(main)


def test_adapters_are_counted_for_each_front_end() -> None:
    """One that goes takes back what it has loaded, also what was still being loaded, and nothing of another's; nor can
    one unload what only another has."""

    async def main(engine: Engine, loop: VirtualLoop) -> None:
        first, second = engine.join(), engine.join()
        for front in (first, second, first):
            await front.send(LoadAdapter(1, "/fr"))
        loaded = await answers(first, AdapterLoaded)
        assert isinstance(loaded, AdapterLoaded) and loaded.digest
        await answers(first, AdapterLoaded), await answers(second, AdapterLoaded)
        third = engine.join()
        await third.send(UnloadAdapter(loaded.digest))
        await third.send(LoadAdapter(1, "/de"))
        await asyncio.sleep(0)
        third.close()
        first.close()
        await asyncio.sleep(1.0)
        assert engine.executor.adapters == (loaded.digest,)
        await second.send(Submit((request("a", 3, adapter=loaded.digest),)))
        step = await answers(second, StepOutputs)
        assert isinstance(step, StepOutputs) and not step.outputs[0].error
        await second.send(Abort(("a",)))
        await second.send(UnloadAdapter(loaded.digest))
        await asyncio.sleep(1.0)
        assert engine.executor.adapters == ()
        second.close()
        await asyncio.gather(*engine.serving)

    on_virtual_time(main)


def test_the_highest_epoch_decides_on_the_pool_and_all_hear_of_it() -> None:
    async def main(engine: Engine, loop: VirtualLoop) -> None:
        first, second = engine.join(), engine.join()
        for front, change, now in (
            (first, SetPool("prefill", 1), PoolChanged("prefill", 1)),
            (second, SetPool("decode", 1), PoolChanged("prefill", 1)),
            (second, SetPool("decode", 2), PoolChanged("decode", 2)),
        ):
            await front.send(change)
            assert await first.receive() == now == await second.receive()
        assert engine.core.state.membership.pool == "decode"
        first.close(), second.close()
        await asyncio.gather(*engine.serving)

    on_virtual_time(main)


def test_kv_events_go_to_who_wants_them_until_nobody_does() -> None:
    async def main(engine: Engine, loop: VirtualLoop) -> None:
        first, second = engine.join(), engine.join()
        for front in (first, second):
            await front.send(WatchKV(True))
            await answers(front, KVEvents)
        await first.send(WatchKV(False))
        await second.send(Submit((replace(request("a", 1), prompt_tokens=tuple(range(40))),)))
        found = await answers(second, KVEvents)
        assert isinstance(found, KVEvents) and found.events[0].kind == STORED
        await asyncio.sleep(1.0)
        await first.send(SetPool("last", 1))
        while not isinstance(message := await first.receive(), PoolChanged):
            assert not isinstance(message, KVEvents) or message.events[0].kind == CLEARED
        second.close()
        await asyncio.sleep(0.1)
        assert engine.core.state.blocks.full_pool is not None
        assert engine.core.state.blocks.full_pool.listeners == []
        first.close()
        await asyncio.gather(*engine.serving)

    on_virtual_time(main)


def test_a_front_end_that_does_not_read_is_let_go_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "MOST_BEHIND", 5)

    class Stuck(LocalEngineEnd):
        async def send(self, message: FromEngine) -> None:
            await asyncio.get_running_loop().create_future()

    async def main(engine: Engine, loop: VirtualLoop) -> None:
        inbound: asyncio.Queue[ToEngine | None] = asyncio.Queue()
        inbound.put_nowait(Submit((request("a", 1, max_tokens=40),)))
        stuck = asyncio.ensure_future(
            engine.front_ends.serve(Stuck(inbound, asyncio.Queue()), lambda: inbound.put_nowait(None))
        )
        front = engine.join()
        await story(front, 0, random.Random(1), [request("a", 2, max_tokens=30)], leaves=False)
        assert await stuck is False
        await asyncio.gather(*engine.serving)

    on_virtual_time(main)


def test_moves_are_of_the_front_end_that_makes_them() -> None:
    """Both have a request of the same id; one gives its own away. What it offers holds the worker until its release."""

    async def main(engine: Engine, loop: VirtualLoop) -> None:
        first, second = engine.join(), engine.join()
        for front in (first, second):
            await front.send(Submit((request("a", 1, max_tokens=40),)))
            await asyncio.sleep(0.02)
        await second.send(Offer("ticket", "a"))
        await second.send(Yield("ticket", "a"))
        await second.send(Yield("ticket", "another's"))
        await second.send(Drain())
        while True:
            step = await answers(second, StepOutputs)
            assert isinstance(step, StepOutputs)
            if any(output.finish_reason is not None for output in step.outputs):
                break
        assert [(each.request_id, each.finish_reason) for each in step.outputs] == [("a", FINISH_MOVED)]
        assert engine.core.open_ids == ("a",)
        await asyncio.sleep(0.1)
        assert engine.front_ends.num_attached == 2
        await second.send(Release("ticket"))
        assert await engine.serving[1] is True
        await first.send(Offer("other", "a"))
        await asyncio.sleep(0.02)
        first.close()
        await asyncio.gather(*engine.serving)

    on_virtual_time(main)


def test_what_a_later_attempt_offers_is_held_until_its_release() -> None:
    async def main(engine: Engine, loop: VirtualLoop) -> None:
        front = engine.join()
        await front.send(Submit((request("a", 1, max_tokens=40),)))
        await asyncio.sleep(0.02)
        await front.send(Abort(("a",)))
        await front.send(Submit((replace(request("a", 1, max_tokens=40), attempt=1, yields="ticket"),)))
        await front.send(Drain())
        ends: list[str] = []
        while FINISH_MOVED not in ends:
            step = await answers(front, StepOutputs)
            assert isinstance(step, StepOutputs)
            ends += [output.finish_reason for output in step.outputs if output.finish_reason is not None]
        await asyncio.sleep(0.1)
        assert engine.front_ends.num_attached == 1
        await front.send(Release("ticket"))
        assert await engine.serving[0] is True

    on_virtual_time(main)


def test_what_is_no_message_to_an_engine_is_the_end_of_that_link_alone() -> None:
    async def main(engine: Engine, loop: VirtualLoop) -> None:
        bad, good = engine.join(), engine.join()
        await bad.send(Leaving())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="No message to an engine: Leaving"):
            await engine.serving[0]
        await story(good, 1, random.Random(1), [request("a", 2)], leaves=False)
        assert await engine.serving[1] is True

    on_virtual_time(main)
