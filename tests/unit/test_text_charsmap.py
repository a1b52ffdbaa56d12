"""Tables of characters from files: what is damaged is refused, and what is not refused does not stop the process."""

from __future__ import annotations

import base64
import json
import random
import struct
from pathlib import Path

import pytest
from tokenizers import normalizers

from tokenmill.core.errors import BadCheckpoint
from tokenmill.text.gguf_tokenizer import check_charsmap, tokenizer_from_gguf
from tokenmill.text.hf_tokenizer import tokenizer_from_folder

TEXT = "".join(map(chr, range(1, 600))) + "axa"
SIZE, BASE, LEAF = 512, 256, 300


def make_table(source: str = "a", replacement: bytes = b"bc", value: int = 1, leaf: int = LEAF) -> bytes:
    """A trie that knows one character: the root's children are counted from BASE, its value stands at `leaf`."""
    units = [0] * SIZE
    units[0] = BASE << 10
    place = BASE ^ ord(source)
    units[place] = ord(source) | 1 << 8 | (place ^ leaf) << 10
    if leaf < SIZE:
        units[leaf] = value
    return struct.pack("<I", 4 * SIZE) + struct.pack(f"<{SIZE}I", *units) + b"\0" + replacement + b"\0"


def metadata(table: bytes) -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<unk>", "b", "c", "x", "▁"],
        "tokenizer.ggml.scores": [0.0, -1.0, -1.0, -1.0, -1.0],
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 1],
        "tokenizer.ggml.precompiled_charsmap": list(table),
    }


def test_a_sound_table_replaces() -> None:
    check_charsmap(make_table())
    assert tokenizer_from_gguf(metadata(make_table())).encode("axa") == [4, 1, 2, 3, 1, 2]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (b"ab", "no length"),
        (struct.pack("<I", 400) + b"abcd", "400 bytes"),
        (make_table(value=9), "not there"),
        (make_table(replacement="é".encode(), value=2), "not there"),
        (make_table(replacement=b"\xff"), "UTF-8"),
        (make_table(leaf=1 << 20), "outside"),
    ],
)
def test_damage_is_refused(table: bytes, reason: str, tmp_path: Path) -> None:
    """In a GGUF file, and in a folder's tokenizer.json where the library itself lets it pass."""
    with pytest.raises(BadCheckpoint, match=reason):
        check_charsmap(table)
    with pytest.raises(BadCheckpoint):
        tokenizer_from_gguf(metadata(table))
    state = json.loads(tokenizer_from_gguf(metadata(make_table())).to_json())
    steps = state["normalizer"]["normalizers"]
    steps[0] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(BadCheckpoint):
        tokenizer_from_folder(tmp_path)


def test_what_passes_does_not_stop_the_process() -> None:
    """Of tables damaged at random, those that are not refused can be walked."""
    rng = random.Random(0)
    passed = 0
    for _ in range(3000):
        table = bytearray(make_table(replacement="bé".encode()))
        for _ in range(rng.randint(1, 3)):
            hot = rng.choice([0, 4, 4 + 4 * (BASE ^ ord("a")), 4 + 4 * LEAF, rng.randrange(len(table) - 4)])
            table[hot + rng.randrange(4)] = rng.randrange(256)
        try:
            check_charsmap(bytes(table))
        except BadCheckpoint:
            continue
        passed += 1
        normalizers.Precompiled(bytes(table)).normalize_str(TEXT)
    assert 100 < passed < 2900
