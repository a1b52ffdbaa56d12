"""The sampling that requests get which name none: whose word counts, and what is printed of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import byte_metadata

from tokenmill.core.errors import BadCheckpoint, ConfigError
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.node.options import TextOptions
from tokenmill.node.sampling import LLAMA_CPP, SamplingChoice, choose_sampling, read_override

CHAT = {"tokenizer.chat_template": "{{ messages }}"}


def chosen(more: dict[str, Any] | None = None, **how: Any) -> SamplingChoice:
    """Of a GGUF file with this metadata, by whatever name."""
    metadata = {**byte_metadata(), "general.architecture": "llama", **(more or {})}
    options = TextOptions(**how)
    checkpoint = Checkpoint("gguf", Path("any.gguf"), metadata, {})
    return choose_sampling(checkpoint, options.generation_config, options.override_generation_config)


def of_folder(generation: dict[str, Any]) -> SamplingChoice:
    return choose_sampling(Checkpoint("hf", Path("folder"), {}, {}, generation), "auto")


def test_a_file_that_says_nothing_is_drawn_from_as_llama_cpp_does() -> None:
    found = chosen()
    assert found.defaults == LLAMA_CPP == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert "llama.cpp" in found.describe() and "--generation-config vllm" in found.describe()


def test_a_known_model_is_known_by_what_its_file_says_of_itself() -> None:
    known = chosen({"general.basename": "SmolLM2"} | CHAT)
    assert known.defaults == {"temperature": 0.2, "top_p": 0.9}
    assert known.describe().startswith("temperature 0.2, top_p 0.9 ")
    base_model = chosen({"general.basename": "SmolLM2"})
    assert base_model.defaults == LLAMA_CPP, "a card's advice is for the chat model"


def test_the_file_has_the_last_word_and_llama_cpp_what_it_leaves_open() -> None:
    said = {"general.sampling.temp": 0.5}
    assert chosen(said).defaults == {**LLAMA_CPP, "temperature": 0.5}
    assert "rest llama.cpp" in chosen(said).reason
    known = chosen(said | CHAT | {"general.basename": "smollm2"})
    assert known.defaults == {"temperature": 0.5, "top_p": 0.9}
    xtc = {"general.sampling.xtc_probability": 0.5, "general.sampling.xtc_threshold": 0.2}
    assert chosen(xtc).defaults == {**LLAMA_CPP, "xtc_probability": 0.5, "xtc_threshold": 0.2}
    assert "xtc_probability" not in chosen(xtc | {"general.sampling.sequence": "top_k;temperature"}).defaults
    numbers = {"general.sampling.temp": 1, "general.sampling.top_k": 20.0, "general.sampling.penalty_repeat": 1.1}
    assert chosen(numbers).defaults == {**LLAMA_CPP, "temperature": 1.0, "top_k": 20, "repetition_penalty": 1.1}
    with pytest.raises(BadCheckpoint, match=r"general\.sampling\.temp"):
        chosen({"general.sampling.temp": "hot"})


def test_samplers_left_out_of_a_sequence_are_off() -> None:
    found = chosen({"general.sampling.sequence": "top_k;temperature", "general.sampling.top_p": 0.5})
    assert found.defaults == {"temperature": 0.8, "top_k": 40} and found.notes == ()
    assert chosen({"general.sampling.sequence": ""}).defaults == LLAMA_CPP


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.sampling.mirostat", 2),
        ("general.sampling.sequence", "top_p;temperature"),
        ("general.sampling.penalty_last_n", 64),
    ],
)
def test_what_a_file_recommends_and_cannot_be_done_is_said_by_name(key: str, value: Any) -> None:
    repeat = {"general.sampling.penalty_repeat": 1.1, "general.sampling.temp": 0.5}
    (note,) = chosen({key: value} | repeat).notes
    assert key in note
    assert chosen({"general.sampling.mirostat": 0}).notes == ()


def test_folders_recommend_in_generation_config() -> None:
    generation = {"temperature": 0.6, "top_k": 40, "max_new_tokens": 128, "do_sample": True, "typical_p": 0.9}
    assert of_folder(generation).defaults == {"temperature": 0.6, "top_k": 40, "max_tokens": 128, "typical_p": 0.9}
    assert of_folder(generation).notes == () and "eta_cutoff" in of_folder({"eta_cutoff": 0.1}).notes[0]
    assert of_folder({}).defaults == {} and "temperature 1 " in of_folder({}).describe()


def test_defaults_of_every_kind_are_shown() -> None:
    asked = {"dry_multiplier": 0.8, "dry_sequence_breakers": ["\n"], "typical_p": 0.9}
    shown = chosen(generation_config="vllm", override_generation_config=asked).describe()
    assert shown.startswith('dry_multiplier 0.8, dry_sequence_breakers ["\\n"], typical_p 0.9 where ')


def test_the_user_comes_first() -> None:
    assert chosen({"general.sampling.temp": 0.5}, generation_config="vllm").defaults == {}
    found = chosen(override_generation_config={"temp": 0.3, "max_new_tokens": 9})
    assert found.defaults == {**LLAMA_CPP, "temperature": 0.3, "max_tokens": 9} and "as asked" in found.describe()
    assert "9 tokens, or what is left" in found.describe_bound() and "max_tokens" not in found.describe()
    assert "4,096 tokens" in chosen().describe_bound()
    unbounded = chosen(override_generation_config={"max_tokens": -1})
    assert unbounded.defaults["max_tokens"] is None and unbounded.describe_bound().startswith("what is left")
    alone = chosen(generation_config="vllm", override_generation_config={"top_k": 5})
    assert alone.defaults == {"top_k": 5}
    with pytest.raises(ConfigError, match="one of auto, vllm"):
        chosen(generation_config="vlm")


@pytest.mark.parametrize(
    ("text", "says"),
    [("[]", "object"), ("{", "object"), ('{"temperatur": 1}', "temperature"), ('{"top_p": 2}', "top_p")],
)
def test_a_wrong_override_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read_override(text)
    assert "override" in caught.value.message and "generation" in caught.value.message
