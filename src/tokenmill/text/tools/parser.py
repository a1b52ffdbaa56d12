"""From the text of one choice to content and calls of tools, character by character.

A family's reader is a generator that is sent the characters behind a marker, says what it finds to `Calls`, and returns
the characters that it read too far. Whatever a reader decides depends on the text so far and never on how it was cut.
A reader that meets what no call has raises Malformed: before the name is certain, all that it read is content; after
that, what follows up to the family's end marker is arguments as the model wrote them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..parts import CallArguments, CallStart, Content, Part, Reasoning
from .tool_choice import TEXT_ARGUMENT, Tool

MAX_NAME = 256
_SURROGATE = re.compile("[\ud800-\udfff]")

Reading = Generator[None, str, str]


class Malformed(Exception):
    """What was read is no call."""


class Calls:
    """What readers say goes in here. `tools`: by name, those that may be called. `most`: calls that are passed on, the
    others are read and dropped; None: all. `is_bare`: what is read has no marker, so that it may as well be an answer
    in JSON. `read`: the characters since something became certain."""

    def __init__(self, tools: Mapping[str, Tool], new_id: Callable[[int], str], most: int | None = None) -> None:
        self.tools = tools
        self.is_bare = False
        self.is_open = False
        self.has_settled = False
        self.read: list[str] = []
        self._new_id = new_id
        self._most = most
        self._number = -1
        self._parts: list[Part] = []
        self._arguments: list[str] = []
        self._is_custom = False
        self._reader: TextArgument | None = None

    def begin(self, read: str, *, is_bare: bool) -> None:
        """A new reader, behind what was `read`."""
        self.read[:] = [read]
        self.is_bare, self.has_settled = is_bare, False

    @property
    def has_any(self) -> bool:
        return self._number >= 0

    def start(self, name: str) -> None:
        """Raises Malformed for a tool that is not offered."""
        assert not self.is_open
        if name not in self.tools:
            raise Malformed
        self._end_arguments(is_whole=True)
        self.is_open = True
        self._number += 1
        self._is_custom = self.tools[name].is_custom
        if self._is_heard:
            self.add(CallStart(self._number, self._new_id(self._number), name, self._is_custom))
            self._reader = TextArgument() if self._is_custom else None
        self._settle()

    def give(self, text: str) -> None:
        """More of the arguments."""
        assert self.is_open
        if self._is_heard and text:
            self._arguments.append(text)
        self._settle()

    def finish(self) -> None:
        self._end_arguments(is_whole=True)
        self.is_open = False
        self._settle()

    def add(self, part: CallStart | Content | Reasoning) -> None:
        self._end_arguments()
        last = self._parts[-1] if self._parts else None
        if isinstance(part, Content) and isinstance(last, Content):
            self._parts[-1] = Content(last.text + part.text)
        else:
            self._parts.append(part)

    def take(self, *, is_last: bool = False) -> list[Part]:
        self._end_arguments(is_whole=is_last)
        parts, self._parts = self._parts, []
        return parts

    def _end_arguments(self, *, is_whole: bool = False) -> None:
        text, self._arguments = "".join(self._arguments), []
        if self._reader is not None:
            text = self._reader.push(text)
            if is_whole:
                text += self._reader.end()
                self._reader = None
        if text:
            self._parts.append(CallArguments(self._number, text, self._is_custom))

    def _settle(self) -> None:
        self.has_settled = True
        self.read.clear()

    @property
    def _is_heard(self) -> bool:
        return self._most is None or self._number < self._most


_HEAD = re.compile(rf'\s*\{{\s*"{TEXT_ARGUMENT}"\s*:\s*"')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class TextArgument:
    """The text in the arguments of a call of a custom tool, as they come: {"input": text}. Other arguments are the text
    themselves, unless they have one text and nothing else."""

    def __init__(self) -> None:
        self._given = ""
        self._is_inside = self._is_over = False

    def push(self, arguments: str) -> str:
        self._given += arguments
        if self._is_over:
            return ""
        if not self._is_inside:
            head = _HEAD.match(self._given)
            if head is None:
                return ""
            self._is_inside, self._given = True, self._given[head.end() :]
        out, place = [], 0
        while place < len(self._given):
            char = self._given[place]
            if char == '"':
                self._is_over = True
                break
            size = 1
            if char == "\\":
                size = 6 if self._given[place + 1 : place + 2] == "u" else 2
                size = 12 if self._given[place + 2 : place + 4].lower() in _HIGH and size == 6 else size
                if place + size > len(self._given):
                    break
                char = _meaning(self._given[place : place + size])
            out.append(char)
            place += size
        self._given = self._given[place:]
        return "".join(out)

    def end(self) -> str:
        """What is left when the arguments are whole, or cut off."""
        if self._is_inside:
            return ""
        try:
            value = json.loads(self._given)
        except (ValueError, RecursionError):
            return self._given
        texts = list(value.values()) if isinstance(value, dict) else []
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) and is_whole(texts[0]) else self._given


_HIGH = ("d8", "d9", "da", "db")


def _meaning(escape: str) -> str:
    """Of an escape of JSON. Half a character, which no message can carry, is a replacement character."""
    if escape[1] != "u":
        return _ESCAPES.get(escape[1], escape[1])
    try:
        return _SURROGATE.sub("\ufffd", json.loads(f'"{escape}"'))
    except ValueError:
        return escape


class Syntax(Protocol):
    """How a family writes calls; see `family.Family`."""

    @property
    def markers(self) -> tuple[str, ...]: ...
    @property
    def bare(self) -> str: ...
    @property
    def ends(self) -> tuple[str, ...]: ...
    @property
    def read(self) -> Callable[[Calls, str], Reading]: ...


@dataclass(slots=True, eq=False)
class CallParser:
    """`text.parts.Parser` of one choice. `is_forced`: it is nothing but calls, so that what is cut off is no text."""

    syntax: Syntax
    calls: Calls
    is_forced: bool = False
    _text: str = ""
    _space: str = ""
    _reading: Reading | None = None
    _is_first: bool = True
    _is_raw: bool = False
    _is_behind_call: bool = False

    def push(self, text: str) -> list[Part]:
        self._text += text
        while self._text and self._step():
            pass
        return self.calls.take()

    def end(self) -> list[Part]:
        calls = self.calls
        if self._is_raw:
            calls.give(self._text)
        elif not self.is_forced and (self._reading is None or not calls.has_any):
            # Else the answer was cut off within a call or its marks, or within a further one.
            rest = "".join(calls.read) + self._text if self._reading is not None else self._text
            if rest.strip():
                self._say(rest)
            else:
                self._space += rest
            if self._space and not self._is_behind_call:
                calls.add(Content(self._space))
        self._text, self._space, self._reading = "", "", None
        return calls.take(is_last=True)

    def _step(self) -> bool:
        """Whether something has become certain, and more may."""
        if self._is_raw:
            return self._pass_on()
        if self._reading is not None:
            self._read(self._reading)
            return True
        return self._search()

    def _search(self) -> bool:
        """Look for the beginning of a call."""
        if self._is_first and self.syntax.bare:
            start = len(self._text) - len(self._text.lstrip())
            if start == len(self._text):
                return False
            self._is_first = False
            if self._text[start] in self.syntax.bare:
                self._begin("", self._text[:start], self._text[start:])
                return True
        found = [(at, marker) for marker in self.syntax.markers if (at := self._text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._say(self._text[:at])
            self._begin(marker, marker, self._text[at + len(marker) :])
            return True
        keep = unfinished(self._text, self.syntax.markers)
        self._say(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        return False

    def _begin(self, marker: str, read: str, rest: str) -> None:
        self.calls.begin(read, is_bare=not marker)
        self._text = rest
        self._reading = self.syntax.read(self.calls, marker)
        next(self._reading)

    def _read(self, reading: Reading) -> None:
        text, self._text = self._text, ""
        for at, char in enumerate(text):
            self.calls.read.append(char)
            try:
                reading.send(char)
            except StopIteration as ended:
                self._end_reading(ended.value + text[at + 1 :])
                return
            except Malformed:
                self._give_up(text[at + 1 :])
                return

    def _end_reading(self, rest: str) -> None:
        self._reading = None
        self._text, self._space, self._is_behind_call = rest, "", True

    def _give_up(self, rest: str) -> None:
        read = self.calls.read
        if self.calls.is_open:
            self._is_raw = True
            self._text = "".join(read) + rest
        elif self.calls.has_settled:
            self._end_reading("".join(read) + rest)
        else:
            # No call begins with the marker, or without one with the first character; behind that one may.
            first = 1 if read[0] else 2
            self._say("".join(read[:first]))
            self._text = "".join(read[first:]) + rest
        self._reading = None

    def _pass_on(self) -> bool:
        """Arguments that are not what they should be, up to where the call ends."""
        found = [(at, end) for end in self.syntax.ends if (at := self._text.find(end)) >= 0]
        if found:
            at, end = min(found)
            self.calls.give(self._text[:at])
            self.calls.finish()
            self._is_raw = False
            self._end_reading(self._text[at + len(end) :])
            return True
        keep = unfinished(self._text, self.syntax.ends)
        self.calls.give(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        return False

    def _say(self, text: str) -> None:
        """Content. White space before a call, between calls and behind them is the family's, not the answer's."""
        text = self._space + text
        if self._is_behind_call:
            text = text.lstrip()
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._is_behind_call = False
            self.calls.add(Content(said))


def unfinished(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` with which one of the markers begins."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for size in range(longest, 0, -1):
        if any(len(marker) > size and text.endswith(marker[:size]) for marker in markers):
            return size
    return 0


# ---- what readers are made of ----


def space(char: str = "") -> Reading:
    """The first character that is no white space; `char`: one that was read already."""
    char = char or (yield)
    while char.isspace():
        char = yield
    return char


def literal(text: str, char: str = "") -> Generator[None, str, None]:
    """Exactly this. Raises Malformed."""
    for wanted in text:
        char = char or (yield)
        if char != wanted:
            raise Malformed
        char = ""


def until(stops: Sequence[str], give: Callable[[str], None] | None = None, char: str = "", most: int = 0) -> Reading:
    """The text up to one of `stops`; where `give` is there, it gets that text as it comes. `most`: characters, 0: any
    number. Raises Malformed."""
    kept, size, text, held = [], 0, "", ""
    while True:
        held += char or (yield)
        char = ""
        stop = next((each for each in stops if held.endswith(each)), None)
        keep = len(stop) if stop is not None else unfinished(held, stops)
        text, held = held[: len(held) - keep], held[len(held) - keep :]
        if give is not None:
            give(text)
        else:
            kept.append(text)
            size += len(text)
            if most and size > most:
                raise Malformed
        if stop is not None:
            return "".join(kept)


def as_json(value: Any) -> str:
    """A value of JSON as text that can be sent. Raises Malformed for numbers that have no place there."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise Malformed from None
    return text if is_whole(text) else json.dumps(value)


def is_whole(text: str) -> bool:
    """Whether it holds no half of a character, which no message can carry."""
    return text.isascii() or _SURROGATE.search(text) is None


def ending(end: str, char: str) -> Reading:
    """Past `end` where that is what follows, past nothing else."""
    read = char
    while end.startswith(read):
        if read == end:
            return ""
        read += yield
    return read
