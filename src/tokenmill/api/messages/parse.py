"""Anthropic's request bodies as validated calls. Pure.

A body becomes one of a chat, under OpenAI's names, and is read as such: what a model can do is decided in one place.
What was complained about is told under Anthropic's names. Fields of our own (`seed`, `min_p`, ...) are taken too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...core.errors import InvalidRequest
from ...core.sampling import SETTINGS
from ..call import Call
from ..common_fields import template_switch
from ..fields import Fields, kind_name
from ..openai.parse import parse_chat
from ..rules import Rules
from ..unsupported_fields import Ignored, Refused, Table, check
from .history import check_cache_control, read_messages, read_system

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


PASSED = (
    "model", "stream", *SETTINGS, "seed", "min_tokens", "ignore_eos", "loop_guard", "stop_token_ids", "bad_words",
    "allowed_token_ids", "logit_bias", "skip_special_tokens", "chat_template", "chat_template_kwargs", "priority",
    "cache_salt", "request_id", "slo", "priority_class",
)  # fmt: skip
"""Fields that mean the same in a chat: Anthropic's, then this server's own."""

_ACCOUNT = Ignored("accounts and storage are not kept here")
_SPEED = Ignored("every call is answered as soon as it can be")

MESSAGES: Table = {
    "metadata": _ACCOUNT,
    "user_profile_id": _ACCOUNT,
    "billing_policy": _ACCOUNT,
    "inference_geo": _ACCOUNT,
    "service_tier": _SPEED,
    "speed": _SPEED,
    "diagnostics": Ignored("the answer has one shape"),
    "anthropic_version": Ignored("there is one version"),
    "betas": Ignored("what a beta changes is said by other fields"),
    "container": Refused(),
    "mcp_servers": Refused(([],), "call the servers from where your tools run"),
    "fallbacks": Refused(([],)),
    "fallback_credit_token": Refused(),
    "thread": Refused((), "send the whole conversation"),
    "compaction": Refused((), "send what is to be kept"),
    "n": Refused((1,), "send the call again"),
    "stop": Refused((), "give stop_sequences"),
    "max_completion_tokens": Refused((), "give max_tokens"),
    "max_tokens_to_sample": Refused((), "give max_tokens"),
    "prompt": Refused((), "give messages"),
    "response_format": Refused((), "give output_config.format"),
    "reasoning_effort": Refused((), "give output_config.effort"),
    "logprobs": Refused((False,), "use /v1/chat/completions"),
    "top_logprobs": Refused((0,), "use /v1/chat/completions"),
    "prompt_logprobs": Refused((), "use /v1/chat/completions"),
    "truncate_prompt_tokens": Refused((), "send what is to be read"),
    "parallel_tool_calls": Refused((), "give tool_choice.disable_parallel_tool_use"),
}
"""Of Anthropic's, and what callers of other APIs may write here."""

EFFORTS = ("low", "medium", "high", "xhigh", "max")
_NEUTRAL_EDIT = "clear_thinking_20251015"
_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_TOOLS = re.compile(r"tools\[(\d{1,6})\]\.function\b")


def parse_messages(body: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """(the call, the names of unknown fields). Raises InvalidRequest naming the field."""
    fields = Fields(body)
    max_tokens = fields.integer("max_tokens", 0, 2**31 - 1)
    if max_tokens is None:
        raise InvalidRequest("max_tokens must be given: the most tokens of the answer.", param="max_tokens")
    return _parse(fields, rules, max_tokens)


def parse_count(body: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """As parse_messages, of a body whose prompt is only to be counted."""
    fields = Fields(body)
    return _parse(fields, rules, fields.integer("max_tokens", 0, 2**31 - 1))


def _parse(fields: Fields, rules: Rules, max_tokens: int | None) -> tuple[Call, list[str]]:
    check(fields, MESSAGES)
    check_cache_control("", {"cache_control": fields.any("cache_control")})
    chat = {name: fields.any(name) for name in PASSED if fields.any(name) is not None}
    messages, is_begun, ignored = read_messages(fields)
    chat["messages"] = [*read_system(fields), *messages]
    if is_begun:
        chat["continue_final_message"] = True
    tools, others = read_tools(fields)
    ignored += others
    chat |= ({"tools": list(tools.values())} if tools else {}) | read_choice(fields, bool(tools))
    chat["stop"] = fields.array("stop_sequences")
    _read_output(fields, chat)
    kwargs = fields.object("chat_template_kwargs") or {}
    switch = _read_thinking(fields, chat, max_tokens)
    if not rules.chat_format.reasoning and chat.pop("thinking_token_budget", None) is not None:
        ignored.append("thinking")
    chat["chat_template_kwargs"] = kwargs if switch.keys() & kwargs.keys() else switch | kwargs
    _check_context(fields)
    chat["max_tokens"] = max_tokens or 1
    try:
        call, _ = parse_chat(chat, rules)
    except InvalidRequest as error:
        raise renamed(error, list(tools)) from None
    hides = (fields.object("thinking") or {}).get("display") == "omitted"
    extras = {"max_tokens": max_tokens, "hides_thinking": hides}
    return replace(
        call,
        score_only=max_tokens == 0,
        fits_room=True,
        limit_field="max_tokens",
        ignored=tuple(ignored),
        extras=extras,
    ), fields.unread()


def _read_output(fields: Fields, chat: dict[str, Any]) -> None:
    """`output_config`, or its older name for the format."""
    config = Fields(fields.object("output_config") or {}, "output_config")
    effort, form = config.text("effort"), config.object("format")
    older = fields.object("output_format")
    if form is not None and older is not None:
        raise InvalidRequest("output_format and output_config.format are the same; give one.", param="output_format")
    _refuse_others(config)
    if effort is not None:
        if effort not in EFFORTS:
            raise _wrong("output_config.effort", f"must be one of {', '.join(EFFORTS)}")
        chat["reasoning_effort"] = effort
    where, form = ("output_config.format", form) if form is not None else ("output_format", older)
    if form is None:
        return
    given = Fields(form, where)
    if given.text("type") != "json_schema":
        raise _wrong(f"{where}.type", "must be 'json_schema'")
    schema = given.object("schema")
    if schema is None:
        raise _wrong(f"{where}.schema", "must be an object, got null")
    named = {"name": given.text("name") or "answer", "schema": schema, "strict": True}
    chat["response_format"] = {"type": "json_schema", "json_schema": named}


def _read_thinking(fields: Fields, chat: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """What the template is told: a model that may think or not does so only where the call wants it."""
    given = fields.object("thinking")
    if given is None:
        return template_switch(False)
    thinking = Fields(given, "thinking")
    kind, budget = thinking.text("type"), thinking.integer("budget_tokens", 1, 2**31 - 1)
    display = thinking.text("display")
    if display not in (None, "summarized", "omitted"):
        raise _wrong("thinking.display", "must be 'summarized' or 'omitted'")
    _refuse_others(thinking)
    if kind not in ("enabled", "adaptive", "disabled"):
        raise _wrong("thinking.type", "must be one of enabled, adaptive, disabled")
    if kind == "enabled":
        if budget is None:
            raise _wrong("thinking.budget_tokens", "must be given where thinking is enabled")
        if max_tokens is not None and budget >= max_tokens:
            raise _wrong("thinking.budget_tokens", f"is {budget}, which must be less than max_tokens ({max_tokens})")
        chat["thinking_token_budget"] = budget
    elif budget is not None:
        raise _wrong("thinking.budget_tokens", f"goes with thinking that is enabled, not {kind}")
    return template_switch(kind != "disabled")


def _check_context(fields: Fields) -> None:
    """Edits would change the prompt, but for the one that keeps all of it."""
    context = Fields(fields.object("context_management") or {}, "context_management")
    for number, edit in enumerate(context.array("edits") or ()):
        if not (isinstance(edit, dict) and edit.get("type") == _NEUTRAL_EDIT and edit.get("keep") == "all"):
            what = (
                'is not supported, but for {"type": "clear_thinking_20251015", "keep": "all"}; send what is to be kept'
            )
            raise _wrong(f"context_management.edits[{number}]", what)
    _refuse_others(context)


def _refuse_others(fields: Fields) -> None:
    for name in fields.unread():
        raise _wrong(fields.name(name), "is not known here; leave it out")


def renamed(error: InvalidRequest, places: Sequence[int] = ()) -> InvalidRequest:
    """A complaint about the chat, in the caller's words. `places`: of the tools that the chat has."""
    message, param = error.message, error.param or ""
    for other, name in _NAMES.items():
        if param == other or param.startswith(f"{other}."):
            message, param = message.replace(other, name), name + param[len(other) :]
    known = dict(enumerate(places))

    def place(found: re.Match[str]) -> str:
        return f"tools[{known.get(int(found[1]), found[1])}]"

    message, param = (_TOOLS.sub(place, text).replace("].parameters", "].input_schema") for text in (message, param))
    return type(error)(message, param=param or None)
