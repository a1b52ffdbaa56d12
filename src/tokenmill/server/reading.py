"""From the bytes of a body to a validated call: here where that is quick, in the helper process where it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..api.endpoints import ENDPOINTS, parse_body
from ..api.fields import parse_object
from ..api.jobs import Read, unpack, unpack_ids
from ..api.openai.parse import Rules
from ..core.errors import BodyTooLarge
from ..text.special_tokens import Rendered
from .helper import Caller, Helper, is_heavy

Check = Callable[[dict[str, Any]], Any]


async def read_call(
    endpoint: str, body: bytes, rules: Rules, helper: Helper, caller: Caller, check_model: Check, room: int
) -> tuple[Any, list[str], Rendered | None]:
    """(the call, names of unknown fields, the conversation where it is rendered already). `check_model` refuses a body
    that names a model which is not here. `room`: tokens of context. Raises InvalidRequest naming the field."""
    if not is_heavy(body):
        fields = parse_object(body)
        check_model(fields)
        call, unknown = parse_body(endpoint, fields, rules)
        return call, unknown, None
    result = await caller.stay(helper.run(Read(endpoint, body, room), caller.name))
    call, unknown, prompts, rendered = unpack(endpoint, result)
    check_model({"model": call.model})
    given: list[str | tuple[int, ...]] = []
    for prompt in prompts:
        if isinstance(prompt, bytes):
            await asyncio.sleep(0)  # Between many prompts the streams of others have their turn.
            prompt = unpack_ids(prompt)
        given.append(prompt)
    return replace(call, **{ENDPOINTS[endpoint][2]: tuple(given)}), unknown, rendered


def parse_small(body: bytes) -> dict[str, Any]:
    """The object in a body that has no reason to be large. Raises BodyTooLarge, InvalidRequest."""
    if is_heavy(body):
        raise BodyTooLarge("The body is larger than this path takes.")
    return parse_object(body)
