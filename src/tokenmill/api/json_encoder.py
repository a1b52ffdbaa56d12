"""JSON as it goes out: one line for whoever splits text into lines.

JSON may hold U+2028, U+2029 and U+0085 as they are, but `str.splitlines` and its kin in other languages break a line
there, and clients read Server-Sent Events, lines of JSON and batch files so. They are rare, so what has none costs a
search or three and no copy.
"""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
_SEPARATORS = "\x85\u2028\u2029"
_ESCAPES = [(char.encode(), b"\\u%04x" % ord(char)) for char in _SEPARATORS]
IN_TEXT = {ord(char): f"\\u{ord(char):04x}" for char in _SEPARATORS}
"""The same for `str.translate` of what is text already."""


def encode_json(value: Any) -> bytes:
    data = _encode(value)
    if not data.isascii() and (b"\xe2\x80" in data or b"\xc2\x85" in data):
        for raw, escape in _ESCAPES:  # outside of its strings JSON is ASCII
            data = data.replace(raw, escape)
    return data
