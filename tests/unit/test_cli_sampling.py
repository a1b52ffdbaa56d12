"""The sampling that requests get which name none: whose word counts, and what is printed of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizer import byte_metadata

from tokenmill.cli.sampling import choose_sampling, describe_sampling
from tokenmill.core.errors import ConfigError
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.formats.hub import RECOMMENDED, ResolvedModel
from tokenmill.text.load import TextModel, load_text

ALIAS = ResolvedModel(Path("m.gguf"), "smollm2", "alias", RECOMMENDED["smollm2"])


def load_gguf(**more: float) -> TextModel:
    metadata = {**byte_metadata(), "general.architecture": "llama", "llama.context_length": 77, **more}
    return load_text(Checkpoint("gguf", Path("x.gguf"), metadata, {}))


def test_an_alias_brings_its_cards_recommendation_and_the_file_has_the_last_word() -> None:
    plain = choose_sampling(load_gguf(), ALIAS, "auto")
    assert plain.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    said = load_gguf(**{"general.sampling.temp": 0.5})
    assert choose_sampling(said, ALIAS, "auto").sampling_defaults == {"temperature": 0.5, "top_p": 0.9}
    assert describe_sampling(plain).startswith("temperature 0.2, top_p 0.9 ")


def test_without_recommendations_the_api_decides() -> None:
    said = load_gguf(**{"general.sampling.temp": 0.5})
    assert choose_sampling(said, ALIAS, "vllm").sampling_defaults == {}
    by_path = choose_sampling(load_gguf(), ResolvedModel(Path("m.gguf"), "m", "path"), "auto")
    assert by_path.sampling_defaults == {} and "temperature 1 " in describe_sampling(by_path)
    with pytest.raises(ConfigError, match="auto or vllm"):
        choose_sampling(said, ALIAS, "vlm")
