"""Answers that follow a grammar, on the real model in this process: in company, alone, and when something fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tokenmill import AsyncLLM, SamplingParams
from tokenmill.core.errors import InvalidRequest
from tokenmill.llm.async_llm import RequestOutput
from tokenmill.worker import grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "old"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PLAIN = SamplingParams(temperature=0.9, max_tokens=40, seed=7)


@pytest.fixture(scope="module")
def llm(smollm2) -> Iterator[AsyncLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "SPENT_S", 10.0)  # on a busy machine a token may take many times as long as usual
        llm = AsyncLLM(str(smollm2), kv_cache_memory_bytes="100MiB", max_num_seqs=6)
        yield llm
        llm.close()


def constrained(llm: AsyncLLM, wanted: dict[str, Any], **settings) -> SamplingParams:
    sampling = SamplingParams(**{"temperature": 0.9, "max_tokens": 90, "seed": 7} | settings)
    return llm._llm._calls.constrain([sampling], wanted)[0]


async def last(llm: AsyncLLM, prompt: str, sampling: SamplingParams) -> RequestOutput:
    return [output async for output in llm.generate(prompt, sampling)][-1]


def prompt(number: int) -> str:
    return f"Person {number} as JSON:"


@pytest.mark.sampled(1 / 3)
def test_together_is_as_alone(llm):
    """Constrained and free requests that come and go, more than there are rows, with steps planned ahead: each answer
    is the one it gives alone, and what ends by itself fits."""
    kinds = [
        constrained(llm, {"json": SCHEMA}),
        PLAIN,
        constrained(llm, {"regex": "[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9})*"}, n=2, logprobs=2),
        constrained(llm, {"choice": ["yes", "no", "perhaps not"]}, temperature=0),
        constrained(llm, {"json_object": True}, min_tokens=20, repetition_penalty=1.1),
    ]
    asked = [(prompt(number), kinds[number % len(kinds)]) for number in range(20)]

    async def together() -> list[RequestOutput]:
        return await asyncio.gather(*(last(llm, text, sampling) for text, sampling in asked))

    found = asyncio.run(together())
    alone = [llm._llm.generate(text, sampling)[0] for text, sampling in asked]
    assert [output.outputs for output in found] == [output.outputs for output in alone]
    ended = [choice.text for output in found[::5] for choice in output.outputs if choice.finish_reason == "stop"]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert {output.outputs[0].text for output in found[3::5]} <= {"yes", "no", "perhaps not"}


def test_leaving_early_disturbs_nobody(llm):
    """Streams that end at every stage; the others are what they would have been."""
    sampling = constrained(llm, {"json": SCHEMA})

    async def leave(number: int) -> None:
        num_seen = 0
        async for _ in llm.generate(prompt(number), sampling):
            num_seen += 1
            if num_seen > number:
                break

    async def run() -> RequestOutput:
        leaving = [asyncio.create_task(leave(number)) for number in range(8)]
        found = await last(llm, prompt(3), sampling)
        await asyncio.gather(*leaving)
        return found

    assert asyncio.run(run()).outputs == llm._llm.generate(prompt(3), sampling)[0].outputs


def test_a_bad_grammar_is_refused_by_the_engine_too(llm):
    """One that nobody had compiled before; what runs beside it goes on."""

    async def run() -> tuple[RequestOutput, BaseException]:
        free = asyncio.create_task(last(llm, "Once", PLAIN))
        with pytest.raises(InvalidRequest, match="strange") as refused:
            await last(llm, "x", SamplingParams(grammar='{"grammars": [{"json_schema": {"type": "strange"}}]}'))
        return await free, refused.value

    found, refused = asyncio.run(run())
    assert refused.param == "grammar"
    assert found.outputs == llm._llm.generate("Once", PLAIN)[0].outputs
    with pytest.raises(InvalidRequest) as wrong:
        constrained(llm, {"regex": "(a"})
    assert (wrong.value.param or "").startswith("structured_outputs")


def test_a_mask_that_takes_too_long_ends_its_request_alone(llm, monkeypatch):
    sampling = constrained(llm, {"json": SCHEMA})
    before = llm._llm.generate("Once", PLAIN)[0].outputs
    monkeypatch.setattr(grammars, "SPENT_S", -1.0)
    monkeypatch.setattr(grammars, "_SLOW_S", 0.0)

    async def run() -> RequestOutput:
        free = asyncio.create_task(last(llm, "Once", PLAIN))
        with pytest.raises(InvalidRequest, match="processor time"):
            await last(llm, prompt(0), sampling)
        return await free

    assert asyncio.run(run()).outputs == before
    assert llm._llm._runtime.engine is not None
    monkeypatch.undo()
    assert llm._llm.generate(prompt(0), sampling)[0].outputs[0].text.startswith("{")
