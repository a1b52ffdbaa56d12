"""Bodies of vLLM's /inference/v1/generate and of SGLang's /generate as the calls that completions make of them. Pure.

Both give the settings of sampling in an object of their own; these are read as those of a completion are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.errors import InvalidRequest
from ..call import Call
from ..fields import Fields
from ..openai.parse import parse_completion
from ..rules import Rules
from ..unsupported_fields import Refused, Table, check

SGLANG_TOKENS = 128
"""SGLang's max_new_tokens where nobody says how many."""

_OUTSIDE = (
    "prompt", "stream", "stream_options", "model", "echo", "priority", "cache_salt", "request_id", "suffix", "slo",
    "priority_class", "service_tier",
)  # fmt: skip
_NO_EFFECT = ("detokenize", "output_kind", "spaces_between_special_tokens")
OTHERS: Table = {
    "features": Refused((), "send token_ids"),
    "input_embeds": Refused((), "send text or input_ids"),
    "image_data": Refused(([],)),
    "video_data": Refused(([],)),
    "audio_data": Refused(([],)),
    "return_hidden_states": Refused((False,)),
    "lora_path": Refused(([],), "name the adapter as the model"),
    "session_params": Refused(({},)),
    "custom_logit_processor": Refused(("",)),
    "token_ids_logprob": Refused(([],)),
    "bootstrap_host": Refused(),
    "bootstrap_room": Refused(),
}
"""Fields of both that are known and not supported."""

_IN_SGLANG = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}


def parse_vllm(body: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """(the call, the names of unknown fields). Raises InvalidRequest naming the field."""
    fields = Fields(body)
    check(fields, OTHERS)
    completion = _settings(fields, {})
    completion["prompt"] = _ids(fields, "token_ids")
    for name in (
        "stream",
        "stream_options",
        "model",
        "priority",
        "cache_salt",
        "request_id",
        "kv_transfer_params",
        "slo",
        "priority_class",
        "service_tier",
    ):
        completion[name] = fields.any(name)
    call = _parse(completion, rules, {"prompt": "token_ids"}, {})
    return replace(call, named="token_ids", return_token_ids=True), fields.unread()


def parse_sglang(body: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """(the call, the names of unknown fields). Raises InvalidRequest naming the field."""
    fields = Fields(body)
    check(fields, OTHERS)
    text, ids = fields.any("text"), fields.any("input_ids")
    if (text is None) == (ids is None):
        raise InvalidRequest("Give one of text and input_ids.", param="text")
    name = "text" if ids is None else "input_ids"
    completion = _settings(fields, _IN_SGLANG)
    completion["prompt"] = text if ids is None else ids
    for outer, inner in (
        ("stream", "stream"),
        ("model", "model"),
        ("rid", "request_id"),
        ("priority", "priority"),
        ("slo", "slo"),
        ("priority_class", "priority_class"),
        ("service_tier", "service_tier"),
    ):
        completion[inner] = fields.any(outer)
    num_top = fields.integer("top_logprobs_num", 0, 20) or 0
    if fields.flag("return_logprob"):
        completion["logprobs"] = num_top
    elif num_top:
        raise InvalidRequest("top_logprobs_num needs return_logprob to be true.", param="top_logprobs_num")
    if fields.any("logprob_start_len") not in (None, -1):
        raise InvalidRequest(
            "logprob_start_len may only be -1: prompts are not scored here.", param="logprob_start_len"
        )
    params = fields.object("sampling_params") or {}
    given = {inner: outer for outer, inner in _IN_SGLANG.items() if outer in params}
    extras = {"is_list": isinstance(completion["prompt"], list) and not _are_ids(completion["prompt"])}
    extras["with_text"] = bool(fields.flag("return_text_in_logprobs"))
    call = _parse(completion, rules, {"prompt": name, "request_id": "rid"}, given)
    call = replace(call, usual_tokens=SGLANG_TOKENS, named=name, return_token_ids=True, extras=call.extras | extras)
    if call.stream and (call.sampling.n > 1 or len(call.prompts) > 1):
        raise InvalidRequest("stream gives one answer: give one prompt, and leave n at 1.", param="stream")
    return call, fields.unread()


def _settings(fields: Fields, renamed: Mapping[str, str]) -> dict[str, Any]:
    """sampling_params as fields of a completion."""
    given = dict(fields.object("sampling_params") or {})
    for name in _OUTSIDE:
        if given.get(name) is not None:
            raise InvalidRequest(f"sampling_params has no {name}.", param=f"sampling_params.{name}")
    return {renamed.get(name, name): value for name, value in given.items() if name not in _NO_EFFECT}


def _ids(fields: Fields, name: str) -> list[Any]:
    value = fields.array(name)
    if not value or not _are_ids(value):
        raise InvalidRequest(f"{name} must be an array of at least one token id.", param=name)
    return value


def _are_ids(value: list[Any]) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) for token in value)


def _parse(body: dict[str, Any], rules: Rules, outer: Mapping[str, str], inner: Mapping[str, str]) -> Call:
    """The call; what is wrong is told by the names that the caller knows. An unknown setting is refused."""
    try:
        call, unknown = parse_completion(body, rules)
    except InvalidRequest as error:
        name = error.param or ""
        told = outer.get(name) or (
            name if name.partition(".")[0] in _OUTSIDE else f"sampling_params.{inner.get(name, name)}"
        )
        message = error.message.replace(name, told, 1) if name else error.message
        raise type(error)(message, param=told if name else None) from None
    if unknown:
        raise InvalidRequest(
            f"sampling_params has no {unknown[0][:100]!r}.", param=f"sampling_params.{unknown[0][:100]}"
        )
    return call
