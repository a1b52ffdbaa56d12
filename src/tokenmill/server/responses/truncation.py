"""`truncation: auto`: an input that is too long loses its earliest turns, as few as must go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...api.helper import Caller
from ...api.openai.parse import Call
from ...api.port import Server
from ...core.errors import ContextTooLong
from ...text.calls import context_limit


async def fitted(call: Call, server: Server, caller: Caller) -> Call:
    """`call` with as many of its latest turns as fit the context with the answer. System messages at the start stay,
    and so does the last turn. Raises ContextTooLong where that alone is too long."""
    assert call.conversation is not None
    messages = call.conversation.messages
    room = context_limit(await server.wait_ready(caller))
    cuts = cut_points(messages)
    head = messages[: cuts[0]] if cuts else messages

    def without(num_turns: int) -> Call:
        assert call.conversation is not None
        kept = (*head, *messages[cuts[num_turns] :])
        return replace(call, conversation=replace(call.conversation, messages=kept))

    async def fits(num_turns: int) -> bool:
        try:
            (prompt,) = await server.encoder.encode_call(without(num_turns), room, caller=caller)
        except ContextTooLong:
            return False
        return len(prompt.tokens) + (call.sampling.max_tokens or 1) <= room

    low, high = 0, len(cuts) - 1  # the fewest turns to drop are in (low, high], if any number will do
    if high < 1 or not await fits(high):
        raise ContextTooLong("The last turn of input is too long for this model's context; shorten it.", param="input")
    while low + 1 < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle
    return without(high)


def cut_points(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Where turns begin: at each message of the user. What is before the first is no turn."""
    return [index for index, message in enumerate(messages) if message["role"] == "user"]
