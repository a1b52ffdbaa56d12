"""Stop strings: the matcher against a naive reading of the whole text, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenmill.text.detokenizer import StopMatcher


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read ever longer beginnings of the text until one ends with a stop string; the longest such wins."""
    for end in range(len(text) + 1):
        found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if found is not None:
            return text[: end if include else end - len(found)], found
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    text = ""
    for piece in pieces:
        safe, matched = matcher.push(piece)
        text += safe
        if matched is not None:
            assert matcher.flush() == ""
            return text, matched
    return text + matcher.flush(), None


LETTERS = st.text("ab", min_size=1, max_size=5)


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(LETTERS, max_size=4), st.booleans())
@example(["abcd"], ["abcd", "bc"], False)
@example(["ab"], ["b", "ab"], False)
@example(["aab", "aab", "b"], ["aabaabb", "baab"], True)
def test_equals_the_naive_reading(pieces: list[str], stops: list[str], include: bool) -> None:
    assert run(pieces, stops, include) == naive("".join(pieces), stops, include)


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(LETTERS, min_size=1, max_size=4))
def test_holds_back_only_what_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    """After each piece, what is held is exactly the longest end of the text that begins some stop string."""
    matcher, seen, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        safe, matched = matcher.push(piece)
        if matched is not None:
            return
        seen, shown = seen + piece, shown + safe
        held = max((n for stop in stops for n in range(len(stop)) if n == 0 or seen.endswith(stop[:n])), default=0)
        assert shown == seen[: len(seen) - held]


def test_without_stops_text_passes_through() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None) and matcher.flush() == ""


def test_a_stop_across_three_pushes_is_cut_before_its_first_character() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.push("Hi.\n"), matcher.push("\nUs"), matcher.push("er: x")] == [
        ("Hi.", None),
        ("", None),
        ("", "\n\nUser:"),
    ]


def test_text_held_back_in_vain_comes_out() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.push("a</") == ("a", None)
    assert matcher.push("b") == ("</b", None)
    assert matcher.push("<") == ("", None)
    assert matcher.flush() == "<"


def test_long_repetitive_stops_cost_a_constant_per_character() -> None:
    """A stop of 1,000 equal characters over 100,000 of them but one: quadratic matching would take minutes."""
    matcher = StopMatcher(["a" * 999 + "b"])
    text = "".join(matcher.push("a" * 100)[0] for _ in range(1000))
    assert text + matcher.flush() == "a" * 100_000


def test_an_empty_stop_is_a_programmer_error() -> None:
    with pytest.raises(AssertionError):
        StopMatcher([""])
