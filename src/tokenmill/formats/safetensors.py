"""Reads safetensors: a file, or of a folder `model.safetensors` or what `model.safetensors.index.json` lists. Writes a
file, too. A folder without any may have its weights in pytorch_model.bin (pickled.py).

    header length u64 | JSON header: name -> {dtype, shape, data_offsets} | data

Nothing is trusted: the header must fit the file, every range must have the size its shape needs, ranges must follow
one another without gaps or overlaps to the end of the file, and an index may name only files of its own folder.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeGuard

from ..core.errors import BadCheckpoint
from .mapping import map_file, refuse_pointer
from .pickled import open_pickled
from .tensor import BLOCK_LAYOUT, Tensor

KINDS = {
    "F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2",
    "I64": "i64", "I32": "i32", "I16": "i16", "I8": "i8", "U64": "u64", "U32": "u32", "U16": "u16", "U8": "u8",
    "BOOL": "bool",
}  # fmt: skip

WHOLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLED_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_INDEXES = {".safetensors": INDEX_NAME, ".bin": PICKLED_NAMES[1]}
"""Ends of shards -> what lists them."""
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 16


def open_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors file, or of those of a folder that hold its model. Bytes are mapped, not read. Raises
    BadCheckpoint."""
    path = Path(path)
    if not path.is_dir():
        return _open_file(path)
    files = weights_of(path)
    if not files:
        raise BadCheckpoint(f"{path} holds no .safetensors file and no {PICKLED_NAMES[0]}.")
    index = _INDEXES[files[0].suffix]
    if files[0].name not in (WHOLE_NAME, PICKLED_NAMES[0]) and (path / index).is_file():
        return _open_shards(path, index)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _open_file(file).items():
            if name in tensors:
                raise BadCheckpoint(f"{path}: tensor {name!r} is in more than one file and there is no {INDEX_NAME}.")
            tensors[name] = tensor
    return tensors


def write_safetensors(path: Path, tensors: Iterable[Tensor]) -> None:
    """A file of these tensors, in this order. Raises OSError."""
    codes = {kind: code for code, kind in KINDS.items()}
    header, end = {}, 0
    tensors = list(tensors)
    for tensor in tensors:
        begin, end = end, end + tensor.data.nbytes
        header[tensor.name] = {"dtype": codes[tensor.kind], "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            file.write(tensor.data)


def choose_weights(names: Iterable[str], shards: Callable[[str], list[str]]) -> list[str]:
    """Of the names of a folder's files, those that hold its model: model.safetensors alone, else the `shards` of its
    index, else every .safetensors file, else what torch pickled, whole or by its index. Repositories put the same
    weights beside these in a second layout."""
    names = set(names)
    found = sorted(name for name in names if name.endswith(".safetensors"))
    for whole, index, others in ((WHOLE_NAME, INDEX_NAME, found), (*PICKLED_NAMES, [])):
        if whole in names:
            return [whole]
        if index in names:
            return shards(index)
        if others:
            return others
    return []


def weights_of(folder: Path) -> list[Path]:
    """The files of a folder that hold its model, by name. Raises BadCheckpoint for a folder or an index that cannot be
    read."""
    try:
        names = [file.name for file in folder.iterdir()]
    except OSError as error:
        raise BadCheckpoint(f"{folder} cannot be read: {error.strerror or error}.") from error
    return [folder / name for name in choose_weights(names, lambda index: list_shards(folder, index))]


def pickled_weights(path: Path) -> list[Path]:
    """The files of a folder that hold its model where only torch reads them, else none. Raises BadCheckpoint as
    weights_of."""
    return [file for file in weights_of(path) if file.suffix == ".bin"] if path.is_dir() else []


def list_shards(folder: Path, index: str) -> list[str]:
    """The files that the folder's index names. Raises BadCheckpoint."""
    return sorted(set(_read_index(folder, index).values()))


def _read_index(folder: Path, index: str) -> dict[str, str]:
    """Tensor name -> file name."""
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise BadCheckpoint(f"{folder / index}: weight_map must map tensor names to file names.")
    for file in weight_map.values():
        if Path(file).name != file or _INDEXES.get(Path(file).suffix) != index:
            raise BadCheckpoint(f"{folder / index} names {file!r}, which is not a shard of the same folder.")
    return weight_map


def _open_shards(folder: Path, index: str) -> dict[str, Tensor]:
    shards: dict[str, dict[str, Tensor]] = {}
    tensors = {}
    for name, file in _read_index(folder, index).items():
        if file not in shards:
            shards[file] = _open_file(folder / file)
        if name not in shards[file]:
            raise BadCheckpoint(f"{folder / file} lacks tensor {name!r}, which the index places there.")
        tensors[name] = shards[file][name]
    return tensors


def _open_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".bin":
        return open_pickled(path)
    view = map_file(path)
    if len(view) < 8:
        raise BadCheckpoint(f"{path} is too short to be a safetensors file.")
    (header_size,) = struct.unpack("<Q", view[:8])
    if header_size > min(MAX_HEADER_BYTES, len(view) - 8):
        raise BadCheckpoint(f"{path}: a header of {header_size} bytes cannot be right; is the file cut short?")
    header = _object(_parse_json(bytes(view[8 : 8 + header_size]), path), path)
    header.pop("__metadata__", None)
    data = view[8 + header_size :]
    entries = sorted((_check_entry(path, name, entry) for name, entry in header.items()), key=lambda entry: entry[3])
    tensors = {}
    expected = 0
    for name, kind, shape, begin, end in entries:
        if begin != expected:
            raise BadCheckpoint(f"{path}: tensor {name!r} starts at {begin} where {expected} was expected.")
        if end > len(data):
            raise BadCheckpoint(f"{path}: tensor {name!r} ends at {end} of {len(data)} bytes; is the file cut short?")
        tensors[name] = Tensor(name, kind, shape, data[begin:end])
        expected = end
    if expected != len(data):
        raise BadCheckpoint(f"{path}: {len(data) - expected} bytes at its end belong to no tensor.")
    return tensors


def _check_entry(path: Path, name: str, entry: Any) -> tuple[str, str, tuple[int, ...], int, int]:
    """-> (name, kind, shape, begin, end), consistent among themselves."""
    if not isinstance(entry, dict):
        raise BadCheckpoint(f"{path}: the entry of tensor {name!r} is not an object.")
    kind = KINDS.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    if kind is None:
        raise BadCheckpoint(f"{path}: tensor {name!r} has unsupported dtype {entry.get('dtype')!r}.")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _is_counts(shape) or len(shape) > MAX_DIMS:
        raise BadCheckpoint(f"{path}: tensor {name!r} has no valid shape.")
    if not _is_counts(offsets) or len(offsets) != 2:
        raise BadCheckpoint(f"{path}: tensor {name!r} has no valid data_offsets.")
    num_bytes = BLOCK_LAYOUT[kind][1]
    for size in shape:
        num_bytes *= size
    begin, end = offsets
    if end - begin != num_bytes:
        raise BadCheckpoint(f"{path}: tensor {name!r} needs {num_bytes} bytes, its range holds {end - begin}.")
    return name, kind, tuple(shape), begin, end


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most MAX_HEADER_BYTES. Raises BadCheckpoint."""
    return _object(read_json_value(path), path)


def read_json_value(path: Path) -> Any:
    """As read_json, of any kind of value."""
    try:
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise BadCheckpoint(f"{path} is larger than {MAX_HEADER_BYTES} bytes.")
        data = path.read_bytes()
        refuse_pointer(path, data)
        return _parse_json(data, path)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror or error}.") from error


def _parse_json(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data, object_pairs_hook=_unique_object)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} does not hold valid JSON: {error}.") from None


def _object(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} does not hold a JSON object.")
    return value


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return value
