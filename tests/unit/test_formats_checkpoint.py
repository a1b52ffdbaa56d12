"""Opening checkpoints of both formats, and the digest that is remembered."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_writer import write_gguf

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats import digest
from tokenmill.formats.checkpoint import open_checkpoint, weights_digest
from tokenmill.formats.digest import file_digest
from tokenmill.formats.mapping import map_file, release
from tokenmill.text.hf_tokenizer import tokenizer_from_folder


def make_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    return path


def test_opens_gguf(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", {"a": 1}, {"t": (24, (4,), b"abcd")}))
    assert (
        checkpoint.kind == "gguf" and checkpoint.metadata == {"a": 1} and bytes(checkpoint.tensors["t"].data) == b"abcd"
    )
    checkpoint.close()
    assert not checkpoint.tensors


def test_opens_a_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    assert open_checkpoint(folder).generation_config == {}
    (folder / "generation_config.json").write_text('{"top_p": 0.9}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.kind == "hf" and checkpoint.metadata == {"model_type": "llama"}
    assert checkpoint.generation_config == {"top_p": 0.9} and bytes(checkpoint.tensors["w"].data) == b"abcd"


def test_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match="weights alone"):
        open_checkpoint(tmp_path / "m.safetensors")
    with pytest.raises(BadCheckpoint, match="part of 3 files, its name says 1"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", {"split.count": 3}))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "m.gguf"])
def test_a_pointer_of_git_lfs_says_how_to_have_the_file(name: str, tmp_path: Path) -> None:
    """A clone without LFS has such a line in the place of each large file."""
    folder = make_folder(tmp_path / "m")
    pointer = folder / name
    pointer.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4\n")
    with pytest.raises(BadCheckpoint, match=rf"{re.escape(str(pointer))} .*git lfs pull"):
        open_checkpoint(pointer if name.endswith(".gguf") else folder)
        tokenizer_from_folder(folder)


def test_parts_of_a_split_model_are_one(tmp_path: Path) -> None:
    """Any part names the model; a part that is missing, repeated or another's is refused; the digest covers all."""
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, part in enumerate(parts):
        keys = {"split.count": 2, "split.no": number, "split.tensors.count": 2}
        write_gguf(part, keys, {f"t{number}": (0, [2], bytes(8))})
    for part in parts:
        assert list(open_checkpoint(part).tensors) == ["t0", "t1"]
    before = weights_digest(parts[0], tmp_path / "cache")
    write_gguf(parts[1], {"split.count": 2, "split.no": 1}, {"t1": (0, [2], bytes([1] * 8))})
    assert weights_digest(parts[0], tmp_path / "cache") != before
    write_gguf(parts[1], {"split.count": 2, "split.no": 1}, {"t0": (0, [2], bytes(8))})
    with pytest.raises(BadCheckpoint, match="repeats tensor 't0'"):
        open_checkpoint(parts[0])
    write_gguf(parts[1], {"split.count": 2, "split.no": 0}, {"t1": (0, [2], bytes(8))})
    with pytest.raises(BadCheckpoint, match="is not part 2 of 2"):
        open_checkpoint(parts[0])
    parts[1].unlink()
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        open_checkpoint(parts[0])


def test_digest_is_computed_once_per_state_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    reads = []
    real = digest.hash_file
    monkeypatch.setattr(digest, "hash_file", lambda path: reads.append(path) or real(path))
    assert file_digest(path, cache) == hashlib.sha256(b"one").hexdigest() == file_digest(path, cache)
    assert len(reads) == 1
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert file_digest(path, cache) == hashlib.sha256(b"two").hexdigest()
    assert len(reads) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"sha256": 5}'])
def test_a_damaged_memo_is_ignored(tmp_path: Path, content: str) -> None:
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    file_digest(path, cache)
    (memo,) = (cache / "digests").iterdir()
    memo.write_text(content)
    assert file_digest(path, cache) == hashlib.sha256(b"one").hexdigest()


def test_digest_works_where_nothing_can_be_remembered(tmp_path: Path) -> None:
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    cache.write_bytes(b"a file where the folder should be")
    assert file_digest(path, cache) == hashlib.sha256(b"one").hexdigest()


def test_weights_digest_of_a_folder_sees_weights_and_config(tmp_path: Path) -> None:
    folder, cache = make_folder(tmp_path / "m"), tmp_path / "cache"
    first = weights_digest(folder, cache)
    assert weights_digest(make_folder(tmp_path / "copy"), cache) == first
    (folder / "tokenizer.json").write_text("{}")
    assert weights_digest(folder, cache) == first
    (folder / "config.json").write_text('{"model_type": "other"}')
    assert weights_digest(folder, cache) != first


def test_formats_and_text_do_not_import_numpy() -> None:
    """The front end must start fast: only formats/ggml.py may need numpy."""
    code = (
        "import sys, tokenmill.formats.checkpoint, tokenmill.formats.hub, tokenmill.text.text_model, "
        "tokenmill.text.detokenizer; sys.exit('numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _mapped_kib() -> int:
    """KiB of files in this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssFile")))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to ask what is in memory")
def test_released_bytes_leave_memory_and_can_be_read_again(tmp_path: Path) -> None:
    """Whole pages of a slice that starts and ends within pages; what other slices hold stays."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20) * 16)
    view = map_file(path)
    piece = view[100 : (12 << 20) + 100]
    content = hashlib.sha256(view).digest()
    held = _mapped_kib()
    release(piece)
    freed = held - _mapped_kib()
    assert (11 << 10) < freed <= (12 << 10), freed
    assert hashlib.sha256(view).digest() == content
    release(memoryview(b"not mapped"))
