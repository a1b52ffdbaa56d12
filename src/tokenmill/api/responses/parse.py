"""What of a body of /v1/responses may name something stored: looked for before the body is read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ...core.errors import InvalidRequest
from ...core.request import IDLE_PRIORITY
from ..call import Call
from ..fields import MAX_SPELLED, Fields, nearest, parse_object
from ..openai.parse import parse_chat
from ..rules import Rules
from ..unsupported_fields import Ignored, Refused, Table, check
from .items import Item, read_items, to_messages
from .tools import MAX_NAME, GivenTools, read_tools

MAX_REFERENCES = 100

_decode = msgspec.json.decode


class Outline(msgspec.Struct, frozen=True):
    """previous, conversation: `previous_response_id` and `conversation` as they stand there; references: the ids that
    item references name."""

    previous: Any = None
    conversation: Any = None
    references: tuple[str, ...] = ()


class _Body(msgspec.Struct):
    """All else is passed over without being made."""

    previous_response_id: Any = None
    conversation: Any = None
    input: msgspec.Raw = msgspec.Raw(b"null")


class _Item(msgspec.Struct):
    type: Any = None
    id: Any = None
    role: Any = None


def unpack_outline(result: bytes) -> Outline:
    """Of a Skim."""
    return msgspec.msgpack.decode(result, type=Outline)


def outline_of(body: bytes) -> Outline:
    """Raises InvalidRequest for what is no body, and for too many references."""
    try:
        found = _decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        parse_object(body)  # says what is wrong
        raise
    return Outline(found.previous_response_id, found.conversation, _references(found.input))


def _references(given: msgspec.Raw) -> tuple[str, ...]:
    """What is no input is for its reader to refuse."""
    try:
        items = _decode(given, type=list[_Item])
    except msgspec.ValidationError:
        return ()
    found = [
        item.id
        for item in items
        if isinstance(item.id, str) and (item.type == "item_reference" or item.type is item.role is None)
    ]
    if len(found) > MAX_REFERENCES:
        raise InvalidRequest(f"input may name at most {MAX_REFERENCES} stored items.", param="input")
    return tuple(found)


MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
LOGPROBS = "message.output_text.logprobs"

INCLUDES = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Those but the first belong to what never occurs here, or to reasoning, which is given readable."""

OTHER: Table = {
    "background_options": Refused(),
    "prompt": Refused((), "give instructions and input: prompts are not kept here"),
    "context_management": Refused(([],), "shorten the input"),
    "moderation": Refused(),
    "access_programs": Refused(),
    "request_id": Ignored("a response has an id of its own"),
    "image": Refused(),
    "prompt_cache_options": Ignored("what is cached never changes an answer"),
    # What chat calls otherwise
    "messages": Refused((), "give input"),
    "n": Refused((1,)),
    "instruction": Refused((), "give instructions"),
    "previous_response": Refused((), "give previous_response_id"),
    "max_tokens": Refused((), "give max_output_tokens"),
    "max_completion_tokens": Refused((), "give max_output_tokens"),
    "n_predict": Refused((), "give max_output_tokens"),
    "max_new_tokens": Refused((), "give max_output_tokens"),
    "response_format": Refused((), "give text.format"),
    "logprobs": Refused((False,), f"give include {LOGPROBS!r}"),
    "prompt_logprobs": Refused(),
    "reasoning_effort": Refused((), "give reasoning.effort"),
    "verbosity": Refused((), "give text.verbosity"),
    "continue_final_message": Refused((False,)),
    "add_generation_prompt": Refused((True,)),
    "kv_transfer_params": Refused(),
    "return_token_ids": Refused((False,)),
    "truncate_prompt_tokens": Refused((), "give truncation"),
    "include_stop_str_in_output": Refused((False,)),
}
"""Fields that other endpoints or OpenAI's own servers read."""

_ECHOED = ("user", "safety_identifier", "prompt_cache_key")
_TAKEN = (
    "input",
    "instructions",
    "previous_response_id",
    "background",
    "conversation",
    "text",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
    "max_output_tokens",
    "include",
    "top_logprobs",
    "max_tool_calls",
    "metadata",
    "store",
    "truncation",
    "stream_options",
    "user",
    "safety_identifier",
    "prompt_cache_key",
)
"""What is read here; the rest of a body is read as chat's."""

_RENAMED = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    (".function.", "."),
    (".custom.format.grammar.", ".format."),
    (".custom.", "."),
    ("messages", "input"),
)
"""What messages about the body of chat call a field, and what its caller does."""


def parse_response(body: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """(the call, names of unknown fields). Raises InvalidRequest naming the field."""
    return _parse(body, rules, [], {})


def parse_continued(outer: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """As parse_response; outer: {"body", "before": items that come before the input, "known": items by id}, and where
    MCP servers are asked {"mcp": their tools by label, "after": items that the response has already}."""
    return _parse(
        outer["body"], rules, outer["before"], outer["known"], after=outer.get("after") or [], mcp=outer.get("mcp")
    )


def _parse(
    body: dict[str, Any],
    rules: Rules,
    before: list[Item],
    known: Mapping[str, Item],
    *,
    after: list[Item] | None = None,
    mcp: Mapping[str, list[dict[str, Any]]] | None = None,
) -> tuple[Call, list[str]]:
    fields = Fields(body)
    check(fields, OTHER)
    items, left_out = read_items(fields.any("input"), known)
    instructions = fields.text("instructions")
    settings, chat, tools = _settings(fields, mcp, is_later=bool(after))
    store = fields.flag("store") is not False
    passed = {name: value for name, value in body.items() if name not in _TAKEN and name not in OTHER}
    chat |= passed
    chat["messages"] = to_messages([*before, *items, *(after or [])], instructions, len(before))
    try:
        call, unknown = parse_chat(chat, rules)
    except InvalidRequest as error:
        if error.param in passed and (meant := nearest(error.param, _TAKEN)) is not None:
            raise _misspelled(error.param, meant) from None
        raise in_own_words(error, tools) from None
    for name in unknown[:MAX_SPELLED]:
        if len(name) <= MAX_NAME and (meant := nearest(name, _TAKEN)) is not None:
            raise _misspelled(name, meant)
    asks_to_store = fields.flag("store") is True or settings["background"]
    settings |= {"instructions": instructions, "store": store, "asks_to_store": asks_to_store}
    if settings["background"] and not store:
        raise InvalidRequest("background needs store to be true: the answer is read from there.", param="store")
    if settings["background"] and call.priority >= IDLE_PRIORITY:
        raise InvalidRequest("background is not available in a batch, which is not waited for.", param="background")
    extras = {"settings": settings, "input": items if store or settings["conversation"] else []}
    constraint = call.constraint
    if constraint is not None:
        constraint = msgspec.structs.replace(constraint, param=_own_name(constraint.param))
    return replace(
        call,
        limit_field="max_output_tokens",
        named="input",
        constraint=constraint,
        ignored=(*tools.ignored, *left_out),
        extras=call.extras | extras,
    ), unknown


def _settings(
    fields: Fields, mcp: Mapping[str, list[dict[str, Any]]] | None, *, is_later: bool
) -> tuple[dict[str, Any], dict[str, Any], GivenTools]:
    """(what a response repeats of its call, the same and more as a body of chat has it, its tools)."""
    chat: dict[str, Any] = {}
    settings: dict[str, Any] = {name: fields.text(name) for name in _ECHOED}
    settings["max_tool_calls"] = fields.integer("max_tool_calls", 1, 2**31 - 1)
    settings["metadata"] = read_metadata(fields)
    settings["previous_response_id"] = fields.text("previous_response_id")
    settings["background"] = fields.flag("background") is True
    settings["conversation"] = conversation_of(fields.any("conversation"), settings["previous_response_id"])
    truncation = fields.text("truncation") or "disabled"
    if truncation not in ("auto", "disabled"):
        raise InvalidRequest("truncation must be 'auto' or 'disabled'.", param="truncation")
    settings["truncation"] = truncation
    settings["max_output_tokens"] = chat["max_tokens"] = fields.integer("max_output_tokens", 1, 2**31 - 1)
    settings["text"] = _text_format(fields, chat)
    settings["reasoning"] = _reasoning(fields, chat)
    settings["top_logprobs"] = _logprobs(fields, chat)
    tools = read_tools(fields, settings, chat, mcp, is_later=is_later)
    options = Fields(fields.object("stream_options") or {}, "stream_options")
    if options.names() and not fields.flag("stream"):
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    if options.flag("include_obfuscation"):
        raise InvalidRequest(
            "stream_options.include_obfuscation is not supported by this server; leave it out.",
            param="stream_options.include_obfuscation",
        )
    options.flag("include_usage")  # the last event has it in any case
    if options.unread():
        name = options.name(options.unread()[0])
        raise InvalidRequest(f"{name[:MAX_NAME]} is not known here; leave it out.", param=name[:MAX_NAME])
    return settings, chat, tools


def conversation_of(given: Any, previous: Any) -> str | None:
    """The id that `conversation` names, by itself or in an object; previous: `previous_response_id`. Raises
    InvalidRequest."""
    identifier = given.get("id") if isinstance(given, dict) and set(given) == {"id"} else given
    if identifier is not None and (not isinstance(identifier, str) or not identifier):
        raise InvalidRequest("conversation must be the id of a conversation, or {id: that}.", param="conversation")
    if identifier is not None and previous is not None:
        raise InvalidRequest(
            "conversation and previous_response_id exclude each other; give the one that the input follows.",
            param="conversation",
        )
    return identifier


def read_metadata(fields: Fields) -> dict[str, str]:
    metadata = fields.object("metadata") or {}
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata may hold at most {MAX_METADATA} pairs, got {len(metadata)}.", param="metadata")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY or not isinstance(value, str) or len(value) > _MAX_VALUE:
            raise InvalidRequest(
                f"metadata takes keys of at most {_MAX_KEY} characters and strings of at most {_MAX_VALUE}.",
                param="metadata",
            )
    return metadata


def _text_format(fields: Fields, chat: dict[str, Any]) -> dict[str, Any]:
    text = Fields(fields.object("text") or {}, "text")
    form = Fields(text.object("format") or {"type": "text"}, "text.format")
    verbosity = text.text("verbosity")
    if verbosity is not None:
        chat["verbosity"] = verbosity
    kind = form.text("type")
    shown: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        for name in ("name", "description"):
            shown[name] = form.text(name)
        shown["schema"], shown["strict"] = form.object("schema"), form.flag("strict")
        chat["response_format"] = {
            "type": kind,
            "json_schema": {
                name: shown[name] for name in ("name", "schema", "strict", "description") if shown[name] is not None
            },
        }
    elif kind == "json_object":
        chat["response_format"] = {"type": kind}
    elif kind != "text":
        raise InvalidRequest("text.format.type must be text, json_object or json_schema.", param="text.format.type")
    for part in (text, form):
        if part.unread():
            name = part.name(part.unread()[0])[:MAX_NAME]
            raise InvalidRequest(f"{name} is not known here; leave it out.", param=name)
    return {"format": shown, "verbosity": verbosity or "medium"}


def _reasoning(fields: Fields, chat: dict[str, Any]) -> dict[str, Any]:
    given = Fields(fields.object("reasoning") or {}, "reasoning")
    effort = given.text("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    for name in ("summary", "generate_summary"):
        if given.text(name) not in (None, "auto"):
            raise InvalidRequest(
                f"reasoning.{name} may only be 'auto' here: reasoning is given as it is, not summed up.",
                param=f"reasoning.{name}",
            )
    for name, neutral in (("context", "auto"), ("mode", "standard")):
        if given.text(name) not in (None, neutral):
            raise InvalidRequest(f"reasoning.{name} may only be {neutral!r} here.", param=f"reasoning.{name}")
    if given.unread():
        name = given.name(given.unread()[0])[:MAX_NAME]
        raise InvalidRequest(f"{name} is not known here; leave it out.", param=name)
    return {"effort": effort, "summary": given.text("summary")}


def _logprobs(fields: Fields, chat: dict[str, Any]) -> int:
    include = fields.array("include") or []
    for index, name in enumerate(include):
        if name not in INCLUDES:
            raise InvalidRequest(f"include[{index}] must be one of {', '.join(INCLUDES)}.", param=f"include[{index}]")
    top = fields.integer("top_logprobs", 0, 20) or 0
    if LOGPROBS in include:
        chat |= {"logprobs": True, "top_logprobs": top}
    elif top:
        raise InvalidRequest(f"top_logprobs needs include to hold {LOGPROBS!r}.", param="top_logprobs")
    return top


def _misspelled(name: str, meant: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not known here; {meant} is.", param=name)


def in_own_words(error: InvalidRequest, tools: GivenTools) -> InvalidRequest:
    """The same error, under the names that this API's callers know."""
    message, param = (tools.in_place(_own_name(text)) for text in (error.message, error.param or ""))
    return type(error)(message, param=param or None)


def _own_name(text: str) -> str:
    for theirs, own in _RENAMED:
        text = text.replace(theirs, own)
    return text
