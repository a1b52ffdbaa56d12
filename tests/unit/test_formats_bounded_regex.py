"""Regular expressions of adapters: the answers of Python's own engine, and an end to every one."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.formats.bounded_regex import BadPattern, matches_tail

NAMES = (
    "model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.k_proj", "model.layers.7.mlp.down_proj", "lm_head",
    "model.text_model.layers.3.mlp.up_proj", "q_proj", "",
)  # fmt: skip
PATTERNS = (
    "q_proj", "layers.0.self_attn.q_proj", r"^model\.layers\.0\.self_attn\.q_proj", "^layers.*", r".*\.layers\.\d+\..*",
    r"model\.layers\.(0|7|[1-3][0-9])\..*_proj", "(q|k|v)_proj$", r"layers\.\d{1,2}\.mlp\.(?:up|down)_proj", "[^.]*",
    r"layers\.([0-9]|1[0-9])\.self_attn\.[qk]_proj", "q_proj|lm_head", r"(.+\.)?.*head", r"\w+_proj", "",
    r"[\w.]+?\.q_proj", r"(layers|text_model)\..*", r"la{1}yers\.\d{2,}\..*", r"(([a-z_]+|\d+)\.)*q_proj", r"\S+",
    r"[]a-z_.0-9]+",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_answers_of_pythons_own_engine(pattern: str) -> None:
    """As PEFT asks it."""
    for name in NAMES:
        expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
        assert matches_tail(pattern, name) == expected, name


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@given(st.text("ab.|()*+?[]{2,}", max_size=9), st.text("ab.", max_size=6))
def test_random_patterns(pattern: str, name: str) -> None:
    """What is understood here means what it means there."""
    try:
        found = matches_tail(pattern, name)
    except BadPattern:
        return
    assert found == (re.match(rf"(.*\.)?({pattern})$", name) is not None)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*" * 50, "((a{50}){50}){50}", "(.*)*(.*)*(.*)*b", "(a?){100}" * 20]
)
def test_every_pattern_ends(pattern: str) -> None:
    began_s = time.perf_counter()
    try:
        matches_tail(pattern, "a" * 300)
    except BadPattern as error:
        assert "too long" in str(error)
    assert time.perf_counter() - began_s < 30


@pytest.mark.parametrize(
    "pattern", ["(", "a)", "[a", "*a", "a**", r"\1", r"(?=a)", "(?P<x>a)", "a{101}", "a{3,2}", "\\", "[b-a]"]
)
def test_what_is_not_understood_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern):
        matches_tail(pattern, "a")
