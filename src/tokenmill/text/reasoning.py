"""What a model thinks before it answers: how families mark it, and how it is told from the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..plugins.groups import REASONING_PARSERS
from ..plugins.load import load_plugin
from .parts import Content, Parser, Part, Reasoning
from .tools.harmony import ANALYSIS, CHANNEL, END, FINAL, NEXT
from .tools.parser import unfinished


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """begin, end  the marks around what is thought
    after       what follows `end`, where an answer comes
    lead        what an answer in words begins with, thought or not
    """

    name: str
    begin: str
    end: str
    after: str = ""
    lead: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Everything in an answer that may be a special token of the model's vocabulary."""
        return self.begin, self.end, self.after, self.lead


class ReasoningUse(msgspec.Struct, frozen=True):
    """is_separate  reasoning is told from the answer; else it is content, marks and all
    is_shown        it is in the answer at all
    budget          most tokens of it; None: any number
    """

    is_separate: bool = True
    is_shown: bool = True
    budget: int | None = None


REASONING: dict[str, ReasoningFamily] = {
    family.name: family
    for family in (
        ReasoningFamily("think", "<think>", "</think>"),
        ReasoningFamily("mistral", "[THINK]", "[/THINK]"),
        ReasoningFamily("granite", "Here is my thought process:", "Here is my response:"),
        ReasoningFamily("seed_oss", "<seed:think>", "</seed:think>"),
        ReasoningFamily("harmony", ANALYSIS, END, NEXT, FINAL),
    )
}
"""By the names that --reasoning-parser takes."""

ALIASES = {
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "holo2"), "think"),
    **dict.fromkeys(("openai_gptoss", "gpt_oss", "gpt-oss"), "harmony"),
}
"""Other servers' names of the same."""


def reasoning_family(name: str) -> ReasoningFamily | None:
    """One of ours, or of a plug-in; None where neither has the name. Raises ConfigError."""
    return REASONING.get(name) or load_plugin(REASONING_PARSERS, name, ReasoningFamily, param="reasoning_parser")


def reasoning_of(template: str | None) -> ReasoningFamily | None:
    """The one whose marks the template's text shows."""
    if template is None:
        return None
    harmony = REASONING["harmony"]
    if CHANNEL in template:
        return harmony
    others = (family for family in REASONING.values() if family is not harmony)  # its end marks other templates' turns
    return next((family for family in others if family.begin in template or family.end in template), None)


def is_open(family: ReasoningFamily, prompt: str, continued: str | None = None) -> bool:
    """Whether an answer to `prompt` begins within reasoning: its last mark is one that the template has put there.
    `continued`: the answer's own beginning, where the caller gave one."""
    if continued is not None:
        return continued.rfind(family.begin) > continued.rfind(family.end)
    return prompt.rstrip().endswith(family.begin)


class ReasoningParser:
    """`text.parts.Parser`: reasoning, if the answer begins with it, and what `inner` makes of the rest. White space
    next to the marks belongs to them.

    is_open   the text begins within reasoning
    is_shown  reasoning is given; else it is dropped
    """

    def __init__(
        self, family: ReasoningFamily, inner: Parser | None = None, *, is_open: bool = False, is_shown: bool = True
    ) -> None:
        self._family = family
        self._inner = inner
        self._is_shown = is_shown
        self._text = ""
        self._space = ""
        self._place = "within" if is_open else "before"
        self._has_said = False
        self.has_reasoned = is_open

    @property
    def is_thinking(self) -> bool:
        """Whether the next character may be reasoning or one of its marks."""
        return self._place in ("before", "within")

    @property
    def may_think(self) -> bool:
        """Whether reasoning may yet come."""
        return self.is_thinking

    def push(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        if self._place == "before":
            self._begin()
        if self._place == "within":
            parts += self._think()
        if self._place == "behind":
            self._text = self._text.lstrip()
            if self._text:
                self._place = "over"
        if self._place == "over":
            parts += self._answer()
        return parts

    def end(self) -> list[Part]:
        parts: list[Part] = []
        if self._place == "within":
            parts = [Reasoning(self._space + self._text)] if self._text and self._is_shown else []
        elif self._place in ("before", "over"):
            parts = [*self._answer()]
        self._text = self._space = ""
        return [*parts, *(self._inner.end() if self._inner is not None else [])]

    def _begin(self) -> None:
        begin, text = self._family.begin, self._text.lstrip()
        if text.startswith(begin):
            self._place, self.has_reasoned = "within", True
            self._text = text[len(begin) :]
        elif not begin.startswith(text):
            self._place = "over"

    def _think(self) -> list[Part]:
        end = self._family.end
        at = self._text.find(end)
        if at >= 0:
            self._place = "behind"
            said, self._text = self._text[:at], self._text[at + len(end) :]
            parts = self._reason(said)
            self._space = ""
            return parts
        keep = unfinished(self._text, (end,))
        said, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return self._reason(said)

    def _reason(self, text: str) -> list[Part]:
        text = self._space + text
        if not self._has_said:
            text = text.lstrip()
        said = text.rstrip()
        self._space = text[len(said) :]
        self._has_said = self._has_said or bool(said)
        return [Reasoning(said)] if said and self._is_shown else []

    def _answer(self) -> Sequence[Part]:
        text, self._text = self._text, ""
        if self._inner is not None:
            return self._inner.push(text)
        return [Content(text)] if text else []
