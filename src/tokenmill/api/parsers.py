"""How the answer to a call is taken apart and constrained, as far as its prompt decides: a template may open reasoning
itself, or close it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from ..text.chat_format import ChatFormat
from ..text.grammar.constraint import Constraint, Thinking
from ..text.parts import Parser
from ..text.reasoning import is_open
from ..text.tools.call_grammar import ToolConstraint
from .call import Call
from .common_fields import BUDGET


def begins_thinking(call: Call, chat_format: ChatFormat, prompt: str | None) -> bool:
    """Whether the answer begins within reasoning. `prompt`: its text."""
    family, conversation = chat_format.reasoning_family, call.conversation
    if family is None or conversation is None or prompt is None:
        return False
    continued = None
    if conversation.continue_final_message and conversation.messages:
        content = conversation.messages[-1].get("content") or ""
        continued = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return is_open(family, prompt, continued)


def parsers_of(call: Call, chat_format: ChatFormat, prompt: str | None) -> Callable[[str], Parser | None]:
    """Gives the parser of one choice, by its request's id; None for a prompt that is no conversation, and where all of
    an answer is content."""
    if call.conversation is None:
        return lambda request_id: None
    opened = begins_thinking(call, chat_format, prompt)
    return partial(chat_format.parser, call.tool_use, is_open=opened, reasoning=call.reasoning)


def constraint_of(call: Call, chat_format: ChatFormat, prompt: str | None) -> Constraint | None:
    """The call's constraint, with the reasoning that may come before what it constrains."""
    family, budget = chat_format.reasoning_family, call.reasoning.budget
    if family is None or call.conversation is None or prompt is None:
        return call.constraint
    opened = begins_thinking(call, chat_format, prompt)
    over = (family.end, family.lead) if family.lead else family.end
    if not opened and (call.conversation.continue_final_message or prompt.rstrip().endswith(over)):
        return call.constraint  # it is over
    constraint = call.constraint
    if constraint is None:
        if budget is None:
            return None
        constraint = _free(call, chat_format)
    thinking = Thinking(
        family.begin,
        family.end,
        opened,
        budget,
        may_skip=call.constraint is not None,
        after=family.after,
        lead="" if constraint.kind == "tools" else family.lead,  # calls have their own
    )
    return msgspec.structs.replace(constraint, thinking=thinking)


def _free(call: Call, chat_format: ChatFormat) -> Constraint:
    """What constrains nothing but what comes before."""
    if call.tool_use is not None:
        return Constraint("tools", ToolConstraint(chat_format.tools, call.tool_use, "tools[{}]").as_json(), BUDGET)
    return Constraint("regex", "(?s:.*)", BUDGET)
