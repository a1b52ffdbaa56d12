"""Anthropic's `tools` and `tool_choice` under OpenAI's names, which is what the rest of the server reads. Pure."""

from __future__ import annotations

from typing import Any

from ...core.errors import InvalidRequest
from ..fields import Fields, kind_name
from .history import check_cache_control

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_KNOWN = (
    "type", "name", "description", "input_schema", "strict", "cache_control", "input_examples",
    "eager_input_streaming", "defer_loading", "allowed_callers",
)  # fmt: skip


def read_tools(fields: Fields) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """(the caller's own tools as OpenAI's, by their place; the others, of Anthropic's types, which nobody here can
    call). Raises InvalidRequest naming the place."""
    tools: dict[int, dict[str, Any]] = {}
    ignored: list[str] = []
    for index, given in enumerate(fields.array("tools") or ()):
        where = f"tools[{index}]"
        if not isinstance(given, dict):
            raise _wrong(where, f"must be an object, got {kind_name(given)}")
        kind = Fields(given, where).text("type")
        if kind in (None, "custom"):
            tools[index] = _tool(where, given)
        else:
            ignored.append(f"tool {kind}")
    return tools, ignored


def _tool(where: str, given: dict[str, Any]) -> dict[str, Any]:
    tool = Fields(given, where)
    tool.expect(_KNOWN)
    check_cache_control(where, given)
    name, schema = tool.required_text("name"), tool.object("input_schema")
    if schema is None:
        raise _wrong(f"{where}.input_schema", "must be an object, got null")
    tool.flag("defer_loading")  # there is no search that would load it: it is offered at once
    if tool.any("allowed_callers") not in (None, ["direct"]):
        raise _wrong(f"{where}.allowed_callers", 'may only be ["direct"]: there is no code execution')
    tool.flag("eager_input_streaming")
    examples = tool.array("input_examples")
    if examples:
        schema = {**schema, "examples": examples}
    function: dict[str, Any] = {"name": name, "description": tool.text("description") or "", "parameters": schema}
    if tool.flag("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def read_choice(fields: Fields, has_tools: bool) -> dict[str, Any]:
    """`tool_choice` as OpenAI's `tool_choice` and `parallel_tool_calls`; empty where it is not given."""
    given = fields.object("tool_choice")
    if given is None:
        return {}
    choice = Fields(given, "tool_choice")
    kind = choice.text("type")
    one_at_most = choice.flag("disable_parallel_tool_use")
    choice.expect(("name",))
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.required_text("name")}}
    elif kind in _CHOICES:
        chosen = _CHOICES[kind]
    else:
        raise _wrong("tool_choice.type", f"must be one of {', '.join([*_CHOICES, 'tool'])}")
    if not has_tools and kind in ("any", "tool"):
        raise _wrong("tool_choice", f"is {kind!r}, but no tools are given")
    if not has_tools:
        return {}
    return {"tool_choice": chosen} | ({} if one_at_most is None else {"parallel_tool_calls": not one_at_most})


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}.", param=where)
