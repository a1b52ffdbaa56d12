"""`tools` and `tool_choice` of /v1/responses as chat has them. Pure.

Functions may come in namespaces, as those of MCP servers do: the model knows such a function by one name made of both,
and its calls tell both again. Custom tools, which take a text, are functions of one. What OpenAI's servers run cannot
be called here: it is left out and told, because agents send all that they know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import InvalidRequest
from ..fields import Fields, kind_name, nearest
from ..json_encoder import encode_json

MAX_NAME = 100
"""A longer field is no misspelling, and is cut in messages."""
_SHOWN_OF_MCP = ("type", "server_label", "server_url", "server_description", "allowed_tools", "require_approval")
_PLACE = re.compile(r"tools\[(\d{1,6})\]")


@dataclass(slots=True)
class GivenTools:
    """functions   those that can be called, by the names that the model knows them by
    shown       what the response repeats
    places      of the functions, where the caller gives them
    namespaces  of a function's name, where it is in a namespace: that, and its name there
    customs     names of tools that take a text, which are no functions to the caller
    ignored     what was left out
    mcp_calls   of a function's name, where it is a tool of an MCP server: that, its name there, and whether its calls
                need approval
    """

    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    customs: set[str] = field(default_factory=set)
    ignored: list[str] = field(default_factory=list)
    mcp: Mapping[str, list[dict[str, Any]]] | None = None
    mcp_calls: dict[str, tuple[str, str, bool]] = field(default_factory=dict)

    def in_place(self, text: str) -> str:
        """`text` about the tools of a chat, about where the caller gives them."""
        places = dict(enumerate(self.places))
        return _PLACE.sub(lambda found: places.get(int(found[1]), found[0]), text)


def qualified(namespace: str, name: str) -> str:
    """The one name of a function in a namespace, in the form that is usual for tools of MCP servers."""
    return f"{namespace}{'' if not namespace or namespace.endswith('__') else '__'}{name}"


def read_tools(
    fields: Fields,
    settings: dict[str, Any],
    chat: dict[str, Any],
    mcp: Mapping[str, list[dict[str, Any]]] | None = None,
    *,
    is_later: bool = False,
) -> GivenTools:
    """What a response repeats goes to `settings`, the same as a body of chat has it to `chat`. mcp: the tools of MCP
    servers by these' labels; None: none are asked here. is_later: a tool was called already, so that none has to be."""
    given = GivenTools(mcp=mcp)
    for index, tool in enumerate(fields.array("tools") or []):
        _read(f"tools[{index}]", tool, given)
    choice = fields.any("tool_choice")
    parallel = fields.flag("parallel_tool_calls")
    settings["tools"] = _as_json(given.shown, "tools")
    settings["namespaces"] = given.namespaces
    settings["mcp"] = given.mcp_calls
    if given.mcp_calls:  # of which one is made at a time
        parallel = False
    settings["tool_choice"] = "auto" if choice is None else choice
    settings["parallel_tool_calls"] = parallel is not False
    if parallel is not None:
        chat["parallel_tool_calls"] = parallel
    if isinstance(choice, dict):
        choice = _named_choice(choice, given)
    if is_later and choice is not None and choice != "none":
        choice = "auto"
    if choice is not None:
        chat["tool_choice"] = choice
    if given.functions:
        chat["tools"] = [_as_chat(function, given) for function in given.functions.values()]
    return given


def _read(where: str, tool: Any, given: GivenTools) -> None:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{where} must be an object, got {kind_name(tool)}.", param=where)
    fields = Fields(tool, where)
    kind = fields.text("type")
    if kind == "namespace":
        namespace, inner = fields.required_text("name"), fields.array("tools") or []
        functions = [_function(f"{where}.tools[{index}]", each, given, namespace) for index, each in enumerate(inner)]
        named = {"type": kind, "name": namespace, "description": fields.text("description")}
        given.shown.append(named | {"tools": [function for function in functions if function is not None]})
        refuse_others(fields)
        return
    if kind == "mcp" and given.mcp is not None:
        _mcp(where, tool, given, given.mcp)
        return
    function = _function(where, tool, given)
    if function is not None:
        given.shown.append(function)


def _mcp(where: str, tool: dict[str, Any], given: GivenTools, mcp: Mapping[str, list[dict[str, Any]]]) -> None:
    """The tools of an MCP server. What is shown of it has no secrets."""
    label = tool["server_label"]
    for told in mcp[label]:
        name = qualified(label, told["name"])
        if name in given.functions:
            raise InvalidRequest(
                f"{where} has the tool {name[:MAX_NAME]!r}, as one before it is called.", param="tools"
            )
        function = {"name": name, "description": told["description"], "parameters": told["parameters"], "strict": None}
        given.functions[name] = function
        given.places.append(where)
        given.mcp_calls[name] = (label, told["name"], told["needs_approval"])
    given.shown.append({name: tool.get(name) for name in _SHOWN_OF_MCP} | {"headers": None})


def _as_chat(tool: dict[str, Any], given: GivenTools) -> dict[str, Any]:
    kind = "custom" if tool["name"] in given.customs else "function"
    told = {key: value for key, value in tool.items() if value is not None}
    form = told.get("format")
    if kind == "custom" and form is not None and form.get("type") == "grammar":
        grammar = {key: value for key, value in form.items() if key != "type"}
        told["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: told}


def _function(where: str, tool: Any, given: GivenTools, namespace: str = "") -> dict[str, Any] | None:
    """As the response repeats it; None for what was left out."""
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{where} must be an object, got {kind_name(tool)}.", param=where)
    fields = Fields(tool, where)
    kind = fields.required_text("type")
    if kind not in ("function", "custom"):
        if nearest(kind, ("function", "namespace", "custom")) is not None:
            raise InvalidRequest(f"{where}.type must be function, custom or namespace.", param=f"{where}.type")
        name = tool.get("name")
        given.ignored.append(f"tool {kind} {name}" if isinstance(name, str) and name != kind else f"tool {kind}")
        return None
    if "function" in tool:
        raise InvalidRequest(
            f"{where}.function: name, description and parameters stand in {where} itself in this API.",
            param=f"{where}.function",
        )
    own = fields.required_text("name")
    function: dict[str, Any] = {"name": own, "description": fields.text("description")}
    if kind == "custom":
        function["format"] = fields.object("format")
    else:
        function |= {"parameters": fields.object("parameters"), "strict": fields.flag("strict")}
    if fields.flag("async"):
        raise InvalidRequest(f"{where}.async is not supported by this server.", param=f"{where}.async")
    fields.flag("defer_loading")  # there is no search that would load it: it is offered at once
    fields.any("output_schema"), fields.any("allowed_callers")
    refuse_others(fields)
    name = qualified(namespace, own)
    if name in given.functions:
        raise InvalidRequest(f"{where} has the name {name[:MAX_NAME]!r}, as one before it does.", param="tools")
    if namespace:
        given.namespaces[name] = (namespace, own)
    given.functions[name] = function | {"name": name}
    given.places.append(where)
    if kind == "custom":
        given.customs.add(name)
    return {"type": kind} | function


def refuse_others(fields: Fields) -> None:
    if fields.unread():
        name = fields.name(fields.unread()[0])[:MAX_NAME]
        raise InvalidRequest(f"{name} is not known here; leave it out.", param=name)


def _as_json(value: Any, param: str) -> bytes:
    """What a response repeats and nobody here reads again: as JSON it costs little, however large it is."""
    try:
        return encode_json(value)
    except OverflowError:
        raise InvalidRequest(f"{param} holds an integer of more than 64 bits.", param=param) from None


def _named_choice(choice: dict[str, Any], given: GivenTools) -> dict[str, Any]:
    """tool_choice as chat has it."""
    kind = choice.get("type")
    if kind == "mcp" and given.mcp is not None:
        label, name = choice.get("server_label"), choice.get("name")
        of_label = [known for known, (of, own, _) in given.mcp_calls.items() if of == label and name in (None, own)]
        if not of_label:
            raise InvalidRequest("tool_choice names no tool of an MCP server of this call.", param="tool_choice")
        of_server = [{"type": "function", "function": {"name": each}} for each in of_label]
        return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": of_server}}
    if kind in ("function", "custom"):
        name = _chosen(choice, given)
        if name is None:
            raise InvalidRequest("tool_choice.name must be the name of one of tools.", param="tool_choice.name")
        return {"type": kind, kind: {"name": name}}
    if choice.get("type") == "allowed_tools":
        allowed, mode = choice.get("tools"), choice.get("mode")
        if mode not in ("auto", "required"):
            raise InvalidRequest("tool_choice.mode must be auto or required.", param="tool_choice.mode")
        names = [_chosen(tool, given) for tool in allowed] if isinstance(allowed, list) else []
        if not names or None in names:
            raise InvalidRequest(
                "tool_choice.tools must be an array of {type: function or custom, name: one of tools}.",
                param="tool_choice.tools",
            )
        functions = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}
    raise InvalidRequest(
        "tool_choice must be none, auto, required, or an object of type function, custom or allowed_tools.",
        param="tool_choice",
    )


def _chosen(tool: Any, given: GivenTools) -> str | None:
    """The tool that is named, by its name in its namespace too where that is clear; None: there is none."""
    if not isinstance(tool, Mapping) or tool.get("type") not in ("function", "custom"):
        return None
    name, namespace = tool.get("name"), tool.get("namespace") or ""
    if not isinstance(name, str) or not isinstance(namespace, str):
        return None
    if qualified(namespace, name) in given.functions:
        found = [qualified(namespace, name)]
    else:
        found = [known for known, (_, own) in given.namespaces.items() if own == name and not namespace]
    is_kind = len(found) == 1 and (found[0] in given.customs) == (tool["type"] == "custom")
    return found[0] if is_kind else None
