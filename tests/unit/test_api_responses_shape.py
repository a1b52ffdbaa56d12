"""Events and objects of /v1/responses: as OpenAI's own types read them, in order, and the same streamed or whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from scripted import make_text_model
from tokenmill.api.answer import Answer
from tokenmill.api.encoder import Encoded
from tokenmill.api.logprobs import TokenNames
from tokenmill.api.responses.output import item_id, response_of
from tokenmill.api.responses.parse import parse_response
from tokenmill.api.responses.shape import Progress, ResponseShape
from tokenmill.api.rules import Rules
from tokenmill.core.errors import EngineFailed
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import TokenLogprob
from tokenmill.text.choice import Choice, Piece
from tokenmill.text.parts import CallArguments, CallStart, Content, Part, Reasoning

TEXT = make_text_model()
RULES = Rules(TEXT.tokenizer.vocab_size)
BASE = "ab" * 16
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PARTS: list[Part] = [
    Reasoning("think"), Reasoning(" hard"), Content("I "), Content("ask."), CallStart(0, "call_1", "f"),
    CallArguments(0, '{"a"'), CallArguments(0, ":1}"), CallStart(1, "call_2", "g"), CallArguments(1, "{}"),
]  # fmt: skip


def make(**body: Any) -> tuple[Answer, Progress]:
    call, _ = parse_response({"input": "ab"} | body, RULES)
    request = Request("r-0", (68, 69), SamplingParams(), 16, 0, 0)
    choice = Choice(0, request, TEXT.tokenizer)
    choice.num_cached, choice.num_tokens = 1, 5
    prompts, names = [Encoded((68, 69), "ab")], TokenNames(TEXT.tokenizer)
    answer = Answer(f"resp_{BASE}", 1, "m", "fp", call, prompts, [choice], names)
    return answer, Progress(answer, wall_s=lambda: 7.0)


def pieces_of(parts: Sequence[Part], reason: str = "stop") -> list[Piece]:
    return [*(Piece("x", (70,), (), parsed=[part]) for part in parts), Piece(finish_reason=reason, parsed=[])]


def done(work: Any) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def streamed(pieces: Sequence[Piece], **body: Any) -> list[dict[str, Any]]:
    answer, progress = make(stream=True, **body)
    chunks = ResponseShape(progress).chunks(answer)
    data = chunks.start()
    for piece in pieces:
        plain = chunks.is_plain and piece.finish_reason is None
        data += chunks.text(answer.choices[0], piece) if plain else done(chunks.piece(answer.choices[0], piece))
    return events_of(data + chunks.end())


def events_of(data: bytes) -> list[dict[str, Any]]:
    found = []
    for number, block in enumerate(data.decode().split("\n\n")[:-1]):
        name, event = block.split("\n")
        fields = json.loads(event.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        assert fields["sequence_number"] == number
        EVENT.validate_python(fields, strict=False)
        found.append(fields)
    return found


def whole(pieces: Sequence[Piece], **body: Any) -> dict[str, Any]:
    answer, progress = make(**body)
    found: dict[str, Any] = json.loads(done(ResponseShape(progress).whole(answer, [pieces])))
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_events_come_in_order_and_end_with_the_whole_response() -> None:
    """Reasoning, text and two calls: each item added, filled, done; the last event has what a whole answer has."""
    events = streamed(pieces_of(PARTS))
    text = [
        "output_item.added",
        "content_part.added",
        "{0}.delta",
        "{0}.delta",
        "{0}.done",
        "content_part.done",
        "output_item.done",
    ]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    expected = [each.format("reasoning_text") for each in text] + [each.format("output_text") for each in text]
    expected += [call[0], call[1], *call[1:], *call]
    assert kinds(events) == ["created", "in_progress", *expected, "completed"]
    assert events[-1]["response"] == whole(pieces_of(PARTS))
    assert [event["output_index"] for event in events if event["type"].endswith("item.done")] == [0, 1, 2, 3]
    ended = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert ended == events[-1]["response"]["output"]
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {item["id"] for item in ended}


def test_a_whole_answer_is_openais_object() -> None:
    """Each item, the usage and the state, read strictly by the official package's type."""
    body = whole(pieces_of(PARTS), metadata={"k": "v"}, instructions="I")
    response = Response.model_validate(body)
    reasoning, message, first, second = response.output
    assert reasoning.content[0].text == "think hard" and reasoning.summary == []
    assert (message.content[0].text, message.role, message.status) == ("I ask.", "assistant", "completed")
    assert (first.name, first.call_id, first.arguments) == ("f", "call_1", '{"a":1}')
    assert (second.name, second.arguments, second.status) == ("g", "{}", "completed")
    assert (response.status, response.completed_at, response.metadata) == ("completed", 7, {"k": "v"})
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (2, 5, 7)
    assert response.usage.input_tokens_details.cached_tokens == 1
    assert body["instructions"] == "I" and body["id"] == f"resp_{BASE}"


@pytest.mark.parametrize("cut", range(len(PARTS) + 1))
def test_an_answer_that_reaches_its_limit_is_incomplete(cut: int) -> None:
    """Wherever it ends, the last item alone is incomplete, and all that was said is there."""
    body = whole(pieces_of(PARTS[:cut], "length"))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["completed_at"] is None
    states = [item["status"] for item in body["output"]]
    assert states == ["completed"] * (len(states) - 1) + ["incomplete"] * bool(states)
    last = streamed(pieces_of(PARTS[:cut], "length"))[-1]
    assert (last["type"], last["response"]) == ("response.incomplete", body)


def test_a_call_cut_by_a_stop_string_is_incomplete_for_none_of_openais_reasons() -> None:
    """The state says that the call is no call; whole and streamed alike."""
    parts = PARTS[4:6]
    answer, progress = make(stream=True)
    answer.choices[0].has_calls = answer.choices[0].has_cut_call = True
    body = json.loads(done(ResponseShape(progress).whole(answer, [pieces_of(parts)])))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", None)
    assert [item["status"] for item in body["output"]] == ["incomplete"]
    Response.model_validate(body, strict=True)
    answer, progress = make(stream=True)
    answer.choices[0].has_calls = answer.choices[0].has_cut_call = True
    chunks = ResponseShape(progress).chunks(answer)
    data = chunks.start() + b"".join(done(chunks.piece(answer.choices[0], piece)) for piece in pieces_of(parts))
    last = events_of(data + chunks.end())[-1]
    assert (last["type"], last["response"]) == ("response.incomplete", body)


def test_an_answer_that_says_nothing_has_one_empty_message() -> None:
    assert [item["content"][0]["text"] for item in whole([Piece(finish_reason="stop")])["output"]] == [""]


def test_parts_of_one_piece_are_as_those_of_many() -> None:
    assert whole([Piece("x", parsed=PARTS), Piece(finish_reason="stop")]) == whole(pieces_of(PARTS))


def test_text_after_a_call_is_another_message() -> None:
    body = whole(pieces_of([Content("a"), CallStart(0, "c", "f"), CallArguments(0, "{}"), Content("b")]))
    assert [item["type"] for item in body["output"]] == ["message", "function_call", "message"]
    assert len({item["id"] for item in body["output"]}) == 3


def test_logprobs_go_with_their_text() -> None:
    """Each delta has those of its tokens, the message has all; reasoning has none."""
    entry = TokenLogprob(75, -1.25, 1, ((75, -1.25), (76, -2.0)))
    pieces = [
        Piece("x", (75,), (entry,), parsed=[Reasoning("r")]), Piece("y", (75,), (entry,), parsed=[Content("y")]),
        Piece("z", (75, 75), (entry, entry), "stop", parsed=[Content("z")]),
    ]  # fmt: skip
    events = streamed(pieces, include=["message.output_text.logprobs"], top_logprobs=2)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [len(event["logprobs"]) for event in deltas] == [1, 2]
    part = events[-1]["response"]["output"][1]["content"][0]
    assert [each["token"] for each in part["logprobs"]] == ["H"] * 3
    assert [top["logprob"] for top in part["logprobs"][0]["top_logprobs"]] == [-1.25, -2.0]


def test_a_failed_stream_says_so_last() -> None:
    """With what had been said, and nothing that looks complete."""
    answer, progress = make(stream=True)
    chunks = ResponseShape(progress).chunks(answer)
    data = (
        chunks.start() + chunks.text(answer.choices[0], Piece("a")) + chunks.failure(EngineFailed("The step failed."))
    )
    events = events_of(data)
    assert kinds(events)[-1] == "failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]) == (
        "failed",
        {"code": "server_error", "message": "The step failed."},
    )
    assert response["output"][0]["content"][0]["text"] == "a" and response["output"][0]["status"] == "incomplete"


def test_a_cancelled_response_stays_cancelled() -> None:
    """What still comes changes nothing, and the end is told once."""
    ends = []
    answer, progress = make(stream=True)
    progress = Progress(answer, ends.append)
    chunks = ResponseShape(progress).chunks(answer)
    data = chunks.start() + chunks.text(answer.choices[0], Piece("a"))
    progress.cancel()
    data += chunks.failure(EngineFailed("x"))
    events = events_of(data)
    assert (kinds(events)[-1], events[-1]["response"]["status"]) == ("incomplete", "cancelled")
    assert events[-1]["response"]["error"] is None and ends == [progress]


def test_an_items_id_tells_its_response() -> None:
    assert response_of(item_id("message", BASE, 3)) == f"resp_{BASE}"
    assert response_of(item_id("function_call_output", BASE, 70000)) == f"resp_{BASE}"
    assert (response_of("msg_"), response_of("x"), response_of("odd_" + BASE)) == ("", "", "")
