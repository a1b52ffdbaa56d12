"""The form of an audit log: entries of which each names the hash of the one before it, and signed heads.

An entry is one line of JSON: `seq` counts from 1, `time` is UTC, `prev` is the SHA-256 of the line before (of 64 zeros
before the first), then what happened. So the hash of the last line, the head, stands for all lines. A head is one line
too: `seq` and `hash` of an entry, `time`, the key's id and its Ed25519 signature over the first three.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ..signing import Signer, Verifier

HEADS = ".heads"
"""What the file of heads is called besides the log's name."""


class Tip(NamedTuple):
    """An entry's number and the hash of its line."""

    seq: int
    hash: str

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"


START = Tip(0, "0" * 64)


def shown_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def line_after(tip: Tip, time_s: float, event: Mapping[str, Any]) -> bytes:
    """The entry that goes behind `tip`, without its line's end."""
    entry = {"seq": tip.seq + 1, "time": shown_time(time_s), "prev": tip.hash, **event}
    return json.dumps(entry, separators=(",", ":")).encode()


def is_begun(line: bytes, tip: Tip) -> bool:
    """Whether `line` is the beginning of an entry behind `tip`, whatever its time is."""
    begin, time, rest = line_after(tip, 0.0, {})[:-1].partition(shown_time(0.0).encode())
    at = len(begin), len(begin) + len(time)
    timeless = (line[: at[0]] + time + line[at[1] :])[: len(line)]
    return (begin + time + rest).startswith(timeless[: at[1] + len(rest)])


def tip_of(seq: int, line: bytes) -> Tip:
    return Tip(seq, hashlib.sha256(line).hexdigest())


def head_of(tip: Tip, time_s: float, signer: Signer) -> dict[str, Any]:
    head = {"seq": tip.seq, "hash": tip.hash, "time": shown_time(time_s), "key": signer.key_id}
    return head | {"signature": base64.b64encode(signer.sign(_signed(head))).decode()}


def is_signed(head: Mapping[str, Any], keys: Mapping[str, Verifier]) -> bool:
    """Whether a head was signed with one of `keys`, which go by their ids."""
    try:
        key, signature = keys.get(head["key"]), base64.b64decode(head["signature"], validate=True)
        return key is not None and key.holds(signature, _signed(head))
    except (KeyError, TypeError, ValueError):
        return False


def _signed(head: Mapping[str, Any]) -> bytes:
    return f"tokenmill audit head\n{head['seq']}\n{head['hash']}\n{head['time']}\n".encode()
