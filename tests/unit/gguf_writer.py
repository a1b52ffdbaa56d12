"""Writes small GGUF files for tests: whole ones, and the parts of damaged ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ALIGNMENT = 32


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Type number and content: bool, int (u32 or u64; i32 if negative), float (f32), str, or list (of ints: i32)."""
    if isinstance(item, list):
        kind = 5 if item and type(item[0]) is int else _kind(item[0]) if item else 8
        content = struct.pack(f"<{len(item)}i", *item) if kind == 5 else b"".join(value(part)[4:] for part in item)
        return struct.pack("<IIQ", 9, kind, len(item)) + content
    kind = _kind(item)
    content = string(item) if kind == 8 else struct.pack({4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}[kind], item)
    return struct.pack("<I", kind) + content


def _kind(item: Any) -> int:
    if isinstance(item, list):
        return 9
    if isinstance(item, bool):
        return 7
    if isinstance(item, int):
        return 5 if item < 0 else 4 if item < 2**32 else 10
    return 6 if isinstance(item, float) else 8


def entry(key: str | bytes, item: Any) -> bytes:
    return string(key) + value(item)


def tensor_entry(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(num_tensors: int, num_entries: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, Sequence[int], bytes]] | None = None, version: int = 3
) -> bytes:
    """`tensors`: name -> (type number, dims innermost first, data)."""
    tensors = tensors or {}
    entries = b"".join(entry(key, item) for key, item in metadata.items())
    table, data = b"", b""
    for name, (kind, dims, content) in tensors.items():
        table += tensor_entry(name, dims, kind, len(data))
        data += content + bytes(-len(content) % ALIGNMENT)
    head = header(len(tensors), len(metadata), version) + entries + table
    return head + bytes(-len(head) % ALIGNMENT) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Any = None) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path
