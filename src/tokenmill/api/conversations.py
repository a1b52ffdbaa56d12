"""`messages` and what steers the chat template, validated and in the form that templates read.

Calls of tools in earlier messages get their arguments as objects, however the caller wrote them, and each must be
answered by the messages behind it, as models have learned it. Models write arguments that are no objects, and answers
are cut off within them: those stay text. One that is cut off so and that nobody answers is no call. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from ..core.errors import InvalidRequest
from ..text.chat_format import ChatFormat, call_ids, known_of
from ..text.tools.hermes import as_text, describe
from ..text.tools.tool_choice import TEXT_ARGUMENT
from .common_fields import template_switch
from .fields import Fields, kind_name
from .rules import Rules

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token")
VERBOSITIES = ("low", "medium", "high")
_OTHER_PARTS = {
    "image_url": "an image",
    "image": "an image",
    "input_image": "an image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "a video",
    "video": "a video",
    "file": "a file",
    "input_file": "a file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A chat to be rendered by the model's template, or by `template` where one is given."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


def parse_conversation(fields: Fields, rules: Rules, tools: tuple[dict[str, Any], ...] = ()) -> Conversation:
    """Raises InvalidRequest naming the field, and in its message the place."""
    given = fields.any("messages")
    if not isinstance(given, list) or not given:
        got = "an empty array" if given == [] else kind_name(given)
        raise InvalidRequest(f"messages must be an array of at least one message, got {got}.", param="messages")
    template = fields.text("chat_template")
    if template is not None and not rules.allow_chat_template:
        raise InvalidRequest(
            "chat_template is not allowed here; the server takes it with --trust-request-chat-template.",
            param="chat_template",
        )
    messages = read_messages(given, rules.chat_format)
    family = rules.chat_format.family
    messages = messages if family.arrange is None else family.arrange(messages)
    tools = tools if family.arrange_tools is None else family.arrange_tools(tools)
    proceed = _proceeds(fields, given)
    generate = fields.flag("add_generation_prompt")
    if proceed and generate:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true.", param="continue_final_message"
        )
    chat_format = rules.chat_format
    knows_tools, knows_calls = chat_format.knows_tools, chat_format.knows_calls
    if template is not None:
        knows_tools, knows_calls = known_of(template)
    if not knows_calls:
        messages = as_text(messages, chat_format.family.form)
    if not knows_tools:
        messages, tools = describe(messages, tools, chat_format.family.form), ()
    return Conversation(
        messages=tuple(messages),
        add_generation_prompt=not proceed if generate is None else generate,
        continue_final_message=proceed,
        template=template,
        tools=tools,
        extra=_extra(fields),
    )


def _extra(fields: Fields) -> dict[str, Any]:
    """Further variables of the template."""
    extra = dict(fields.object("chat_template_kwargs") or {})
    for name in _RESERVED:
        if name in extra:
            raise InvalidRequest(f"chat_template_kwargs must not hold {name!r}.", param="chat_template_kwargs")
    effort = fields.text("reasoning_effort")
    if effort is not None:
        extra.setdefault("reasoning_effort", effort)
    verbosity = fields.text("verbosity")
    if verbosity not in (None, *VERBOSITIES):
        raise InvalidRequest(f"verbosity must be one of {', '.join(VERBOSITIES)}.", param="verbosity")
    if verbosity is not None:
        extra.setdefault("verbosity", verbosity)
    return {**template_switch(False), **extra} if effort == "none" else extra


def _proceeds(fields: Fields, messages: Sequence[Any]) -> bool:
    """Whether the answer goes on with the last message: `continue_final_message`, or `prefix` in the message itself."""
    proceed = fields.flag("continue_final_message")
    last = messages[-1]
    prefix = last.get("prefix") if isinstance(last, dict) else None
    if prefix is None:
        return bool(proceed)
    where = f"messages[{len(messages) - 1}]"
    if not isinstance(prefix, bool) or (prefix and last.get("role") != "assistant"):
        raise InvalidRequest(f"{where}.prefix may be true only in an assistant's message.", param="messages")
    if proceed is not None and proceed != prefix:
        raise InvalidRequest(
            f"continue_final_message contradicts {where}.prefix; give one of them.", param="continue_final_message"
        )
    return prefix


def read_messages(given: Sequence[Any], chat_format: ChatFormat) -> list[dict[str, Any]]:
    """Raises InvalidRequest naming the place."""
    return _History(chat_format).read(given)


def _answers(given: Sequence[Any], start: int) -> set[str]:
    """The ids that the results from there on name, up to the next message of another kind."""
    found = set()
    for message in islice(given, start, None):
        if not isinstance(message, dict) or message.get("role") not in ("tool", "function"):
            break
        if isinstance(call_id := message.get("tool_call_id"), str):
            found.add(call_id)
    return found


class _History:
    """Reads messages in order. `_open`: calls that no message has answered yet, by id, and where they are made."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._id_size = chat_format.family.id_size
        self._answered: set[str] = set()  # calls, by the messages right behind the one that is read
        self._open: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._made_at = ""

    def read(self, given: Sequence[Any]) -> list[dict[str, Any]]:
        messages = []
        for number, message in enumerate(given):
            where = f"messages[{number}]"
            self._answered = _answers(given, number + 1)
            messages.append(self._message(where, message))
        self._require_answers("the end")
        return messages

    def _message(self, where: str, message: Any) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise InvalidRequest(f"{where} must be an object, got {kind_name(message)}.", param="messages")
        role = message.get("role")
        if role not in _ROLES:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", param="messages")
        read = {name: value for name, value in message.items() if name not in ("prefix", "refusal", "function_call")}
        read["role"] = "system" if role == "developer" else role
        read["content"] = _content(where, message, role)
        if role in ("tool", "function"):
            return self._result(where, read)
        self._require_answers(where)
        if role == "assistant":
            self._calls(where, message, read)
            self._reasoning(where, message, read)
        elif message.get("tool_calls"):
            raise InvalidRequest(f"{where}.tool_calls may stand only in an assistant's message.", param="messages")
        return read

    def _reasoning(self, where: str, message: dict[str, Any], read: dict[str, Any]) -> None:
        for name in ("reasoning", "reasoning_content"):
            reasoning = message.get(name)
            if reasoning is not None and not isinstance(reasoning, str):
                raise InvalidRequest(f"{where}.{name} must be a string.", param="messages")
        read.pop("reasoning_content", None)
        if given := message.get("reasoning_content") or message.get("reasoning"):
            read["reasoning_content"] = given

    def _calls(self, where: str, message: dict[str, Any], read: dict[str, Any]) -> None:
        calls, older = message.get("tool_calls"), message.get("function_call")
        if older is not None:
            if calls:
                raise InvalidRequest(f"{where} has both tool_calls and function_call.", param="messages")
            calls = [{"id": f"function at {where}", "type": "function", "function": older}]
        if not calls:
            read.pop("tool_calls", None)
            return
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where}.tool_calls must be an array, got {kind_name(calls)}.", param="messages")
        self._made_at = where
        name = f"{where}.function_call" if older is not None else ""
        made = [
            self._call(name or f"{where}.tool_calls[{number}]", call, is_old=bool(name))
            for number, call in enumerate(calls)
        ]
        read["tool_calls"] = [call for call in made if call is not None]
        if not read["tool_calls"]:
            del read["tool_calls"]

    def _call(self, where: str, call: Any, *, is_old: bool) -> dict[str, Any] | None:
        """None for one that was cut off and that nobody answers."""
        if not isinstance(call, dict):
            raise InvalidRequest(f"{where} must be an object, got {kind_name(call)}.", param="messages")
        kind = call.get("type", "function")
        if kind not in ("function", "custom"):
            raise InvalidRequest(f"{where}.type must be 'function' or 'custom'.", param="messages")
        call_id, function = call.get("id"), call.get(kind)
        if not isinstance(call_id, str) or not call_id:
            raise InvalidRequest(f"{where}.id must be a string that is not empty.", param="messages")
        if call_id in self._open:
            raise InvalidRequest(f"{where}.id is {call_id[:80]!r}, as of a call before it.", param="messages")
        where = where if is_old else f"{where}.{kind}"
        if not isinstance(function, dict):
            raise InvalidRequest(f"{where} must be an object, got {kind_name(function)}.", param="messages")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"{where}.name must be a string that is not empty.", param="messages")
        if kind == "custom":
            arguments: dict[str, Any] | str = _text_argument(where, function)
        else:
            arguments = _arguments(f"{where}.arguments", function.get("arguments"))
        if isinstance(arguments, str) and not is_old and call_id not in self._answered:
            return None
        self._open[call_id] = name
        self._names[call_id] = name
        return {
            "id": self._known_id(call_id),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _result(self, where: str, read: dict[str, Any]) -> dict[str, Any]:
        if read["role"] == "function":
            name = read.get("name")
            call_id = next((each for each, called in self._open.items() if called == name), None)
            if call_id is None:
                raise InvalidRequest(
                    f"{where}.name is {str(name)[:80]!r}, but the message before calls no such function.",
                    param="messages",
                )
            read["role"] = "tool"
        else:
            call_id = read.get("tool_call_id")
            if not isinstance(call_id, str):
                raise InvalidRequest(f"{where}.tool_call_id must be a string.", param="messages")
            if call_id not in self._open:
                what = "that call is answered already" if call_id in self._names else "no message before has that call"
                raise InvalidRequest(f"{where}.tool_call_id is {call_id[:80]!r}, but {what}.", param="messages")
        del self._open[call_id]
        read["tool_call_id"] = self._known_id(call_id)
        read["name"] = read.get("name") or self._names[call_id]
        return read

    def _require_answers(self, where: str) -> None:
        """Every call must be answered before the conversation goes on."""
        if self._open:
            missing = ", ".join(repr(call_id[:80]) for call_id in self._open)
            raise InvalidRequest(
                f"{self._made_at} calls tools, but before {where} no message of the role tool answers {missing}.",
                param="messages",
            )

    def _known_id(self, call_id: str) -> str:
        """In the form that the model's template demands."""
        size = self._id_size
        if not size or (len(call_id) == size and call_id.isalnum()):
            return call_id
        return call_ids(call_id, size)(0)


def _text_argument(where: str, call: dict[str, Any]) -> dict[str, Any]:
    """Of a call of a custom tool: those of the function that the model takes it for."""
    text = call.get(TEXT_ARGUMENT)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{TEXT_ARGUMENT} must be a string, got {kind_name(text)}.", param="messages")
    return {TEXT_ARGUMENT: text}


def _arguments(where: str, given: Any) -> dict[str, Any] | str:
    if isinstance(given, str):
        return read_arguments(given)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object as JSON text, got {kind_name(given)}.", param="messages")
    return given


def read_arguments(text: str) -> dict[str, Any] | str:
    """The object that the text writes; the text as it is where it writes none."""
    try:
        found = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _content(where: str, message: dict[str, Any], role: str) -> str | list[dict[str, str]] | None:
    content = message.get("content")
    if isinstance(content, list):
        return [_part(f"{where}.content[{index}]", part, role) for index, part in enumerate(content)]
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        refusal = message.get("refusal")
        return refusal if isinstance(refusal, str) else None
    raise InvalidRequest(
        f"{where}.content must be a string or an array of text parts, got {kind_name(content)}.", param="messages"
    )


def _part(where: str, part: Any, role: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    field_name = "refusal" if kind == "refusal" and role == "assistant" else "text"
    if kind not in ("text", field_name):
        given = f"{_OTHER_PARTS[kind]} ({kind})" if isinstance(kind, str) and kind in _OTHER_PARTS else repr(kind)
        raise InvalidRequest(
            f"{where} must be a text part; this model takes no other input, got {given[:80]}.", param="messages"
        )
    text = part.get(field_name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{field_name} must be a string, got {kind_name(text)}.", param="messages")
    return {"type": "text", "text": text}
