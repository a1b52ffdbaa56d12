"""SentencePiece's table of characters to replace, checked before the tokenizers library walks it.

A table is a length, that many bytes of a double-array trie (32-bit units), and replacements that end with a NUL. The
library trusts it: a unit that leads outside the array, or a leaf that names no replacement, would stop the process at
the first text that meets it.

    unit  bits 0-7 and 31: label | 8: a leaf follows | 9: the offset counts 256 | 10-30: offset
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import tokenizers

from ..core.errors import BadCheckpoint


def check_charsmap(table: bytes) -> None:
    """Raises BadCheckpoint unless every walk through the table stays inside it."""
    if len(table) < 4:
        raise BadCheckpoint("The table of characters has no length.")
    (num_bytes,) = struct.unpack_from("<I", table)
    if num_bytes % 4 or not 4 <= num_bytes <= len(table) - 4:
        raise BadCheckpoint(f"The table of characters says {num_bytes} bytes of trie; it has {len(table) - 4} in all.")
    units = struct.unpack_from(f"<{num_bytes // 4}I", table, 4)
    texts = table[4 + num_bytes :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise BadCheckpoint("The replacements of the table of characters are not UTF-8.") from None
    # A unit can only be the child of nodes whose children are counted from its place and label.
    children: dict[int, list[int]] = {}
    for place, unit in enumerate(units):
        if not unit & 0x80000000 and unit & 0xFF:
            children.setdefault(place ^ unit & 0xFF, []).append(place)
    waiting = [_follow(units[0], 0)]
    seen = set()
    while waiting:
        start = waiting.pop()
        if start in seen:
            continue
        seen.add(start)
        if start | 0xFF >= len(units):
            raise BadCheckpoint("The trie of the table of characters leads outside itself.")
        for place in children.get(start, ()):
            node = _follow(units[place], place)
            waiting.append(node)
            if not units[place] >> 8 & 1:
                continue
            if node >= len(units):
                raise BadCheckpoint("The trie of the table of characters leads outside itself.")
            value = units[node] & 0x7FFFFFFF
            if value > len(texts) or (value < len(texts) and texts[value] & 0xC0 == 0x80):
                raise BadCheckpoint("The trie of the table of characters names replacements that are not there.")


def _follow(unit: int, place: int) -> int:
    """Where the children of the unit at `place` are counted from."""
    return place ^ (unit >> 10 << ((unit & 0x200) >> 6))


def check_normalizer(backend: tokenizers.Tokenizer) -> None:
    """check_charsmap for every table in a tokenizer's normaliser."""
    if backend.normalizer is None:
        return
    steps: list[dict[str, Any]] = [json.loads(backend.normalizer.__getstate__())]
    while steps:
        step = steps.pop()
        steps += step.get("normalizers", [])
        if step.get("type") == "Precompiled":
            check_charsmap(base64.b64decode(step["precompiled_charsmap"]))
