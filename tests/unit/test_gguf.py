"""The GGUF reader: what it reads is what was written, and nothing a file says can crash, hang or bloat it."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from gguf_writer import ALIGNMENT, entry, gguf_bytes, header, string, tensor_entry, value, write_gguf

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.gguf import MAX_ARRAY_VALUES, GGUFFile

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "flag": True,
    "negative": -5,
    "large": 2**40,
    "tokens": ["a", "", "é漢😀"],
    "types": [1, -3, 2],
    "scores": [0.5, -1.0],
    "flags": [True, False],
    "empty": [],
}
TENSORS = {
    "matrix": (8, (64, 3), bytes(range(204))),
    "vector": (0, (5,), struct.pack("<5f", 1, 2, 3, 4, 5)),
}


def open_bytes(tmp_path: Path, data: bytes) -> GGUFFile:
    path = tmp_path / "file.gguf"
    path.write_bytes(data)
    return GGUFFile.open(path)


@pytest.mark.parametrize("version", [2, 3])
def test_reads_back_what_was_written(tmp_path: Path, version: int) -> None:
    file = open_bytes(tmp_path, gguf_bytes(METADATA, TENSORS, version))
    assert file.metadata == METADATA
    matrix, vector = file.tensors["matrix"], file.tensors["vector"]
    assert (matrix.kind, matrix.shape, bytes(matrix.data)) == ("q8_0", (3, 64), bytes(range(204)))
    assert (vector.kind, vector.shape, vector.num_values) == ("f32", (5,), 5)
    assert struct.unpack("<5f", vector.data) == (1, 2, 3, 4, 5)


def test_reads_nested_arrays_and_every_scalar_width(tmp_path: Path) -> None:
    nested = struct.pack("<IIQ", 9, 9, 2) + value([1, 2])[4:] + value(["x"])[4:]
    widths = [
        (0, "B", 200),
        (1, "b", -3),
        (2, "H", 60000),
        (3, "h", -9),
        (10, "Q", 2**63),
        (11, "q", -7),
        (12, "d", 0.1),
    ]
    entries = string("nested") + nested
    for kind, code, number in widths:
        entries += string(code) + struct.pack("<I" + code, kind, number)
    file = open_bytes(tmp_path, header(0, 1 + len(widths)) + entries)
    assert file.metadata.pop("nested") == [[1, 2], ["x"]]
    assert file.metadata == {code: number for _, code, number in widths}


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    head = header(1, 1) + entry("general.alignment", 64) + tensor_entry("t", (4,), 24, 64)
    head += bytes(-len(head) % 64)
    assert bytes(open_bytes(tmp_path, head + bytes(64) + b"abcd").tensors["t"].data) == b"abcd"


def test_tensor_bytes_outlive_the_reader(tmp_path: Path) -> None:
    file = open_bytes(tmp_path, gguf_bytes({}, TENSORS))
    data = file.tensors["matrix"].data
    file.close()
    assert bytes(data) == bytes(range(204)) and not file.tensors


def one_tensor(dims: tuple[int, ...], kind: int, offset: int, data: bytes = bytes(64)) -> bytes:
    head = header(1, 0) + tensor_entry("t", dims, kind, offset)
    return head + bytes(-len(head) % ALIGNMENT) + data


def array(kind: int, count: int) -> bytes:
    """A file whose only entry 'a' begins an array."""
    return header(0, 1) + string("a") + struct.pack("<IIQ", 9, kind, count)


DAMAGE = {
    "empty file": (b"", "is empty"),
    "not a GGUF": (b"PK\x03\x04" + bytes(60), "does not start with"),
    "header cut": (header(0, 0)[:20], "does not start with"),
    "version 1": (header(0, 0, version=1), "version 1"),
    "big endian": (header(0, 0, version=0x03000000), "big endian"),
    "impossible entry count": (header(0, 2**63), "cannot fit"),
    "impossible tensor count": (header(2**40, 0), "cannot fit"),
    "key length past the end": (header(0, 1) + struct.pack("<Q", 2**62) + bytes(20), "ends inside"),
    "key not UTF-8": (header(0, 1) + entry(b"\xff\xfe", 1), "not UTF-8"),
    "empty key": (header(0, 1) + entry("", 1), "has 0 characters"),
    "duplicate key": (header(0, 2) + entry("a", 1) + entry("a", 2), "occurs twice"),
    "unknown value type": (header(0, 1) + string("a") + struct.pack("<II", 13, 0), "unknown value type 13"),
    "unknown element type": (array(77, 0), "unknown element type 77"),
    "array longer than the file": (array(4, 1000) + bytes(16), "ends inside"),
    "array of absurd length": (array(0, 2**60), str(MAX_ARRAY_VALUES)),
    "strings cut": (array(8, 1) + struct.pack("<Q", 100) + b"x", "ends inside"),
    "string not UTF-8": (array(8, 1) + string(b"\x80"), "string 0 of 'a'"),
    "arrays nested too deep": (array(9, 1) + struct.pack("<IQ", 9, 1) * 40, "nests"),
    "alignment zero": (header(0, 1) + entry("general.alignment", 0), "alignment"),
    "alignment not a power of two": (header(0, 1) + entry("general.alignment", 24), "alignment"),
    "alignment of wrong type": (header(0, 1) + entry("general.alignment", "32"), "alignment"),
    "no dimensions": (one_tensor((), 0, 0), "0 dimensions"),
    "five dimensions": (one_tensor((1,) * 5, 0, 0), "5 dimensions"),
    "unknown tensor type": (one_tensor((4,), 4, 0), "unknown type 4"),
    "empty tensor": (one_tensor((4, 0), 0, 0), "is empty"),
    "sizes that overflow 64 bits": (one_tensor((2**63, 2**63, 2**63), 0, 0), "cut short"),
    "part of a block": (one_tensor((33,), 8, 0), "not a multiple"),
    "offset not aligned": (one_tensor((4,), 0, 4), "alignment"),
    "offset past the end": (one_tensor((4,), 0, 2**60), "cut short"),
    "data cut": (one_tensor((17,), 0, 0), "cut short"),
    "tensor name twice": (header(2, 0) + tensor_entry("t", (1,), 0, 0) * 2 + bytes(99), "occurs twice"),
    "tensor without a name": (header(1, 0) + tensor_entry("", (1,), 0, 0) + bytes(99), "has 0 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_with_its_reason(tmp_path: Path, name: str) -> None:
    data, reason = DAMAGE[name]
    with pytest.raises(BadCheckpoint, match=reason.replace("(", r"\(")):
        open_bytes(tmp_path, data)


def test_missing_file_is_a_bad_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="No such file"):
        GGUFFile.open(tmp_path / "none.gguf")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """A file cut anywhere is refused, down to its last byte."""
    data = gguf_bytes({key: METADATA[key] for key in ("flag", "tokens", "types")}, TENSORS).rstrip(b"\0")
    for size in range(len(data)):
        with pytest.raises(BadCheckpoint):
            open_bytes(tmp_path, data[:size])


def test_random_damage_never_escapes(tmp_path: Path) -> None:
    """Seeded mutations of a header: each opens or is a BadCheckpoint, and none makes us allocate."""
    original = gguf_bytes(METADATA, TENSORS)
    extremes = [b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 2**31), struct.pack("<Q", 2**62), struct.pack("<Q", 10**7)]
    path = tmp_path / "fuzz.gguf"
    opened = refused = 0
    tracemalloc.start()
    try:
        for seed in range(600):
            rng = random.Random(seed)
            data = bytearray(original)
            for _ in range(rng.randint(1, 4)):
                place = rng.randrange(len(data))
                if rng.random() < 0.5:
                    data[place] = rng.randrange(256)
                else:
                    data[place : place + 8] = rng.choice(extremes)[: len(data) - place]
            path.write_bytes(data[: rng.randint(1, len(data))] if rng.random() < 0.2 else data)
            try:
                GGUFFile.open(path).close()
                opened += 1
            except BadCheckpoint:
                refused += 1
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert opened > 40 and refused > 40, f"the mutations prove little: {opened} opened, {refused} refused"


def test_reads_what_the_reference_writer_writes(tmp_path: Path) -> None:
    """A file of the gguf package's own writer opens with equal contents."""
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    path = tmp_path / "reference.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("llama.block_count", 7)
    writer.add_array("tokenizer.ggml.tokens", ["x", "yy"])
    writer.add_tensor("a", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("b", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(path)
    assert file.metadata["general.architecture"] == "llama" and file.metadata["llama.block_count"] == 7
    assert file.metadata["tokenizer.ggml.tokens"] == ["x", "yy"]
    assert file.tensors["a"].shape == (3, 4)
    assert np.frombuffer(file.tensors["a"].data, "<f4").tolist() == list(range(12))
    assert np.frombuffer(file.tensors["b"].data, "<f2").tolist() == list(range(5))


def test_writer_helper_makes_files(tmp_path: Path) -> None:
    assert GGUFFile.open(write_gguf(tmp_path / "x.gguf", {"a": 1})).metadata == {"a": 1}
