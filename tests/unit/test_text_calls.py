"""A call becomes requests, the same for the server and for LLM: what fits, who shares a seed, what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from scripted import READY
from tokenmill.core.errors import ContextTooLong, InvalidRequest
from tokenmill.core.request import PoolingParams, Request, SamplingParams
from tokenmill.text.calls import NO_BOUND, TextCall, default_max_tokens, make_requests

LONGEST = READY.max_model_len


def requests_of(call: TextCall, *lengths: int) -> list[Request]:
    seeds = itertools.count(100)
    prompts = [(7,) * length for length in lengths]
    return make_requests(call, prompts, READY, root_id="r", arrival_s=2.0, new_seed=lambda: next(seeds))


@pytest.mark.parametrize(
    ("asked", "default", "min_tokens", "length", "gets"),
    [
        (9, None, 0, 10, 9),
        (None, None, 0, 10, LONGEST - 10),
        (None, 16, 0, 10, 16),
        (None, 16, 20, 10, 20),
        (None, 16, 0, LONGEST - 3, 3),
        (LONGEST - 10, None, 0, 10, LONGEST - 10),
    ],
)
def test_an_answer_is_as_long_as_asked_else_as_fits(asked, default, min_tokens, length, gets) -> None:
    sampling = SamplingParams(max_tokens=asked, min_tokens=min_tokens)
    (request,) = requests_of(TextCall(sampling=sampling, default_max_tokens=default), length)
    assert request.max_tokens == request.sampling.max_tokens == gets


@pytest.mark.parametrize(
    ("asked", "length", "kind", "param"),
    [
        (LONGEST - 9, 10, ContextTooLong, "max_new"),
        (None, LONGEST, ContextTooLong, "text"),
        (1, 0, InvalidRequest, "text"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_callers_name_for_it(asked, length, kind, param) -> None:
    call = TextCall(sampling=SamplingParams(max_tokens=asked), prompt_field="text", limit_field="max_new")
    with pytest.raises(kind) as caught:
        requests_of(call, length)
    assert caught.value.param == param and param in caught.value.message


def test_choices_of_a_prompt_share_its_seed() -> None:
    requests = requests_of(TextCall(sampling=SamplingParams(n=2), adapter="d", priority=3, cache_salt="s"), 4, 4)
    assert [(each.id, each.seed, each.choice) for each in requests] == [
        ("r-0", 100, 0), ("r-1", 100, 1), ("r-2", 101, 0), ("r-3", 101, 1),
    ]  # fmt: skip
    assert {(each.adapter, each.priority, each.cache_salt, each.arrival_s) for each in requests} == {("d", 3, "s", 2.0)}
    seeded = requests_of(TextCall(sampling=SamplingParams(seed=-1)), 4, 4)
    assert [each.seed for each in seeded] == [2**64 - 1] * 2


def test_a_model_of_vectors_writes_nothing() -> None:
    ready = replace(READY, pooling=PoolingParams("mean"))
    with pytest.raises(InvalidRequest, match="generates no text"):
        make_requests(
            TextCall(sampling=SamplingParams()), [(1,)], ready, root_id="r", arrival_s=0.0, new_seed=lambda: 1
        )


@pytest.mark.parametrize(
    ("defaults", "usual", "most"),
    [
        ({}, None, 4096), ({}, 16, 16), ({"max_tokens": 9}, None, 9), ({"max_tokens": 9}, 16, 9),
        ({"max_tokens": None}, None, None), ({"max_tokens": None}, 16, 16), ({}, NO_BOUND, NO_BOUND),
    ],
)  # fmt: skip
def test_who_says_how_long_an_answer_may_be(defaults: dict[str, int | None], usual: int | None, most: int | None):
    """The operator or the model, then the endpoint, then 4,096; None of the operator's takes only the last away."""
    assert default_max_tokens(defaults, usual) == most
