"""The meter: what is in the journal when, between an engine's message and a client that may be slow, or gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from scripted import make_text_model
from tokenmill.control.usage.journal import MARK, Account, Journal, records
from tokenmill.control.usage.meter import Meter, Tab
from tokenmill.core.events import FINISH_LENGTH, Output
from tokenmill.core.request import Request, SamplingParams
from tokenmill.server.deltas import Delta, Stream
from tokenmill.text.choice import Choice


class Call:
    """One streamed call of n choices, its reader and engine in the test's hands."""

    def __init__(
        self, folder: Path, *, n: int = 1, num_prompts: int = 1, stop: tuple[str, ...] = (), **how: Any
    ) -> None:
        self.folder = folder
        self.journal = Journal(folder, lambda: 1.0)
        self.journal.open()
        self.meter = Meter(self.journal)
        tokenizer = make_text_model().tokenizer
        sampling = SamplingParams(max_tokens=99, n=n, stop=stop)
        self.letters = [tokenizer.encode(letter, add_special=False)[0] for letter in "abcdefgh"]
        requests = [Request(f"r{index}", (1, 2, 3), sampling, 99, seed=1) for index in range(n * num_prompts)]
        self.choices = [Choice(index, request, tokenizer) for index, request in enumerate(requests)]
        self.tab: Tab = self.meter.tab(Account("t", "k", "m"), self.choices, n, **how)
        self.stream = Stream(lambda name, reason: None, [request.id for request in requests])

    def give(self, *tokens: int, choice: int = 0, end: str | None = None) -> None:
        """The engine's message of one output, as EngineClient deals it out."""
        output = Output(f"r{choice}", tokens or tuple(self.letters[:1]), finish_reason=end, num_cached=2)
        self.meter.sending([output], None)
        self.stream.push(output)

    async def read(self) -> None:
        """What a reader does with what has come."""
        deltas: list[Delta] = await self.stream.take()
        for delta in deltas:
            self.choices[int(delta.request_id[1:])].push(delta)
        self.tab.note()
        self.tab.follow(self.stream)

    def told(self) -> list[tuple[int, ...]]:
        """(calls, prompt, cached, output) of each record."""
        (path,) = self.folder.glob("*.journal")
        found = [record for _, record in records(path.read_bytes(), len(MARK))]
        return [entry[1:5] for record in found for entry in record.entries]


def looped(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(tmp_path), 30))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@looped
async def test_a_reader_that_waits_has_its_tokens_counted_before_they_are_dealt_out(tmp_path: Path) -> None:
    """The first with the prompt by the reader, the rest by the engine's message, and none twice."""
    call = Call(tmp_path)
    call.give()
    assert call.told() == [], "nothing has been handed over"
    await call.read()
    reading = asyncio.ensure_future(call.read())
    await turns()
    call.meter.sending([Output("r0", tuple(call.letters[:2]))], None)
    assert call.told() == [(1, 3, 2, 1), (0, 0, 0, 2)]
    call.stream.push(Output("r0", tuple(call.letters[:2])))
    await reading
    call.give(end=FINISH_LENGTH)
    await call.read()
    call.tab.close()
    assert call.told() == [(1, 3, 2, 1), (0, 0, 0, 2), (0, 0, 0, 1)]
    call.journal.close()


@looped
async def test_what_waits_for_a_slow_reader_is_not_counted(tmp_path: Path) -> None:
    """Tokens that pile up count when they are read; those that never are, do not."""
    call = Call(tmp_path)
    call.give()
    await call.read()
    for _ in range(5):
        call.give()
    assert call.told() == [(1, 3, 2, 1)]
    await call.read()
    assert call.told() == [(1, 3, 2, 1), (0, 0, 0, 5)]
    for _ in range(5):
        call.give()
    call.tab.close()
    assert sum(each[3] for each in call.told()) == 6
    call.journal.close()


@looped
async def test_what_was_counted_and_not_written_is_taken_back(tmp_path: Path) -> None:
    """A client that left between the record and its tokens, and tokens behind a stop string."""
    call = Call(tmp_path, stop=("bc",))
    call.give()
    await call.read()
    reading = asyncio.ensure_future(call.read())
    await turns()
    call.give(*call.letters[:6])
    assert sum(each[3] for each in call.told()) == 7
    await reading
    assert sum(each[3] for each in call.told()) == 4, "a, and a b c of a b c d e f"
    call.tab.close()
    assert not call.meter.followed
    call.journal.close()
    (other := tmp_path / "other").mkdir()
    call = Call(other)
    call.give()
    await call.read()
    reading = asyncio.ensure_future(call.read())
    await turns()
    call.give()
    reading.cancel()
    call.tab.close()
    assert [each[3] for each in call.told()] == [1, 1, -1] and not call.meter.followed
    call.journal.close()


@looped
async def test_prompts_count_once_and_when_their_first_choice_begins(tmp_path: Path) -> None:
    call = Call(tmp_path, n=2, num_prompts=2)
    for choice, expected in ((1, (1, 3, 0, 1)), (0, (0, 0, 2, 1)), (2, (0, 3, 2, 1)), (3, (0, 0, 0, 1))):
        call.give(choice=choice)
        await call.read()
        assert call.told()[-1] == expected, choice
    call.tab.close()
    assert len(call.told()) == 4
    call.journal.close()


@looped
async def test_a_prompt_that_is_only_scored_has_no_output(tmp_path: Path) -> None:
    call = Call(tmp_path, counts_output=False)
    call.give(end=FINISH_LENGTH)
    await call.read()
    call.tab.close()
    assert call.told() == [(1, 3, 2, 0)]
    call.journal.close()
