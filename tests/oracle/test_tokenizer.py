"""Our tokens against llama.cpp's (goldens, on the same GGUF vocabulary) and transformers' (live).

llama.cpp and transformers differ from each other in three corners, found by comparing them on random text:

- A byte that is no token (SmolLM2 lacks 21 of them, among them 0x04, 0x06, 0x13, 0x14, 0x16 and 0x1D) is dropped by
  both; a tokenizer.json as published then lets its neighbours merge, llama.cpp does not. From a GGUF file we do as
  llama.cpp does, and the tokenizer.json we export says so, so that transformers agrees on it too.
- Letters and numbers newer than a library's Unicode tables are symbols to it (llama.cpp's tables are the newest here).
- llama.cpp stands in its own expressions for a few of the models': cased letters outside ASCII (gpt-4o, tekken) and
  unusual spaces (deepseek-coder). We use the models' own, as transformers does.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tokenmill.formats.gguf import GGUFFile
from tokenmill.formats.hub import cached_path
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.hf_tokenizer import tokenizer_from_folder
from tokenmill.text.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
PUBLIC_TEXT = HERE.parents[2] / "shared" / "data" / "text" / "xquad.jsonl.gz"
GOLDENS: dict[str, Any] = json.loads(gzip.decompress((HERE / "tokenizer_goldens.json.gz").read_bytes()))
TEXTS: list[str] = GOLDENS["texts"]


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    path = cached_path("smollm2")
    if path is None:
        pytest.skip("the default model is not in the cache (tokenmill pull smollm2)")
    return GGUFFile.open(path).metadata


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(metadata)


def check(tokenizer: Tokenizer, expected: list[list[int]], *, parse_special: bool = True) -> None:
    for text, ids in zip(TEXTS, expected, strict=True):
        assert tokenizer.encode(text, add_special=False, parse_special=parse_special) == ids, repr(text)


def test_equals_llama_cpp_on_our_texts(tokenizer: Tokenizer) -> None:
    """Many scripts, emoji, code, spaces, digits, control characters; special tokens read and not read."""
    check(tokenizer, GOLDENS["parsed"])
    check(tokenizer, GOLDENS["plain"], parse_special=False)
    assert GOLDENS["parsed"] != GOLDENS["plain"]


@pytest.mark.parametrize("name", GOLDENS["schemes"])
def test_equals_llama_cpp_with_every_pre_tokenizer(metadata: dict[str, Any], name: str) -> None:
    """The same vocabulary in a file that names another pre-tokenizer."""
    expected = GOLDENS["schemes"][name]
    check(tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": name}), expected)
    assert expected != GOLDENS["parsed"], f"our texts do not tell {name} from the model's own pre-tokenizer"


def test_equals_llama_cpp_on_a_sentencepiece_vocabulary() -> None:
    golden = GOLDENS["sentencepiece"]
    check(tokenizer_from_gguf(golden["metadata"]), golden["ids"])


def test_equals_llama_cpp_on_public_texts(tokenizer: Tokenizer) -> None:
    """1,440 encyclopedia paragraphs in twelve languages, by the digest of each paragraph's tokens."""
    if not PUBLIC_TEXT.is_file():
        pytest.skip("the public texts are not here")
    assert GOLDENS["public"]
    with gzip.open(PUBLIC_TEXT, "rt", encoding="utf-8") as file:
        for number, (line, expected) in enumerate(zip(file, GOLDENS["public"], strict=True)):
            ids = tokenizer.encode(json.loads(line)["context"], add_special=False, parse_special=False)
            got = hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()[:16]
            assert got == expected, f"paragraph {number}"


def test_decoding_gives_the_text_back(tokenizer: Tokenizer) -> None:
    """But for bytes the vocabulary lacks."""
    for text in TEXTS:
        if not set(text.encode()) & {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}:
            assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def transformers_tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def check_transformers(ours: Tokenizer, theirs: Any) -> None:
    """Equal ids, and equal text."""
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), repr(text)
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False), repr(text)
        for skip in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special=skip) == decoded, repr(text)


def test_transformers_agrees_on_the_exported_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    check_transformers(tokenizer, transformers_tokenizer(tmp_path))


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "metaspace"])
def test_transformers_agrees_on_folders(kind: str, tmp_path: Path) -> None:
    """Small tokenizers trained on our texts, saved as folders with BOS, EOS, special and ordinary added tokens."""
    pytest.importorskip("transformers")
    from tokenizers.processors import TemplateProcessing

    backend = train(kind)
    end = {"__type": "AddedToken", "content": "</s>", "special": True}
    config = {"bos_token": "<s>", "eos_token": end, "add_bos_token": True}
    late = {str(backend.get_vocab_size()): {"content": "<late>", "special": True}}
    for template, added in (("$A", {}), ("<s> $A", config), ("$A </s>", {**config, "added_tokens_decoder": late})):
        backend.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
        backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
        ours, theirs = tokenizer_from_folder(tmp_path), transformers_tokenizer(tmp_path)
        check_transformers(ours, theirs)
        for text in ("a<s>b</s>", "x <tool> y<s>", "<late>r"):
            assert ours.encode(text) == theirs.encode(text)
            plain = ours.encode(text, add_special=False, parse_special=False)
            assert plain == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)


def train(kind: str) -> Any:
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    special = ["<unk>", "<s>", "</s>"]
    if kind == "byte-level":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    else:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        if kind == "metaspace":
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(steps)
        trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, limit_alphabet=200, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    backend = Backend.from_str(json.dumps(state))
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return backend
