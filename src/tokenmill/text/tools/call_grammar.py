"""The grammar of calls: of answers that must call, and of those that may but must then fit.

What it says is Lark, in llguidance's dialect. The family's own form is demanded, so that its parser reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .families import tool_family
from .family import TEXT_VALUE, VALUE_END, Form, Spell
from .hermes import HERMES
from .tool_choice import TEXT_ARGUMENT, ToolUse

Finish = Callable[[Any, str], str]
"""A schema, and where it comes from, as the Lark that takes what fits."""

_ANY = {"type": "object"}
_TEXT_PLACE = "tools[{}].custom.format.grammar.definition"
_TEXT_HEAD, _TEXT_TAIL = f'{{"{TEXT_ARGUMENT}": "', '"}'
_CLOSABLE = {"type", "properties", "required", "description", "title", "$defs", "definitions", "$schema", "$id"}


@dataclass(frozen=True, slots=True)
class ToolConstraint:
    """family  in whose form calls are
    use        the tools, and how many calls
    place      what the caller calls the n-th tool's schema
    answer     schema of an answer that calls nothing, and what the caller calls it; None: such an answer is free
    """

    family: str
    use: ToolUse
    place: str
    answer: tuple[Any, str] | None = None

    def as_json(self) -> dict[str, Any]:
        """Of a `Constraint` whose kind is "tools"."""
        offered = {tool.name for tool in self.use.offered}
        return {
            "family": self.family,
            "tools": [
                {
                    "name": tool.name,
                    "place": _TEXT_PLACE.format(number) if tool.is_custom else self.place.format(number),
                    "grammar": tool.grammar,
                    "parameters": tool.parameters if self.use.is_forced or tool.is_strict else _ANY,
                }
                for number, tool in enumerate(self.use.tools)
                if tool.name in offered
            ],
            "is_forced": self.use.is_forced,
            "is_parallel": self.use.is_parallel and self.use.choice != "named",
            "answer": None if self.answer is None else list(self.answer),
        }


def text_grammars(value: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(name that `calls_to_lark` has for it, syntax, definition, place) of the texts that tools take."""
    return [
        (f"text{number}", *tool["grammar"], tool["place"])
        for number, tool in enumerate(value["tools"])
        if tool["grammar"] is not None
    ]


def calls_to_lark(value: dict[str, Any], spell: Spell, finish: Finish) -> str:
    """`value`: of ToolConstraint.as_json. Raises what `finish` does."""
    family = tool_family(value["family"])
    assert family is not None, value["family"]
    writer = _Writer(family.form, value, spell, finish)
    if value["is_forced"]:
        start = writer.calls()
    elif value["answer"] is not None:
        start = f"{writer.calls()} | {writer.lead()} {finish(*value['answer'])}"
    else:
        start = writer.free()
    lines = [f"start: {start}", *writer.rules]
    text = "\n".join(lines)
    if TEXT_VALUE in text:
        text += f"\n{TEXT_VALUE}[lazy]: TEXT {spell(VALUE_END)}"
    return text + ("\nTEXT: /(?s:.*)/\n" if "TEXT" in text else "\n")


class _Writer:
    def __init__(self, form: Form, value: dict[str, Any], spell: Spell, finish: Finish) -> None:
        self.rules: list[str] = []
        self._form = form
        self._tools = value["tools"]
        self._several = value["is_parallel"] and form.is_parallel
        self._spell = spell
        self._finish = finish

    def calls(self, skip: str = "") -> str:
        """One call, or several. `skip`: what was said of the first already."""
        form = self._form
        before = self._spell(form.before.removeprefix(skip))
        first = self._call("" if form.before else skip)
        again = ""
        if self._several:
            rest = first if form.before or not skip else self._call("")
            again = f"({self._spell(form.between)} {rest})*"
        return f"{before} {first} {again} {self._spell(form.after)}".strip()

    def lead(self) -> str:
        """What an answer in words begins with."""
        return self._spell(self._form.lead)

    def free(self) -> str:
        """Text in which calls may stand: what the family's mark begins goes on as a call."""
        form, trigger = self._form, self._form.trigger
        if form.lead:
            begin, end = map(self._spell, form.preamble)
            self.rules.append(f"{self._rule('words', end)}: TEXT {end}")
            return f"({begin} words)? {self.calls()} | {self.lead()} TEXT"
        if not trigger:
            self.rules.append("OTHER: /(\\s*[^\\s{\\[](?s:.*))?/")
            return f"{self.calls()} | OTHER"
        mark = self._spell(trigger)
        self.rules.append(f"{self._rule('head', mark)}: TEXT {mark}")
        group = self.calls(trigger) if form.before else self._call(trigger)
        return f"(head {group}){'*' if self._several else '?'} TEXT"

    def _rule(self, name: str, mark: str) -> str:
        """The head of a rule of text that ends with `mark`; text never runs over a special token."""
        return name if mark.startswith("<[") else f"{name}[lazy]"

    def _call(self, skip: str) -> str:
        """A rule for one call of any of the tools."""
        name = f"call{len(self.rules)}"
        options = [self._option(number, tool, skip) for number, tool in enumerate(self._tools)]
        self.rules.append(f"{name}: " + "\n    | ".join(options))
        return name

    def _option(self, number: int, tool: dict[str, Any], skip: str) -> str:
        form, schema = self._form, _closed(tool["parameters"])
        arguments = None
        if tool["grammar"] is not None:
            form = form if form.arguments is None else HERMES.form
            arguments = f"{self._spell(_TEXT_HEAD)} @text{number} {self._spell(_TEXT_TAIL)}"
        elif form.arguments is not None:
            arguments = form.arguments(schema, self._spell, lambda part: self._finish(part, tool["place"]))
        if arguments is None:
            form = form if form.arguments is None else HERMES.form
            arguments = self._finish(schema, tool["place"])
        opening = form.opening.replace("{name}", tool["name"]).removeprefix(skip)
        return f"{self._spell(opening)} {arguments} {self._spell(form.closing)}".strip()


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the schema does not describe would help nobody, though it allows them where it is silent."""
    if schema.get("properties") is None or not schema.keys() <= _CLOSABLE:
        return schema
    return {**schema, "additionalProperties": False}
