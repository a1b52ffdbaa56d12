"""One choice: text is never cut inside a character, stop strings match across tokens, and counts end where they do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripted import make_text_model
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import TokenLogprob
from tokenmill.server.deltas import Delta
from tokenmill.text.choice import Choice, Piece
from tokenmill.text.parts import CallArguments, CallStart, Content, Part

TEXT = make_text_model()
BYTE_0 = 3


def tokens_of(text: str) -> list[int]:
    return [BYTE_0 + byte for byte in text.encode()]


def choice(**sampling: Any) -> Choice:
    return Choice(0, Request("r", (5,), SamplingParams(**sampling), 100, seed=1), TEXT.tokenizer)


def run(
    subject: Choice, text: str, sizes: list[int], finish: str = "length", stop_token: int | None = None
) -> list[Piece]:
    """Push the bytes of `text` in pieces of the given sizes, until the choice says it is finished."""
    tokens, pieces = tokens_of(text), []
    while tokens:
        size = sizes[len(pieces) % len(sizes)]
        delta = Delta("r", tokens[:size], [TokenLogprob(token, -1.0, 1) for token in tokens[:size]])
        tokens = tokens[size:]
        if not tokens:
            delta.finish_reason, delta.stop_token = finish, stop_token
        pieces.append(subject.push(delta))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


@given(st.text(min_size=1, max_size=20), st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(max_examples=100)
def test_pieces_add_up_to_the_text_and_are_whole_characters(text: str, sizes: list[int]) -> None:
    pieces = run(choice(), text, sizes)
    assert "".join(piece.text for piece in pieces) == text
    assert all("\ufffd" not in piece.text for piece in pieces) or "\ufffd" in text


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=20), st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(max_examples=200)
def test_a_stop_string_cuts_at_its_first_completion_however_tokens_fall(letters: list[str], sizes: list[int]) -> None:
    text = "".join(letters)
    subject = choice(stop=("aab", "bb"))
    pieces = run(subject, text, sizes)
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(("aab", "bb"))]
    if ends:
        stop = "aab" if text[: ends[0]].endswith("aab") else "bb"
        assert "".join(piece.text for piece in pieces) == text[: ends[0] - len(stop)]
        assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", stop)
        assert subject.num_tokens == sum(len(piece.logprobs) for piece in pieces) == ends[0]
    else:
        assert "".join(piece.text for piece in pieces) == text
        assert (pieces[-1].finish_reason, subject.num_tokens) == ("length", len(text))


def test_the_stop_string_is_kept_where_the_caller_wants_it() -> None:
    pieces = run(choice(stop=("lo",), include_stop_str_in_output=True), "hello you", [2])
    assert "".join(piece.text for piece in pieces) == "hello"


def test_text_of_the_first_min_tokens_tokens_is_not_searched() -> None:
    subject = choice(stop=("a",), min_tokens=3)
    assert "".join(piece.text for piece in run(subject, "aaabac", [1])) == "aaab"
    assert subject.num_tokens == 5


def test_a_stop_token_is_counted_but_not_shown() -> None:
    subject = choice(stop_token_ids=(50,))
    piece = run(subject, "ab", [2], "stop", stop_token=50)[-1]
    assert (piece.text, piece.stop_reason, subject.num_tokens, list(piece.tokens)) == (
        "ab",
        50,
        3,
        [*tokens_of("ab"), 50],
    )


def test_an_end_token_gives_no_stop_reason() -> None:
    subject = choice()
    piece = run(subject, "ab", [2], "stop", stop_token=2)[-1]
    assert (piece.text, piece.stop_reason, subject.num_tokens) == ("ab", None, 3)


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_half_a_character_at_the_end_shows_as_a_replacement(stop: tuple[str, ...]) -> None:
    subject = choice(stop=stop)
    piece = subject.push(Delta("r", [*tokens_of("a"), *tokens_of("€")[:2]], finish_reason="length"))
    assert piece.text == "a\ufffd"


def test_what_a_half_matched_stop_held_back_is_given_at_the_end() -> None:
    pieces = run(choice(stop=("lollipop",)), "lollip", [1])
    assert [piece.text for piece in pieces] == ["", "", "", "", "", "lollip"]


class Marked:
    """`*` begins a call, `_` begins reasoning, and one character is always held back."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, text: str) -> list[Part]:
        given, self.held = (self.held + text)[:-1], (self.held + text)[-1:]
        return [CallStart(0, "id", "f") if char == "*" else Content(char) for char in given]

    def end(self) -> list[Part]:
        return [Content(self.held)]


def test_without_a_parser_all_text_is_content() -> None:
    assert Piece("ab").parts == (Content("ab"),)
    assert Piece(finish_reason="stop").parts == ()


def test_a_parser_takes_text_apart_and_gives_up_what_it_held_with_the_last_piece() -> None:
    subject = Choice(0, Request("r", (5,), SamplingParams(), 100, seed=1), TEXT.tokenizer, Marked())
    pieces = run(subject, "a*b", [1])
    assert [list(piece.parts) for piece in pieces] == [
        [],
        [Content("a")],
        [CallStart(0, "id", "f"), Content("b")],
    ]
    assert subject.has_calls and [piece.text for piece in pieces] == ["a", "*", "b"]


class Calling:
    """All text is the arguments of one call."""

    def __init__(self) -> None:
        self.start: list[Part] = [CallStart(0, "id", "f")]

    def push(self, text: str) -> list[Part]:
        start, self.start = self.start, []
        return [*start, CallArguments(0, text)]

    def end(self) -> list[Part]:
        return []


@pytest.mark.parametrize(
    ("sampling", "text", "token", "is_cut"),
    [
        ({"stop": ("b",)}, '{"a": "b"}', None, True),
        ({"stop": ("zz",)}, "{}zz", None, False),
        ({"stop_token_ids": (50,)}, '{"a": ', 50, True),
        ({"stop_token_ids": (50,)}, "{}", 50, False),
        ({}, '{"a": ', 2, False),  # the model's own end
    ],
)
def test_a_call_that_a_stop_cuts_is_told_from_one_that_is_whole(
    sampling: dict[str, Any], text: str, token: int | None, is_cut: bool
) -> None:
    subject = Choice(0, Request("r", (5,), SamplingParams(**sampling), 100, seed=1), TEXT.tokenizer, Calling())
    assert run(subject, text, [100], "stop", stop_token=token)[-1].finish_reason == "stop"
    assert subject.has_calls and subject.has_cut_call == is_cut
