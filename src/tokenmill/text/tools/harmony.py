"""Harmony, the format of GPT-OSS: its marks, its calls, histories as its chat template reads them, and whole answers.

An answer is messages one after the other, each with a header that names its channel and whom it is for. What is in the
channel "analysis" is reasoning. A message to `functions.NAME`, which <|call|>, an end token, closes, is a call, so an
answer has one; the recipient stands behind the channel, as models write it, or behind the role, as templates do. All
else is content; what is for a tool that is not offered is content as the model wrote it, marks and all. The prompt has
given the header's beginning, `<|start|>assistant`, or has begun a message's body. Text that has no header is content.
The format is OpenAI's ("OpenAI harmony response format", 2025).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..parts import Content, Part, Reasoning
from .family import Family, Form
from .parser import Calls, Malformed, Reading, unfinished

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
RECIPIENT = "functions."
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
PREAMBLE = f"{CHANNEL}commentary{MESSAGE}"
NEXT = f"{START}assistant"
"""What the header of a further message begins with."""


def _read(calls: Calls, marker: str) -> Reading:
    """Never used: calls are messages among others, which `text.harmony` reads."""
    yield
    raise Malformed


def describe_all(tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The tools, each with a description, as the template adds a text to it."""
    functions = [(tool, tool["function"]) for tool in tools]
    return tuple(
        {**tool, "function": {**function, "description": function.get("description") or ""}}
        for tool, function in functions
    )


def arrange(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A history in which each message of the assistant makes at most one call, which its result follows, as the
    template writes only the first; with reasoning where the template looks for it. A message that calls has either
    reasoning or content there: what was said before the call joins the reasoning."""
    arranged: list[dict[str, Any]] = []
    results = {message.get("tool_call_id"): dict(message) for message in messages if message["role"] == "tool"}
    placed = set()
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in placed:
            placed.discard(message.get("tool_call_id"))
            continue
        message = _with_thinking(message)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            arranged.append(message)
            continue
        for number, call in enumerate(calls):
            bare = {"role": "assistant", "content": ""}
            arranged.append({**(message if number == 0 else bare), "tool_calls": [call]})
            if call["id"] in results:
                arranged.append(results[call["id"]])
                placed.add(call["id"])
    return arranged


def _with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    message = dict(message)
    thought = message.pop("reasoning_content", None)
    if not thought:
        return message
    if message.get("tool_calls") and (content := message.get("content")):
        said = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        return {**message, "thinking": f"{thought}\n{said}", "content": ""}
    return {**message, "thinking": thought}


HARMONY = Family(
    "harmony",
    (),
    _read,
    Form(
        opening=f"{CHANNEL}commentary to={RECIPIENT}{{name}} {CONSTRAIN}json{MESSAGE}",
        is_parallel=False,
        lead=FINAL,
        preamble=(PREAMBLE, END + NEXT),
    ),
    ends=(CALL, END, RETURN, START),
    arrange=arrange,
    arrange_tools=describe_all,
)


MAX_HEADER = 1024
_ENDS = (END, CALL, RETURN)
_OPENINGS = (START, CHANNEL, MESSAGE)
_BREAKS = (*_ENDS, START, CHANNEL)
"""What ends a message's body; models forget the end mark at times."""

_TO = "to="
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_ROLE = re.compile(r"<\|start\|>([^\s<]*)")
_PEOPLE = ("", "assistant", "user", "all")

_Kind = Literal["content", "reasoning", "call"]


class HarmonyParser:
    """`text.parts.Parser`. A line break stands between messages of one kind.

    calls        the tools that may be called
    is_open      the text begins within reasoning
    is_separate  reasoning is told from content; else it stays there, with its marks
    is_shown     reasoning is given; else it is dropped
    """

    may_think = True
    """Reasoning may come at any time."""

    def __init__(self, calls: Calls, *, is_open: bool = False, is_separate: bool = True, is_shown: bool = True) -> None:
        self._calls = calls
        self._is_separate = is_separate
        self._is_shown = is_shown
        self._text = ""
        self._place: Literal["first", "header", "body", "gap"] = "first"
        self._kind: _Kind = "content"
        self._is_verbatim = False
        self._joint = ""  # what comes before the body's next character
        self._told: set[_Kind] = set()
        self.has_reasoned = False
        if is_open:
            self._think("")

    @property
    def is_thinking(self) -> bool:
        """Whether the next character may be reasoning or the mark that ends it."""
        return self._place == "body" and self._kind == "reasoning"

    def push(self, text: str) -> list[Part]:
        self._text += text
        while self._text and self._step():
            pass
        return self._calls.take()

    def end(self) -> list[Part]:
        text, self._text = self._text, ""
        is_header = text.lstrip().startswith(_OPENINGS)
        if self._place in ("first", "body") or (text.strip() and not is_header):
            self._give(text)
        return self._calls.take(is_last=True)

    def _step(self) -> bool:
        """Whether something has become certain, and more may."""
        if self._place == "body":
            return self._pass_on()
        if self._place == "header":
            return self._head()
        text = self._text.lstrip()
        for mark in _ENDS:
            if text.startswith(mark):
                self._text = text[len(mark) :]
                return True
        openings = (*_OPENINGS, _TO) if self._place == "first" else _OPENINGS
        if text.startswith(openings):
            self._place = "header"
        elif any(mark.startswith(text) for mark in (*openings, *_ENDS)):
            return False
        else:
            self._begin("content")
        return True

    def _head(self) -> bool:
        """Read a header."""
        text = self._text
        found = [(at, mark) for mark in (MESSAGE, *_ENDS) if (at := text.find(mark)) >= 0]
        at, mark = min(found, default=(-1, ""))
        if at > MAX_HEADER or (at < 0 and len(text) > MAX_HEADER + len(MESSAGE)):
            self._begin("content", text[:MAX_HEADER])
            self._is_verbatim = False
            self._text = text[MAX_HEADER:]
            return True
        if at < 0:
            return False
        written, self._text = text[: at + len(mark)], text[at + len(mark) :]
        if mark == MESSAGE:
            self._open(written[max(0, written.rfind(START)) :], written)
        else:
            self._begin("content", written)
            self._place = "gap"
        return True

    def _open(self, header: str, written: str) -> None:
        """Decide what the message is. `written`: all that stands before its body."""
        role, channel, recipient = (_last(pattern, header) for pattern in (_ROLE, _CHANNEL, _RECIPIENT))
        name = recipient.removeprefix(RECIPIENT)
        if role not in ("", "assistant"):
            self._begin("content", written)
        elif name in self._calls.tools:
            self._calls.start(name)
            self._begin("call")
        elif channel == "analysis":
            self._think(written)
        else:
            self._begin("content", "" if recipient in _PEOPLE else written)

    def _think(self, written: str) -> None:
        self.has_reasoned = True
        if self._is_separate:
            self._begin("reasoning")
        else:
            self._begin("content", written)
            self._is_verbatim = True

    def _begin(self, kind: _Kind, written: str = "") -> None:
        """A body. `written`: its header, where that and the mark at its end belong to it."""
        self._place, self._kind = "body", kind
        self._is_verbatim = bool(written)
        self._joint = "\n" if kind in self._told and not written else ""
        if written:
            self._give(written)
            self._told.discard(kind)

    def _pass_on(self) -> bool:
        """Give the body, up to its end."""
        text = self._text
        found = [(at, mark) for mark in _BREAKS if (at := text.find(mark)) >= 0]
        if not found:
            keep = unfinished(text, _BREAKS)
            self._text = text[len(text) - keep :]
            self._give(text[: len(text) - keep])
            return False
        at, mark = min(found)
        is_end = mark in _ENDS
        behind = at + len(mark) if is_end else at
        self._text = text[behind:]
        self._give(text[: behind if self._is_verbatim else at])
        self._close()
        self._place = "gap" if is_end else "header"
        return True

    def _give(self, text: str) -> None:
        """More of the body."""
        if self._kind == "call":
            # White space around the arguments is not theirs.
            text = self._joint + text
            text = text if self._kind in self._told else text.lstrip()
            said = text.rstrip()
            self._joint = text[len(said) :]
        else:
            said = self._joint + text if text else ""
            self._joint = "" if text else self._joint
        if not said:
            return
        self._told.add(self._kind)
        if self._kind == "call":
            self._calls.give(said)
        elif self._kind == "content":
            self._calls.add(Content(said))
        elif self._is_shown:
            self._calls.add(Reasoning(said))

    def _close(self) -> None:
        if self._kind == "call":
            if self._kind not in self._told:
                self._calls.give("{}")
            self._calls.finish()
            self._told.discard(self._kind)
        elif self._is_verbatim:
            self._told.discard(self._kind)


def _last(pattern: re.Pattern[str], header: str) -> str:
    return (pattern.findall(header) or [""])[-1]
