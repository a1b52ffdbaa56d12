"""The text side of a checkpoint: end tokens, context and chat template from both formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import DEFINED, SPECIAL, byte_metadata

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.config import config_from_checkpoint
from tokenmill.text.calls import pair_messages
from tokenmill.text.chat_template import Renderer
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.text_model import TextModel, load_text

END = byte_metadata()["tokenizer.ggml.tokens"].index(SPECIAL)
USER = [{"role": "user", "content": "x"}]


def load_gguf(**changes: Any) -> TextModel:
    metadata = {**byte_metadata(), "general.architecture": "llama", "llama.context_length": 77}
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return load_text(Checkpoint("gguf", Path("x.gguf"), metadata, {}))


def load_folder(
    folder: Path, config: dict[str, Any], generation: dict[str, Any], tokenizer_config: dict[str, Any] | None
) -> TextModel:
    (folder / "tokenizer.json").write_text(tokenizer_from_gguf(byte_metadata()).to_json())
    if tokenizer_config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return load_text(Checkpoint("hf", folder, {"max_position_embeddings": 99, **config}, {}, generation))


@pytest.mark.parametrize("config", [{"architectures": ["GPT2LMHeadModel"], "n_positions": 64}, {"model_type": "rwkv"}])
def test_a_folder_without_a_context_is_refused_by_its_architecture(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_from_gguf(byte_metadata()).to_json())
    with pytest.raises(BadCheckpoint, match=r"architecture '(GPT2LMHeadModel|rwkv)' is not supported"):
        load_text(Checkpoint("hf", tmp_path, config, {}))


def test_what_a_config_leaves_out_is_the_default_of_its_type(tmp_path: Path) -> None:
    """The context, and where no file names an end, the ends; a null is none."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_from_gguf(byte_metadata()).to_json())

    def load(**config: Any) -> TextModel:
        return load_text(Checkpoint("hf", tmp_path, {"model_type": "mistral", **config}, {}))

    assert (load().max_context, load().eos_token_ids, load().bos_token_id) == (131_072, (2,), 1)
    assert load(eos_token_id=None).eos_token_ids == ()
    assert load(eos_token_id=[3, 4]).eos_token_ids == (3, 4)


@pytest.mark.parametrize("kind", [{"model_type": "nomic_bert"}, {"architectures": ["NomicBertModel"]}])
def test_the_context_under_gpt2s_name(tmp_path: Path, kind: dict[str, Any]) -> None:
    """Of a file that has GPT-2's names, as Nomic's makers write them; another's is not read."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_from_gguf(byte_metadata()).to_json())

    def context(**config: Any) -> int:
        return load_text(Checkpoint("hf", tmp_path, {**kind, **config}, {})).max_context

    assert context(n_embd=768, n_positions=64, max_position_embeddings=32) == 64
    assert context(n_embd=768) == 1024
    assert context(n_positions=64) == 2048


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
def test_states_alone_know_no_positions(tmp_path: Path, kind: str) -> None:
    """A model without attention has a context, though no key says one; the model's side and the text's agree."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_from_gguf(byte_metadata()).to_json())
    checkpoint = Checkpoint("hf", tmp_path, {"model_type": kind}, {})
    assert load_text(checkpoint).max_context == config_from_checkpoint(checkpoint).max_context > 0


def test_gguf() -> None:
    model = load_gguf(tokenizer__chat_template="{{ bos_token }}|{{ eos_token }}")
    assert (model.eos_token_ids, model.bos_token_id, model.max_context) == ((END,), END, 77)
    assert model.chat is not None and Renderer(model.chat).render(USER).text == f"{SPECIAL}|{SPECIAL}"
    assert load_gguf().chat is None


def test_gguf_ends_at_every_end_token_it_names_or_spells() -> None:
    keys = {"tokenizer__ggml__eos_token_id": 5, "tokenizer__ggml__eot_token_id": 7, "tokenizer__ggml__eom_token_id": 9}
    assert load_gguf(**keys).eos_token_ids == (5, 7, 9, END)


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__context_length": None},
        {"llama__context_length": 0},
        {"llama__context_length": "8"},
        {"tokenizer__ggml__eot_token_id": 10**7},
    ],
)
def test_gguf_with_unusable_values(changes: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint):
        load_gguf(**changes)


def test_a_broken_template_keeps_no_model_from_loading() -> None:
    """It is compiled where that cannot hurt, when it is first needed; another may be given instead."""
    model = load_gguf(tokenizer__chat_template="{% if %}")
    assert model.chat is not None and model.chat.source == "{% if %}"
    metadata = byte_metadata() | {"general.architecture": "llama", "llama.context_length": 8}
    other = load_text(Checkpoint("gguf", Path("x.gguf"), metadata, {}), "{{ bos_token }}!")
    assert other.chat is not None and Renderer(other.chat).render(USER).text == f"{SPECIAL}!"


def test_folder(tmp_path: Path) -> None:
    generation = {"eos_token_id": [3, 4]}
    tokens = {
        "bos_token": DEFINED,
        "eos_token": {"content": SPECIAL},
        "chat_template": "{{ bos_token }}{{ eos_token }}",
    }
    model = load_folder(tmp_path, {"eos_token_id": 8}, generation, tokens)
    assert model.eos_token_ids == (3, 4, END) and model.max_context == 99
    assert model.bos_token_id == model.tokenizer.token_id(DEFINED)
    assert model.chat is not None and Renderer(model.chat).render(USER).text == DEFINED + SPECIAL


def test_folder_with_little(tmp_path: Path) -> None:
    model = load_folder(tmp_path, {"eos_token_id": 8, "bos_token_id": 2}, {}, None)
    assert (model.eos_token_ids, model.bos_token_id, model.chat) == ((8,), 2, None)


def test_folder_chat_template_files(tmp_path: Path) -> None:
    """The template file wins over the JSON file, which wins over the tokenizer's config, where one may be named."""
    named = {"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "config"}]}

    def rendered() -> str:
        chat = load_folder(tmp_path, {}, {}, named).chat
        assert chat is not None
        return Renderer(chat).render(USER).text

    assert rendered() == "config"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert rendered() == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert rendered() == "jinja"


@pytest.mark.parametrize("ends", ["x", [1, "2"], [-1], True])
def test_folder_with_unusable_end_tokens(tmp_path: Path, ends: Any) -> None:
    with pytest.raises(BadCheckpoint, match="eos_token_id"):
        load_folder(tmp_path, {}, {"eos_token_id": ends}, None)


def test_a_gguf_file_may_have_a_template_for_pairs() -> None:
    """As llama.cpp's converter writes one for Qwen3-Reranker: it comes before that for chats, and what a text spells
    of it is text."""
    template = '<|end|>"it\'s"\\n{{x}}\n<Query>: {query}\n{% <Document>: {document}<|end|>\n\n'
    text = load_gguf(**{"tokenizer.chat_template": "chat", "tokenizer.chat_template.rerank": template})
    assert text.chat is not None and text.renders_pairs and not load_gguf().renders_pairs
    for first, second in (("a", "b"), ("{document}", "{query} {{ 1 }}")):
        expected = template.replace("{query}", "\0").replace("{document}", second).replace("\0", first)
        assert Renderer(text.chat).render(pair_messages(text, first, second)).text == expected
    prompted = replace(text, prompts={"p": "find"}, default_prompt="p")
    assert pair_messages(prompted, "a", "b")[0] == {"role": "system", "content": "find"}


def test_chat_templates_of_pairs_are_told_by_their_roles() -> None:
    pairs = "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}{{ messages['document'] }}"
    assert load_gguf(**{"tokenizer.chat_template": pairs}).renders_pairs
    assert not load_gguf(**{"tokenizer.chat_template": "{{ documents }} query"}).renders_pairs
