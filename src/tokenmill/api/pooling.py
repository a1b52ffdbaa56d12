"""Bodies of /v1/embeddings, /v1/score and /v1/rerank as validated calls, and the bodies of their answers. Pure.

Fields are OpenAI's for embeddings, Jina's and Cohere's for rerank, vLLM's for score, with vLLM's extras for all.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import InvalidRequest
from ..text.calls import Input
from .common_fields import read_class
from .fields import Fields, kind_name
from .prompts import Prompt, token_ids
from .rules import Rules
from .unsupported_fields import EMBEDDING, RERANK, SCORE, check

MAX_INPUTS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingCall:
    """inputs        texts or token ids; of pairs the first texts
    seconds       of pairs the second texts, one for each input; else empty
    names         of the fields that inputs and seconds came from
    activate      False: vectors and scores as the model gives them; None: as usual for the model
    dimensions    values of a vector to keep; 0: all
    as_base64     vectors are base64 of little-endian float32
    prompt_name   of the model's prompts, the one to put before the inputs; None: its default
    priority_class  as Call's
    top_n         most results of a ranking; None: all
    with_texts    a ranking's results carry the documents
    truncate_to   as Call.truncate_to; keep_end: what is kept then is the end
    """

    model: str | None
    inputs: tuple[Prompt, ...]
    seconds: tuple[str, ...] = ()
    names: tuple[str, str] = ("input", "")
    activate: bool | None = None
    dimensions: int = 0
    as_base64: bool = False
    prompt_name: str | None = None
    top_n: int | None = None
    with_texts: bool = True
    truncate_to: int | None = None
    keep_end: bool = False
    priority: int = 0
    cache_salt: str = ""
    priority_class: int | None = None
    request_id: str | None = None


def parse_embedding(body: dict[str, Any], rules: Rules) -> tuple[PoolingCall, list[str]]:
    """(the call, the names of unknown fields). Raises InvalidRequest naming the field."""
    fields = Fields(body)
    check(fields, EMBEDDING)
    form = fields.text("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise InvalidRequest("encoding_format must be 'float' or 'base64'.", param="encoding_format")
    call = PoolingCall(
        inputs=_inputs(fields, rules.vocab_size),
        as_base64=form == "base64",
        dimensions=fields.integer("dimensions", 1, 2**31 - 1) or 0,
        prompt_name=fields.text("prompt_name"),
        **_common(fields),
    )
    return call, fields.unread()


def parse_score(body: dict[str, Any], rules: Rules) -> tuple[PoolingCall, list[str]]:
    """One first text goes with every second one; else they go by their places."""
    fields = Fields(body)
    check(fields, SCORE)
    first_name, firsts = _named_texts(fields, "text_1", "queries")
    second_name, seconds = _named_texts(fields, "text_2", "documents")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequest(
            f"{first_name} holds {len(firsts)} texts and {second_name} {len(seconds)}: give one, or as many.",
            param=first_name,
        )
    names = (first_name, second_name)
    return PoolingCall(inputs=firsts, seconds=seconds, names=names, **_common(fields)), fields.unread()


def parse_rerank(body: dict[str, Any], rules: Rules) -> tuple[PoolingCall, list[str]]:
    fields = Fields(body)
    check(fields, RERANK)
    query = fields.text("query")
    if query is None:
        raise fields.wrong("query", "a string")
    documents = _texts(fields, "documents")
    with_texts = fields.flag("return_documents")
    call = PoolingCall(
        inputs=(query,) * len(documents),
        seconds=documents,
        names=("query", "documents"),
        top_n=fields.integer("top_n", 1, 2**31 - 1),
        with_texts=True if with_texts is None else with_texts,
        **_common(fields),
    )
    return call, fields.unread()


def _inputs(fields: Fields, vocab_size: int) -> tuple[Prompt, ...]:
    value = fields.any("input")
    shapes = "a string, an array of strings, an array of token ids or an array of arrays of token ids"
    if isinstance(value, str):
        return _not_empty("input", (value,))
    if not isinstance(value, list) or not value:
        got = "an empty array" if value == [] else kind_name(value)
        raise InvalidRequest(f"input must be {shapes}, got {got}.", param="input")
    _check_number("input", len(value) if isinstance(value[0], (str, list)) else 1)
    if all(isinstance(item, str) for item in value):
        return _not_empty("input", tuple(value))
    if all(isinstance(item, list) for item in value):
        return tuple(token_ids("input", item, vocab_size) for item in value)
    if any(isinstance(item, (str, list)) for item in value):
        raise InvalidRequest(f"input must be {shapes}, got a mixture.", param="input")
    return (token_ids("input", value, vocab_size),)


def _named_texts(fields: Fields, *names: str) -> tuple[str, tuple[str, ...]]:
    """The texts of the first of the names that is given, and that name."""
    name = next((name for name in names if fields.any(name) is not None), names[0])
    return name, _texts(fields, name)


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    """A string, or an array of strings or of objects with `text`. Empty ones are read like others: one empty document
    among many must not cost the others their scores."""
    value = fields.any(name)
    listed = value if isinstance(value, list) else [value]
    texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in listed]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{name} must be a string or an array of strings, at least one.", param=name)
    _check_number(name, len(texts))
    return tuple(texts)


def _check_number(name: str, number: int) -> None:
    if number > MAX_INPUTS:
        raise InvalidRequest(f"{name} may hold at most {MAX_INPUTS} inputs, got {number}.", param=name)


def _not_empty(name: str, texts: tuple[str, ...]) -> tuple[str, ...]:
    if not all(texts):
        raise InvalidRequest(f"{name} must not hold an empty string.", param=name)
    return texts


def _common(fields: Fields) -> dict[str, Any]:
    """The arguments of PoolingCall that all endpoints read alike."""
    truncate = fields.integer("truncate_prompt_tokens", -1, 2**31 - 1)
    if truncate == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
    side = fields.text("truncation_side") or "right"
    if side not in ("left", "right"):
        raise InvalidRequest("truncation_side must be 'left' or 'right'.", param="truncation_side")
    salt, request_id = fields.text("cache_salt"), fields.text("request_id")
    if salt == "":
        raise InvalidRequest("cache_salt must not be empty; leave it out instead.", param="cache_salt")
    if request_id is not None and not (0 < len(request_id) <= 256 and request_id.isprintable()):
        raise InvalidRequest("request_id must be 1 to 256 printable characters.", param="request_id")
    flags = [fields.flag(name) for name in ("use_activation", "normalize")]
    return {
        "model": fields.text("model"),
        "activate": next((flag for flag in flags if flag is not None), None),
        "truncate_to": truncate,
        "keep_end": side == "left",
        "priority": fields.integer("priority", -(2**31), 2**31 - 1) or 0,
        "cache_salt": salt or "",
        "priority_class": read_class(fields),
        "request_id": request_id,
    }


Embedded = Callable[[dict[str, Any], PoolingCall, Sequence[Input], list[bytes]], Any]
"""(head, call, inputs, their vectors) -> the answer"""

Scored = Callable[[dict[str, Any], PoolingCall, list[float], dict[str, int]], dict[str, Any]]
"""(head, call, a score for each pair, usage) -> the answer"""


def floats(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


def usage_of(inputs: Iterable[Input]) -> dict[str, int]:
    num_tokens = sum(len(tokens) for tokens, _ in inputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def embedding_body(
    head: dict[str, Any], call: PoolingCall, inputs: Sequence[Input], vectors: list[bytes]
) -> dict[str, Any]:
    shown: list[Any] = [base64.b64encode(v).decode() if call.as_base64 else floats(v) for v in vectors]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown)]
    return {**head, "object": "list", "data": data, "usage": usage_of(inputs)}


def score_body(head: dict[str, Any], call: PoolingCall, scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
    data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
    return {**head, "object": "list", "data": data, "usage": usage}


def rerank_body(head: dict[str, Any], call: PoolingCall, scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
    """Best first; of equal scores, the earlier document."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: call.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if call.with_texts:
        for result in results:
            result["document"] = {"text": call.seconds[result["index"]]}
    return {**head, "results": results, "usage": usage}
