"""Reads GGUF (versions 2 and 3, little endian): metadata and a table of tensors over a memory-mapped file.

    magic "GGUF" | version u32 | num_tensors u64 | num_entries u64
    entries:  key string | type u32 | value                       string = length u64 + UTF-8 bytes
    tensors:  name string | num_dims u32 | dims u64... | kind u32 | offset u64     dims: innermost first
    padding to `general.alignment` (32), then tensor data; offsets count from here

The file is not trusted. Every count is checked against the bytes that are left before anything is allocated, every
tensor must lie inside the file, and nothing is read past its end; whatever is wrong becomes a BadCheckpoint that says
where. The format is described in ggml's documentation (docs/gguf.md).
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

from ..core.errors import BadCheckpoint
from .mapping import map_file
from .tensor import BLOCK_LAYOUT, Tensor

KINDS = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k",
    12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64",
    29: "iq1_m", 30: "bf16", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4", 41: "q1_0",
}  # fmt: skip

MAX_DIMS = 4
MAX_NAME_BYTES = 255
MAX_KEY_BYTES = 65_535
MAX_ARRAY_DEPTH = 3
MAX_ARRAY_VALUES = 1 << 23
"""Values in all metadata arrays together; the largest vocabularies need about two million."""
MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_NUM_HEADER_BYTES = 24
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_U64 = struct.Struct("<Q")


class GGUFFile:
    """An open GGUF file. `metadata` maps keys to int, float, bool, str or (nested) lists of them; `tensors` maps names
    to `Tensor` in the order of the file."""

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map and check the file. Cost: about 30 ms for a vocabulary of 49,152. Raises BadCheckpoint."""
        path = Path(path)
        reader = _Reader(map_file(path), path)
        num_tensors, num_entries = reader.read_header()
        metadata = reader.read_metadata(num_entries)
        return cls(path, metadata, reader.read_tensors(num_tensors, metadata))

    def close(self) -> None:
        """Drop this reader's views. The file stays mapped while a caller still holds some tensor's `data`."""
        self.tensors = {}


_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 999


def split_name(path: Path) -> str:
    """A file's name without ".gguf", and without the number that a part of a split model has."""
    match = _PART_NAME.fullmatch(path.name)
    return match[1] if match else path.stem


def split_parts(path: Path) -> list[Path]:
    """Every part of a model split into files named `<name>-00001-of-0000N.gguf`, given any of them; `[path]` for a
    file that is not so named."""
    match = _PART_NAME.fullmatch(path.name)
    count = int(match[3]) if match else 0
    if match is None or not 1 <= count <= _MAX_PARTS:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def open_gguf(path: Path) -> GGUFFile:
    """A GGUF file, or all parts of a split one as if they were one file. Raises BadCheckpoint."""
    parts = split_parts(path)
    whole = GGUFFile.open(parts[0])
    count = whole.metadata.get("split.count", 0)
    if count in (0, 1) and len(parts) == 1:
        return whole
    if count != len(parts):
        raise BadCheckpoint(
            f"{parts[0]} says that it is part of {count} files, its name says {len(parts)}; keep the names that the"
            " parts were published under."
        )
    for number, part in enumerate(parts[1:], start=1):
        file = GGUFFile.open(part)
        if file.metadata.get("split.no") != number or file.metadata.get("split.count") != count:
            raise BadCheckpoint(f"{part} is not part {number + 1} of {count} of the model that {parts[0]} begins.")
        twice = whole.tensors.keys() & file.tensors.keys()
        if twice:
            raise BadCheckpoint(f"{part} repeats tensor {min(twice)!r} of an earlier part.")
        whole.tensors |= file.tensors
    expected = whole.metadata.get("split.tensors.count", len(whole.tensors))
    if expected != len(whole.tensors):
        raise BadCheckpoint(f"the {count} parts of {parts[0]} hold {len(whole.tensors)} tensors instead of {expected}.")
    return whole


class _Reader:
    """A position in the mapped file that only moves forward and never past the end."""

    def __init__(self, view: memoryview, path: Path) -> None:
        self.view = view
        self.path = path
        self.size = len(view)
        self.position = 0
        self.num_array_values = 0

    def fail(self, message: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path} is not a usable GGUF file: {message} (at byte {self.position}).")

    def take(self, num_bytes: int, what: str) -> memoryview:
        if num_bytes > self.size - self.position:
            raise self.fail(f"it ends inside {what}")
        start = self.position
        self.position += num_bytes
        return self.view[start : self.position]

    def read_u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def read_u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def read_string(self, what: str) -> str:
        try:
            return str(self.take(self.read_u64(what), what), "utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def read_header(self) -> tuple[int, int]:
        """-> (number of tensors, number of metadata entries), both possible in a file of this size."""
        if self.size < _NUM_HEADER_BYTES or bytes(self.view[:4]) != b"GGUF":
            raise self.fail("it does not start with a GGUF header")
        self.position = 4
        version = self.read_u32("the version")
        if version in (0x02000000, 0x03000000):
            raise self.fail("it is big endian; convert it to little endian")
        if version not in (2, 3):
            raise self.fail(f"version {version} is not supported; versions 2 and 3 are")
        num_tensors = self.read_u64("the tensor count")
        num_entries = self.read_u64("the entry count")
        if num_entries * _MIN_ENTRY_BYTES + num_tensors * _MIN_TENSOR_BYTES > self.size:
            raise self.fail(f"{num_entries} entries and {num_tensors} tensors cannot fit in {self.size} bytes")
        return num_tensors, num_entries

    def read_metadata(self, num_entries: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(num_entries):
            key = self.read_string(f"the key of metadata entry {index}")
            if not 1 <= len(key) <= MAX_KEY_BYTES:
                raise self.fail(f"the key of metadata entry {index} has {len(key)} characters")
            if key in metadata:
                raise self.fail(f"metadata key {key!r} occurs twice")
            metadata[key] = self.read_value(self.read_u32(key), key)
        return metadata

    def read_value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.read_string(key)
        if kind == _ARRAY:
            return self.read_array(key, depth=1)
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fail(f"{key!r} has unknown value type {kind}")
        value = struct.unpack("<" + code, self.take(struct.calcsize(code), key))[0]
        return bool(value) if kind == _BOOL else value

    def read_array(self, key: str, depth: int) -> list[Any]:
        kind = self.read_u32(key)
        count = self.read_u64(key)
        self.num_array_values += count
        if self.num_array_values > MAX_ARRAY_VALUES:
            raise self.fail(f"metadata arrays hold more than {MAX_ARRAY_VALUES} values, reached in {key!r}")
        if kind == _STRING:
            return self.read_strings(key, count)
        if kind == _ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise self.fail(f"{key!r} nests arrays deeper than {MAX_ARRAY_DEPTH}")
            if count * 12 > self.size - self.position:
                raise self.fail(f"it ends inside {key}")
            return [self.read_array(key, depth + 1) for _ in range(count)]
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fail(f"{key!r} has unknown element type {kind}")
        data = self.take(count * struct.calcsize(code), key)
        values = list(struct.unpack(f"<{count}{code}", data))
        return [bool(value) for value in values] if kind == _BOOL else values

    def read_strings(self, key: str, count: int) -> list[str]:
        """The hot loop of opening a file: a vocabulary and its merges are a hundred thousand short strings."""
        data: Any = self.view.obj  # slices of the map itself are bytes, which decode faster than views
        position, size = self.position, self.size
        unpack = _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                (length,) = unpack(data, position)
                start = position + 8
                position = start + length
                if position > size:
                    raise self.fail(f"it ends inside {key}")
                append(data[start:position].decode())
        except UnicodeDecodeError:
            raise self.fail(f"string {len(strings)} of {key!r} is not UTF-8") from None
        except struct.error:
            raise self.fail(f"it ends inside {key}") from None
        self.position = position
        return strings

    def read_tensors(self, num_tensors: int, metadata: dict[str, Any]) -> dict[str, Tensor]:
        table: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for index in range(num_tensors):
            name = self.read_string(f"the name of tensor {index}")
            if not 1 <= len(name) <= MAX_NAME_BYTES:
                raise self.fail(f"the name of tensor {index} has {len(name)} characters")
            if name in table:
                raise self.fail(f"tensor {name!r} occurs twice")
            table[name] = self.read_tensor_entry(name)
        alignment = self.read_alignment(metadata)
        data_start = -(-self.position // alignment) * alignment
        tensors = {}
        for name, (kind, dims, offset) in table.items():
            num_bytes = self.tensor_bytes(name, kind, dims)
            start = data_start + offset
            if offset % alignment:
                raise self.fail(f"tensor {name!r} starts at {offset}, not a multiple of the alignment {alignment}")
            if start + num_bytes > self.size:
                raise self.fail(f"tensor {name!r} ends at byte {start + num_bytes} of {self.size}; is it cut short?")
            tensors[name] = Tensor(name, kind, dims[::-1], self.view[start : start + num_bytes])
        return tensors

    def read_tensor_entry(self, name: str) -> tuple[str, tuple[int, ...], int]:
        num_dims = self.read_u32(name)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims, name))
        number = self.read_u32(name)
        kind = KINDS.get(number)
        if kind is None:
            raise self.fail(f"tensor {name!r} has unknown type {number}")
        return kind, dims, self.read_u64(name)

    def read_alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {alignment!r}; a power of two up to {MAX_ALIGNMENT} is needed")
        return alignment

    def tensor_bytes(self, name: str, kind: str, dims: tuple[int, ...]) -> int:
        """Python integers do not overflow, so one comparison with the file's size bounds any product of sizes."""
        block_values, block_bytes = BLOCK_LAYOUT[kind]
        num_values = 1
        for dim in dims:
            num_values *= dim
        if num_values == 0:
            raise self.fail(f"tensor {name!r} is empty")
        if dims[0] % block_values:
            raise self.fail(f"rows of tensor {name!r} hold {dims[0]} values, not a multiple of {kind}'s {block_values}")
        return num_values // block_values * block_bytes
