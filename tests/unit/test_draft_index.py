"""Indices of corpora: what is read of files, the order of contexts, the file, and what is wrong with one."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from random_models import Shape, write_gguf_model
from tokenmill import LLM, SamplingParams
from tokenmill.cli.main import main
from tokenmill.core.errors import ConfigError
from tokenmill.draft import texts as draft_texts
from tokenmill.draft.index import build_index
from tokenmill.draft.texts import read_texts
from tokenmill.formats.corpus_index import DATA_OFFSET, END, CorpusIndex, open_corpus
from tokenmill.ops import contexts
from tokenmill.ops.contexts import followed_places, sort_contexts
from tokenmill.text.text_model import fetch_text
from tokenmill.text.tokenizer import Tokenizer

SMALL = {"width": 64, "heads": 2, "kv_heads": 2, "head": 32, "rope": 32, "value": 32, "experts": 0, "dense_ffn": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_gguf_model(path, Shape("qwen3", layers=1, context=64, **SMALL), "q8_0")
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return fetch_text(str(model)).tokenizer


def build(tokenizer: Tokenizer, folder: Path, *texts: str, name: str = "corpus") -> CorpusIndex:
    path = folder / name
    build_index(tokenizer, [[text] for text in texts], path)
    return open_corpus(path, tokenizer.digest())


def joined(paths: list[Path], template: str = "{text}") -> list[str]:
    return ["".join(pieces) for pieces in read_texts(paths, template)]


@pytest.mark.parametrize("seed", range(10))
def test_places_are_in_the_order_of_what_is_before_them(seed, monkeypatch):
    """As sorted() has them, the last token first, within their texts and to the depth that counts; then by place."""
    rng = random.Random(seed)
    depth = rng.choice((2, 4, 16, 256))
    monkeypatch.setattr(contexts, "DEPTH", depth)
    tokens = [END]
    for _ in range(rng.randint(1, 12)):
        tokens += [rng.randrange(rng.choice((1, 2, 9))) for _ in range(rng.randint(1, 60))] + [END]
    if seed % 2:
        tokens[1:1] = tokens[1:-1]  # every context twice
    found = np.array(tokens, np.int32)

    def context(place: int) -> list[int]:
        begin = max(at for at in range(place) if tokens[at] == END)
        return tokens[place:begin:-1][:depth]

    expected = [at for at in range(len(tokens) - 1) if tokens[at] >= 0 and tokens[at + 1] >= 0]
    assert list(followed_places(found)) == expected
    expected.sort(key=lambda place: (context(place), place))
    assert list(sort_contexts(found, followed_places(found))) == expected


def test_an_index_has_the_tokens_of_its_texts(tokenizer, tmp_path):
    """Special tokens that are spelled out are text, an empty text is none, and equal texts make equal files."""
    texts = ["one two one two", "", "<s>three</s>"]
    index = build(tokenizer, tmp_path, *texts)
    expected = []
    for text in (texts[0], texts[2]):
        expected += [END, *tokenizer.encode(text, add_special=False, parse_special=False)]
    assert list(index.tokens) == [*expected, END]
    assert sorted(index.places) == list(followed_places(index.tokens))
    assert (index.header.num_texts, index.header.vocab_size) == (2, tokenizer.vocab_size)
    build(tokenizer, tmp_path, *texts, name="again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "corpus").read_bytes()
    assert (tmp_path / "corpus").stat().st_mode & 0o777 == 0o600


def test_texts_come_from_files_folders_and_rows(tmp_path, monkeypatch):
    """Packed ones too; in a folder, what is no text and what is hidden is passed over; long files come in pieces."""
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, content in {
        "b.py": b"b\n", "inner/a.py": b"\xffa", ".git/c": b"hidden", ".hidden": b"hidden", "picture": b"P\0NG",
        "broken.gz": b"no gzip",
    }.items():  # fmt: skip
        (folder / name).write_bytes(content)
    (folder / "d.txt.gz").write_bytes(gzip.compress(b"packed"))
    rows = [{"text": "row one", "more": ["x", "y"]}, {"text": "row two", "more": ["z"]}]
    lines = tmp_path / "rows.jsonl.gz"
    lines.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    assert joined([folder, lines]) == ["b\n", "packed", "\ufffda", "row one", "row two"]
    assert joined([lines], "{more[0]}\\n{text}") == ["x\nrow one", "z\nrow two"]
    monkeypatch.setattr(draft_texts, "PIECE_CHARS", 10)
    long = tmp_path / "long.txt"
    long.write_text("".join(f"line {number}\n" for number in range(9)))
    (pieces,) = read_texts([long], "")
    assert len(found := list(pieces)) > 3 and "".join(found) == long.read_text()


def test_texts_that_cannot_be_read_are_named(tmp_path):
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"body": "x"}\n')
    for path, error in ((lines, "Its fields: body"), (tmp_path / "none.txt", "none.txt cannot be read: No such file")):
        with pytest.raises(ConfigError, match=error):
            joined([path])


def damage(path: Path, at: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [
        (0, b"x", "is no index"),
        (8, b"\x09", "is of version 9, this program reads version 1"),
        (16, b"\x05", "is cut"),
        (40, b"\0\0", "for another tokenizer"),
        (4100, b"\x07\x07", "is damaged: its checksum"),
    ],
)
def test_an_index_that_is_not_as_it_was_written_is_refused(tokenizer, tmp_path, at, value, error):
    build(tokenizer, tmp_path, "one two one two three")
    damage(tmp_path / "corpus", at, value)
    with pytest.raises(ConfigError, match=error):
        open_corpus(tmp_path / "corpus", tokenizer.digest())


def test_an_index_that_is_cut_or_not_there_is_refused(tokenizer, tmp_path):
    path = build(tokenizer, tmp_path, "one two one two three").path
    whole = path.read_bytes()
    for size in (50, 4096, len(whole) - 4):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="is cut"):
            open_corpus(path, tokenizer.digest())
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        open_corpus(path, tokenizer.digest())


def test_what_cannot_be_built_leaves_what_was_there(tokenizer, tmp_path):
    path = build(tokenizer, tmp_path, "one two").path
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="no text of two tokens"):
        build_index(tokenizer, [["x"]], path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        build_index(tokenizer, [["one two"]], tmp_path / "none" / "corpus")


def test_the_command_indexes_files(model, tmp_path, capsys):
    corpus = tmp_path / "a.txt"
    corpus.write_text("some text, some text")
    out = tmp_path / "out.index"
    assert main(["draft", "index", str(model), str(corpus), "--out", str(out)]) == 0
    assert "1 texts" in capsys.readouterr().out and out.exists()
    assert main(["draft", "index", str(model), str(tmp_path / "none"), "--out", str(out)]) == 2
    assert "none is not there." in capsys.readouterr().err


LIMITS = {"kv_cache_memory_bytes": "16MiB", "max_num_seqs": 4, "threads": 1}


def drafting(path: Path, tenants: str | list[str] = "*") -> dict[str, Any]:
    return {"corpora": [{"path": str(path), "tenants": tenants}], "adaptive": False, "num_speculative_tokens": 4}


def test_answers_are_drafted_from_it_and_stay(model, tokenizer, tmp_path):
    """By whoever may use it: an index of what a model answers has right drafts for it. What is given to a tenant is for
    no caller without one."""
    how = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, seed=1)
    with LLM(str(model), **LIMITS) as llm:
        (plain,) = llm.generate(["one two three"], how)
    answer = plain.outputs[0].token_ids
    index = build(tokenizer, tmp_path, "one two three", name="empty")
    tokens = np.array([END, *plain.prompt_token_ids, *answer, END], np.int32)
    places = sort_contexts(tokens, followed_places(tokens))
    header = replace(index.header, num_tokens=len(tokens), num_places=len(places))
    path = tmp_path / "answers"
    path.write_bytes(header.pack((tokens, places)).ljust(DATA_OFFSET, b"\0") + tokens.tobytes() + places.tobytes())
    right = []
    for tenants in ("*", ["acme"]):
        with LLM(str(model), **LIMITS, speculative_config=drafting(path, tenants)) as llm:
            (given,) = llm.generate(["one two three"], how)
            said = dict(llm.ready.facts)["speculation"]
        assert given.outputs[0].token_ids == answer
        assert f"from {path} for {'all' if tenants == '*' else 'acme'}" in said
        right.append(sum(step[1] for step in given.outputs[0].draft_steps))
    assert right[0] >= 20 and right[0] > right[1]


def test_a_server_that_cannot_use_it_says_so_in_one_line(model, tokenizer, tmp_path, capsys):
    """Before any weights are read: one that is of another tokenizer, cut, damaged or not there."""
    path = build(tokenizer, tmp_path, "one two one two three").path
    whole = path.read_bytes()
    for data, error in (
        (whole[:40] + b"\0\0" + whole[42:], "was built for another tokenizer; build it again with the model"),
        (whole[:-4], "is cut: it has"),
        (whole[:-4] + bytes([whole[-4] ^ 1]) + whole[-3:], "is damaged: its checksum is another; build it again"),
        (None, "cannot be read: No such file or directory"),
    ):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        asked = ["--speculative-config", json.dumps(drafting(path)), "--kv-cache-memory-bytes", "16MiB"]
        assert main(["generate", str(model), "--prompt", "hello", "--max-tokens", "2", *asked]) == 2
        said = capsys.readouterr().err
        print(said)
        assert said.count("\n") == 1 and f"The corpus {path} {error}" in said
