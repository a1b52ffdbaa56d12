"""Bodies of /api/chat, /api/generate, /api/embed and the older /api/embeddings as validated calls. Pure.

A body is rewritten as one of OpenAI's, and validated as such; what is refused is named as the caller named it. What
Ollama alone has is read here: `options`, a conversation's tokens as `context`, a `suffix`, empty prompts, which load
the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from ...core.errors import InvalidRequest
from ...core.sampling import MAX_LOGPROBS, SamplingParams
from ...text.calls import NO_BOUND
from ..call import Call
from ..common_fields import template_switch
from ..fields import Fields, check_integer, kind_name, said_as
from ..llama_cpp import closed, fill_gap, require_marks
from ..openai.parse import parse_chat, parse_completion
from ..pooling import MAX_INPUTS, PoolingCall
from ..prompts import token_ids
from ..rules import Rules
from ..unsupported_fields import KEPT, Ignored, Refused, Table, check

READ: Mapping[str, str] = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repeat_last_n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "loop_guard": "loop_guard",
}
"""Options that are read, and what OpenAI's bodies (with extra fields) call them."""

_LOADING = Ignored("it is settled when the server starts")
_NEVER_CUT = Ignored("a prompt is never cut: one that is too long is refused")

OTHERS: Table = {
    "num_ctx": Ignored("the context is settled when the server starts; /api/show tells it"),
    "num_keep": _NEVER_CUT,
    "mirostat": Refused((0,)),
    "mirostat_tau": Ignored("it belongs to a sampler that is refused"),
    "mirostat_eta": Ignored("it belongs to a sampler that is refused"),
    "tfs_z": Refused((1,)),
    "penalize_newline": Ignored("Ollama has dropped it too"),
    "num_batch": _LOADING,
    "num_gpu": _LOADING,
    "main_gpu": _LOADING,
    "num_thread": _LOADING,
    "numa": _LOADING,
    "low_vram": _LOADING,
    "f16_kv": _LOADING,
    "logits_all": _LOADING,
    "vocab_only": _LOADING,
    "use_mmap": _LOADING,
    "use_mlock": _LOADING,
    "embedding_only": _LOADING,
}
_NAMES = (*READ, *OTHERS)


def read_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the settings under OpenAI's names, unknown options). Raises InvalidRequest naming the option; also for one that
    is nearly a known one's name."""
    fields = Fields(dict(options), "options")
    try:
        check(fields, OTHERS)
    except InvalidRequest as error:
        raise InvalidRequest(f"options.{error.message}", param=f"options.{error.param}") from None
    fields.integer("num_ctx", 1, 2**31 - 1)
    found = {name: fields.any(option) for option, name in READ.items() if fields.any(option) is not None}
    if "max_tokens" in found and check_integer("options.num_predict", found["max_tokens"], -2, 2**31 - 1) < 1:
        del found["max_tokens"]
    if found.get("seed") == -1:
        del found["seed"]
    return found, [f"options.{name}" for name in fields.unread()]


def refuse_misplaced(names: list[str]) -> None:
    """Raises InvalidRequest for an option that stands beside `options`, where Ollama would overlook it."""
    for name in names:
        if name in _NAMES:
            raise InvalidRequest(f"{name} is to be given as options.{name}.", param=name)


OLDER: Table = {"keep_alive": KEPT}
EMBED: Table = OLDER


def parse_embed(body: dict[str, Any], rules: Rules) -> tuple[PoolingCall, list[str]]:
    """Vectors of length 1; texts that are too long are cut unless `truncate` is false."""
    fields = Fields(body)
    check(fields, EMBED)
    value = fields.any("input")
    texts = value if isinstance(value, list) else [] if value in (None, "") else [value]
    if not all(isinstance(text, str) for text in texts):
        odd = next(text for text in texts if not isinstance(text, str))
        raise InvalidRequest(f"input must be a string or an array of strings, got {kind_name(odd)}.", param="input")
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(f"input may hold at most {MAX_INPUTS} texts, got {len(texts)}.", param="input")
    cuts = fields.flag("truncate")
    call = PoolingCall(
        model=fields.required_text("model"),
        inputs=tuple(texts),
        activate=True,
        dimensions=fields.integer("dimensions", 1, 2**31 - 1) or 0,
        truncate_to=None if cuts is False else -1,
    )
    return call, _unknown_options(fields)


def parse_embeddings(body: dict[str, Any], rules: Rules) -> tuple[PoolingCall, list[str]]:
    """One vector, as the model gives it."""
    fields = Fields(body)
    check(fields, OLDER)
    prompt = fields.text("prompt")
    inputs = (prompt,) if prompt else ()
    call = PoolingCall(model=fields.required_text("model"), inputs=inputs, names=("prompt", ""), activate=False)
    return call, _unknown_options(fields)


def _unknown_options(fields: Fields) -> list[str]:
    _, unknown = read_options(fields.object("options") or {})
    return unknown + fields.unread()


_ANSWER: Table = {
    "keep_alive": KEPT,
    "truncate": Ignored("a prompt is never cut: one that is too long is refused"),
    "shift": Ignored("a context that is full ends the answer"),
}
CHAT: Table = _ANSWER
GENERATE: Table = _ANSWER | {
    "images": Refused(([],), "this model takes text alone"),
    "template": Refused(("",), "give raw and the whole prompt, or start the server with --chat-template"),
    "width": Refused((0,)),
    "height": Refused((0,)),
    "steps": Refused((0,)),
}
_THINK_LEVELS = ("low", "medium", "high", "max")
_SAID: Mapping[str, str] = {name: f"options.{option}" for option, name in READ.items()} | {
    "response_format.json_schema.schema": "format",
    "response_format.json_schema": "format",
    "response_format": "format",
    "chat_template_kwargs": "think",
    "reasoning_effort": "think",
}
"""What OpenAI's bodies call a field, and Ollama's."""


def parse_ollama_chat(body: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """(the call, the names of unknown fields). Raises InvalidRequest naming the field."""
    fields = Fields(body)
    check(fields, CHAT)
    rewritten, unknown = _common(fields, rules)
    messages = fields.array("messages") or []
    tools = fields.array("tools")
    unknown += _unknown(fields)
    if not messages:
        return _loading(fields, rewritten), unknown
    if tools:
        rewritten["tools"] = tools
    rewritten["messages"] = _messages(messages)
    last = rewritten["messages"][-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        rewritten["continue_final_message"] = True
    with said_as(_SAID):
        call, _ = parse_chat(rewritten, rules)
    return _named(call, fields), unknown


def parse_ollama_generate(body: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """(the call, the names of unknown fields). Raises InvalidRequest naming the field."""
    fields = Fields(body)
    check(fields, GENERATE)
    rewritten, unknown = _common(fields, rules)
    prompt, suffix, system = (fields.text(name) or "" for name in ("prompt", "suffix", "system"))
    context = fields.array("context") or []
    prefix = token_ids("context", context, rules.vocab_size) if context else ()
    is_raw = bool(fields.flag("raw"))
    unknown += _unknown(fields)
    for name, value in (("system", system), ("context", context), ("suffix", suffix)):
        if is_raw and value:
            raise InvalidRequest(f"{name} does not go with raw: the prompt is taken as it is.", param=name)
    if suffix and (system or context):
        raise InvalidRequest("suffix goes with neither system nor context.", param="suffix")
    if not prompt and not suffix:
        return _loading(fields, rewritten), unknown
    changes: dict[str, Any] = {"named": "prompt", "prefix": prefix}
    if system and not rules.has_template:
        raise InvalidRequest("system needs a model with a chat template, and this one has none.", param="system")
    if not is_raw:
        changes["extras"] = {"gives_context": True}
    if is_raw or suffix or not rules.has_template:
        fim = require_marks(rules, "suffix") if suffix else None
        with said_as(_SAID):
            call, _ = parse_completion(_as_completion(rewritten) | {"prompt": prompt or " "}, rules)
        if fim is not None:
            call = fill_gap(call, fim, prompt, suffix)
        return replace(_named(call, fields), **changes), unknown
    rewritten["messages"] = [{"role": "system", "content": system}] if system else []
    rewritten["messages"].append({"role": "user", "content": prompt})
    with said_as({**_SAID, "messages": "prompt"}):
        call, _ = parse_chat(rewritten, rules)
    return replace(_named(call, fields), **changes), unknown


def _named(call: Call, fields: Fields) -> Call:
    """With the caller's names for what is found wrong later. A context that is full ends an answer."""
    constraint = None if call.constraint is None else structs.replace(call.constraint, param="format")
    is_said = (fields.object("options") or {}).get("num_predict") is not None
    return replace(
        call,
        limit_field="options.num_predict",
        usual_tokens=NO_BOUND if is_said else None,
        fits_room=True,
        constraint=constraint,
    )


def _common(fields: Fields, rules: Rules) -> tuple[dict[str, Any], list[str]]:
    """(what of a body both endpoints read alike, rewritten; unknown options)."""
    settings, unknown = read_options(fields.object("options") or {})
    stream = fields.flag("stream")
    rewritten: dict[str, Any] = {"model": fields.required_text("model"), "stream": stream is None or stream}
    rewritten |= settings
    rewritten |= _format(fields.any("format")) | _think(fields.any("think"), rules)
    rewritten["logprobs"] = fields.flag("logprobs")
    rewritten["top_logprobs"] = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    return rewritten, unknown


def _unknown(fields: Fields) -> list[str]:
    names = fields.unread()
    refuse_misplaced(names)
    return names


def _loading(fields: Fields, rewritten: Mapping[str, Any]) -> Call:
    """A call that asks for nothing but that the model be there, or that it be gone."""
    wish = "unload" if keep_alive_s(fields.any("keep_alive")) == 0 else "load"
    return Call(model=rewritten["model"], sampling=SamplingParams(), extras={"done_reason": wish})


_DURATION = re.compile(r"[+-]?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+|[+-]?\d+(\.\d*)?")
_PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h|$)")
_MAX_DURATION = 100
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def keep_alive_s(value: Any) -> float | None:
    """For how long a model is to be kept after a call, as Ollama's clients say it: seconds, or a duration of Go's such
    as "5m" or "1h30m"; less than 0: for ever. None: not said. Raises InvalidRequest."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, str) or len(value) > _MAX_DURATION or not _DURATION.fullmatch(value):
        got = repr(value[:40]) if isinstance(value, str) else kind_name(value)
        raise InvalidRequest(f"keep_alive must be seconds or a duration such as '5m', got {got}.", param="keep_alive")
    told_s = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(value))
    return -told_s if value.startswith("-") else told_s


def read_keep_alive(raw: bytes) -> float | None:
    """Of a body's field as it came; b"": there is none. Raises InvalidRequest."""
    return keep_alive_s(json.loads(raw)) if raw else None


_WHAT_FOR = {"/api/generate": ("prompt", "suffix"), "/api/chat": ("messages",)}


def asks_nothing(path: str, data: bytes) -> bool:
    """Whether a body of this path asks for no answer: that its model be loaded, or unloaded."""
    fields = json.loads(data) if path in _WHAT_FOR else None
    return fields is not None and not any(fields.get(name) for name in _WHAT_FOR[path])


def _format(value: Any) -> dict[str, Any]:
    if value in (None, ""):
        return {}
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    if isinstance(value, dict):
        schema = {"name": "format", "schema": closed(value)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    got = repr(value[:40]) if isinstance(value, str) else kind_name(value)
    raise InvalidRequest(f"format must be 'json' or a JSON schema, got {got}.", param="format")


def _think(value: Any, rules: Rules) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, bool) and value not in _THINK_LEVELS:
        raise InvalidRequest(f"think must be true, false or one of {', '.join(_THINK_LEVELS)}.", param="think")
    if value and not rules.chat_format.reasoning:
        raise InvalidRequest("think needs a model that marks its reasoning, and this one does not.", param="think")
    if isinstance(value, bool):
        return {"chat_template_kwargs": template_switch(value)}
    return {"chat_template_kwargs": template_switch(True), "reasoning_effort": value}


def _as_completion(rewritten: Mapping[str, Any]) -> dict[str, Any]:
    """Where no template is rendered: thinking is the prompt's own business, and log probabilities are one number."""
    body = {name: value for name, value in rewritten.items() if name not in ("chat_template_kwargs", "top_logprobs")}
    body.pop("reasoning_effort", None)
    body["logprobs"] = (rewritten["top_logprobs"] or 0) if rewritten["logprobs"] else None
    return body


def _messages(messages: list[Any]) -> list[dict[str, Any]]:
    """As OpenAI has them. Calls of tools get ids, and results the id of the call that they answer: the first of that
    name which has none, or simply the first."""
    found: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise InvalidRequest(f"{where} must be an object, got {kind_name(message)}.", param="messages")
        if message.get("images"):
            raise InvalidRequest(f"{where}.images: this model takes text alone.", param="messages")
        role = message.get("role")
        rewritten: dict[str, Any] = {"role": role, "content": message.get("content") or ""}
        if message.get("thinking"):
            rewritten["reasoning_content"] = message["thinking"]
        if calls := message.get("tool_calls"):
            rewritten["tool_calls"] = _calls(where, calls, number)
            open_calls = [(call["id"], call["function"]["name"]) for call in rewritten["tool_calls"]]
        if role == "tool":
            name = message.get("tool_name") or message.get("name")
            answered = next((each for each in open_calls if name in (None, each[1])), None)
            if answered is not None:
                open_calls.remove(answered)
            call_id = message.get("tool_call_id") or (answered and answered[0])
            if not call_id:
                raise InvalidRequest(f"{where} answers no call of a tool before it; see tool_name.", param="messages")
            rewritten |= {"name": name} if name else {}
            rewritten["tool_call_id"] = call_id
        found.append(rewritten)
    return found


def _calls(where: str, calls: Any, number: int) -> list[dict[str, Any]]:
    found = []
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        here = f"{where}.tool_calls[{index}]"
        call = call if isinstance(call, dict) else {}
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"{here}.function.name must be a string that is not empty.", param="messages")
        arguments = function.get("arguments")
        if not isinstance(arguments, (dict, str, type(None))):
            raise InvalidRequest(f"{here}.function.arguments must be an object.", param="messages")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        call_id = call.get("id") or f"call_{number}_{index}"
        found.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": text}})
    return found
