"""The safetensors reader: reads what was written, refuses what does not add up."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.digest import weight_files
from tokenmill.formats.safetensors import INDEX_NAME, open_safetensors


def safetensors_bytes(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def f32(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: Any, data: bytes) -> Path:
    path.write_bytes(safetensors_bytes(header, data))
    return path


def test_reads_a_file(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [8, 12]},
        "a": f32([2, 1], 0, 8),
        "scalar": {"dtype": "I64", "shape": [], "data_offsets": [12, 20]},
    }
    tensors = open_safetensors(write(tmp_path / "m.safetensors", header, bytes(range(20))))
    assert {name: (t.kind, t.shape, bytes(t.data)) for name, t in tensors.items()} == {
        "a": ("f32", (2, 1), bytes(range(8))),
        "b": ("bf16", (2,), bytes(range(8, 12))),
        "scalar": ("i64", (), bytes(range(12, 20))),
    }


def test_reads_shards_by_their_index(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", {"a": f32([1], 0, 4)}, b"aaaa")
    write(tmp_path / "two.safetensors", {"b": f32([1], 0, 4), "unused": f32([1], 4, 8)}, b"bbbbcccc")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    tensors = open_safetensors(tmp_path)
    assert {name: bytes(t.data) for name, t in tensors.items()} == {"a": b"aaaa", "b": b"bbbb"}


def test_reads_all_files_of_a_folder_without_index(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", {"a": f32([1], 0, 4)}, b"aaaa")
    write(tmp_path / "two.safetensors", {"b": f32([1], 0, 4)}, b"bbbb")
    assert sorted(open_safetensors(tmp_path)) == ["a", "b"]
    write(tmp_path / "three.safetensors", {"a": f32([1], 0, 4)}, b"aaaa")
    with pytest.raises(BadCheckpoint, match="more than one file"):
        open_safetensors(tmp_path)


def test_a_second_copy_of_the_weights_does_not_count(tmp_path: Path) -> None:
    """model.safetensors alone is the model, else what the index lists, as in transformers; the digest sees no more."""
    write(tmp_path / "consolidated.safetensors", {"layers.a": f32([1], 0, 4), "b": f32([1], 4, 8)}, b"otheroth")
    write(tmp_path / "shard.safetensors", {"a": f32([1], 0, 4)}, b"shar")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))
    assert {name: bytes(t.data) for name, t in open_safetensors(tmp_path).items()} == {"a": b"shar"}
    assert [file.name for file in weight_files(tmp_path)] == ["config.json", "shard.safetensors"]
    write(tmp_path / "model.safetensors", {"b": f32([1], 0, 4)}, b"whol")
    assert {name: bytes(t.data) for name, t in open_safetensors(tmp_path).items()} == {"b": b"whol"}
    assert [file.name for file in weight_files(tmp_path)] == ["config.json", "model.safetensors"]


DAMAGE = {
    "too short": (b"\1\2", "too short"),
    "header longer than the file": (struct.pack("<Q", 100) + b"{}", "header of 100 bytes"),
    "absurd header length": (struct.pack("<Q", 2**63) + b"{}", "header of"),
    "not JSON": (safetensors_bytes(b"{x", b""), "valid JSON"),
    "not an object": (safetensors_bytes(b"[]", b""), "JSON object"),
    "JSON nested without end": (safetensors_bytes(b'{"a":' + b"[" * 200_000, b""), "valid JSON"),
    "name twice": (safetensors_bytes(b'{"a":{},"a":{}}', b""), "occurs twice"),
    "entry not an object": (safetensors_bytes({"a": 3}, b""), "not an object"),
    "unknown dtype": (safetensors_bytes({"a": {**f32([1], 0, 4), "dtype": "Q4"}}, bytes(4)), "unsupported dtype 'Q4'"),
    "dtype not a string": (safetensors_bytes({"a": {**f32([1], 0, 4), "dtype": [1]}}, bytes(4)), "unsupported dtype"),
    "negative size": (safetensors_bytes({"a": f32([-1], 0, 4)}, bytes(4)), "no valid shape"),
    "size is a float": (safetensors_bytes({"a": f32([1.0], 0, 4)}, bytes(4)), "no valid shape"),
    "size is a bool": (safetensors_bytes({"a": f32([True], 0, 4)}, bytes(4)), "no valid shape"),
    "one offset": (safetensors_bytes({"a": {**f32([1], 0, 4), "data_offsets": [0]}}, bytes(4)), "data_offsets"),
    "range of wrong size": (safetensors_bytes({"a": f32([2], 0, 4)}, bytes(4)), "needs 8 bytes"),
    "sizes that overflow": (safetensors_bytes({"a": f32([2**40, 2**40], 0, 4)}, bytes(4)), "its range holds 4"),
    "data cut": (safetensors_bytes({"a": f32([2], 0, 8)}, bytes(4)), "cut short"),
    "gap": (safetensors_bytes({"a": f32([1], 4, 8)}, bytes(8)), "0 was expected"),
    "overlap": (safetensors_bytes({"a": f32([2], 0, 8), "b": f32([1], 4, 8)}, bytes(8)), "8 was expected"),
    "bytes left over": (safetensors_bytes({"a": f32([1], 0, 4)}, bytes(9)), "5 bytes at its end"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_with_its_reason(tmp_path: Path, name: str) -> None:
    data, reason = DAMAGE[name]
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=reason):
        open_safetensors(path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "sub/m.safetensors", "..", "m.bin"])
def test_an_index_reaches_only_its_own_folder(tmp_path: Path, file: str) -> None:
    write(tmp_path / "outside.safetensors", {"a": f32([1], 0, 4)}, b"aaaa")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(BadCheckpoint, match="not a shard of the same folder"):
        open_safetensors(folder)


def test_a_shard_must_hold_what_the_index_says(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", {"a": f32([1], 0, 4)}, b"aaaa")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"b": "one.safetensors"}}))
    with pytest.raises(BadCheckpoint, match="lacks tensor 'b'"):
        open_safetensors(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": ["b"]}))
    with pytest.raises(BadCheckpoint, match="weight_map"):
        open_safetensors(tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"holds no \.safetensors"):
        open_safetensors(tmp_path)


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    """A file of the safetensors package opens with equal contents."""
    reference = pytest.importorskip("safetensors.numpy")
    np = pytest.importorskip("numpy")
    path = tmp_path / "m.safetensors"
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.arange(4, dtype=np.int8)}
    reference.save_file(arrays, path)
    tensors = open_safetensors(path)
    assert tensors["x"].shape == (2, 3) and bytes(tensors["x"].data) == arrays["x"].tobytes()
    assert tensors["y"].kind == "i8" and bytes(tensors["y"].data) == arrays["y"].tobytes()


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its owner lets others enter it and not look."""

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(BadCheckpoint, match="cannot be read: Permission denied"):
        open_safetensors(tmp_path)
