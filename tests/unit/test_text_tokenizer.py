"""The tokenizer on small vocabularies made here: special tokens, BOS and EOS, bytes, both ways of being built."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import DEFINED, SPECIAL, byte_metadata

from tokenmill.core.errors import BadCheckpoint, InvalidRequest
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.hf_tokenizer import tokenizer_from_folder
from tokenmill.text.pretokenizers import SCHEMES
from tokenmill.text.tokenizer import Tokenizer, _encode_batch

TOKENIZER = tokenizer_from_gguf(byte_metadata())


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(i) or "?" for i in ids]


def test_merges_apply_within_words() -> None:
    assert spelled(TOKENIZER, TOKENIZER.encode("hello world")) == ["hello", "Ġworld"]
    assert spelled(TOKENIZER, TOKENIZER.encode("help")) == ["he", "l", "p"]


@given(st.text(max_size=30))
def test_text_survives_the_round_trip(text: str) -> None:
    """Every byte has a token here, so any text comes back; lone surrogates come back as U+FFFD."""
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for parse_special in (True, False):
        assert TOKENIZER.decode(TOKENIZER.encode(text, parse_special=parse_special), skip_special=False) == expected


@given(st.text("<|end>tol ", max_size=20))
def test_plain_text_never_becomes_a_special_token(text: str) -> None:
    text = text + SPECIAL + text
    plain = TOKENIZER.encode(text, parse_special=False)
    assert not any(TOKENIZER.is_special(i) for i in plain)
    assert TOKENIZER.decode(plain) == text
    assert any(TOKENIZER.is_special(i) for i in TOKENIZER.encode(text))


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """Counts what another thread does meanwhile; one that keeps the interpreter lock would let it do nothing."""
    about_to, done = threading.Event(), threading.Event()

    def encode() -> None:
        about_to.set()
        TOKENIZER.encode("".join(f"hello w{n} " for n in range(50_000)))
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    about_to.wait()
    num_turns = 0
    while not done.wait(0.001):
        num_turns += 1
    thread.join()
    assert num_turns >= 5


def test_special_and_user_defined_tokens() -> None:
    """Control tokens count as special and are skipped; user-defined ones are matched always and shown."""
    end, tool = TOKENIZER.token_id(SPECIAL), TOKENIZER.token_id(DEFINED)
    assert TOKENIZER.encode(f"1{SPECIAL}{DEFINED}") == [*TOKENIZER.encode("1"), end, tool]
    assert TOKENIZER.encode(DEFINED, parse_special=False) == [tool]
    assert TOKENIZER.is_special(end) and not TOKENIZER.is_special(tool)
    assert TOKENIZER.decode([end, tool]) == DEFINED
    assert TOKENIZER.decode([end, tool], skip_special=False) == SPECIAL + DEFINED


def test_bytes_of_tokens() -> None:
    assert TOKENIZER.token_bytes(TOKENIZER.encode(" world")[0]) == b" world"
    assert b"".join(TOKENIZER.token_bytes(i) for i in TOKENIZER.encode("é\x00\n")) == "é\x00\n".encode()
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size) == b"" == TOKENIZER.token_bytes(-1)
    assert TOKENIZER.vocab_size == len(byte_metadata()["tokenizer.ggml.tokens"])


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({}, 0, 0),
        ({"add_bos_token": True}, 1, 0),
        ({"add_eos_token": True}, 0, 1),
        ({"add_bos_token": True, "add_eos_token": True}, 1, 1),
        ({"pre": "llama-bpe"}, 1, 0),
        ({"pre": "llama-bpe", "add_bos_token": False}, 0, 0),
        ({"pre": "llama-bpe", "bos_token_id": -1}, 0, 0),
    ],
)
def test_bos_and_eos(changes: dict[str, Any], before: int, after: int) -> None:
    """The file's switches decide; some pre-tokenizers begin with BOS by default."""
    tokenizer = tokenizer_from_gguf(byte_metadata(**changes))
    mark = tokenizer.token_id(SPECIAL)
    bare = tokenizer.encode("hello", add_special=False)
    assert mark not in bare
    for parse_special in (True, False):
        assert tokenizer.encode("hello", parse_special=parse_special) == [mark] * before + bare + [mark] * after


def test_a_byte_without_token_leaves_nothing_and_joins_nothing() -> None:
    """As llama.cpp has it: what stands on both sides of a missing byte does not merge across it."""
    metadata = byte_metadata()
    metadata["tokenizer.ggml.tokens"] = ["[gone]" if t == "Ĕ" else t for t in metadata["tokenizer.ggml.tokens"]]
    tokenizer = tokenizer_from_gguf(metadata)
    assert spelled(tokenizer, tokenizer.encode("!\x14!!")) == ["!", "!!"]


def test_every_scheme_builds_and_keeps_all_bytes() -> None:
    text = "I'll say:  Hello, 12345 wörld!\r\n\t漢字かな 😀\u2003x"
    for name in SCHEMES:
        tokenizer = tokenizer_from_gguf(byte_metadata(pre=name))
        assert tokenizer.decode(tokenizer.encode(text)).removeprefix(SPECIAL) == text, name


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    pieces = ["▁", "a", "b", "c", "ab", "▁a", "abc", "▁abc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{"tokenizer.ggml." + key: value for key, value in changes.items()},
    }


def test_sentencepiece_vocabulary() -> None:
    """Best score first, bytes where no piece fits, a space before the text, BOS by default."""
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata())
    assert spelled(tokenizer, tokenizer.encode("abc aé")) == ["<s>", "▁abc", "▁a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc aé")) == "abc aé"
    assert tokenizer.decode(tokenizer.encode(" a", add_special=False)) == " a"
    assert tokenizer.decode(tokenizer.encode("a"), skip_special=False) == "<s> a"
    assert tokenizer.token_bytes(tokenizer.token_id("<0xC3>") or 0) == b"\xc3"
    assert tokenizer.is_special(0) and tokenizer.is_special(1)
    bare = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert spelled(bare, bare.encode("abc a")) == ["abc", "▁a"]
    assert bare.decode(bare.encode(" a")) == " a"


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (byte_metadata(model="rwkv"), "'rwkv' is not supported"),
        (byte_metadata(model=None), "None is not supported"),
        (byte_metadata(pre="brand-new"), "'brand-new'"),
        (byte_metadata(tokens=None), "no usable tokenizer.ggml.tokens"),
        (byte_metadata(tokens=[1, 2]), "no usable tokenizer.ggml.tokens"),
        (byte_metadata(tokens=[]), "is empty"),
        (byte_metadata(tokens=["a", "a"]), "twice"),
        (byte_metadata(token_type=[1]), "token_type"),
        (byte_metadata(merges=None), "merges"),
        (byte_metadata(merges=["xx yy"]), "do not fit together"),
        (byte_metadata(merges=["x"]), "do not fit together"),
        (byte_metadata(bos_token_id=10**6, add_bos_token=True), "bos_token_id"),
        (byte_metadata(eos_token_id="x", add_eos_token=True), "eos_token_id"),
        (sentencepiece_metadata(scores=[1.0]), "scores"),
    ],
)
def test_unusable_metadata_is_refused_with_its_reason(metadata: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadCheckpoint, match=reason):
        tokenizer_from_gguf(metadata)


# ---- folders ---------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, tokenizer: Tokenizer = TOKENIZER, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_an_exported_tokenizer_reads_back_equal(tmp_path: Path) -> None:
    for index, metadata in enumerate((byte_metadata(add_bos_token=True), sentencepiece_metadata())):
        original = tokenizer_from_gguf(metadata)
        copy = tokenizer_from_folder(write_folder(tmp_path / str(index), original))
        for text in ("hello world", f"abc {SPECIAL}é\n{DEFINED}"):
            for parse_special in (True, False):
                ids = original.encode(text, parse_special=parse_special)
                assert copy.encode(text, parse_special=parse_special) == ids
                assert copy.decode(ids) == original.decode(ids)


def test_tokenizer_json_alone_decides_bos_and_eos(tmp_path: Path) -> None:
    """As in transformers: the switches of tokenizer_config.json do not count beside a tokenizer.json."""
    config = {"add_bos_token": False, "add_eos_token": True, "bos_token": SPECIAL, "eos_token": SPECIAL}
    with_bos = tokenizer_from_gguf(byte_metadata(add_bos_token=True))
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, with_bos, config))
    assert spelled(tokenizer, tokenizer.encode("12")) == [SPECIAL, "12"]


def test_tokens_listed_only_in_tokenizer_config_are_added(tmp_path: Path) -> None:
    size = TOKENIZER.vocab_size
    listed = {str(size): {"content": "<late>", "special": True}, str(size + 1): {"content": "<later>"}}
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, config={"added_tokens_decoder": listed}))
    assert tokenizer.encode("<late><later>") == [size, size + 1] and tokenizer.vocab_size == size + 2
    assert tokenizer.is_special(size) and not tokenizer.is_special(size + 1)
    with pytest.raises(BadCheckpoint, match="malformed"):
        tokenizer_from_folder(write_folder(tmp_path, config={"added_tokens_decoder": {"x": {}}}))


def test_padding_and_truncation_of_a_folder_are_off(tmp_path: Path) -> None:
    state = json.loads(TOKENIZER.to_json())
    state["truncation"] = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    state["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "!",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert spelled(tokenizer_from_folder(tmp_path), tokenizer_from_folder(tmp_path).encode("abcd")) == list("abcd")


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match="not a tokenizer"):
        tokenizer_from_folder(tmp_path)
    state = json.loads(TOKENIZER.to_json())
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {**state, "decoder": {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}}
        )
    )
    with pytest.raises(BadCheckpoint, match="CTC"):
        tokenizer_from_folder(tmp_path)


def pair_folder(folder: Path) -> Path:
    """A WordPiece vocabulary with BERT's marks around and between texts."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh", "##s"]
    marks = {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}, {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]}

    def mark(name: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    def text(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    one = [mark("[CLS]", 0), text("A", 0), mark("[SEP]", 0)]
    state = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "added_tokens": [
            {"id": i, "content": words[i], "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
            for i in range(4)
        ],
        "post_processor": {
            "type": "TemplateProcessing", "single": one, "pair": [*one, text("B", 1), mark("[SEP]", 1)],
            "special_tokens": {each["id"]: each for each in marks},
        },
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {word: place for place, word in enumerate(words)},
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


def test_word_pieces_decode_to_words(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(pair_folder(tmp_path))
    assert tokenizer.decode(tokenizer.encode("as b cs")) == "as b cs"


def test_an_empty_text_of_a_pair_has_its_type(tmp_path: Path) -> None:
    """The mark behind a second text is of the second type even where nothing stands before it."""
    tokenizer = tokenizer_from_folder(pair_folder(tmp_path))
    for text, second in (("a", 3), ("", 2)):
        assert tokenizer.encode_inputs([text], [""])[0][1] == second
        assert tokenizer.encode_inputs([text], [""], max_tokens=9)[0][1] == second


def test_inputs_and_pairs_are_cut_within_their_texts(tmp_path: Path) -> None:
    """What is around and between stays, the longer text gives way first, and the second text's place is told."""
    tokenizer = tokenizer_from_folder(pair_folder(tmp_path))

    def words(ids: list[int]) -> str:
        return "".join({2: "<", 3: ">"}.get(i) or (tokenizer.token_text(i) or "?") for i in ids)

    (whole,) = tokenizer.encode_inputs(["a b c d e"])
    assert (words(whole[0]), whole[1]) == ("<abcde>", 0)
    for keep_end, kept in ((False, "<ab>"), (True, "<de>")):
        ((ids, _),) = tokenizer.encode_inputs(["a b c d e"], max_tokens=4, keep_end=keep_end)
        assert words(ids) == kept
    pairs = tokenizer.encode_inputs(["a", "a b c d e", "a b c"], ["a b c d e", "f", "f g h"], max_tokens=7)
    assert [(words(ids), place) for ids, place in pairs] == [("<a>abc>", 3), ("<abc>f>", 5), ("<ab>fg>", 4)]


def test_a_word_too_long_for_the_library_is_an_error_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gives up with what is no Exception: a thread or a server must not end by it."""

    class PanicException(BaseException):
        pass

    class Backend:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[object]:
            raise PanicException("fail to memory allocation")

    with pytest.raises(InvalidRequest, match="millions of characters"):
        _encode_batch(Backend(), ["a"], False)  # type: ignore[arg-type]
