"""Workers of a front end: who is taken in, what their clocks do to metrics, and what the secret's file must be."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from links import IDENTITY, SECRET, Stopped, linked, listening_socket, run
from tokenmill.cli import worker as worker_module
from tokenmill.cli import workers as workers_module
from tokenmill.cli.worker_options import LinkOptions, read_address
from tokenmill.cli.workers import Workers
from tokenmill.cluster.links import incompatibility
from tokenmill.control.observe.metrics import Metrics
from tokenmill.control.workers.roster import Owner
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.errors import ConfigError, LinkRefused
from tokenmill.core.events import (
    CacheShown,
    Drain,
    Leaving,
    PoolChanged,
    Ready,
    SetPool,
    StepOutputs,
    Submit,
    WorkerFacts,
)
from tokenmill.core.request import PoolingParams, Request, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.core import EngineCore
from tokenmill.net.codec import encode
from tokenmill.net.link import EngineLink, FrontLink
from tokenmill.net.system import MonotonicClock
from tokenmill.net.tcp import Credentials, WorkerListener, join
from tokenmill.node.options import EngineOptions
from tokenmill.node.resolve import asked_answering
from tokenmill.server.client import EngineClient
from tokenmill.sim.executor import ToyExecutor

READY = IDENTITY.ready
CONFIG = EngineConfig(groups=full_groups(16), max_model_len=64)


class Shifted:
    """A clock of another machine."""

    def __init__(self, by_s: float) -> None:
        self._by_s = by_s

    def now(self) -> float:
        return MonotonicClock().now() + self._by_s


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("hours", [-50, 50])
def test_metrics_are_of_the_front_ends_clock(kind: str, hours: int) -> None:
    """An engine whose clock is days ahead or behind: times to first token, of queueing and in all are what passed."""

    async def main() -> None:
        clock = Shifted(3600.0 * hours)
        async with linked(kind, MonotonicClock(), clock) as (front, engine):
            client = EngineClient()
            client.observers.metrics = Metrics("m", 64)
            client.attach(front)
            executor = ToyExecutor(CONFIG, clock, costs=Costs(step_s=0.002))
            serving = asyncio.create_task(build_engine(CONFIG, executor, engine, clock).run())
            await engine.send(READY)
            await client.wait_ready(5.0)
            arrival_s = MonotonicClock().now()
            stream = client.open([Request("r", (1, 2, 3), SamplingParams(), 8, seed=1, arrival_s=arrival_s)])
            deltas = await stream.take()
            while deltas[-1].finish_reason is None:
                deltas = await stream.take()
            past_s = MonotonicClock().now() - arrival_s
            labels, value = {"model_name": "m", "engine": "0"}, client.observers.metrics.registry.get_sample_value
            sums = {
                name: value(f"vllm:{name}_seconds_sum", labels)
                for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency", "request_decode_time")
            }
            assert all(found is not None and 0 <= found <= past_s for found in sums.values()), (sums, past_s)
            assert sums["e2e_request_latency"] > sums["time_to_first_token"] > 0  # type: ignore[operator]
            assert client.stalled_s(MonotonicClock().now()) == 0
            client.close("over")
            serving.cancel()

    run(main())


@contextlib.asynccontextmanager
async def taking(
    monkeypatch: pytest.MonkeyPatch, like: Ready | None = None, asked: tuple[tuple[str, str], ...] = ()
) -> AsyncIterator[tuple[EngineClient, int]]:
    """A front end's client that takes workers in at a port; its model's digest is "weights"."""
    monkeypatch.setattr(workers_module, "weights_digest", lambda path, cache_dir: "weights")
    client, told = EngineClient(), asyncio.get_running_loop().create_future()
    workers = Workers(("127.0.0.1", 0), Credentials(SECRET), "", "", 10**6, asked)
    running = asyncio.create_task(workers.run(client, lambda ready: ready, told.set_result, like))
    try:
        yield client, read_address(await told)[1]
    finally:
        client.close("over")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def come(port: int, **changes: Any) -> EngineLink:
    link = await join("127.0.0.1", port, Credentials(SECRET), replace(IDENTITY, **changes), Stopped())
    await link.send(changes.get("ready", READY))
    return link


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_a_second_link_of_one_engine_replaces_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first may be half open: its worker has seen it break, and the front end has not."""

    async def main() -> None:
        async with taking(monkeypatch) as (client, port):
            first = await come(port)
            await until(lambda: client.ready is not None)
            second = await come(port)
            with pytest.raises(EOFError):
                await first.receive()
            await until(lambda: client.ready is not None)
            await second.send(Leaving())
            assert await second.receive() == Drain()
            assert client.ready is None, "one that leaves gets no requests"
            first.close(), second.close()

    run(main())


def test_the_flags_of_a_front_end_decide_and_not_the_first_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that computes otherwise hears which flag, also where there is no other; the right one may join."""
    asked = asked_answering(EngineOptions(max_model_len=2048, kv_cache_dtype="f16", quantization="q8"))

    def told(**settings: str) -> Ready:
        right = {"max_model_len": "2048", "kv_cache_dtype": "f16", "quantization": "q8_0", "block_size": "16"}
        return replace(READY, settings=tuple((right | settings).items()))

    async def main() -> None:
        async with taking(monkeypatch, asked=asked) as (client, port):
            wrong = {"max_model_len": "1024", "kv_cache_dtype": "int8", "quantization": "as stored"}
            for name, value in wrong.items():
                why = f"Its --{name.replace('_', '-')} is {value}; the front end was given {dict(asked)[name]}"
                with pytest.raises(LinkRefused, match=why):
                    await come(port, ready=told(**{name: value}))
            assert client.ready is None
            link = await come(port, ready=told())
            await until(lambda: client.ready is not None)
            link.close()

    run(main())


def test_a_later_life_of_a_worker_ends_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its link is closed, what it still sends is dropped, and when it comes back it is refused; others may come."""

    def life(incarnation: str, name: str = "worker-1") -> Ready:
        return replace(READY, worker=WorkerFacts(name, incarnation))

    async def main() -> None:
        async with taking(monkeypatch) as (client, port):
            first = await come(port)
            await until(lambda: client.ready is not None)
            client.open([Request("r", (1, 2, 3), SamplingParams(), 8, seed=1, arrival_s=MonotonicClock().now())])
            assert isinstance(await first.receive(), Submit)
            second = await come(port, ready=life("engine-2"))
            assert isinstance(await second.receive(), Submit), "what the earlier life had"
            with pytest.raises(EOFError):
                await first.receive()
            with pytest.raises(LinkRefused, match="A later life of the worker 'worker-1' has joined"):
                await come(port)
            other = await come(port, ready=life("engine-1b", "worker-2"))
            await until(lambda: len(client._links) == 2)
            assert client.num_open == 1
            second.close(), other.close()

    run(main())


def test_a_worker_may_not_be_called_as_an_engine_of_the_front_ends_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever drains the one by its name must not end the other."""

    async def main() -> None:
        async with taking(monkeypatch) as (client, port):
            client.roster.start("w0", cast(Owner, SimpleNamespace(pool="mixed")))
            with pytest.raises(LinkRefused, match="'w0'"):
                await come(port, ready=replace(READY, worker=WorkerFacts("w0", "life")))
            link = await come(port, ready=replace(READY, worker=WorkerFacts("w1", "life")))
            await until(lambda: client.ready is not None)
            link.close()

    run(main())


def test_a_worker_is_put_into_a_pool_by_one_front_end_and_both_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later of two changes that were made at once changes nothing."""

    async def main() -> None:
        async with taking(monkeypatch) as (client, port):
            link = await come(port, ready=replace(READY, worker=WorkerFacts("worker-1", "engine-1", epoch=3)))
            await until(lambda: client.ready is not None)
            number = next(iter(client._links))
            client.put_into_pool(number, "prefill")
            assert await link.receive() == SetPool("prefill", 4)
            await link.send(PoolChanged("decode", 4))  # another front end was first
            await until(lambda: client.roster.shown()[0].facts.pool == "decode")
            client.put_into_pool(number, "prefill")
            assert await link.receive() == SetPool("prefill", 5)
            link.close()

    run(main())


BAD = {
    "no message": b"Zzz",
    "a damaged one": b"O\x93\x01\x02\x03",
    "one to an engine": encode(Drain(), 0.0),
    "an answer to nothing": encode(CacheShown(99, 16), 0.0) + b"x",
}


@pytest.mark.parametrize("data", [*BAD.values(), None], ids=[*BAD, "4 GB announced"])
def test_a_worker_that_sends_what_it_should_not_is_let_go_and_no_other(
    monkeypatch: pytest.MonkeyPatch, data: bytes | None
) -> None:
    """It knows the secret: another build, or memory gone bad. What it had goes on in the other worker."""

    async def main() -> None:
        async with taking(monkeypatch) as (client, port):
            bad = await come(port)
            await until(lambda: client.ready is not None)
            client.open([Request("r", (1, 2, 3), SamplingParams(), 8, seed=1, arrival_s=MonotonicClock().now())])
            assert isinstance(await bad.receive(), Submit)
            good = await come(port, ready=replace(READY, worker=WorkerFacts("worker-2", "engine-2")))
            await until(lambda: len(client._links) == 2)
            if data is None:
                bad._pipe._socket.send((2**32 - 1).to_bytes(4, "little") + b"O")  # type: ignore[union-attr]
            else:
                await bad._pipe.send(data)
            while not isinstance(await good.receive(), Submit):
                pass
            with pytest.raises(EOFError):
                while True:
                    await bad.receive()
            assert client.ready is not None and client.num_open == 1
            bad.close(), good.close()

    run(main())


def test_other_weights_and_other_numerics_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with taking(monkeypatch) as (client, port):
            with pytest.raises(LinkRefused, match="other weights"):
                await come(port, weights="others")
            link = await come(port)
            await until(lambda: client.ready is not None)
            with pytest.raises(LinkRefused, match=r"computes otherwise.*\(numerics_id other, not numerics\)"):
                await come(port, ready=replace(READY, numerics_id="other"))
            link.close()

    run(main())


def test_workers_are_measured_by_the_front_ends_own_engine_also_while_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a worker that computes otherwise could take its place, and it could not come back."""

    async def main() -> None:
        async with taking(monkeypatch, like=READY) as (client, port):
            with pytest.raises(LinkRefused, match="computes otherwise"):
                await come(port, ready=replace(READY, numerics_id="other"))
            link = await come(port)
            await until(lambda: client.ready is not None)
            link.close()

    run(main())


def new_worker(*ports: int) -> worker_module._Worker:
    """With an engine of the toy model, for front ends at these ports."""
    executor = ToyExecutor(CONFIG, MonotonicClock(), costs=Costs(step_s=0.002))
    engine: Any = SimpleNamespace(
        worker=SimpleNamespace(executor=executor, expert_load=lambda: None),
        ops=SimpleNamespace(progress=lambda: None),
        first_events=lambda: (),
        settings=SimpleNamespace(spec=SimpleNamespace(kv_store=None)),
    )
    addresses = [("127.0.0.1", port) for port in ports]
    return worker_module._Worker(engine, EngineCore(CONFIG), IDENTITY, addresses, Credentials(SECRET), 0.0)


def test_a_worker_that_is_refused_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """As its last word where there is one front end; one line for each, and one for the end, where there are more."""

    async def main() -> None:
        with listening_socket() as (listener, port), listening_socket() as (other_listener, other):
            takers = [
                WorkerListener(each, Credentials(SECRET), MonotonicClock(), lambda _: "Not today.", lambda *_: None)
                for each in (listener, other_listener)
            ]
            for taker in takers:
                taker.open()
            with pytest.raises(LinkRefused, match=rf"127.0.0.1:{port}: .*Not today."):
                await new_worker(port).run()
            assert not told()
            with pytest.raises(LinkRefused, match=r"No front end takes this worker\."):
                await new_worker(port, other).run()
            assert sorted(line.split()[0] for line in told()) == sorted(f"127.0.0.1:{each}:" for each in (port, other))
            for taker in takers:
                taker.close()

    def told() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name == worker_module.__name__]

    run(main())


def test_a_worker_says_nothing_to_a_front_end_of_what_another_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the same front end again, which has given the worker the same requests again."""
    monkeypatch.setattr(worker_module, "FIRST_DELAY_S", 0.01)
    clock = MonotonicClock()

    def request(name: str, max_tokens: int) -> Submit:
        return Submit((Request(name, (1, 2, 3), SamplingParams(ignore_eos=True), max_tokens, seed=1),))

    async def steps(link: FrontLink, until: Callable[[StepOutputs], bool]) -> StepOutputs:
        while True:
            step = await link.receive()
            assert isinstance(step, StepOutputs) and {each.request_id for each in step.outputs} <= {"a"}
            if until(step):
                return step

    async def main() -> None:
        joined: asyncio.Queue[FrontLink] = asyncio.Queue()
        with listening_socket() as (listener, port):
            taker = WorkerListener(
                listener, Credentials(SECRET), clock, lambda identity: "", lambda _, link, __: joined.put_nowait(link)
            )
            taker.open()
            running = asyncio.create_task(new_worker(port).run())
            link = await joined.get()
            ready = await link.receive()
            assert isinstance(ready, Ready) and ready.stats.num_steps == 0
            await link.send(request("a", 60))
            num_steps = (await steps(link, lambda step: bool(step.outputs))).stats.num_steps
            link.close()
            link = await joined.get()
            ready = await link.receive()
            assert isinstance(ready, Ready) and ready.stats.num_steps >= num_steps
            await asyncio.sleep(0.02)
            await link.send(request("a", 2))
            tokens: list[int] = []

            def is_over(step: StepOutputs) -> bool:
                tokens.extend(token for each in step.outputs for token in each.tokens)
                return any(each.finish_reason is not None for each in step.outputs)

            last = await steps(link, is_over)
            assert last.outputs[0].finish_reason == "length" and len(tokens) == 2
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            link.close(), taker.close()

    run(main())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"numerics_id": "x"}, "kv-cache-dtype"),
        ({"draw_version": 99}, "draws tokens"),
        ({"vocab_size": 1}, "vocabulary"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"pooling": PoolingParams("mean")}, "--pooling"),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], said: str) -> None:
    other: Ready = replace(READY, **change)
    assert said in incompatibility(other, READY) and incompatibility(READY, READY) == "" == incompatibility(other, None)


def test_the_secrets_file_is_long_enough_and_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_WORKER_SECRET", "of the environment, long enough")
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    given = LinkOptions(worker_secret_file=str(file))
    assert given.credentials("127.0.0.1", is_front_end=True).secret == SECRET
    assert LinkOptions().credentials("localhost", is_front_end=False).secret == b"of the environment, long enough"
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="read by others than its owner"):
        given.credentials("127.0.0.1", is_front_end=True)
    file.chmod(0o600)
    file.write_bytes(b"fifteen bytes..")
    with pytest.raises(ConfigError, match="has 15 bytes; it needs 16") as refused:
        given.credentials("127.0.0.1", is_front_end=True)
    assert "fifteen" not in refused.value.message
    with pytest.raises(ConfigError, match="cannot be read"):
        LinkOptions(worker_secret_file=str(tmp_path / "none")).credentials("127.0.0.1", is_front_end=True)


def test_without_tls_only_this_machine_is_linked_unless_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_WORKER_SECRET", SECRET.decode())
    with pytest.raises(ConfigError, match="--worker-tls-cert"):
        LinkOptions().credentials("0.0.0.0", is_front_end=True)
    assert "TOKENMILL_WORKER_SECRET" not in os.environ, "child processes are not to have it"
    monkeypatch.setenv("TOKENMILL_WORKER_SECRET", SECRET.decode())
    assert LinkOptions(worker_insecure=True).credentials("0.0.0.0", is_front_end=True).tls is None


@pytest.mark.parametrize(("text", "address"), [("h:1", ("h", 1)), ("[::1]:7000", ("::1", 7000))])
def test_addresses_are_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert read_address(text) == address


@pytest.mark.parametrize("text", ["7000", ":7000", "h:", "h:x", "h:65536", "h:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        read_address(text)
