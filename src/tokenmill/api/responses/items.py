"""The items of /v1/responses: checked as a caller gives them, and as the messages that a chat template reads. Calls of
tools that take free text, and of the local shell, which models of others have made, are calls of functions there.

What comes back of earlier calls (assistant messages, function calls, reasoning) has the same form as what a caller
writes, so one reader serves both. Consecutive items of the assistant are one message, as templates expect: reasoning,
then text, then calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import InvalidRequest
from ..conversations import read_arguments
from ..fields import has_type, kind_name
from .tools import qualified

Item = dict[str, Any]

_ROLES = ("user", "system", "developer", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")
_MAX_ID = 128
MAX_ITEMS = 10_000
"""Items of an input, and parts of one: the response repeats them, and some are no tokens that would bound them."""
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_MCP = ("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response")
_STATES = ("in_progress", "completed", "incomplete", "calling", "failed")
_SKIPPED = (
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
    "tool_search_call", "tool_search_output", "computer_call", "computer_call_output",
)  # fmt: skip
"""What tools on the servers of others did, or what only images tell of: agents send back all that was said."""
_SKIPPED_PARTS = ("input_image", "input_file")
"""Of outputs. What a user shows the model is refused instead: the answer would be about something else."""


def read_items(value: Any, known: Mapping[str, Item]) -> tuple[list[Item], list[str]]:
    """(`input` as items in one form: content is always an array of parts; what of it was left out, since the model
    cannot be shown it). `known`: what an item_reference may name, by id. Raises InvalidRequest naming the place."""
    if isinstance(value, str):
        return [_message("user", [{"type": "input_text", "text": value}])], []
    if not isinstance(value, list) or not value:
        got = "an empty array" if value == [] else kind_name(value)
        raise _wrong("input", f"must be a string or an array of at least one item, got {got}")
    _check_number("input", value)
    ignored = [name for item in value for name in _left_out(item)]
    items = [_item(f"input[{i}]", item, known) for i, item in enumerate(value) if not has_type(item, _SKIPPED)]
    if not items:
        raise _wrong("input", "must hold an item that the model can be shown")
    return items, ignored


def to_messages(items: Sequence[Item], instructions: str | None, num_before: int = 0) -> list[dict[str, Any]]:
    """The conversation for a chat template. Instructions come first, in one message with the system message that
    follows them, if one does. `num_before`: items that are not of this call's input. Raises InvalidRequest for an
    output without its call, and for a call without its output unless it was cut off: that one is no call."""
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    unanswered: dict[str, str] = {}
    assistant: dict[str, Any] | None = None
    asked: dict[str, Item] = {}
    for index, item in enumerate(items):
        where = f"input[{index - num_before}]" if index >= num_before else "an earlier item"
        kind = item["type"]
        if kind in _CALLS and _is_cut(item) and not _is_answered(item["call_id"], items[index + 1 :]):
            continue
        if kind in _MCP:
            _refuse_unanswered(unanswered)
            if kind == "mcp_approval_request":
                asked[item.get("id", "")] = item
            if (told := _told_of(item, asked)) is not None:
                if assistant is None or "tool_calls" in assistant:
                    assistant = {"role": "assistant", "content": None}
                    messages.append(assistant)
                function, result, call_id = told
                assistant["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
                messages.append({"role": "tool", "tool_call_id": call_id, "name": function["name"], "content": result})
                assistant = None
            continue
        is_assistant = kind in (*_CALLS, "reasoning") or item.get("role") == "assistant"
        if is_assistant:
            if assistant is None or not _joins(assistant, item):
                _refuse_unanswered(unanswered)
                assistant = {"role": "assistant", "content": None}
                messages.append(assistant)
            _join(assistant, item)
            if kind in _CALLS:
                if item["call_id"] in unanswered:
                    raise _wrong(f"{where}.call_id", f"is {item['call_id'][:100]!r}, as of a call before it")
                unanswered[item["call_id"]] = _function_of(item)["name"]
            continue
        assistant = None
        if kind in _OUTPUTS:
            call_id = item["call_id"]
            if call_id not in unanswered:
                raise _wrong(
                    f"{where}.call_id", f"is {call_id[:100]!r}, but no function_call before it waits for that output"
                )
            name = unanswered.pop(call_id)
            message = {"role": "tool", "tool_call_id": call_id, "name": name, "content": _text(item["output"])}
        else:
            _refuse_unanswered(unanswered)
            message = {"role": item["role"], "content": _text(item["content"])}
            if message["role"] == "developer":
                message["role"] = "system"
        if message["role"] == "system" and len(messages) == 1 and instructions is not None:
            messages[0]["content"] += "\n\n" + message["content"]
        else:
            messages.append(message)
    _refuse_unanswered(unanswered)
    return [message for message in messages if message["role"] != "assistant" or _says_anything(message)]


def _told_of(item: Item, asked: Mapping[str, Item]) -> tuple[dict[str, Any], str, str] | None:
    """(function, result, id) of a call of an MCP server's tool, or of one that was denied; None: the model sees
    nothing of the item."""
    if item["type"] == "mcp_call":
        error = item.get("error")
        text = item.get("output") if error is None else f"Error: {_message_of(error)}"
        function = {"name": qualified(item["server_label"], item["name"]), "arguments": item["arguments"] or "{}"}
        return function, text or "", item.get("id") or f"mcp_{len(asked)}"
    if item["type"] != "mcp_approval_response" or item["approve"]:
        return None
    request = asked.get(item["approval_request_id"])
    if request is None:
        return None
    reason = item.get("reason")
    text = f"The user did not approve this call{f': {reason}' if reason else '.'}"
    function = {"name": qualified(request["server_label"], request["name"]), "arguments": request["arguments"] or "{}"}
    return function, text, item["approval_request_id"]


def _message_of(error: Any) -> str:
    return str(error.get("content") or error.get("message") or "") if isinstance(error, dict) else str(error)


def _left_out(item: Any) -> list[str]:
    if has_type(item, _SKIPPED):
        return [f"item {item['type']}"]
    parts = item.get("output") if has_type(item, _OUTPUTS) else None
    return (
        [f"content {part['type']}" for part in parts if has_type(part, _SKIPPED_PARTS)]
        if isinstance(parts, list)
        else []
    )


def _item(where: str, item: Any, known: Mapping[str, Item]) -> Item:
    if not isinstance(item, dict):
        raise _wrong(where, f"must be an object, got {kind_name(item)}")
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "item_reference" or (kind is None and set(item) == {"id"}):
        return _referenced(where, item, known)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        named = f"of type {kind[:100]!r}" if isinstance(kind, str) else "without a type"
        raise _wrong(where, f"is {named}; this server takes items of type {', '.join(_READERS)} and item_reference")
    found = read(where, item)
    for name in ("id", "status"):
        if item.get(name) is None:
            continue
        if not isinstance(item[name], str) or len(item[name]) > _MAX_ID or not item[name].isprintable():
            raise _wrong(f"{where}.{name}", f"must be a string of at most {_MAX_ID} printable characters")
        if name == "status" and item[name] not in _STATES:
            raise _wrong(f"{where}.{name}", f"must be one of {', '.join(_STATES)}")
        found[name] = item[name]
    return found


def _referenced(where: str, item: Item, known: Mapping[str, Item]) -> Item:
    name = item.get("id")
    if not isinstance(name, str) or not name:
        raise _wrong(f"{where}.id", "must be the id of a stored item")
    if name not in known:
        raise _wrong(f"{where}.id", f"is {name[:100]!r}, which is not the id of an item that is stored here")
    return known[name]


def _read_message(where: str, item: Item) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    content = item.get("content")
    own = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        parts = [{"type": own, "text": content}]
    elif isinstance(content, list):
        _check_number(f"{where}.content", content)
        parts = [_part(f"{where}.content[{index}]", part, own) for index, part in enumerate(content)]
    else:
        raise _wrong(f"{where}.content", f"must be a string or an array of parts, got {kind_name(content)}")
    return _message(role, parts)


def _message(role: str, parts: list[dict[str, Any]]) -> Item:
    if role == "assistant":
        parts = [part | {"annotations": []} if part["type"] == "output_text" else part for part in parts]
    return {"type": "message", "role": role, "status": "completed", "content": parts}


def _part(where: str, part: Any, own: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal" and own == "output_text":
        if not isinstance(part.get("refusal"), str):
            raise _wrong(f"{where}.refusal", f"must be a string, got {kind_name(part.get('refusal'))}")
        return {"type": kind, "refusal": part["refusal"]}
    if kind not in _TEXT_PARTS:
        named = f"is of type {kind[:100]!r}" if isinstance(kind, str) else "has no type"
        raise _wrong(where, f"{named}; this model takes text only ({own})")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{where}.text", f"must be a string, got {kind_name(part.get('text'))}")
    return {"type": own, "text": part["text"]}


def _named_call(where: str, item: Item, kind: str, given: str) -> Item:
    """What all kinds of calls have. `given`: the field of what the tool is given, which may be empty."""
    found: Item = {"type": kind, "status": "completed"}
    for name in ("call_id", "name", given):
        value = item.get(name)
        if not isinstance(value, str) or (not value and name != given):
            raise _wrong(f"{where}.{name}", f"must be a string, got {kind_name(value)}")
        found[name] = value
    return found


def _read_call(where: str, item: Item) -> Item:
    found = _named_call(where, item, "function_call", "arguments")
    namespace = item.get("namespace")
    if namespace is not None:
        if not isinstance(namespace, str) or not namespace:
            raise _wrong(f"{where}.namespace", f"must be a string, got {kind_name(namespace)}")
        found["namespace"] = namespace
    return found


def _read_custom_call(where: str, item: Item) -> Item:
    return _named_call(where, item, "custom_tool_call", "input")


def _read_shell_call(where: str, item: Item) -> Item:
    call_id, action = item.get("call_id") or item.get("id"), item.get("action")
    if not isinstance(call_id, str) or not call_id:
        raise _wrong(f"{where}.call_id", f"must be a string, got {kind_name(call_id)}")
    if not isinstance(action, dict):
        raise _wrong(f"{where}.action", f"must be an object, got {kind_name(action)}")
    return {"type": "local_shell_call", "call_id": call_id, "action": action, "status": "completed"}


def _read_output(where: str, item: Item) -> Item:
    kind, output = item["type"], item.get("output")
    call_id = item.get("call_id") or (item.get("id") if kind == "local_shell_call_output" else None)
    if not isinstance(call_id, str) or not call_id:
        raise _wrong(f"{where}.call_id", f"must be a string, got {kind_name(call_id)}")
    if isinstance(output, list):
        _check_number(f"{where}.output", output)
        output = [
            _part(f"{where}.output[{index}]", part, "input_text")
            for index, part in enumerate(output)
            if not has_type(part, _SKIPPED_PARTS)
        ]
    elif not isinstance(output, str):
        raise _wrong(f"{where}.output", f"must be a string or an array of parts, got {kind_name(output)}")
    return {"type": kind, "call_id": call_id, "output": output, "status": "completed"}


def _read_reasoning(where: str, item: Item) -> Item:
    found: Item = {"type": "reasoning"}
    for name, part_kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise _wrong(f"{where}.{name}", f"must be an array, got {kind_name(parts)}")
        _check_number(f"{where}.{name}", parts)
        for index, part in enumerate(parts):
            if not isinstance(part, dict) or part.get("type") != part_kind or not isinstance(part.get("text"), str):
                raise _wrong(f"{where}.{name}[{index}]", f"must be a part of type {part_kind} with a text")
        found[name] = [{"type": part_kind, "text": part["text"]} for part in parts]
    if item.get("encrypted_content") and not found["content"]:
        raise _wrong(
            f"{where}.encrypted_content", "cannot be read here; give the reasoning as content, or leave it out"
        )
    return found


_MCP_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mcp_list_tools": (("server_label",), ("tools", "error")),
    "mcp_call": (("server_label", "name", "arguments"), ("output", "error", "approval_request_id")),
    "mcp_approval_request": (("server_label", "name", "arguments"), ()),
    "mcp_approval_response": (("approval_request_id",), ("approve", "reason")),
}
"""Of items about tools of MCP servers: the texts that they must have, and what else they may."""


def _read_mcp(where: str, item: Item) -> Item:
    kind = item["type"]
    texts, others = _MCP_FIELDS[kind]
    found: Item = {"type": kind}
    for name in texts:
        if not isinstance(item.get(name), str):
            raise _wrong(f"{where}.{name}", f"must be a string, got {kind_name(item.get(name))}")
        found[name] = item[name]
    found |= {name: item.get(name) for name in others}
    if kind == "mcp_approval_response" and not isinstance(found["approve"], bool):
        raise _wrong(f"{where}.approve", "must be true or false")
    if not isinstance(found.get("output"), str | None):
        raise _wrong(f"{where}.output", "must be a string")
    return found


_READERS = {
    **dict.fromkeys(_MCP, _read_mcp),
    "message": _read_message,
    "function_call": _read_call,
    "custom_tool_call": _read_custom_call,
    "local_shell_call": _read_shell_call,
    **dict.fromkeys(_OUTPUTS, _read_output),
    "reasoning": _read_reasoning,
}


def _function_of(call: Item) -> dict[str, Any]:
    """A call as the function that a chat has called."""
    if call["type"] == "custom_tool_call":
        return {"name": call["name"], "arguments": {"input": call["input"]}}
    if call["type"] == "local_shell_call":
        return {
            "name": "local_shell",
            "arguments": {key: call["action"][key] for key in call["action"] if key != "type"},
        }
    return {"name": qualified(call.get("namespace", ""), call["name"]), "arguments": call["arguments"]}


def _is_cut(call: Item) -> bool:
    arguments = _function_of(call)["arguments"]
    return call.get("status") == "incomplete" or (
        isinstance(arguments, str) and isinstance(read_arguments(arguments), str)
    )


def _joins(assistant: dict[str, Any], item: Item) -> bool:
    """Whether an item continues the assistant's message: text after text, and reasoning after either, begin another,
    except where a call still waits for its output."""
    if item["type"] in _CALLS or "tool_calls" in assistant:
        return True
    return assistant["content"] is None and (item["type"] == "message" or "reasoning_content" not in assistant)


def _join(assistant: dict[str, Any], item: Item) -> None:
    if item["type"] in _CALLS:
        call = {"id": item["call_id"], "type": "function", "function": _function_of(item)}
        assistant.setdefault("tool_calls", []).append(call)
        return
    name, text = "content", ""
    if item["type"] == "reasoning":
        name, text = "reasoning_content", _text(item["content"])
        if not text:
            return
    else:
        text = _text(item["content"])
    before = assistant.get(name)
    assistant[name] = text if before is None else f"{before}\n{text}"


def _says_anything(assistant: dict[str, Any]) -> bool:
    return assistant["content"] is not None or len(assistant) > 2


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _check_number(where: str, given: Sequence[Any]) -> None:
    if len(given) > MAX_ITEMS:
        raise _wrong(where, f"may hold at most {MAX_ITEMS}, got {len(given)}")


def _is_answered(call_id: str, later: Sequence[Item]) -> bool:
    """Whether an output comes for it before another call has its id."""
    kinds = (item["type"] for item in later if item.get("call_id") == call_id)
    return next((kind in _OUTPUTS for kind in kinds if kind in (*_CALLS, *_OUTPUTS)), False)


def _refuse_unanswered(unanswered: Mapping[str, str]) -> None:
    if unanswered:
        call_id, name = next(iter(unanswered.items()))
        raise InvalidRequest(
            f"input has no function_call_output for the call {call_id[:100]!r} of {name[:100]!r}; give one before what "
            "follows.",
            param="input",
        )


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}.", param=where)
