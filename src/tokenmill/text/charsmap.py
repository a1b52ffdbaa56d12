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

import numpy as np
import tokenizers

from ..core.errors import BadCheckpoint

_LABEL = 0x800000FF
_AT_A_TIME = 4096
"""Units whose children are looked at together: a megabyte for each 512."""


def check_charsmap(table: bytes) -> None:
    """Raises BadCheckpoint unless every walk through the table stays inside it."""
    if len(table) < 4:
        raise BadCheckpoint("The table of characters has no length.")
    (num_bytes,) = struct.unpack_from("<I", table)
    if num_bytes % 4 or not 4 <= num_bytes <= len(table) - 4:
        raise BadCheckpoint(f"The table of characters says {num_bytes} bytes of trie; it has {len(table) - 4} in all.")
    units = np.frombuffer(table, "<u4", num_bytes // 4, 4).astype(np.int64)
    texts = table[4 + num_bytes :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise BadCheckpoint("The replacements of the table of characters are not UTF-8.") from None
    starts = np.append((np.frombuffer(texts, np.uint8) & 0xC0) != 0x80, True)
    seen = np.zeros(len(units), bool)
    labels = np.arange(1, 256)
    waiting = [_follow(units[:1], np.zeros(1, np.int64))]
    while waiting:
        nodes = waiting.pop()
        children = (nodes[:, None] ^ labels).reshape(-1)
        if children.max() >= len(units):
            raise BadCheckpoint("The trie of the table of characters leads outside itself.")
        taken = (units[children] & _LABEL) == np.tile(labels, len(nodes))
        children = np.unique(children[taken])
        children = children[~seen[children]]
        seen[children] = True
        nodes = _follow(units[children], children)
        leaves = nodes[(units[children] >> 8 & 1) == 1]
        if len(leaves) and leaves.max() >= len(units):
            raise BadCheckpoint("The trie of the table of characters leads outside itself.")
        values = units[leaves] & 0x7FFFFFFF
        if len(values) and (values.max() > len(texts) or not starts[values].all()):
            raise BadCheckpoint("The trie of the table of characters names replacements that are not there.")
        waiting += [nodes[first : first + _AT_A_TIME] for first in range(0, len(nodes), _AT_A_TIME)]


def _follow(units: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Where the children of `units`, which stand at `places`, are counted from."""
    return places ^ (units >> 10 << ((units & 0x200) >> 6))


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
