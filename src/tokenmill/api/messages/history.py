"""Anthropic's `system` and `messages` as the messages of a chat. Pure.

A user's message may carry results of tools beside text: they become messages of their own. Neighbours of one role are
one turn. Whatever is out of order (a result without its call, a call without its result) is refused by its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ...core.errors import InvalidRequest
from ..fields import Fields, has_type, kind_name

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system")
_IS_ACCOUNTING = "x-anthropic-billing-header:"
"""A block of `system` that begins so is a header of the account which agents send there, and no part of a prompt."""

_ONLY_TEXT = "this model reads text alone"
_REFUSED = {
    "image": _ONLY_TEXT,
    "document": _ONLY_TEXT,
    "search_result": "give it as text",
    "redacted_thinking": "it can be read by those who wrote it alone; leave it out",
    "container_upload": "there are no containers",
    "tool_reference": "give the tools themselves",
    "browser_state": _ONLY_TEXT,
}
_KNOWN = {
    "text": ("type", "text", "cache_control", "citations"),
    "thinking": ("type", "thinking", "signature"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
}
_SKIPPED = ("server_tool_use", "mcp_tool_use")
"""Of the assistant: calls of tools that ran on the servers of others, and their results."""
_IMAGES = ("image", "document")
"""Of results of tools, which agents cannot leave out. Those that a user shows are refused: the answer would be about
something else."""
_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
    "tool_result": ("text",),
}


def read_system(fields: Fields) -> list[Message]:
    """`system`: a string or text blocks, as no message or one."""
    given = fields.any("system")
    if given is None:
        return []
    if isinstance(given, str):
        texts = [given]
    elif isinstance(given, list):
        texts = [
            _text(f"system[{index}]", _block(f"system[{index}]", one, ("text",))) for index, one in enumerate(given)
        ]
    else:
        raise fields.wrong("system", "a string or an array of text blocks")
    text = "\n".join(each for each in texts if each and not each.startswith(_IS_ACCOUNTING))
    return [{"role": "system", "content": text}] if text else []


def read_messages(fields: Fields) -> tuple[list[Message], bool, list[str]]:
    """(the messages of a chat, whether the last is the beginning of the answer, what was left out). Raises
    InvalidRequest naming the place."""
    given = fields.any("messages")
    if not isinstance(given, list) or not given:
        got = "an empty array" if given == [] else kind_name(given)
        raise InvalidRequest(f"messages must be an array of at least one message, got {got}.", param="messages")
    history, ignored = _History(), []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise _wrong(where, f"must be an object, got {kind_name(message)}")
        role = message.get("role")
        if role not in _ROLES:
            raise _wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
        content = message.get("content")
        if isinstance(content, list):
            ignored += [f"content {block['type']}" for block in _left_out(role, content)]
        history.add(where, role, _blocks(where, role, content))
    return *history.end(), ignored


def _left_out(role: str, content: list[Any]) -> list[Any]:
    if role == "assistant":
        return [block for block in content if _is_left_out(role, block)]
    results = (block.get("content") for block in content if has_type(block, ("tool_result",)))
    parts = [each for result in results if isinstance(result, list) for each in result]
    return [each for each in parts if _is_left_out("tool_result", each)]


def _is_left_out(role: str, block: Any) -> bool:
    return _is_skipped(block) if role == "assistant" else role == "tool_result" and has_type(block, _IMAGES)


def _is_skipped(block: Any) -> bool:
    kind = block.get("type") if isinstance(block, dict) else None
    return isinstance(kind, str) and (kind in _SKIPPED or kind.endswith("_tool_result"))


class _History:
    """The chat as it grows. `_open`: calls whose results have to come next, by id, with their places."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._open: dict[str, str] = {}
        self._seen: set[str] = set()

    def add(self, where: str, role: str, blocks: list[tuple[str, Message]]) -> None:
        if role == "assistant":
            self._add_assistant(blocks)
        elif role == "user":
            self._add_user(blocks)
        else:
            self._check_answered()
            self._messages.append({"role": "system", "content": "\n".join(_texts(blocks))})

    def end(self) -> tuple[list[Message], bool]:
        self._check_answered()
        last = self._messages[-1]
        is_begun = last["role"] == "assistant"
        if is_begun and not last["content"]:
            raise InvalidRequest(
                "messages: the last message is the assistant's, which is continued, but it has no text.",
                param="messages",
            )
        return self._messages, is_begun

    def _add_assistant(self, blocks: list[tuple[str, Message]]) -> None:
        self._check_answered()
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant" or "tool_calls" in last:
            last = {"role": "assistant", "content": ""}
            self._messages.append(last)
        last["content"] += "".join(_texts(blocks))
        thoughts = [_string(where, block, "thinking") for where, block in blocks if block["type"] == "thinking"]
        if thoughts:
            last["reasoning_content"] = last.get("reasoning_content", "") + "".join(thoughts)
        for where, block in blocks:
            if block["type"] == "tool_use":
                last.setdefault("tool_calls", []).append(self._call(where, block))

    def _call(self, where: str, block: Message) -> Message:
        given_id, name, arguments = _string(where, block, "id"), _string(where, block, "name"), block.get("input")
        if not isinstance(arguments, dict):
            raise _wrong(f"{where}.input", f"must be an object, got {kind_name(arguments)}")
        if given_id in self._seen:
            raise _wrong(f"{where}.id", f"is {given_id[:100]!r}, which an earlier call has already")
        self._seen.add(given_id)
        self._open[given_id] = where
        function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
        return {"id": given_id, "type": "function", "function": function}

    def _add_user(self, blocks: list[tuple[str, Message]]) -> None:
        said = False
        for where, block in blocks:
            if block["type"] == "text":
                said = True
                continue
            if said:
                raise _wrong(where, "is the result of a tool behind text; results come first")
            self._add_result(where, block)
        texts = _texts(blocks)
        if not texts:
            return
        self._check_answered()
        parts = [{"type": "text", "text": text} for text in texts]
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "user":
            self._messages.append({"role": "user", "content": texts[0] if len(texts) == 1 else parts})
            return
        if isinstance(last["content"], str):
            last["content"] = [{"type": "text", "text": last["content"]}]
        last["content"] += parts

    def _add_result(self, where: str, block: Message) -> None:
        call = _string(where, block, "tool_use_id")
        if call not in self._open:
            raise _wrong(
                f"{where}.tool_use_id", f"is {call[:100]!r}, but the turn before has no tool_use of that id to answer"
            )
        failed = block.get("is_error")
        if failed not in (None, True, False):
            raise _wrong(f"{where}.is_error", f"must be true or false, got {kind_name(failed)}")
        content = block.get("content")
        blocks = [] if content in (None, []) else _blocks(where, "tool_result", content)
        text = "\n".join(_texts(blocks))
        del self._open[call]
        self._messages.append({"role": "tool", "tool_call_id": call, "content": f"Error: {text}" if failed else text})

    def _check_answered(self) -> None:
        for call, where in self._open.items():
            raise _wrong(where, f"is a call of a tool, {call[:100]!r}, but the next message has no tool_result for it")


def _blocks(where: str, role: str, content: Any) -> list[tuple[str, Message]]:
    """The blocks of a message, or of a tool_result, each with its place; those that are left out keep theirs."""
    if isinstance(content, str):
        return [(f"{where}.content", {"type": "text", "text": content})]
    if not isinstance(content, list) or not content:
        got = "an empty array" if content == [] else kind_name(content)
        raise _wrong(f"{where}.content", f"must be a string or an array of content blocks, got {got}")
    places = [f"{where}.content[{index}]" for index in range(len(content))]
    return [
        (place, _block(place, block, _OF_ROLE[role]))
        for place, block in zip(places, content, strict=True)
        if not _is_left_out(role, block)
    ]


def _block(where: str, block: Any, kinds: Iterable[str]) -> Message:
    if not isinstance(block, dict):
        raise _wrong(where, f"must be an object, got {kind_name(block)}")
    kind = block.get("type")
    if not isinstance(kind, str):
        raise _wrong(f"{where}.type", f"must be a string, got {kind_name(kind)}")
    if kind in kinds:
        Fields(block, where).expect(_KNOWN[kind])
        check_cache_control(where, block)
        return block
    refusal = _REFUSED.get(kind)
    if refusal is not None:
        raise _wrong(where, f"is of type {kind!r}, which is not supported: {refusal}")
    raise _wrong(f"{where}.type", f"is {kind[:100]!r}; here it may be {' or '.join(kinds)}")


def check_cache_control(where: str, block: Message) -> None:
    """What is cached changes no answer, so a mark of what to cache is taken; it must be one."""
    mark = block.get("cache_control")
    if mark is not None and not (isinstance(mark, dict) and mark.get("type") == "ephemeral"):
        raise _wrong(f"{where}.cache_control" if where else "cache_control", 'must be {"type": "ephemeral"}')


def _texts(blocks: Iterable[tuple[str, Message]]) -> list[str]:
    return [_text(where, block) for where, block in blocks if block["type"] == "text"]


def _text(where: str, block: Message) -> str:
    return _string(where, block, "text", can_be_empty=True)


def _string(where: str, block: Message, name: str, *, can_be_empty: bool = False) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", f"must be a string, got {kind_name(value)}")
    if not value and not can_be_empty and name != "thinking":
        raise _wrong(f"{where}.{name}", "must not be empty")
    return value


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}.", param=where)
