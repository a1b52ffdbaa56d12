"""Complaints in the caller's own words, and how long the parts of an answer took."""

from __future__ import annotations

import pytest

from scripted import make_text_model
from tokenmill.api.fields import said_as
from tokenmill.api.llama_cpp import durations
from tokenmill.core.errors import ContextTooLong, InvalidRequest
from tokenmill.core.events import Timing
from tokenmill.core.request import Request, SamplingParams
from tokenmill.text.choice import Choice

NAMES = {"max_tokens": "options.num_predict", "format.schema": "form", "format": "shape", "input[0]": "prompt"}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("max_tokens must be 1.", "options.num_predict must be 1."),
        ("format.schema and format", "form and shape"),
        ("input[0] has 5; min_max_tokens, max_tokens_x and a.format stay.", "prompt has 5; min_max_tokens, "
         "max_tokens_x and a.format stay."),
    ],
)  # fmt: skip
def test_fields_are_named_as_the_caller_named_them(said: str, told: str) -> None:
    """Whole names only, the longest first, in one pass."""
    with pytest.raises(ContextTooLong) as raised, said_as(NAMES):
        raise ContextTooLong(said, param="max_tokens")
    assert (raised.value.message, raised.value.param) == (told, "options.num_predict")


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), said_as(NAMES):
        raise KeyError("max_tokens")
    with pytest.raises(InvalidRequest, match="max_tokens"), said_as({}):
        raise InvalidRequest("max_tokens")


@pytest.mark.parametrize(
    ("timing", "parts"),
    [
        (None, (9.0, 0.0, 0.0)),
        (Timing(1.0, 2.0, -1.0, -1.0), (1.0, 8.0, 0.0)),
        (Timing(1.0, 2.0, 4.0, -1.0), (1.0, 2.0, 6.0)),
        (Timing(1.0, 2.0, 4.0, 7.0), (1.0, 2.0, 3.0)),
        (Timing(1.0, 0.5, 0.7, 0.8), (0.0, 0.0, 0.0)),
    ],
)
def test_parts_of_an_answer_follow_each_other(timing: Timing | None, parts: tuple[float, float, float]) -> None:
    """Arrival at 1, now 10: what has not happened yet counts as happening now, and nothing takes less than no time."""
    request = Request("r", (1,), SamplingParams(), 5, 0, arrival_s=1.0)
    took = durations(Choice(0, request, make_text_model().tokenizer, timing=timing), 10.0)
    assert (took.wait_s, took.prompt_s, took.output_s) == parts and took.total_s == sum(parts)
