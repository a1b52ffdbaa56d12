"""AsyncLLM: the same answers as LLM, streamed to many tasks of one event loop, each of which may leave."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from tokenmill import AsyncLLM, SamplingParams
from tokenmill.core.errors import InvalidRequest
from tokenmill.llm.async_llm import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
QUESTION = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def llm(smollm2) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(smollm2), kv_cache_memory_bytes="100MiB")
    yield llm
    llm.close()


async def last(llm: AsyncLLM, prompt, sampling=GREEDY, **how) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, sampling, **how)]
    assert outputs[-1].finished
    return outputs[-1]


def num_running(llm: AsyncLLM) -> int:
    return llm._llm._runtime.client.num_open


def test_outputs_grow_to_what_llm_gives(llm):
    async def run() -> list[RequestOutput]:
        return [output async for output in llm.generate("Once upon a time", GREEDY)]

    outputs = asyncio.run(run())
    whole = llm._llm.generate("Once upon a time", GREEDY)[0]
    assert len(outputs) > 2 and outputs[-1] == whole
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for shorter, longer in itertools.pairwise(outputs):
        assert longer.text.startswith(shorter.text)
        assert longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids


def test_many_at_once_equal_one_at_a_time(llm):
    prompts = [f"{number}, {number + 1}," for number in range(20)]

    async def together() -> list[RequestOutput]:
        return await asyncio.gather(*(last(llm, {"prompt": prompt, "cache_salt": "a"}) for prompt in prompts))

    found = asyncio.run(together())
    assert [output.token_ids for output in found] == [
        output.token_ids for output in llm._llm.generate(prompts, GREEDY, cache_salt="b")
    ]


def test_a_conversation_and_several_choices(llm):
    output = asyncio.run(last(llm, QUESTION, SamplingParams(temperature=0, max_tokens=30, n=2)))
    assert [choice.index for choice in output.outputs] == [0, 1]
    assert all("Paris" in choice.text for choice in output.outputs)


def test_an_aborted_call_ends_and_says_so(llm):
    async def run() -> list[RequestOutput]:
        outputs = []
        async for output in llm.generate("Count: 1", ENDLESS, "mine"):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort("mine")
        await llm.abort("mine")
        await llm.abort("nobody's")
        return outputs

    outputs = asyncio.run(run())
    assert outputs[-1].finish_reason == "abort" and outputs[-1].text.startswith(outputs[-2].text)


def test_abort_reaches_a_call_that_waits(llm):
    async def run() -> RequestOutput:
        task = asyncio.create_task(last(llm, "Count: 1", ENDLESS, request_id="waiting"))
        while "waiting" not in llm._open:
            await asyncio.sleep(0.01)
        with pytest.raises(InvalidRequest, match="in use"):
            await last(llm, "x", request_id="waiting")
        await llm.abort("waiting")
        return await task

    assert asyncio.run(run()).finish_reason == "abort"


def test_who_leaves_or_is_cancelled_frees_the_engine(llm):
    async def leave() -> None:
        async for _ in llm.generate("Count: 1", ENDLESS):
            break

    async def run() -> None:
        await leave()
        for number in range(20):
            task = asyncio.create_task(last(llm, "Count: 2", ENDLESS))
            await asyncio.sleep(0.005 * number)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        for _ in range(500):
            if not num_running(llm):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{num_running(llm)} requests still run")

    asyncio.run(run())
    assert not llm._open


def test_what_is_wrong_is_said_before_it_runs(llm):
    for wrong in (5, None, b"bytes", [["nested"]], {"text": "x"}, ["a", "b"]):
        with pytest.raises(InvalidRequest):
            asyncio.run(last(llm, wrong))
    with pytest.raises(InvalidRequest, match="sampling_params"):
        asyncio.run(last(llm, "x", {"temperature": 0}))


def test_a_closed_model_ends_its_calls_with_the_reason(smollm2):
    async def run() -> None:
        async with AsyncLLM(str(smollm2), kv_cache_memory_bytes="100MiB") as llm:
            task = asyncio.create_task(last(llm, "Count: 1", ENDLESS))
            while not num_running(llm):
                await asyncio.sleep(0.01)
        with pytest.raises(Exception, match=r"closed|stopped"):
            await task
        with pytest.raises(InvalidRequest, match="closed"):
            await last(llm, "x")

    asyncio.run(run())
