"""How the answer to a call is taken apart, which depends on its prompt too: the template may open reasoning itself."""

from __future__ import annotations

from ..text.parts import Parser
from ..text.reasoning import is_open
from ..text.speech import Speech
from .openai import Call


def begins_thinking(call: Call, speech: Speech, prompt: str | None) -> bool:
    """Whether the answer begins within reasoning. `prompt`: its text."""
    family, conversation = speech.reasoning_family, call.conversation
    if family is None or conversation is None or prompt is None:
        return False
    continued = None
    if conversation.continue_final_message and conversation.messages:
        content = conversation.messages[-1].get("content") or ""
        continued = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return is_open(family, prompt, continued)


def parser_of(call: Call, speech: Speech, prompt: str | None, request_id: str) -> Parser | None:
    """Of one choice; None for a prompt that is no conversation, and where all of an answer is content."""
    if call.conversation is None:
        return None
    opened = begins_thinking(call, speech, prompt)
    return speech.parser(call.tool_use, request_id, is_open=opened, reasoning=call.reasoning)
