"""Adapters in the engine: loaded beside the steps, refused once unloaded, freed only behind their last request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import DropAdapter, Job, JobEnded, Outbox
from tokenmill.core.errors import EngineFailed, InvalidRequest
from tokenmill.core.events import AdapterLoaded, Drain, LoadAdapter, Output, StepOutputs, Submit, UnloadAdapter
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.build import LocalFrontEnd, build_engine, local_link
from tokenmill.engine.journal import Entry
from tokenmill.engine.replay import replay
from tokenmill.engine.shared import AdapterRegistry
from tokenmill.sim.executor import ToyExecutor
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.toy_model import solo_answer

CONFIG = EngineConfig(
    groups=full_groups(64), max_model_len=64, block_size=4, max_num_batched_tokens=16, steps_in_flight=2
)


def request(name: str, adapter: str, max_tokens: int = 3) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(name, tuple(range(1, 14)), sampling, max_tokens, 0, adapter=adapter)


class FrontEnd:
    """What a front end sees: answers about adapters, and the outputs of each request."""

    def __init__(self, link: LocalFrontEnd) -> None:
        self.link = link
        self.outputs: dict[str, list[Output]] = {}

    async def take(self) -> AdapterLoaded | StepOutputs:
        message = await self.link.receive()
        assert isinstance(message, AdapterLoaded | StepOutputs)
        if isinstance(message, StepOutputs):
            for output in message.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
        return message

    async def load(self, path: str) -> AdapterLoaded:
        await self.link.send(LoadAdapter(1, path))
        while True:
            message = await self.take()
            if isinstance(message, AdapterLoaded):
                return message

    async def until_ended(self, *names: str) -> None:
        while not all(name in self.outputs and self.outputs[name][-1].finish_reason for name in names):
            await self.take()

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(token for output in self.outputs[name] for token in output.tokens)


def serve(script: Callable[[FrontEnd, ToyExecutor], Awaitable[None]], journal: list[Entry] | None = None) -> None:
    loop = VirtualLoop()
    executor = ToyExecutor(CONFIG, loop)

    async def main() -> None:
        engine_end, front_end = local_link()
        record = None if journal is None else journal.append
        engine = loop.spawn(build_engine(CONFIG, executor, engine_end, loop, record).run(), "engine")
        await script(FrontEnd(front_end), executor)
        await front_end.send(Drain())
        await engine

    loop.run(main())


def test_an_unloaded_adapter_serves_what_it_has() -> None:
    """Its requests run to their end, further ones are refused, and only then does the worker forget it."""
    journal: list[Entry] = []

    async def script(front: FrontEnd, executor: ToyExecutor) -> None:
        digest = (await front.load("a")).digest
        await front.link.send(Submit((request("long", digest, 20),)))
        while "long" not in front.outputs:
            await front.take()
        await front.link.send(UnloadAdapter(digest))
        await front.link.send(Submit((request("late", digest), request("plain", ""))))
        await front.until_ended("late", "plain")
        assert "not loaded any more" in front.outputs["late"][-1].error
        assert front.outputs["late"][-1].error_kind == InvalidRequest.kind
        assert executor.adapters == (digest,)
        await front.until_ended("long")
        assert front.tokens("long") == solo_answer(request("long", digest, 20), 64).tokens
        await front.link.send(Submit((request("after", ""),)))
        await front.until_ended("after")
        assert executor.adapters == ()

    serve(script, journal)
    replayed = replay(CONFIG, journal)
    assert replayed.num_steps > 20 and replayed.difference is None


def test_loading_again_keeps_an_adapter_that_was_leaving() -> None:
    """Its users never notice; loads count, so one unload of two leaves it."""

    async def script(front: FrontEnd, executor: ToyExecutor) -> None:
        digest = (await front.load("a")).digest
        await front.link.send(Submit((request("long", digest, 20),)))
        await front.link.send(UnloadAdapter(digest))
        assert (await front.load("a")).digest == digest
        assert (await front.load("a")).digest == digest
        await front.link.send(UnloadAdapter(digest))
        await front.link.send(Submit((request("more", digest),)))
        await front.until_ended("long", "more")
        assert not front.outputs["more"][-1].error and executor.adapters == (digest,)

    serve(script)


def test_equal_prompts_under_different_adapters_share_nothing() -> None:
    """The toy worker marks what it stores with the adapter, so a shared block would be a violation."""

    async def script(front: FrontEnd, executor: ToyExecutor) -> None:
        digests = ["", (await front.load("a")).digest, (await front.load("b")).digest]
        for turn in range(2):
            names = [f"{turn} {digest}" for digest in digests]
            requests = [request(name, digest) for name, digest in zip(names, digests, strict=True)]
            await front.link.send(Submit(tuple(requests)))
            await front.until_ended(*names)
            assert [front.outputs[name][-1].num_cached for name in names] == [12 * turn] * 3

    serve(script)


def test_a_job_that_fails_for_no_known_reason_ends_with_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """The answer names the kind of error and the log has the rest; the engine goes on, and may load another."""

    async def script(front: FrontEnd, executor: ToyExecutor) -> None:
        run = executor.run

        async def fail(job: Job) -> str:
            raise KeyError("secret")

        executor.run = fail
        answer = await front.load("a")
        assert answer.error_kind == EngineFailed.kind and not answer.digest
        assert "KeyError" in answer.error and "secret" not in answer.error
        executor.run = run
        digest = (await front.load("b")).digest
        executor.run = fail
        await front.link.send(UnloadAdapter(digest))
        await front.link.send(Submit((request("plain", ""),)))
        await front.until_ended("plain")
        assert not front.outputs["plain"][-1].error

    serve(script)
    failed = [record.getMessage() for record in caplog.records]
    assert len(failed) == 2 and "LoadAdapter" in failed[0] and "DropAdapter" in failed[1]


def test_the_ledger_drops_what_is_neither_loaded_nor_used() -> None:
    """Nor is anything dropped while an adapter is being loaded: it may be that one."""
    outbox = Outbox()
    ledger = AdapterRegistry(outbox)

    def dropped() -> list[str]:
        return [job.digest for job in outbox.take().jobs if isinstance(job, DropAdapter)]

    load = LoadAdapter(1, "somewhere")
    for digest in ("a", "b"):
        ledger.load(load, 0.0), ledger.end_load(JobEnded(load, digest), 0.0)
    assert [answer.digest for answer in outbox.take().answers if isinstance(answer, AdapterLoaded)] == ["a", "b"]
    ledger.begin("a")
    for digest in ("a", "b", "never loaded"):
        ledger.unload(UnloadAdapter(digest), 0.0)
    assert not ledger.takes("a") and dropped() == ["b"]
    ledger.check({"a": 1})
    ledger.load(load, 0.0)
    ledger.end("a")
    assert dropped() == []
    ledger.end_load(JobEnded(load, error="no such folder"), 0.0)
    assert dropped() == ["a"] and not ledger
