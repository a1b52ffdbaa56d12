"""Conversations of `LLM` as the server reads them: messages, tools, and what the answer must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api.conversations import parse_conversation
from ..api.fields import Fields
from ..api.openai.parse import Call
from ..api.rules import Rules
from ..api.tools import demand, read_tools
from ..core.request import SamplingParams
from ..text.grammar.constraint import Constraint
from ..text.load import TextModel
from .arguments import Message


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What may go with a conversation, in OpenAI's words. constraint: what the answer must be; None: it is free."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    constraint: Constraint | None = None


def read_chat(
    messages: Sequence[Message],
    text: TextModel,
    options: ChatOptions | None = None,
    *,
    add_generation_prompt: bool | None = None,
) -> Call:
    """A call without settings. Raises InvalidRequest naming the argument."""
    options = options or ChatOptions()
    fields = Fields(
        {
            "messages": [dict(message) for message in messages],
            "tools": None if options.tools is None else [dict(tool) for tool in options.tools],
            "tool_choice": options.tool_choice,
            "parallel_tool_calls": options.parallel_tool_calls,
            "chat_template_kwargs": None
            if options.chat_template_kwargs is None
            else dict(options.chat_template_kwargs),
            "add_generation_prompt": add_generation_prompt,
        }
    )
    tools = read_tools(fields)
    rules = Rules(text.tokenizer.vocab_size, speech=text.speech)
    return Call(
        model=None,
        sampling=SamplingParams(),
        conversation=parse_conversation(fields, rules, tools.shown),
        tool_use=tools.use,
        constraint=demand(tools, options.constraint, text.speech),
    )
