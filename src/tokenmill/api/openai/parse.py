"""OpenAI's request bodies (with vLLM's extra fields) as validated `Call`s. Pure: no model, no engine, no clock.

Strict where a mistake would change the answer: a wrong type or range is refused by name, and so is a field that is
known but not supported here, unless it holds its neutral value. Lenient elsewhere: unknown fields are ignored (and
handed back, so that the caller can log each once).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...core.errors import InvalidRequest
from ...core.request import EXPORT, IMPORT
from ...core.sampling import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_TOKENS, SETTINGS, SamplingParams, Setting
from ..call import Call
from ..common_fields import (
    budget_field,
    read_beams,
    read_class,
    read_drafts,
    read_keep,
    read_prediction,
    read_reasoning,
    read_wish,
)
from ..constraints import read_constraint
from ..conversations import parse_conversation
from ..fields import Fields
from ..prompts import parse_prompts, token_ids
from ..rules import Rules
from ..tools import FUNCTION_CALL, demand, read_tools
from ..unsupported_fields import CHAT, COMPLETION, check, rename

MAX_TOKENS_DEFAULT = 16
"""Of /v1/completions, which is OpenAI's; of a chat answer it is core.sampling.CHAT_TOKENS."""

_INT64 = 2**63


def parse_completion(body: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """(the call, the names of unknown fields). Raises InvalidRequest naming the field."""
    fields = Fields(rename(body))
    check(fields, COMPLETION)
    prompts = parse_prompts(fields, rules.vocab_size)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    echo = bool(fields.flag("echo"))
    max_tokens = fields.integer("max_tokens", 0, 2**31 - 1)
    if max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens may be 0 only where echo is true; give at least 1.", param="max_tokens")
    scored = prompt_logprobs
    if echo and logprobs is not None:
        scored = max(logprobs, prompt_logprobs or 0)
    sampling = _sampling(fields, rules, 1 if max_tokens == 0 else max_tokens, logprobs, scored)
    call = Call(
        sampling=sampling,
        prompts=prompts,
        echo=echo,
        usual_tokens=MAX_TOKENS_DEFAULT,
        score_only=max_tokens == 0,
        prompt_logprobs=prompt_logprobs,
        add_special_tokens=_or(fields.flag("add_special_tokens"), True),
        **_common(fields, prompt_logprobs),
    )
    return _searching(call, fields), fields.unread()


def parse_chat(body: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """(the call, the names of unknown fields). Raises InvalidRequest naming the field."""
    fields = Fields(rename(body))
    check(fields, CHAT)
    tools = read_tools(fields)
    conversation = parse_conversation(fields, rules, tools.shown)
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    wanted = bool(fields.flag("logprobs"))
    if top and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    max_tokens = fields.integer("max_completion_tokens", 1, 2**31 - 1)
    limit_field = "max_completion_tokens" if max_tokens is not None else "max_tokens"
    older = fields.integer("max_tokens", 1, 2**31 - 1)
    max_tokens = older if max_tokens is None else max_tokens
    sampling = _sampling(fields, rules, max_tokens, (top or 0) if wanted else None, prompt_logprobs)
    call = Call(
        sampling=sampling if tools.use is None else tools.use.settings(sampling),
        conversation=conversation,
        tool_use=tools.use,
        reasoning=read_reasoning(fields, rules.chat_format),
        extras={FUNCTION_CALL: True} if tools.is_old else {},
        limit_field=limit_field,
        prompt_logprobs=prompt_logprobs,
        add_special_tokens=_or(fields.flag("add_special_tokens"), False),
        **_common(fields, prompt_logprobs),
    )
    call = replace(call, constraint=demand(tools, call.constraint, rules.chat_format))
    return _searching(call, fields), fields.unread()


def _searching(call: Call, fields: Fields) -> Call:
    """With the beam search that is wanted, if one is."""
    beams = read_beams(fields, call.sampling)
    if beams is None:
        return call
    if call.constraint is not None or call.echo or call.handoff:
        name = "echo" if call.echo else "kv_transfer_params" if call.handoff else "use_beam_search"
        raise InvalidRequest(
            "use_beam_search is not available with constraints, demanded tools, echo or kv_transfer_params.", param=name
        )
    if call.reasoning.budget is not None:
        name = budget_field(fields)
        raise InvalidRequest(f"{name} is not available with use_beam_search.", param=name)
    return replace(call, beams=beams)


def _sampling(
    fields: Fields, rules: Rules, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    def chosen(name: str, declared: Setting) -> Any:
        given = _setting(fields, name, declared)
        return given if given is not None else rules.defaults.get(name, declared.default)

    n = _or(fields.integer("n", 1, MAX_CHOICES), 1)
    ignore_eos = bool(fields.flag("ignore_eos"))
    settings = {name: chosen(name, declared) for name, declared in SETTINGS.items()}
    penalties = [settings[name] for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")]
    if fields.any("repeat_last_n") not in (None, -1) and penalties != [1, 0, 0]:
        raise InvalidRequest("repeat_last_n may only be -1: penalties cover the whole sequence.", param="repeat_last_n")
    return SamplingParams(
        n=n,
        max_tokens=max_tokens,
        min_tokens=_or(fields.integer("min_tokens", 0, 2**31 - 1), 0),
        **settings,
        seed=fields.integer("seed", -_INT64, 2 * _INT64 - 1),
        stop=_stops(fields),
        stop_token_ids=_some_ids(fields, "stop_token_ids", rules.vocab_size, MAX_STOP_TOKENS),
        ignore_eos=ignore_eos,
        loop_guard=_or(fields.flag("loop_guard"), not ignore_eos and rules.defaults.get("loop_guard", False)),
        logit_bias=_logit_bias(fields, rules.vocab_size),
        allowed_token_ids=_allowed(fields, rules.vocab_size),
        bad_words=tuple(fields.array("bad_words") or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        include_stop_str_in_output=bool(fields.flag("include_stop_str_in_output")),
        skip_special_tokens=_or(fields.flag("skip_special_tokens"), True),
    )


def _setting(fields: Fields, name: str, declared: Setting) -> Any:
    if isinstance(declared.default, int):
        return fields.integer(name, int(declared.low), int(declared.high))
    return fields.number(name) if isinstance(declared.default, float) else fields.array(name)


def _common(fields: Fields, prompt_logprobs: int | None) -> dict[str, Any]:
    """The arguments of Call that both endpoints read alike."""
    stream = bool(fields.flag("stream"))
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    if stream and prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not available while streaming.", param="prompt_logprobs")
    usage = Fields(options or {}, "stream_options")
    counts = {
        "include_usage": bool(usage.flag("include_usage")),
        "continuous_usage": bool(usage.flag("continuous_usage_stats")),
    }
    usage.unread()
    salt, request_id = fields.text("cache_salt"), fields.text("request_id")
    if salt == "":
        raise InvalidRequest("cache_salt must not be empty; leave it out instead.", param="cache_salt")
    if request_id is not None and not (0 < len(request_id) <= 256 and request_id.isprintable()):
        raise InvalidRequest("request_id must be 1 to 256 printable characters.", param="request_id")
    truncate = fields.integer("truncate_prompt_tokens", -1, 2**31 - 1)
    if truncate == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
    side = fields.text("truncation_side") or "left"
    if side not in ("left", "right"):
        raise InvalidRequest("truncation_side must be 'left' or 'right'.", param="truncation_side")
    return {
        "model": fields.text("model"),
        "stream": stream,
        "stream_interval": fields.integer("stream_interval", 1, 2**31 - 1),
        **counts,
        "truncate_to": truncate,
        "truncate_right": side == "right",
        "priority": _or(fields.integer("priority", -(2**31), 2**31 - 1), 0),
        "cache_salt": salt or "",
        "request_id": request_id,
        "return_token_ids": bool(fields.flag("return_token_ids")),
        "tokens_as_ids": bool(fields.flag("return_tokens_as_token_ids")),
        "handoff": _handoff(fields, stream),
        "constraint": read_constraint(fields),
        "slo": read_wish(fields),
        "keep_s": read_keep(fields),
        "priority_class": read_class(fields),
        "drafts": read_drafts(fields),
        "prediction": read_prediction(fields),
    }


def _handoff(fields: Fields, stream: bool) -> str:
    """`kv_transfer_params`, vLLM's words for a prefill that another server continues. Where the KV lies need not be
    said: it is in the folder that the servers share."""
    params = Fields(fields.object("kv_transfer_params") or {}, "kv_transfer_params")
    does_export, does_import = bool(params.flag("do_remote_decode")), bool(params.flag("do_remote_prefill"))
    params.unread()
    if does_export and does_import:
        message = "kv_transfer_params may have one of do_remote_decode and do_remote_prefill true, not both."
        raise InvalidRequest(message, param="kv_transfer_params")
    if does_export and stream:
        message = "kv_transfer_params.do_remote_decode is not available while streaming: the body says what was saved."
        raise InvalidRequest(message, param="kv_transfer_params")
    return EXPORT if does_export else IMPORT if does_import else ""


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.any("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidRequest("stop must be a string or an array of strings.", param="stop")
    return tuple(value)


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = {}
    for key, bias in (fields.object("logit_bias") or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 12 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias keys must be token ids from 0 to {vocab_size - 1}, got {key[:40]!r}.", param="logit_bias"
            )
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise InvalidRequest("logit_bias values must be numbers from -100 to 100.", param="logit_bias")
        biases[int(key)] = float(bias)
    return tuple(sorted(biases.items()))


def _allowed(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    if fields.array("allowed_token_ids") == []:
        raise InvalidRequest("allowed_token_ids must hold at least one token.", param="allowed_token_ids")
    return _some_ids(fields, "allowed_token_ids", vocab_size, vocab_size)


def _some_ids(fields: Fields, name: str, vocab_size: int, most: int) -> tuple[int, ...]:
    """Token ids, none if the field is absent or empty. More than `most` are refused unread."""
    value = fields.array(name) or []
    if len(value) > most:
        raise InvalidRequest(f"{name} may hold at most {most} tokens, got {len(value)}.", param=name)
    return token_ids(name, value, vocab_size) if value else ()


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
