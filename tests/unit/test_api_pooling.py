"""Bodies of embeddings, scores and rankings: a bad value is refused with its field named, a good one understood."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.api.pooling import MAX_INPUTS, parse_embedding, parse_rerank, parse_score
from tokenmill.api.rules import Rules
from tokenmill.core.errors import InvalidRequest

RULES = Rules(vocab_size=100)

BAD_COMMON: list[tuple[str, Any]] = [
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncation_side", "middle"), ("priority", "high"),
    ("cache_salt", ""), ("request_id", "a\nb"), ("normalize", 1), ("use_activation", "no"), ("model", 3),
]  # fmt: skip
BAD_EMBEDDING: list[tuple[str, Any]] = [
    ("input", None), ("input", []), ("input", ""), ("input", ["a", ""]), ("input", 5), ("input", ["a", 1]),
    ("input", [1, "a"]), ("input", [[]]), ("input", [[1], "a"]), ("input", [100]), ("input", [-1]), ("input", [1.5]),
    ("input", ["a"] * (MAX_INPUTS + 1)), ("encoding_format", "hex"), ("encoding_format", 1), ("dimensions", 0),
    ("dimensions", "8"), ("prompt_name", 3),
]  # fmt: skip
BAD_SCORE: list[tuple[str, Any]] = [
    ("text_1", None), ("text_1", []), ("text_1", [3]), ("text_2", {"text": 3}), ("text_2", None),
    ("text_1", ["a", "b", "c"]),
]  # fmt: skip
BAD_RERANK: list[tuple[str, Any]] = [
    ("query", None), ("query", ["a"]), ("documents", None), ("documents", []), ("documents", ["a", None]),
    ("documents", [{"title": "a"}]), ("top_n", 0), ("top_n", "all"), ("return_documents", "yes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_COMMON + BAD_EMBEDDING)
def test_bad_embedding_fields_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_embedding({"input": "hi"} | {name: value}, RULES)
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "value"), BAD_COMMON + BAD_SCORE)
def test_bad_score_fields_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_score({"text_1": "a", "text_2": ["b", "c"]} | {name: value}, RULES)
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "value"), BAD_COMMON + BAD_RERANK)
def test_bad_rerank_fields_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_rerank({"query": "a", "documents": ["b"]} | {name: value}, RULES)
    assert caught.value.param == name


def test_the_four_shapes_of_input() -> None:
    for given, inputs in (
        ("hi", ("hi",)),
        (["hi", "ho"], ("hi", "ho")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ):
        assert parse_embedding({"input": given}, RULES)[0].inputs == inputs


def test_an_embedding_call() -> None:
    body = {
        "input": "hi", "model": "m", "encoding_format": "base64", "dimensions": 8, "truncate_prompt_tokens": -1,
        "truncation_side": "left", "normalize": False, "priority": -1, "user": "u", "colour": "blue",
    }  # fmt: skip
    call, unknown = parse_embedding(body, RULES)
    assert (call.as_base64, call.dimensions, call.truncate_to, call.keep_end) == (True, 8, -1, True)
    assert (call.activate, call.priority, call.model, unknown) == (False, -1, "m", ["colour"])
    plain, _ = parse_embedding({"input": "hi"}, RULES)
    assert (plain.as_base64, plain.dimensions, plain.truncate_to, plain.activate) == (False, 0, None, None)


def test_one_first_text_goes_with_every_second() -> None:
    """vLLM's two names for each side; equal counts go pair by pair."""
    call, _ = parse_score({"queries": "a", "documents": ["b", "c"]}, RULES)
    assert (call.inputs, call.seconds) == (("a", "a"), ("b", "c"))
    call, _ = parse_score({"text_1": ["a", "b"], "text_2": ["c", "d"]}, RULES)
    assert (call.inputs, call.seconds) == (("a", "b"), ("c", "d"))


def test_documents_may_be_objects() -> None:
    call, _ = parse_rerank({"query": "q", "documents": ["a", {"text": "b"}], "return_documents": False}, RULES)
    assert (call.inputs, call.seconds, call.with_texts, call.top_n) == (("q", "q"), ("a", "b"), False, None)


def test_an_empty_text_of_a_pair_is_a_text() -> None:
    """A cross-encoder scores it; one empty document among many must not cost the others their scores."""
    ranking, _ = parse_rerank({"query": "q", "documents": ["a", "", {"text": ""}]}, RULES)
    assert ranking.seconds == ("a", "", "") and ranking.names == ("query", "documents")
    pairs, _ = parse_score({"text_1": "", "text_2": ["a", ""]}, RULES)
    assert (pairs.inputs, pairs.seconds, pairs.names) == (("", ""), ("a", ""), ("text_1", "text_2"))
