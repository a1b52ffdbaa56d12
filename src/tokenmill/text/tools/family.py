"""What is to be known of a model family to read its calls of tools, and to demand them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .reading import Calls, Reading
from .use import Tool


@dataclass(frozen=True, slots=True)
class Form:
    """How calls are to be written where a grammar demands them: `before`, calls with `between` in between, `after`. A
    call is `opening`, in which {name} stands for the tool's name, the arguments as JSON, and `closing`.

    trigger    the part that `before` and `opening` begin with, by which one knows that a call begins; "": none
    arguments  the grammar of a tool's arguments where they are not JSON, as Lark
    """

    opening: str
    closing: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    trigger: str = ""
    is_parallel: bool = True
    arguments: Callable[[Tool], str] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """markers  what begins calls; `read(calls, marker)` reads what follows
    bare        characters that begin a call without a marker where they come first in an answer
    ends        what ends a call that is malformed; none: the end of the answer
    id_size     0: ids are those of OpenAI; else characters of an id
    """

    name: str
    markers: tuple[str, ...]
    read: Callable[[Calls, str], Reading]
    form: Form
    bare: str = ""
    ends: tuple[str, ...] = ()
    id_size: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """Everything in an answer that may be a special token of the model's vocabulary."""
        form = self.form
        return (*self.markers, *self.ends, form.opening, form.closing, form.before, form.after)
