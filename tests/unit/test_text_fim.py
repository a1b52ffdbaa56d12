"""What a checkpoint is, and how it marks the text around a gap."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripted import make_text_model
from tiny import tiny_checkpoint
from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.checkpoint import open_checkpoint, open_text
from tokenmill.formats.quantised import QuantisedTensor
from tokenmill.formats.tensor import Tensor
from tokenmill.text.fim import FimTokens, find_fim, infill
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.text_model import ModelInfo, model_info
from tokenmill.text.tokenizer import Tokenizer

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]


def tokenizer_of(*specials: str) -> Tokenizer:
    tokens = [*specials, "a", "b"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(specials) + [1] * 2,
        "tokenizer.ggml.merges": [],
    }
    return tokenizer_from_gguf(metadata)


def test_marks_are_found_by_their_spelling() -> None:
    assert find_fim(tokenizer_of(*MARKS, "<|fim_pad|>"), {}) == FimTokens(*MARKS, ends=(3, 4, 5))


def test_a_file_may_name_its_marks() -> None:
    """Under the newer keys or the older ones, whatever they are called."""
    tokenizer = tokenizer_of("<p>", "<s>", "<m>")
    named = {"tokenizer.ggml.fim_pre_token_id": 0, "tokenizer.ggml.suffix_token_id": 1}
    found = find_fim(tokenizer, named | {"tokenizer.ggml.fim_mid_token_id": 2})
    assert found == FimTokens("<p>", "<s>", "<m>")


def test_a_model_without_all_three_has_none() -> None:
    assert find_fim(tokenizer_of(*MARKS[:2], *MARKS[3:]), {}) is None
    assert make_text_model().fim is None


def test_an_infill_prompt() -> None:
    fim = FimTokens(*MARKS)
    assert infill(fim, "a", "b", prompt="c").text == "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c"


def test_other_files_come_first_where_the_model_has_marks_for_them() -> None:
    extra = [("x.py", "one"), ("y.py", "two")]
    with_marks = infill(FimTokens(*MARKS), "a", "b", extra=extra)
    assert with_marks.text == (
        "<|repo_name|>repository\n<|file_sep|>x.py\none\n<|file_sep|>y.py\ntwo\n<|file_sep|>current file\n"
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )
    assert all(piece in MARKS for piece in with_marks.pieces[1::2])
    without = infill(FimTokens(*MARKS[:3]), "a", "b", extra=extra)
    assert without.text == "one\ntwo\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"


def test_marks_that_a_text_spells_are_text() -> None:
    """A file that holds <|fim_middle|> does not end the suffix."""
    tokenizer = tokenizer_of(*MARKS)
    rendered = infill(FimTokens(*MARKS), "a<|fim_middle|>", "b")
    ids = tokenizer.encode_split(rendered.pieces)
    assert [ids.index(token) for token in (0, 1, 2)] == [0, ids.index(1), len(ids) - 1]
    assert ids.count(2) == 1


def test_what_a_checkpoint_is() -> None:
    found = model_info(tiny_checkpoint(kind="gguf"))
    assert (found.architecture, found.format, found.quantization) == ("llama", "gguf", "F32")
    assert found.size_bytes == 4 * found.num_parameters
    assert (found.width, found.num_layers) == (64, 2)
    assert model_info(tiny_checkpoint()).format == "safetensors"


def test_matrices_count_as_what_they_are_stored_as() -> None:
    """What stands side by side in one tensor counts once, and codes by the name of their form."""
    values = memoryview(bytes(3 * 4 * 2 * 2))
    both = Tensor("m.gate_up_proj", "bf16", (3, 8), values)
    halves = [
        QuantisedTensor(name, "bf16", (4, 3), values[i * 24 : i * 24 + 24], "turned", {"weight": both}, 16, first=4 * i)
        for i, name in enumerate(("m.gate_proj", "m.up_proj"))
    ]
    checkpoint = replace(tiny_checkpoint(), tensors={half.name: half for half in halves})
    found = model_info(checkpoint)
    assert (found.num_parameters, found.size_bytes, found.quantization) == (24, 48, "BF16")
    parts = {"weight": Tensor("m", "u8", (12,), values[:12]), "weight.absmax": Tensor("a", "f32", (2,), values[:8])}
    mapped = QuantisedTensor("m", "bitsandbytes nf4", (4, 6), values[:12], "mapped", parts, 4)
    found = model_info(replace(tiny_checkpoint(), tensors={"m": mapped}))
    assert (found.num_parameters, found.size_bytes, found.quantization) == (24, 20, "BITSANDBYTES NF4")


def test_the_text_of_a_model_with_pickled_weights_needs_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors are not opened; what is told of it is what its settings and files say."""
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    with pytest.raises(BadCheckpoint, match="torch is not installed"):
        open_checkpoint(tmp_path)
    found = model_info(open_text(tmp_path))
    assert (found.architecture, found.format, found.size_bytes, found.width) == ("llama", "pytorch", 1000, 64)
    assert (found.parameter_size, found.quantization) == ("", "")


def test_parameters_as_cards_write_them() -> None:
    sizes = [ModelInfo(num_parameters=n).parameter_size for n in (999, 5_000, 134_515_008, 7_615_616_512)]
    assert sizes == ["999", "5.0K", "134.5M", "7.6B"]
