"""The tools of a chat call, as OpenAI writes them: `tools` and `tool_choice`, and the older `functions`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..core.errors import InvalidRequest
from ..text.chat_format import ChatFormat
from ..text.grammar.constraint import Constraint
from ..text.tools.call_grammar import ToolConstraint
from ..text.tools.tool_choice import TEXT_ARGUMENT, Tool, ToolUse
from .fields import Fields, kind_name

MAX_TOOLS = 1024

FUNCTION_CALL = "function_call"
"""Of Call.extras: the answer's call is to be one of the older form."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class GivenTools:
    """shown  the tools as a chat template reads them, in the caller's words
    use       None where no tool is given
    is_old    `functions` was given: the answer's call is a `function_call`
    """

    shown: tuple[dict[str, Any], ...] = ()
    use: ToolUse | None = None
    is_old: bool = False


def demand(tools: GivenTools, given: Constraint | None, chat_format: ChatFormat) -> Constraint | None:
    """The constraint of an answer that may or must call: `given` is what the caller wants of an answer in words. Raises
    InvalidRequest naming the field of a constraint that cannot go with calls."""
    use = tools.use
    if use is None:
        return given
    place = "functions[{}].parameters" if tools.is_old else "tools[{}].function.parameters"
    param = "function_call" if tools.is_old else "tool_choice"
    is_format = given is not None and given.kind in ("json_object", "json_schema")
    if given is not None and not is_format:
        raise InvalidRequest(
            f"{given.param} cannot go with tools; give {param} 'none', or leave it out.", param=given.param
        )
    if use.is_forced:
        return Constraint("tools", ToolConstraint(chat_format.tools, use, place).as_json(), param)
    if given is not None:
        answer = ({"type": "object"} if given.kind == "json_object" else given.value, given.param)
        value = ToolConstraint(chat_format.tools, use, place, answer).as_json()
        return Constraint("tools", value, given.param, given.whitespace)
    if any(tool.is_strict for tool in use.offered):
        param = "functions" if tools.is_old else "tools"
        return Constraint("tools", ToolConstraint(chat_format.tools, use, place).as_json(), param)
    return None


def read_tools(fields: Fields) -> GivenTools:
    """Raises InvalidRequest naming the field. Tools that the caller forbids to use are not shown to the model."""
    tools, functions = fields.array("tools"), fields.array("functions")
    choice, older_choice = fields.any("tool_choice"), fields.any("function_call")
    parallel = fields.flag("parallel_tool_calls")
    if functions and tools:
        raise InvalidRequest("functions is the older form of tools; give one of them.", param="functions")
    if functions:
        if choice is not None:
            raise InvalidRequest("tool_choice goes with tools; give function_call.", param="tool_choice")
        shown = tuple({"type": "function", "function": function} for function in functions)
        use = _read(shown, [f"functions[{number}]" for number in range(len(functions))], "functions")
        use = choose(use, _older(older_choice), "function_call", is_parallel=False)
        return GivenTools(shown, use, is_old=True) if use.choice != "none" else GivenTools()
    if older_choice not in (None, "none", "auto"):
        raise InvalidRequest("function_call goes with functions; give tool_choice.", param="function_call")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
        return GivenTools()
    use = _read(tools, [f"tools[{number}]" for number in range(len(tools))], "tools")
    shown = tuple(_shown(tool, read) for tool, read in zip(tools, use.tools, strict=True))
    use = choose(use, choice, "tool_choice", is_parallel=parallel is not False)
    return GivenTools(shown, use) if use.choice != "none" else GivenTools()


def _read(tools: Sequence[Any], places: Sequence[str], param: str) -> ToolUse:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{param} may hold at most {MAX_TOOLS} tools, got {len(tools)}.", param=param)
    found = [_tool(tool, place, param) for tool, place in zip(tools, places, strict=True)]
    names: set[str] = set()
    for tool, place in zip(found, places, strict=True):
        if tool.name in names:
            raise InvalidRequest(f"{place} has the name {tool.name!r}, as one before it does.", param=param)
        names.add(tool.name)
    return ToolUse(tuple(found))


def _tool(tool: Any, place: str, param: str) -> Tool:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{place} must be an object, got {kind_name(tool)}.", param=param)
    kind = tool.get("type", "function")
    if kind == "custom" and param == "tools":
        return _custom(tool, place, param)
    if kind != "function":
        known = "'function' or 'custom'" if param == "tools" else "'function'"
        raise InvalidRequest(f"{place}.type must be {known}, got {str(kind)[:40]!r}.", param=param)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{place}.function must be an object, got {kind_name(function)}.", param=param)
    place = place if param == "functions" else f"{place}.function"
    name = _name(function, place, param)
    Fields(function, place).expect(("name", "description", "parameters", "strict"))
    description, strict = function.get("description"), function.get("strict")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{place}.description must be a string.", param=param)
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{place}.strict must be true or false.", param=param)
    return Tool(name, description or "", _parameters(function.get("parameters"), place, param), bool(strict))


def _name(told: dict[str, Any], place: str, param: str) -> str:
    name = told.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{place}.name must be 1 to 256 letters, digits and characters of '_-.:/', got {str(name)[:80]!r}.",
            param=param,
        )
    return name


_TEXT = {
    "type": "object",
    "properties": {TEXT_ARGUMENT: {"type": "string"}},
    "required": [TEXT_ARGUMENT],
    "additionalProperties": False,
}
"""Of a tool that takes a text."""


def _custom(tool: dict[str, Any], place: str, param: str) -> Tool:
    """A tool that takes a text, free or of a grammar."""
    custom = tool.get("custom")
    place = f"{place}.custom"
    if not isinstance(custom, dict):
        raise InvalidRequest(f"{place} must be an object, got {kind_name(custom)}.", param=param)
    name = _name(custom, place, param)
    fields = Fields(custom, place)
    fields.expect(("name", "description", "format"))
    description = fields.text("description")
    form = Fields(fields.object("format") or {"type": "text"}, f"{place}.format")
    kind = form.text("type")
    if kind not in ("text", "grammar"):
        raise InvalidRequest(f"{place}.format.type must be 'text' or 'grammar'.", param=param)
    form.expect(("type",) if kind == "text" else ("type", "grammar"))
    if kind == "text":
        return Tool(name, description or "", _TEXT, is_custom=True)
    grammar = Fields(form.object("grammar") or {}, f"{place}.format.grammar")
    syntax, definition = grammar.text("syntax"), grammar.text("definition")
    grammar.expect(("syntax", "definition"))
    if syntax not in ("lark", "regex") or not definition:
        raise InvalidRequest(
            f"{place}.format.grammar must have a syntax, 'lark' or 'regex', and a definition.", param=param
        )
    return Tool(name, description or "", _TEXT, is_strict=True, is_custom=True, grammar=(syntax, definition))


def _shown(tool: Any, read: Tool) -> dict[str, Any]:
    """As chat templates read it: what takes a text is a function of one, and its grammar is told."""
    if not read.is_custom:
        shown: dict[str, Any] = tool
        return shown
    told = [read.description] if read.description else []
    if read.grammar is not None:
        syntax, definition = read.grammar
        called = "Lark grammar" if syntax == "lark" else "regular expression"
        told.append(f"The {TEXT_ARGUMENT} must follow this {called}:\n{definition}")
    function = {"name": read.name, "description": "\n\n".join(told), "parameters": read.parameters}
    return {"type": "function", "function": function}


def _parameters(given: Any, place: str, param: str) -> dict[str, Any]:
    if given is None:
        return {"type": "object", "properties": {}}
    if not isinstance(given, dict) or given.get("type", "object") != "object":
        raise InvalidRequest(f"{place}.parameters must be a JSON schema of an object.", param=param)
    return given if "type" in given else {"type": "object", **given}


def _older(choice: Any) -> Any:
    """`function_call` as `tool_choice` says it."""
    if isinstance(choice, dict):
        return {"type": "function", "function": choice}
    if choice == "required":
        raise InvalidRequest("function_call must be 'auto', 'none' or an object with a name.", param="function_call")
    return choice


def choose(use: ToolUse, choice: Any, param: str, *, is_parallel: bool) -> ToolUse:
    """`use` with the caller's choice among its tools. Raises InvalidRequest naming `param`."""
    use = msgspec.structs.replace(use, is_parallel=is_parallel)
    if choice is None:
        return use
    if isinstance(choice, str) and choice in _CHOICES:
        return msgspec.structs.replace(use, choice=choice)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(use, choice, param)
    kind = choice.get("type") if isinstance(choice, dict) else None
    function = choice.get(kind) if kind in ("function", "custom") and isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        form = '{"name": NAME}' if param == "function_call" else '{"type": "function", "function": {"name": NAME}}'
        words = "'auto' or 'none'" if param == "function_call" else "'auto', 'none', 'required'"
        raise InvalidRequest(f"{param} must be {words} or {form}.", param=param)
    _require({tool.name for tool in use.tools}, name, param)
    return msgspec.structs.replace(use, choice="named", name=name, is_parallel=False)


def _allowed(use: ToolUse, choice: dict[str, Any], param: str) -> ToolUse:
    """OpenAI's {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}."""
    allowed = choice.get("allowed_tools", choice)
    mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidRequest(f"{param}.allowed_tools must have a mode, 'auto' or 'required', and tools.", param=param)
    known = {tool.name for tool in use.tools}
    names = set()
    for tool in tools:
        function = tool.get("function", tool.get("custom", tool)) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise InvalidRequest(f"{param}.allowed_tools.tools must be objects with a name.", param=param)
        _require(known, name, param)
        names.add(name)
    return msgspec.structs.replace(use, tools=tuple(tool for tool in use.tools if tool.name in names), choice=mode)


def _require(known: set[str], name: str, param: str) -> None:
    if name not in known:
        raise InvalidRequest(f"{param} names {name[:80]!r}, which is none of the tools.", param=param)
