"""A constraint on an answer, as the caller gave it. It is data: what it means is for the grammar that is made of it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Kind = Literal["json_object", "json_schema", "regex", "choice", "gbnf", "lark", "structural_tag", "tools"]


class Thinking(msgspec.Struct, frozen=True):
    """Reasoning that comes before what is constrained.

    begin, end  the markers around it
    is_open     the prompt has given `begin` already
    budget      most tokens of it; None: no limit
    may_skip    the answer may also begin with what is constrained
    after       what follows `end`
    lead        what comes before what is constrained, whether anything was thought or not
    """

    begin: str
    end: str
    is_open: bool = False
    budget: int | None = None
    may_skip: bool = False
    after: str = ""
    lead: str = ""


class Constraint(msgspec.Struct, frozen=True):
    """`kind` and `value`, which is JSON data:

        json_object     nothing
        json_schema     the schema
        regex           the pattern
        choice          the texts, one of which is the answer
        gbnf, lark      the grammar
        structural_tag  {"structures": [{"begin", "schema", "end"}], "triggers": [...]}
        tools           calls of tools, as text.tools.demand says it

    param       the field that gave it, for messages
    whitespace  a pattern of what may stand between the tokens of JSON; None: what is usual
    thinking    None: the answer begins with what is constrained
    """

    kind: Kind
    value: Any = None
    param: str = "response_format"
    whitespace: str | None = None
    thinking: Thinking | None = None
