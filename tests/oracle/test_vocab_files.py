"""Folders without a tokenizer.json give the tokens of transformers' own conversion of the same files.

Small vocabularies are trained here, on the texts of the tokenizer goldens and on an encyclopedia in twelve languages
where it is beside the checkout. Texts that begin with a space are left out where transformers drops it and the
vocabulary's own library does not.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from test_sentencepiece import OWN, byte_level, texts, train

from tokenmill.core.errors import BadCheckpoint
from tokenmill.sandbox.child import file_stamp
from tokenmill.text.hf_tokenizer import read_tokenizer_config, tokenizer_from_folder
from tokenmill.text.pretokenizers import ALPHABET, SCHEMES
from tokenmill.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")
__all__ = ["texts"]

AS_IT_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LATE, END = "<|late|>", "<|endoftext|>"
LISTED = {"3001": {"content": LATE, "special": True, "normalized": False}}
SPECIAL = "<s>a</s>b<unk>c"


def write(folder: Path, model_type: str, files: dict[str, bytes], config: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def check(ours: Tokenizer, theirs: Any, texts: list[str], **options: bool) -> None:
    for text in texts:
        assert ours.encode(text, **options) == theirs.encode(
            text, add_special_tokens=options.get("add_special", True)
        ), repr(text)


def merges_of(texts: list[str]) -> dict[str, bytes]:
    from tokenizers import pre_tokenizers

    vocab, merges = byte_level(texts, pre_tokenizers.ByteLevel(add_prefix_space=False))
    vocab[END] = len(vocab)
    return {
        "vocab.json": json.dumps(vocab).encode(),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
    }


def ranks_of(texts: list[str]) -> list[bytes]:
    """Byte strings by rank, as trainers of rank vocabularies give them: bytes first, then in the order of merging."""
    from tokenizers import pre_tokenizers

    vocab, _ = byte_level(texts, pre_tokenizers.ByteLevel(add_prefix_space=False))
    in_order = sorted(vocab, key=lambda text: (len(text) > 1, vocab[text]))
    return [bytes(ALPHABET[char] for char in text) for text in in_order]


def tiktoken_file(ranks: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(text) + b" %d\n" % rank for rank, text in enumerate(ranks))


@pytest.fixture(scope="module")
def bpe(texts: list[str]) -> bytes:
    return train(texts, model_type="bpe", split_digits=True, **AS_IT_IS)


@pytest.mark.parametrize("legacy", [None, True, False])
def test_llama(legacy: bool | None, bpe: bytes, texts: list[str], tmp_path: Path) -> None:
    """A space is put before the text; with `legacy` before what follows a special token, too."""
    late = {"3000": {"content": LATE, "special": True, "normalized": False}}
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "added_tokens_decoder": late}
    if legacy is not None:
        config["legacy"] = legacy
    folder = write(tmp_path, "llama", {"tokenizer.model": bpe}, config)
    ours, theirs = tokenizer_from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    check(ours, theirs, [text for text in [*texts, SPECIAL, f"a{LATE}b"] if not text.startswith(" ")])
    assert ours.decode(ours.encode("a b")) == "a b" == theirs.decode(ours.encode("a b"), skip_special_tokens=True)
    assert len({ours.encode("a</s>b")[-1] == ours.encode("b")[-1], bool(legacy)}) == 1
    plain = ours.encode(SPECIAL, add_special=False, parse_special=False)
    assert not any(map(ours.is_special, plain))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_file_gives_the_librarys_tokens(kind: str, texts: list[str], tmp_path: Path) -> None:
    proto = train(texts, model_type=kind, **AS_IT_IS)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=proto)
    ours = tokenizer_from_folder(write(tmp_path, "llama", {"tokenizer.model": proto}))
    for text, expected in zip(texts, theirs.encode(texts), strict=True):
        if "<" not in text:
            assert ours.encode(text) == [1, *expected], repr(text)


@pytest.mark.parametrize("model_type", ["xlm-roberta", "camembert"])
def test_a_sentencepiece_file_with_ids_of_fairseq(model_type: str, texts: list[str], tmp_path: Path) -> None:
    """Pieces stand behind fairseq's own tokens, one place on, and <mask> behind all; pairs have two </s> between."""
    proto = train(texts, model_type="unigram", byte_fallback=False)
    folder = write(tmp_path, model_type, {"sentencepiece.bpe.model": proto})
    ours, theirs = tokenizer_from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    check(ours, theirs, [*texts, SPECIAL, "a<mask>b", "a  b\t\u3000c ", " a", "\ufb01 \u2460"])
    assert ours.encode_inputs(["a b"], ["c"])[0][0] == theirs("a b", "c").input_ids
    assert ours.vocab_size == len(theirs) == 3000 + (2 if model_type == "xlm-roberta" else 5)
    assert ours.decode(ours.encode("a b")) == theirs.decode(ours.encode("a b"), skip_special_tokens=True)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=proto)
    first = 1 if model_type == "xlm-roberta" else 4
    for text in texts:
        expected = [3 if piece == 0 else piece + first for piece in pieces.encode(text)]
        if text.isascii() and "<" not in text:  # others transformers normalises and cuts apart in its own way
            assert ours.encode(text, add_special=False) == expected, repr(text)


def test_other_sentencepiece_files_are_refused_under_that_name(bpe: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path, "xlm-roberta", {"sentencepiece.bpe.model": bpe})
    with pytest.raises(BadCheckpoint, match="no model of unigrams"):
        tokenizer_from_folder(folder)
    write(folder, "llama", {})
    with pytest.raises(BadCheckpoint, match="XLMRobertaTokenizer, CamembertTokenizer"):
        tokenizer_from_folder(folder)


def test_gemma(texts: list[str], tmp_path: Path) -> None:
    """No space before the text, and BOS around it by what the class means."""
    names = {"bos_piece": "<bos>", "eos_piece": "<eos>", "pad_piece": "<pad>", "pad_id": 0, "eos_id": 1, "bos_id": 2}
    proto = train(texts, model_type="bpe", add_dummy_prefix=False, unk_id=3, **names, **AS_IT_IS)
    config = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}
    folder = write(tmp_path, "gemma", {"tokenizer.model": proto}, config)
    ours, theirs = tokenizer_from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    check(ours, theirs, [*texts, "a<eos> b"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GemmaTokenizer"}))
    assert tokenizer_from_folder(folder).encode("a")[0] == 2
    assert read_tokenizer_config(folder)["bos_token"] == "<bos>"


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("qwen3", None),
        ("qwen2", {"tokenizer_class": "Qwen2Tokenizer", "eos_token": LATE, "added_tokens_decoder": LISTED}),
        ("starcoder2", {"tokenizer_class": "GPT2TokenizerFast"}),
        ("roberta", None),
    ],
)
def test_vocab_and_merges(model_type: str, config: Any, texts: list[str], tmp_path: Path) -> None:
    files = merges_of(texts)
    vocab = json.loads(files["vocab.json"])
    for text in ("<s>", "<pad>", "</s>", "<unk>", "<mask>") if model_type == "roberta" else ():
        vocab[text] = len(vocab)
    folder = write(tmp_path, model_type, {**files, "vocab.json": json.dumps(vocab).encode()}, config)
    ours, theirs = tokenizer_from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    check(ours, theirs, [*texts, SPECIAL, f"a{LATE}b", "e\u0301"])
    if model_type == "roberta":
        assert ours.encode_inputs(["a b"], ["c"])[0][0] == theirs("a b", "c").input_ids


@pytest.mark.parametrize("lower", [None, True, False])
def test_vocab_txt(lower: bool | None, texts: list[str], tmp_path: Path) -> None:
    chars = sorted({char for text in texts for char in text if not char.isspace()})
    words = sorted({word for text in texts[:300] for word in text.lower().split() if word.isalnum()})
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *chars, *words, *(f"##{char}" for char in chars)]
    files = {"vocab.txt": "\n".join([*dict.fromkeys(vocab), ""]).encode()}
    folder = write(tmp_path, "bert", files, None if lower is None else {"do_lower_case": lower})
    ours, theirs = tokenizer_from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    check(ours, theirs, [*texts, "Ab[SEP] c"])
    ids, second = ours.encode_inputs(["Ab cd"], ["Ef"])[0]
    expected = theirs("Ab cd", "Ef")
    assert ids == expected.input_ids and second == expected.token_type_ids.index(1)


@pytest.fixture
def reads_ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' converter, with the tiktoken package's reader of a file written anew."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    def read(path: str) -> dict[bytes, int]:
        lines = (line.split() for line in Path(path).read_bytes().splitlines())
        return {base64.b64decode(text): int(rank) for text, rank in lines}

    monkeypatch.setattr(TikTokenConverter, "load_tiktoken_bpe", staticmethod(read))
    return TikTokenConverter


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model"])
def test_ranks(name: str, reads_ranks: Any, texts: list[str], tmp_path: Path) -> None:
    """Kimi's, and such a file under the other name; ids between listed tokens are reserved ones."""
    ranks = ranks_of(texts)
    first = len(ranks)
    marks = {first: "[BOS]", first + 3: "[EOS]"}
    listed = {str(number): {"content": text, "special": True} for number, text in marks.items()}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": listed,
    }
    folder = write(tmp_path, "kimi_k2", {name: tiktoken_file(ranks)}, config)
    ours = tokenizer_from_folder(folder)
    between = [f"<|reserved_token_{first + 1}|>", f"<|reserved_token_{first + 2}|>"]
    (pattern,) = SCHEMES["kimi-k2"].steps
    converter = reads_ranks(folder / name, pattern, extra_special_tokens=["[BOS]", *between, "[EOS]"])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=converter.converted())
    check(ours, theirs, [*texts, f"a[EOS]{between[0]}b"])
    assert ours.encode("[EOS]") == [first + 3]
    parts = [ours.token_text(token) for token in ours.encode("今天 is fine, 你好World123456")]
    assert max(len(part or "") for part in parts) < 20 and ours.decode(ours.encode("你好World")) == "你好World"


def test_ranks_of_llama3(reads_ranks: Any, texts: list[str], tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        "llama",
        {"tokenizer.model": tiktoken_file(ranks_of(texts))},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
    )
    check(tokenizer_from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder), texts)


@pytest.mark.parametrize("lists", [True, False])
def test_tekken(lists: bool, texts: list[str], tmp_path: Path) -> None:
    """Special tokens come first, then byte strings as many as the file says count; BOS goes before a text."""
    ranks = ranks_of(texts)
    (pattern,) = SCHEMES["tekken"].steps
    special = ["<unk>", "<s>", "</s>", "[INST]"] if lists else []
    file: dict[str, Any] = {
        "config": {"pattern": pattern, "default_vocab_size": len(ranks) + 90, "default_num_special_tokens": 100},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(text).decode()} for rank, text in enumerate(ranks)],
    }
    if lists:
        file["special_tokens"] = [{"rank": rank, "token_str": text} for rank, text in enumerate(special)]
    folder = write(tmp_path, "mistral", {"tekken.json": json.dumps(file).encode()})
    ours = tokenizer_from_folder(folder)
    assert ours.vocab_size == len(ranks) + 90 and ours.encode("[INST]") == [1, 3]
    assert read_tokenizer_config(folder)["eos_token"] == "</s>"
    if lists:
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        check(ours, theirs, [*texts, "a[INST] <SPECIAL_7>b"], add_special=False)


def test_tokens_that_only_older_files_list(texts: list[str], tmp_path: Path) -> None:
    files = {
        **merges_of(texts),
        "added_tokens.json": json.dumps({LATE: 3001, "<|other|>": 3002}).encode(),
        "special_tokens_map.json": json.dumps({"additional_special_tokens": [LATE]}).encode(),
    }
    folder = write(tmp_path, "qwen2", files, {"tokenizer_class": "Qwen2Tokenizer", "eos_token": LATE})
    ours, theirs = tokenizer_from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    check(ours, theirs, [*OWN, f"a{LATE}b<|other|>c"])
    assert ours.is_special(3001) and not ours.is_special(3002)


def test_what_cannot_be_known_is_refused(texts: list[str], bpe: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path, "llama", merges_of(OWN), {"tokenizer_class": "OwnTokenizer"})
    with pytest.raises(BadCheckpoint, match="class 'OwnTokenizer' cuts text"):
        tokenizer_from_folder(folder)
    for damaged in (bpe[: len(bpe) // 2], b"\x00" * 40, b"", b"aGk= x\n", b"YQ== 0\nYQ= 1\n"):
        (folder / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(BadCheckpoint, match=r"tokenizer\.model"):
            tokenizer_from_folder(folder)
    for damaged in (b"{}", b'{"config": {"pattern": "("}, "vocab": [], "special_tokens": []}', b'{"config": 3}'):
        (folder / "tekken.json").write_bytes(damaged)
        with pytest.raises(BadCheckpoint, match=r"tekken\.json"):
            tokenizer_from_folder(folder)


def test_the_sandbox_notices_another_vocabulary(bpe: bytes, tmp_path: Path) -> None:
    """The stamp is of the file that has the tokenizer, whichever it is."""
    folder = write(tmp_path, "llama", {"tokenizer.model": bpe})
    assert file_stamp(str(folder))[0] == len(bpe)
