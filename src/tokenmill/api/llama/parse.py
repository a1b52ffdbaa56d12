"""Bodies of /completion, /infill and /embedding as validated calls. Pure.

Most fields are those that /v1/completions takes too, and are read there; prompts of other shapes, forms of logit_bias,
and what shapes the answer are read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.errors import InvalidRequest
from ...core.sampling import MAX_LOGPROBS
from ...text.calls import NO_BOUND
from ..call import Call
from ..fields import Fields, check_integer, kind_name, nearest, said_as
from ..llama_cpp import closed, fill_gap, require_marks
from ..openai.parse import parse_completion
from ..pooling import PoolingCall, parse_embedding
from ..prompts import MAX_PROMPTS, Mixed, Prompt, token_ids
from ..rules import Rules
from ..unsupported_fields import Ignored, Refused, Table, check
from .settings import RANDOM_SEED, with_samplers

EMBEDDING: Table = {
    "encoding_format": Refused(("float",), "use /v1/embeddings"),
    "image_data": Refused(([],), "this model takes text alone"),
}


def parse_llama_embedding(body: dict[str, Any], rules: Rules) -> tuple[PoolingCall, list[str]]:
    """`content`, or `input` as OpenAI calls it. (the call, the names of unknown fields). Raises InvalidRequest."""
    fields = Fields(body)
    check(fields, EMBEDDING)
    content = fields.any("content")
    name = "input" if content is None else "content"
    if content is not None and fields.any("input") is not None:
        raise InvalidRequest("content and input are the same; give one.", param="content")
    norm = fields.integer("embd_normalize", -1, 2**31 - 1)
    if norm not in (None, -1, 2):
        raise InvalidRequest(
            "embd_normalize may be 2 (length 1) or -1 (as the model gives it).", param="embd_normalize"
        )
    rest = {key: value for key, value in body.items() if key not in ("content", "embd_normalize", *EMBEDDING)}
    with said_as({"input": name}):
        return parse_embedding(
            rest | {"input": body.get(name)} | ({} if norm is None else {"normalize": norm == 2}), rules
        )


OTHERS: Table = {
    "echo": Refused((False,), "use /v1/completions"),
    "logprobs": Refused((), "give n_probs"),
    "prompt_logprobs": Refused((), "use /v1/completions"),
    "return_token_ids": Refused((False,), "give return_tokens"),
    "suffix": Refused(("",), "use /infill"),
    "stream_options": Refused(({},)),
    "best_of": Refused((1,)),
    "kv_transfer_params": Refused((), "use /v1/completions"),
    "post_sampling_probs": Refused((False,), "log probabilities are those of the raw logits"),
    "t_max_prompt_ms": Ignored("a prompt is computed whole"),
    "return_progress": Ignored("a prompt's progress is not told"),
    "sse_ping_interval": Ignored("nothing is sent while nothing is known"),
    "cache_prompt": Ignored("what is cached never changes an answer"),
}
_MINE = frozenset(
    {
        "prompt", "input_prefix", "input_suffix", "input_extra", "n_predict", "n_cmpl", "n_probs", "logit_bias", "seed",
        "samplers", "return_tokens", "response_fields", "timings_per_token",
    }
)  # fmt: skip
_MIXED_SHAPES = "a string, an array of token ids and strings, an object with prompt_string, or an array of these"


def parse_llama_completion(body: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """(the call, the names of unknown fields). Raises InvalidRequest naming the field."""
    fields = Fields(body)
    prompts = _prompts(fields.any("prompt"), rules.vocab_size)
    call, unknown = _parse(fields, body, rules)
    return replace(call, prompts=prompts), unknown


def parse_llama_infill(body: dict[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    """(the call, the names of unknown fields). Raises InvalidRequest naming the field."""
    fields = Fields(body)
    texts = {name: fields.text(name) for name in ("input_prefix", "input_suffix", "prompt")}
    for name in ("input_prefix", "input_suffix"):
        if texts[name] is None:
            raise InvalidRequest(f"{name} must be a string.", param=name)
    extra = _extra(fields.array("input_extra") or [])
    fim = require_marks(rules, "input_prefix")
    call, unknown = _parse(fields, body, rules)
    prefix, suffix, prompt = (text or "" for text in texts.values())
    call = fill_gap(call, fim, prefix, suffix, extra=extra, prompt=prompt)
    return replace(call, named="input_prefix"), unknown


def _parse(fields: Fields, body: Mapping[str, Any], rules: Rules) -> tuple[Call, list[str]]:
    check(fields, OTHERS)
    num_predict = fields.integer("n_predict", -2, 2**31 - 1)
    num_probs = fields.integer("n_probs", 0, MAX_LOGPROBS)
    biases, seed = fields.any("logit_bias"), fields.any("seed")
    wanted = fields.array("response_fields")
    if wanted is not None and not all(isinstance(name, str) for name in wanted):
        raise InvalidRequest("response_fields must be an array of strings.", param="response_fields")
    extras = {
        "return_tokens": bool(fields.flag("return_tokens")),
        "timings_per_token": bool(fields.flag("timings_per_token")),
        "response_fields": wanted,
    }
    samplers = fields.any("samplers")
    num_choices = fields.integer("n_cmpl", 1, 2**31 - 1)
    rewritten = {name: value for name, value in body.items() if name not in _MINE and name not in OTHERS}
    if "json_schema" in rewritten:
        rewritten["json_schema"] = closed(rewritten["json_schema"])
    names: dict[str, str] = {}
    if num_predict is not None:
        names["max_tokens"] = "n_predict"
        if num_predict >= 0:
            rewritten["max_tokens"] = num_predict or 1
    if num_choices is not None:
        names["n"] = "n_cmpl"
        rewritten["n"] = num_choices
    if num_probs:
        rewritten["logprobs"] = num_probs
    if biases is not None:
        rewritten["logit_bias"] = _biases(biases)
    if seed not in (None, -1, RANDOM_SEED):
        rewritten["seed"] = seed
    names |= {"repetition_penalty": "repeat_penalty"} if "repeat_penalty" in body else {}
    with said_as(names):
        call, unknown = parse_completion(rewritten | {"prompt": "x"}, rules)
    for name in unknown:
        if meant := nearest(name, _MINE):
            raise InvalidRequest(f"{name} is not known here; {meant} is.", param=name)
    call = replace(
        call,
        sampling=with_samplers(call.sampling, samplers),
        usual_tokens=NO_BOUND if num_predict in (-1, -2) else None,
        fits_room=True,
        score_only=num_predict == 0,
        limit_field="n_predict" if num_predict is not None else call.limit_field,
        extras=extras,
    )
    return call, unknown


def _prompts(value: Any, vocab_size: int) -> tuple[Prompt | Mixed, ...]:
    """One prompt or several. An array of numbers, with texts or without, is one; of texts alone, several."""
    if not isinstance(value, list):
        return (_prompt(value, vocab_size),)
    kinds = {type(part) for part in value}
    if int in kinds and not kinds & {list, dict}:
        return (_prompt(value, vocab_size),)
    if not value or len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(value)}.", param="prompt")
    return tuple(_prompt(part, vocab_size) for part in value)


def _prompt(value: Any, vocab_size: int) -> Prompt | Mixed:
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise InvalidRequest("prompt.multimodal_data: this model takes text alone.", param="prompt")
        value = value.get("prompt_string")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        got = "an empty array" if value == [] else kind_name(value)
        raise InvalidRequest(f"prompt must be {_MIXED_SHAPES}, got {got}.", param="prompt")
    if not any(isinstance(part, str) for part in value):
        return token_ids("prompt", value, vocab_size)
    parts = [part if isinstance(part, str) else check_integer("prompt", part, 0, vocab_size - 1) for part in value]
    return Mixed(tuple(parts))


def _extra(value: list[Any]) -> list[tuple[str, str]]:
    found = []
    for number, each in enumerate(value):
        name, text = (each.get("filename"), each.get("text")) if isinstance(each, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(name, (str, type(None))):
            raise InvalidRequest(
                f"input_extra[{number}] must be an object with text, and filename if it has one.", param="input_extra"
            )
        found.append((name or "tmp", text))
    return found


def _biases(value: Any) -> dict[str, Any]:
    """As OpenAI has it. Pairs of token id and bias, where false means never; texts have no one token."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"logit_bias must be an array of pairs, got {kind_name(value)}.", param="logit_bias")
    found = {}
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or isinstance(pair[0], bool) or not isinstance(pair[0], int):
            raise InvalidRequest("logit_bias must hold pairs of a token id and a bias.", param="logit_bias")
        found[str(pair[0])] = -100 if pair[1] is False else pair[1]
    return found
