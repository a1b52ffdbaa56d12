"""Tokens to text as they come, never splitting a character, and stop strings in that text.

A token is a run of bytes and may end inside a character; those bytes wait for the next token. Bytes that cannot become
UTF-8 turn into U+FFFD exactly as if the whole output had been decoded at once.

Stop strings are looked for character by character, so how the text is cut into pieces does not matter: the stop string
that is complete first ends the stream, and of several complete at the same character the longest. Only what may still
become a stop string is held back. One Knuth-Morris-Pratt automaton runs per stop string: its state is the length of the
longest prefix of the stop string that the text ends with. So a character costs constant time, whatever repeats.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from .tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one stream, which goes on with another: the pieces of `push` and the last of `flush` add up to
    `tokenizer.decode` of all ids, with the space that this drops at the beginning of a whole text."""

    __slots__ = ("_decode", "_table")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> None:
        """`shown`: special tokens that are not skipped."""
        self._table = tokenizer.bytes_table(skip_special=skip_special, shown=shown)
        self._decode = _new_decoder("replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        """Text completed by these tokens; may be empty."""
        table = self._table
        return self._decode(b"".join([table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character never became whole, else nothing."""
        return self._decode(b"", True)


class StopMatcher:
    """`include`: the emitted text ends with the stop string instead of just before it."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "a stop string must not be empty"
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))  # the longest is found first
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """-> (text that is safe to emit now, the stop string that matched or None). After a match the stream is over:
        what followed the stop string is dropped, and nothing may be pushed."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text, None
        text = self._held + text
        for position in range(len(self._held), len(text)):
            matched = self._advance(text[position])
            if matched is not None:
                self._held = ""
                end = position + 1
                return text[: end if self._include else end - len(matched)], matched
        safe = len(text) - max(self._states)
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """The text still held back, once no more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Move every automaton by one character; the longest stop string that is now complete, or None."""
        for index, (stop, failures) in enumerate(zip(self._stops, self._failures, strict=True)):
            state = self._states[index]
            while state and stop[state] != char:
                state = failures[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                return stop
            self._states[index] = state
        return None


def _failure_table(stop: str) -> list[int]:
    """Entry i: length of the longest proper prefix of stop[: i + 1] that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table
