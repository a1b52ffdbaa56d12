"""One hash of all that clients saw in a run: each request's times and results, to the last bit. Equal seeds give equal
digests, whatever PYTHONHASHSEED and the machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from hashlib import blake2b
from typing import Any


def digest_of(requests: Iterable[Any]) -> str:
    """Of the rows of `bench.result.Run`, in their order; 16 hexadecimal digits. Of floats the shortest text counts that
    reads back the same."""
    total = blake2b(digest_size=8)
    for row in requests:
        total.update(json.dumps(asdict(row), sort_keys=True).encode("utf8") + b"\n")
    return total.hexdigest()
