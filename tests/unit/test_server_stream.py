"""A streamed answer: text goes out where the engine's message is dealt out; a slow client changes only the timing."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from scripted import attached, make_text_model
from tokenmill.api.answer import Answer
from tokenmill.api.call import Call
from tokenmill.api.encoder import Encoded
from tokenmill.api.logprobs import TokenNames
from tokenmill.api.openai.shape import OpenAIShape
from tokenmill.core.events import Abort, EngineStats, Output, StepOutputs, Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.build import LocalEngineEnd
from tokenmill.server.client import EngineClient
from tokenmill.server.stream import EventStream, RunningCall
from tokenmill.text.choice import Choice

TEXT = make_text_model()
BYTE_0 = 3


class Caller:
    """The ASGI server's side of one call. While `gate` is closed every send waits before it takes anything."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.senders: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.has_left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if not self.gate.is_set():
            await self.gate.wait()
        if message["type"] == "http.response.body":
            task = asyncio.current_task()
            assert task is not None
            self.senders.append(task.get_name())
            self.bodies.append(message["body"])

    @property
    def events(self) -> list[Any]:
        """Each event's JSON, without [DONE]."""
        lines = b"".join(self.bodies).removesuffix(b"data: [DONE]\n\n").split(b"\n\n")
        return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines if line]

    @property
    def texts(self) -> list[str]:
        return [choice["text"] for event in self.events for choice in event["choices"]]


class WatchedAnswer(Answer):
    __slots__ = ("__weakref__",)


class Scene:
    """One call being streamed, and the engine that answers it."""

    def __init__(self, client: EngineClient, engine: LocalEngineEnd, **sampling: Any) -> None:
        request = Request("r", (5,), SamplingParams(**sampling), 100, seed=1)
        call = Call(model=None, sampling=request.sampling, stream=True)
        names = TokenNames(TEXT.tokenizer, as_ids=False)
        prompts, choices = [Encoded((5,))], [Choice(0, request, TEXT.tokenizer)]
        assert client.observers.metrics is not None
        stream = client.open([request])
        self.answer = WatchedAnswer("cmpl-1", 1, "m", "fp", call, prompts, choices, names)
        self.caller = Caller()
        self.client = client
        self.engine = engine
        self._number = 0
        app = EventStream(RunningCall(self.answer, stream, client.observers.metrics), OpenAIShape("cmpl-"))
        self.task = asyncio.create_task(app({}, self.caller.receive, self.caller.send), name="call")

    async def step(self, text: bytes, finish: str | None = None, error: str = "") -> None:
        self._number += 1
        tokens = tuple(BYTE_0 + byte for byte in text)
        output = Output("r", tokens, finish_reason=finish, num_output=self._number, error=error)
        await self.engine.send(StepOutputs((output,), EngineStats(num_steps=self._number), float(self._number)))
        await settled()


async def settled() -> None:
    for _ in range(9):
        await asyncio.sleep(0)


def staged(
    **sampling: Any,
) -> Callable[[Callable[[Scene], Coroutine[Any, Any, None]]], Callable[[], None]]:
    def decorate(test: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def main(client: EngineClient, engine: LocalEngineEnd) -> None:
            await test(Scene(client, engine, **sampling))

        main.__name__, main.__doc__ = test.__name__, test.__doc__
        return attached(main)

    return decorate


@staged()
async def test_only_the_first_output_and_the_last_wake_the_call(scene: Scene) -> None:
    for piece in (b"one", b" two", b" thr", b"ee"):
        await scene.step(piece)
    await scene.step(b" four", "length")
    await scene.task
    assert scene.caller.texts == ["one", " two", " thr", "ee", " four"]
    assert scene.caller.bodies[-1] == b"data: [DONE]\n\n"
    assert scene.caller.senders == ["call", *["engine-client-read"] * 3, "call", "call"]
    assert scene.answer.usage()["completion_tokens"] == len("one two three four")


@staged()
async def test_a_character_is_never_cut_and_no_empty_chunk_is_sent(scene: Scene) -> None:
    for byte in "aé€".encode():
        await scene.step(bytes([byte]))
    await scene.step(b"b", "length")
    await scene.task
    assert scene.caller.texts == ["a", "é", "€", "b"]


@staged()
async def test_what_a_slow_client_keeps_waiting_arrives_once_and_in_order(scene: Scene) -> None:
    await scene.step(b"a")
    scene.caller.gate.clear()
    for byte in b"bcdefg":
        await scene.step(bytes([byte]))
    assert scene.caller.texts == ["a"]
    scene.caller.gate.set()
    await scene.step(b"h")
    await scene.step(b"i")
    await scene.step(b"j", "stop")
    await scene.task
    assert "".join(scene.caller.texts) == "abcdefghij"
    assert len(scene.caller.texts) < 9, "what waited was merged"
    assert scene.caller.senders[-3] == "engine-client-read", "the client reads in time again"


@staged()
async def test_a_client_that_is_slow_at_the_end_gets_everything(scene: Scene) -> None:
    await scene.step(b"a")
    scene.caller.gate.clear()
    await scene.step(b"b")
    await scene.step(b"c", "length")
    assert not scene.task.done()
    scene.caller.gate.set()
    await scene.task
    assert scene.caller.texts == ["a", "b", "c"] and scene.caller.bodies[-1] == b"data: [DONE]\n\n"


@staged()
async def test_what_was_held_goes_out_as_soon_as_the_client_reads(scene: Scene) -> None:
    await scene.step(b"a")
    scene.caller.gate.clear()
    await scene.step(b"b")
    scene.caller.gate.set()
    await settled()
    assert scene.caller.texts == ["a", "b"], "no other output is needed"
    await scene.step(b"c")
    await scene.step(b"d", "length")
    await scene.task
    assert scene.caller.senders[:4] == ["call", "held-write", "engine-client-read", "call"]
    assert scene.caller.texts == ["a", "b", "c", "d"]


@pytest.mark.parametrize("ending", ["leaves", "is cancelled"])
def test_nothing_is_written_for_a_call_that_ends_while_a_write_is_held(ending: str) -> None:
    @staged()
    async def run(scene: Scene) -> None:
        await scene.step(b"a")
        scene.caller.gate.clear()
        await scene.step(b"b")
        if ending == "leaves":
            scene.caller.has_left.set()
        else:
            scene.task.cancel()
        await asyncio.wait([scene.task])
        assert scene.task.cancelled() == (ending == "is cancelled")
        await settled()
        assert not [task for task in asyncio.all_tasks() if task.get_name() in ("held-write", "disconnect-watch")]
        scene.caller.gate.set()
        await scene.step(b"c")
        assert scene.caller.texts == ["a"]
        assert isinstance(await scene.engine.receive(), Submit)
        assert await scene.engine.receive() == Abort(("r",))

    run()


@pytest.mark.parametrize("ending", ["error", "loss"])
def test_what_was_held_comes_before_the_error_that_ends_the_call(ending: str) -> None:
    @staged()
    async def run(scene: Scene) -> None:
        await scene.step(b"a")
        scene.caller.gate.clear()
        await scene.step(b"b")
        if ending == "error":
            await scene.step(b"", "error", "no memory is left")
        else:
            scene.client.close("The engine has stopped.")
        await settled()
        assert not scene.task.done()
        scene.caller.gate.set()
        await scene.task
        *texts, error = scene.caller.events
        assert [event["choices"][0]["text"] for event in texts] == ["a", "b"]
        assert ("no memory is left" if ending == "error" else "The engine has stopped") in error["error"]["message"]
        assert not scene.caller.bodies[-1].endswith(b"[DONE]\n\n")

    run()


@staged()
async def test_nothing_of_an_ended_call_waits_for_the_collector(scene: Scene) -> None:
    answer = weakref.ref(scene.answer)
    gc.disable()
    try:
        await scene.step(b"a")
        await scene.step(b"b")
        await scene.step(b"c", "length")
        await scene.task
        del scene.answer, scene.task
        await settled()
        assert answer() is None
    finally:
        gc.enable()


@staged()
async def test_a_failure_while_text_is_passed_on_ends_that_stream_only(scene: Scene) -> None:
    await scene.step(b"a")
    del scene.answer.choices[0]._detokenizer
    await scene.step(b"b")
    await scene.task
    assert scene.caller.events[-1]["error"]["type"] == "internal_error"
    assert not any(body.endswith(b"[DONE]\n\n") for body in scene.caller.bodies)
    assert scene.client.ready is not None, "the engine is still there for the others"


@staged(stop=("c",))
async def test_stop_strings_are_found_across_outputs(scene: Scene) -> None:
    for byte in b"abcd":
        await scene.step(bytes([byte]))
    await scene.task
    assert "".join(scene.caller.texts) == "ab"
    assert scene.caller.events[-1]["choices"][0]["stop_reason"] == "c"
