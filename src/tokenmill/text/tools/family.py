"""What is to be known of a model family to read its calls of tools, and to demand them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .parser import Calls, Reading

Spell = Callable[[str], str]
"""Text as Lark, marks that are tokens of their own among it; nothing for no text."""

TEXT_VALUE, VALUE_END = "text_value", "\n</parameter>\n"
"""A rule for text that ends so, where a form has values that are no JSON."""


@dataclass(frozen=True, slots=True)
class Form:
    """How calls are to be written where a grammar demands them: `before`, calls with `between` in between, `after`. A
    call is `opening`, in which {name} stands for the tool's name, the arguments as JSON, and `closing`.

    trigger    the part that `before` and `opening` begin with, by which one knows that a call begins; "": none
    arguments  where they are not JSON: Lark of a schema, given how text is spelled and the Lark of a value's schema;
               None where the form cannot say what the schema does, so that they must be JSON
    lead       what an answer in words begins with, where it cannot do without
    preamble   around words that come before a call, in a form that has a lead
    """

    opening: str
    closing: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    trigger: str = ""
    is_parallel: bool = True
    lead: str = ""
    preamble: tuple[str, str] = ("", "")
    arguments: Callable[[dict[str, Any], Spell, Callable[[dict[str, Any]], str]], str | None] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """markers  what begins calls; `read(calls, marker)` reads what follows
    bare        characters that begin a call without a marker where they come first in an answer
    ends        what ends a call that is malformed; none: the end of the answer
    id_size     0: ids are those of OpenAI; else characters of an id
    arrange     a history in the form that the family's templates read; None: any is. arrange_tools: the same of tools
    """

    name: str
    markers: tuple[str, ...]
    read: Callable[[Calls, str], Reading]
    form: Form
    bare: str = ""
    ends: tuple[str, ...] = ()
    id_size: int = 0
    arrange: Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]] | None = None
    arrange_tools: Callable[[Sequence[Mapping[str, Any]]], tuple[dict[str, Any], ...]] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Everything in an answer that may be a special token of the model's vocabulary."""
        form = self.form
        return (*self.markers, *self.ends, form.opening, form.closing, form.before, form.after, form.lead)
