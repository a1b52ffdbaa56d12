"""Long answers are put together in small pieces of work, between which everybody else has their turn."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import pytest

from scripted import make_text_model
from tokenmill.api.answer import Answer
from tokenmill.api.encoder import Encoded
from tokenmill.api.logprobs import TextOffsets, TokenNames, chat_logprobs, completion_logprobs, prompt_logprobs
from tokenmill.api.openai.parse import parse_chat, parse_completion
from tokenmill.api.openai.shape import Chunks, whole_body
from tokenmill.api.pieces import in_turns
from tokenmill.api.rules import Rules
from tokenmill.core.events import Output
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import TokenLogprob
from tokenmill.server.deltas import Delta
from tokenmill.text.choice import Choice, Piece

TEXT = make_text_model()
NAN = float("nan")


def entry(token: int, num_top: int, logprob: float = -1.25) -> TokenLogprob:
    top = tuple((other, logprob - rank) for rank, other in enumerate([token, *range(3, 3 + num_top)][:num_top]))
    return TokenLogprob(token, logprob, 1, top)


def answer(num_choices: int, *, chat: bool, **body: Any) -> Answer:
    rules = Rules(TEXT.tokenizer.vocab_size, TEXT.sampling_defaults, False)
    given = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "ab"}
    call, _ = (parse_chat if chat else parse_completion)(given | body | {"n": num_choices}, rules)
    requests = [Request(f"r-{i}", (68, 69), SamplingParams(), 16, 0, i) for i in range(num_choices)]
    return Answer(
        "id", 1, "m", "fp", call, [Encoded((68, 69), "ab")],
        [Choice(i, request, TEXT.tokenizer) for i, request in enumerate(requests)], TokenNames(TEXT.tokenizer),
        echoes=["ab"] if call.echo else (),
    )  # fmt: skip


def finish(work: Any) -> Any:
    """The result of something done in pieces."""
    return asyncio.run(in_turns(work))


@pytest.mark.parametrize("chat", [True, False])
def test_answers_tell_how_many_drafts_were_accepted(chat: bool) -> None:
    """Only where it is wanted; null where there are several choices, or where nothing drafts."""

    def told(level: str, num_choices: int = 1, most: int = 3) -> Any:
        one = answer(num_choices, chat=chat, stream=True, stream_options={"include_usage": True})
        one.draft_metrics, one.most_drafted = level, most
        for steps in ([(3, 0), (2, 2)], [(3, 1)]):
            assert one.choices[0].push(Delta("r-0", [72], draft_steps=steps)).draft_steps == steps
        body = json.loads(bytes(finish(whole_body(one, [[Piece("H", (72,), finish_reason="stop")]] * num_choices))))
        last = json.loads(Chunks(one).end().split(b"\n")[0].removeprefix(b"data: "))
        assert body.get("metrics") == last.get("metrics") and ("metrics" in body) == ("metrics" in last)
        return body.get("metrics", "absent")

    summary = {
        "mean_acceptance_length": 2.0, "draft_acceptance_rate": 3 / 8, "acceptance_histogram": [1, 1, 1, 0],
        "acceptance_histogram_by_draft_length": {"3": [1, 1, 0, 0], "2": [0, 0, 1]}, "num_spec_steps": 3,
        "num_accepted_draft_tokens": 3, "num_draft_tokens": 8, "num_spec_tokens": 3,
    }  # fmt: skip
    assert told("none") == "absent" and told("summary") == {"speculative_decoding": summary}
    by_step = {"per_step_accepted": [0, 2, 1], "per_step_drafted": [3, 2, 3]}
    assert told("detailed") == {"speculative_decoding": summary | by_step}
    assert told("summary", num_choices=2) == told("summary", most=0) == {"speculative_decoding": None}


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_chat_logprobs_are_what_openai_shows(num_top: int) -> None:
    shown = json.loads(
        bytes(finish(chat_logprobs([entry(75, 5), entry(200, 5, -1e9)], TokenNames(TEXT.tokenizer), num_top)))
    )
    first, second = shown["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("H", -1.25, [72])
    assert (second["token"], second["logprob"], len(second["bytes"])) == ("\ufffd", -9999.0, 1)
    assert [top["logprob"] for top in first["top_logprobs"]] == [-1.25 - rank for rank in range(num_top)]


def test_completion_logprobs_keep_names_values_and_offsets() -> None:
    names = TokenNames(TEXT.tokenizer)
    places = TextOffsets(TEXT.tokenizer, skip_special=True)
    shown = json.loads(bytes(finish(completion_logprobs([75, entry(76, 2), entry(200, 2, NAN)], names, 2, places))))
    assert shown["tokens"] == ["H", "I", "bytes:\\xc5"] and shown["text_offset"] == [0, 1, 2]
    assert shown["token_logprobs"] == [None, -1.25, -9999.0]
    assert shown["top_logprobs"][:2] == [None, {"I": -1.25, names.name(3): -2.25}]
    as_ids = TokenNames(TEXT.tokenizer, as_ids=True)
    shown = json.loads(bytes(finish(completion_logprobs([entry(76, 1)], as_ids, 1, places))))
    assert shown["tokens"] == ["token_id:76"] and shown["text_offset"] == [3]


def test_a_stream_that_shows_prompts_again_is_plain_behind_them() -> None:
    """Each choice's prompt comes first, once; then text goes the quick way."""
    subject = answer(2, chat=False, echo=True, stream=True)
    chunks = Chunks(subject)
    told = [b""] * 2
    for choice in subject.choices:
        assert not chunks.is_plain
        told[choice.index] += finish(chunks.piece(choice, Piece("x", (3,))))
    assert chunks.is_plain
    told = [data + chunks.text(choice, Piece("y", (3,))) for data, choice in zip(told, subject.choices, strict=True)]
    events = [[json.loads(line[6:]) for line in data.decode().split("\n\n") if line] for data in told]
    assert [[event["choices"][0]["text"] for event in each] for each in events] == [["ab", "x", "y"]] * 2


@pytest.mark.parametrize("chat", [True, False])
def test_usage_tells_what_became_of_a_prediction(chat: bool) -> None:
    """Of all choices; drafts behind a stop string are not in the answer, and rejected ones are in no other count. Who
    predicted nothing is not told."""
    given = answer(2, chat=chat, prediction={"type": "content", "content": "hello"})
    for choice, num_drafted in zip(given.choices, (3, 9), strict=True):
        delta = Delta(choice.request.id)
        for tokens in ((75, 76), (77, 78, 79)):
            delta.add(Output(choice.request.id, tokens, num_drafted=num_drafted, is_predicted=True))
        delta.add(Output(choice.request.id, (75, 76), num_drafted=7))  # of another drafter
        choice.push(delta)
        choice.push(Output(choice.request.id, finish_reason="stop", stop_token=2, is_predicted=True))
    given.choices[1].num_tokens = 2
    usage = given.usage()
    assert usage["completion_tokens"] == 10 and usage["total_tokens"] == 12
    details = {"reasoning_tokens": 0, "accepted_prediction_tokens": 3 + 2, "rejected_prediction_tokens": 3 + 15}
    assert usage["completion_tokens_details"] == details
    assert "completion_tokens_details" not in answer(2, chat=chat).usage()


@pytest.mark.parametrize("chat", [True, False])
def test_the_body_says_whether_all_kv_was_saved(chat: bool) -> None:
    """One choice that was not is one too many; who did not ask is not told."""
    pieces = [[Piece("x", finish_reason="length")]] * 2
    given = answer(2, chat=chat, kv_transfer_params={"do_remote_decode": True})
    given.choices[0].is_saved = True
    assert json.loads(finish(whole_body(given, pieces)))["kv_transfer_params"] is None
    given.choices[1].is_saved = True
    saved = json.loads(finish(whole_body(given, pieces)))["kv_transfer_params"]
    assert saved == {"do_remote_prefill": True, "do_remote_decode": False}
    assert "kv_transfer_params" not in json.loads(finish(whole_body(answer(2, chat=chat), pieces)))


def test_no_alternative_is_lost_to_another_of_the_same_name() -> None:
    """Tokens that are no whole character are named by their bytes; of tokens with one text, the second by its id."""
    subject = TokenLogprob(200, -1.0, 1, ((200, -1.0), (201, -2.0), (75, -3.0)))
    places = TextOffsets(TEXT.tokenizer, skip_special=True)
    shown = json.loads(bytes(finish(completion_logprobs([subject], TokenNames(TEXT.tokenizer), 3, places))))
    assert shown["top_logprobs"] == [{"bytes:\\xc5": -1.0, "bytes:\\xc6": -2.0, "H": -3.0}]
    alike = make_text_model(specials=[" w"]).tokenizer  # a special token, and a merge with the same text
    first, second = [token for token in range(alike.vocab_size) if alike.token_bytes(token) == b" w"]
    entries = [TokenLogprob(second, -1.0, 1, ((second, -1.0), (first, -2.0)))]
    raw = finish(completion_logprobs(entries, TokenNames(alike), 2, TextOffsets(alike, skip_special=True)))
    assert json.loads(bytes(raw))["top_logprobs"] == [{" w": -1.0, f"token_id:{first}": -2.0}]


def begins(data: bytes, at: int) -> int:
    """The place of byte `at` in the decoded text: where the character begins that it is in. Slow and obvious."""

    def text(part: bytes) -> str:
        return part.decode("utf-8", "replace")

    whole = next(end for end in range(at, -1, -1) if text(data[:end]) + text(data[end:]) == text(data))
    return len(text(data[:whole]))


def test_tokens_begin_where_their_characters_do() -> None:
    """In text of many bytes a character, whole and broken, cut into tokens anywhere."""
    rng = random.Random(7)
    some = ["a", "é", "世", "😀", "\ufffd"]
    broken = [b"\xe2\x80", b"\xf0\x9f", b"\x80", b"\xff", b"\xe0\x80"]
    ids = {TEXT.tokenizer.token_bytes(token): token for token in range(3, 259)}
    for _ in range(300):
        data = b"".join(rng.choice(broken) if rng.random() < 0.3 else rng.choice(some).encode() for _ in range(8))
        data += b"."
        places = TextOffsets(TEXT.tokenizer, skip_special=True)
        found = [places.push(ids[bytes([byte])]) for byte in data]
        assert found == [begins(data, at) for at in range(len(data))], data


def test_what_the_tokenizer_puts_around_an_echoed_prompt_has_no_width() -> None:
    """The answer begins where the prompt's text ends, whatever its tokens are; a special token that the text spells
    has its width."""
    tokenizer = TEXT.tokenizer
    (space,) = tokenizer.encode(" ", add_special=False)
    prompt = [0, space, *tokenizer.encode("ab", add_special=False), 1]
    for echo, expected in (("ab", [0, 0, 0, 1, 2]), ("ab<|im_start|>", [0, 0, 0, 1, 2])):
        places = TextOffsets(tokenizer, skip_special=True, echo=echo, num_echoed=len(prompt))
        assert [places.push(token) for token in prompt] == expected
        assert [places.push(token) for token in (75, 2, 76)] == [len(echo), len(echo) + 1, len(echo) + 1]


def test_prompt_logprobs_are_what_vllm_shows() -> None:
    raw = finish(prompt_logprobs([TokenLogprob(75, -7.0, 30, ((76, -0.5), (3, -2.0)))], TokenNames(TEXT.tokenizer), 2))
    assert json.loads(bytes(raw)) == [
        None,
        {
            "75": {"logprob": -7.0, "rank": 30, "decoded_token": "H"},
            "76": {"logprob": -0.5, "rank": 1, "decoded_token": "I"},
            "3": {"logprob": -2.0, "rank": 2, "decoded_token": TokenNames(TEXT.tokenizer).text(3)},
        },
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_large_answers_are_made_in_many_pieces(chat: bool) -> None:
    """64 choices of 100 tokens with 20 alternatives each: no piece of the work is long."""
    extra = {"logprobs": True, "top_logprobs": 20} if chat else {"logprobs": 5, "echo": True, "max_tokens": 100}
    grown = answer(64, chat=chat, **extra)
    pieces = [[Piece("x" * 100, [75] * 100, [entry(75, 20)] * 100, "stop")] for _ in range(64)]
    num_pieces, longest = 0, 0.0
    work = whole_body(grown, pieces)
    start = time.thread_time()
    try:
        while True:
            next(work)
            now = time.thread_time()
            longest, start, num_pieces = max(longest, now - start), now, num_pieces + 1
    except StopIteration as done:
        body = json.loads(done.value)
    assert len(body["choices"]) == 64 and num_pieces >= 50
    shown = body["choices"][63]["logprobs"]
    assert len(shown["content"]) == 100 if chat else len(shown["tokens"]) == 101  # and the first of the prompt


def test_the_loop_turns_while_a_large_answer_is_made() -> None:
    async def main() -> tuple[int, bytes]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        grown = answer(64, chat=True, logprobs=True, top_logprobs=20)
        pieces = [[Piece("x" * 30, [75] * 30, [entry(75, 20)] * 30, "stop")] for _ in range(64)]
        body = await in_turns(whole_body(grown, pieces))
        counting.cancel()
        return turns, body

    turns, body = asyncio.run(main())
    assert turns > 20 and len(json.loads(body)["choices"]) == 64


def test_chunks_with_log_probabilities_are_whole_json() -> None:
    grown = answer(1, chat=True, logprobs=True, top_logprobs=2, stream=True)
    data = finish(Chunks(grown).piece(grown.choices[0], Piece("H", [75], [entry(75, 2)])))
    assert json.loads(data[6:])["choices"][0]["logprobs"]["content"][0]["token"] == "H"
