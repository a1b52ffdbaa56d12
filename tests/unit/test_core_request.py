"""SamplingParams takes what callers naturally write, and keeps one form of it."""

from __future__ import annotations

import pytest

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import SamplingParams


def test_a_lone_stop_string_is_one_stop_not_its_characters():
    assert SamplingParams(stop="END") == SamplingParams(stop=("END",))


def test_lists_and_mappings_are_kept_as_tuples():
    given = SamplingParams(stop=["a", "b"], stop_token_ids=[1], allowed_token_ids=[2, 3], logit_bias={7: 1.0, 5: -2})
    assert given == SamplingParams(
        stop=("a", "b"), stop_token_ids=(1,), allowed_token_ids=(2, 3), logit_bias=((5, -2), (7, 1.0))
    )
    hash(given)


def test_a_mapping_of_biases_is_checked_too():
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(logit_bias={5: 101})
    assert caught.value.param == "logit_bias"


def test_none_is_an_empty_list_and_a_lone_number_is_named():
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, allowed_token_ids=None) == SamplingParams()
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "logit_bias"):
        with pytest.raises(InvalidRequest, match=f"{name} must be a list, got int") as caught:
            SamplingParams(**{name: 5})
        assert caught.value.param == name
