"""Special tokens that a message spells are plain text: hidden from the template, and from what finds special tokens.

Before rendering, each special token spelled in a string of the caller is replaced by one character that occurs nowhere
else, its placeholder. What special tokens the rendered text then shows are the template's own: it is split at them, and
only then are the placeholders replaced by what they stand for. A string's end that a following text could complete to a
special token is replaced too. A placeholder is one ideograph of a rare plane: no letter case, no escape in `repr`, and
nothing to be cut apart; where it was escaped nevertheless (JSON in ASCII, a URL), the text is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ..core.errors import InvalidRequest

_IDEOGRAPHS = range(0x20000, 0x2A6E0)
"""CJK Unified Ideographs Extension B."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt. `pieces`: the whole text, in which special tokens count; or, if `is_split`, text and special token in
    turns, text first and last, where no special token counts within a text."""

    pieces: tuple[str, ...]
    is_split: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class SpecialTokens:
    """How special tokens are spelled, as expressions to find them with."""

    def __init__(self, spellings: Iterable[str]) -> None:
        longest_first = sorted({text for text in spellings if text}, key=lambda text: (-len(text), text))
        self.whole = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        marked = [text for text in longest_first if not text[0].isalnum()]
        self._beginnings = {text[:size] for text in marked for size in range(1, len(text))}
        self._sizes = sorted({len(text) for text in self._beginnings}, reverse=True)

    def unfinished(self, text: str) -> str:
        """The longest end of `text` with which a special token begins."""
        return next((text[-size:] for size in self._sizes if text[-size:] in self._beginnings), "")


class Placeholders:
    """Those of one rendering. `source`: of the template, where they must not occur either."""

    def __init__(self, specials: SpecialTokens, source: str) -> None:
        self._specials = specials
        self._source = source
        self._chars: dict[str, str] = {}
        self._free: Iterator[str] | None = None
        self._given: Any = None

    def put(self, value: Any) -> Any:
        """`value`, JSON as Python has it, with placeholders. To be called once, with all that is to be rendered."""
        if self._specials.whole is None:
            return value
        self._given = value
        return self._replace(value)

    def take(self, prompt: str) -> Rendered:
        """The rendered text, split if it holds placeholders. Raises InvalidRequest where one was altered."""
        texts = {char: text for text, char in self._chars.items()}
        if not texts or self._specials.whole is None:
            return Rendered((prompt,))
        lower = prompt.lower()
        for char, text in texts.items():
            if any(form in lower for form in _escaped(char)):
                raise InvalidRequest(
                    f"The chat template escapes the special token {text!r} that the messages spell; leave it out.",
                    param="messages",
                )
        if not any(char in prompt for char in texts):
            return Rendered((prompt,))
        found = self._specials.whole
        texts_between, tokens = found.split(prompt), found.findall(prompt)
        back = str.maketrans(texts)
        pieces = [texts_between[0].translate(back)]
        for token, text in zip(tokens, texts_between[1:], strict=True):
            pieces += (token, text.translate(back))
        return Rendered(tuple(pieces), is_split=True)

    def _replace(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._replace_in(value)
        if isinstance(value, Mapping):
            # What is looked up by name keeps its name.
            return {key if key.isidentifier() else self._replace(key): self._replace(i) for key, i in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._replace(item) for item in value]
        return value

    def _replace_in(self, text: str) -> str:
        assert self._specials.whole is not None
        text = self._specials.whole.sub(lambda match: self._stand_in(match[0]), text)
        rest = self._specials.unfinished(text)
        return text[: len(text) - len(rest)] + self._stand_in(rest) if rest else text

    def _stand_in(self, text: str) -> str:
        if text not in self._chars:
            if self._free is None:
                used = {
                    char for given in (self._source, *_strings(self._given)) for char in given if char > "\U0001ffff"
                }
                self._free = (char for char in map(chr, _IDEOGRAPHS) if char not in used)
            char = next(self._free, None)
            if char is None:
                raise InvalidRequest("The messages spell too many special tokens.", param="messages")
            self._chars[text] = char
        return self._chars[text]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _escaped(char: str) -> tuple[str, ...]:
    """How escapes would spell the character, in lower case."""
    return json.dumps(char)[1:-1].lower(), quote(char).lower(), f"{ord(char):x};", f"{ord(char)};"
