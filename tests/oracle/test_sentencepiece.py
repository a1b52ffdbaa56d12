"""Our tokens against the sentencepiece library's and transformers', on small vocabularies that are trained here.

BPE and unigrams, as a GGUF file holds them; byte-level BPE under the pre-tokenizers that transformers has classes of
its own for. The texts are paragraphs of an encyclopedia in twelve languages where they are beside the checkout, and
those of the tokenizer goldens.
"""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import PUBLIC_TEXT, TEXTS, check_transformers, transformers_tokenizer

from tokenmill.text.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, tokenizer_from_gguf
from tokenmill.text.hf_tokenizer import tokenizer_from_folder
from tokenmill.text.tokenizer import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")

OWN = [text for text in TEXTS if "\0" not in text]
"""The library ends a text at a NUL."""
TOOL = "<tool>"
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS = {
    "bpe": {"model_type": "bpe", "split_digits": True, **IDENTITY},
    "bpe without a space before": {"model_type": "bpe", "add_dummy_prefix": False, **IDENTITY},
    "unigram": {"model_type": "unigram"},
    "unigram, text as it is": {"model_type": "unigram", **IDENTITY},
    "unigram without bytes": {"model_type": "unigram", "byte_fallback": False},
}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    if not PUBLIC_TEXT.is_file():
        return OWN
    with gzip.open(PUBLIC_TEXT, "rt", encoding="utf-8") as file:
        return OWN + [json.loads(line)["context"] for line in file]


def train(texts: list[str], **options: Any) -> bytes:
    """A small model, of an eighth of the public texts."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[::8] if len(texts) > 800 else texts),
        model_writer=out,
        minloglevel=2,
        hard_vocab_limit=False,
        **{"vocab_size": 3000, "byte_fallback": True, "character_coverage": 0.995, **options},
        user_defined_symbols=[TOOL],
    )
    return out.getvalue()


def metadata_of(proto: bytes) -> dict[str, Any]:
    """The model as llama.cpp's converter writes it."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(proto)
    types = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 6: BYTE}
    return {
        "tokenizer.ggml.model": "t5" if model.trainer_spec.model_type == 1 else "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in model.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in model.pieces],
        "tokenizer.ggml.token_type": [types[piece.type] for piece in model.pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": model.normalizer_spec.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": model.normalizer_spec.remove_extra_whitespaces,
        "tokenizer.ggml.precompiled_charsmap": list(model.normalizer_spec.precompiled_charsmap),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_sentencepiece_library(kind: str, texts: list[str]) -> None:
    proto = train(texts, **KINDS[kind])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=proto)
    ours = tokenizer_from_gguf(metadata_of(proto))
    for text, expected in zip(texts, theirs.encode(texts), strict=True):
        if "combining" in text and "normalization_rule_name" not in KINDS[kind]:
            continue  # marks piled on one letter: the tokenizers library normalises by letters, sentencepiece by marks
        assert ours.encode(text, add_special=False, parse_special=False) == expected, repr(text)
        if "<" not in text:
            assert ours.encode(text, add_special=False) == expected, repr(text)
    assert ours.encode("a</s>b", add_special=False)[-2] == 2 and theirs.piece_to_id("</s>") == 2
    ids = ours.encode("a")
    assert (ids[0] == 1, ids[-1] == 2) == ((False, True) if "unigram" in kind else (True, False))


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_tokens_name_stays_text_where_it_is_to(kind: str, texts: list[str]) -> None:
    """Also where the model chooses among all pieces that match, as unigrams do; ordinary added tokens are found."""
    ours = tokenizer_from_gguf(metadata_of(train(texts[:200], **KINDS[kind])))
    tool = ours.token_id(TOOL)
    for text in ("</s>", "a<s>b", "<s></s> </s>", "<unk>"):
        plain = ours.encode(text, add_special=False, parse_special=False)
        assert not any(map(ours.is_special, plain)) or "without bytes" in kind, text
        assert not {1, 2} & set(plain), text
        assert tool in ours.encode(text + TOOL, add_special=False, parse_special=False)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_agrees_on_the_exported_tokenizer(kind: str, texts: list[str], tmp_path: Path) -> None:
    """As a folder's tokenizer.json, read by both; in the folder too a special token's name can stay text."""
    ours = tokenizer_from_gguf(metadata_of(train(texts, **KINDS[kind])))
    (tmp_path / "tokenizer.json").write_text(ours.to_json())
    folder = tokenizer_from_folder(tmp_path)
    check_transformers(folder, transformers_tokenizer(tmp_path))
    for text in (*OWN, "a</s>b", "<s>"):
        plain = folder.encode(text, add_special=False, parse_special=False)
        assert plain == ours.encode(text, add_special=False, parse_special=False), repr(text)


def byte_level(texts: list[str], pre_tokenizer: Any) -> tuple[dict[str, int], list[str]]:
    """(vocabulary, merges) of a byte-level BPE."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts[::8], trainer)
    state = json.loads(backend.to_str())["model"]
    return state["vocab"], [" ".join(merge) for merge in state["merges"]]


@pytest.mark.parametrize(("name", "scheme"), [("GPT2", "gpt-2"), ("Qwen2", "qwen2"), ("Qwen3_5", "qwen35")])
def test_equals_transformers_own_pre_tokenizers(name: str, scheme: str, texts: list[str]) -> None:
    """On text that is composed (NFC): Qwen's own tokenizer composes it first, which a GGUF file cannot say."""
    import unicodedata

    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, f"{name}Tokenizer", None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}Tokenizer")
    vocab, merges = byte_level(texts, kind(vocab={}, merges=[]).backend_tokenizer.pre_tokenizer)
    theirs = kind(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    ours: Tokenizer = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": scheme,
            "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
            "tokenizer.ggml.merges": merges,
        }
    )
    for text in (unicodedata.normalize("NFC", text) for text in texts):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True), repr(text)
