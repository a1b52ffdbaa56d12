"""Whether an audit log is what was written: every entry behind the one before it, and every head met.

What it can find: an entry that was changed, taken out, put in or moved; an end that was cut off behind the newest head;
a log that was written anew, which no head signed with the key fits. A head that was kept elsewhere (`--head`, from
syslog) also finds an end that was cut off together with its heads. Entries behind the newest head, of at most ten
seconds, are covered by the chain alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..signing import Verifier
from .chain import HEADS, START, Tip, files_of, is_signed, tip_of

_MAX_TOLD = 20


@dataclass(slots=True)
class Finding:
    """first, last: numbers of the entries there are. signed: of the newest that a valid head covers. problems: what is
    wrong, at most so many; notes: what is not, but is to be known."""

    first: int = 0
    last: Tip = START
    num_entries: int = 0
    num_heads: int = 0
    signed: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def tell(self, problem: str) -> None:
        if len(self.problems) < _MAX_TOLD:
            self.problems.append(problem)


def verify(path: Path, *, keys: Sequence[Verifier], known: Sequence[Tip] = (), begins_at: int = 1) -> Finding:
    """`known`: heads that were kept elsewhere; one without a number (-1) is looked for by its hash. `begins_at`: the
    first entry, where older files have been moved away. Raises OSError."""
    found = Finding()
    heads = list(_heads(path, {key.key_id: key for key in keys}, found))
    wanted: dict[int, list[str]] = {}
    for tip in (*heads, *(tip for tip in known if tip.seq >= 0)):
        wanted.setdefault(tip.seq, []).append(tip.hash)
    loose = {tip.hash for tip in known if tip.seq < 0}
    tip = START
    for file, number, line in _lines(path):
        where = f"{file.name} line {number}"
        entry = _entry(line)
        if entry is None:
            found.tell(f"{where} is no entry.")
            continue
        seq = entry["seq"]
        if not found.num_entries:
            found.first = seq
            if seq != begins_at:
                found.tell(f"{where}: the log begins with entry {seq}, not {begins_at}: earlier ones are missing.")
            elif seq == 1 and entry["prev"] != START.hash:
                found.tell(f"{where}: the first entry follows another.")
        elif seq > tip.seq + 1:
            found.tell(f"{where}: entry {seq} follows {tip.seq}: those between are missing.")
        elif seq <= tip.seq:
            found.tell(f"{where}: entry {seq} follows {tip.seq}: entries were moved or repeated.")
        elif entry["prev"] != tip.hash:
            found.tell(f"{where}: entry {seq} does not fit: entry {tip.seq} was changed, or another was there.")
        tip = tip_of(seq, line)
        found.num_entries += 1
        loose.discard(tip.hash)
        for hash in wanted.pop(seq, ()):
            if hash != tip.hash:
                found.tell(f"{where}: entry {seq} is not the one of its head.")
            elif (seq, hash) in heads:
                found.signed = max(found.signed, seq)
    found.last = tip
    for seq in sorted(wanted):
        if seq > tip.seq:
            found.tell(f"There is a head of entry {seq}, but the log ends at {tip.seq}: its end was cut off.")
        elif begins_at <= seq:
            found.tell(f"There is a head of entry {seq}, but no such entry.")
    for hash in sorted(loose):
        found.tell(f"No entry has the hash {hash}: the log was cut off before it, or written anew.")
    if keys and not found.signed:
        found.tell("No signed head covers any of the log.")
    if keys and found.signed < tip.seq and not found.problems:
        found.notes.append(f"Entries {found.signed + 1} to {tip.seq} come after the newest signed head.")
    return found


def _heads(path: Path, keys: Mapping[str, Verifier], found: Finding) -> Iterator[Tip]:
    """Those with a good signature, where there are keys to look at it by."""
    file = path.with_name(path.name + HEADS)
    lines = file.read_bytes().split(b"\n") if keys and file.exists() else []
    if lines and lines[-1]:
        found.notes.append(f"{file.name} ends with half a line.")
    for number, line in enumerate(lines[:-1], 1):
        head = _entry(line, "hash")
        if head is None or not is_signed(head, keys):
            found.tell(f"{file.name} line {number} is no head signed with the given key.")
            continue
        found.num_heads += 1
        yield Tip(head["seq"], head["hash"])


def _lines(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    files = files_of(path)
    if not files:
        raise FileNotFoundError(2, "There is no such log", str(path))
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n") and file == path:
                    return  # half of one, of a crash: the next start takes it out and tells of it
                yield file, number, line.rstrip(b"\n")


def _entry(line: bytes, hash_field: str = "prev") -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_whole = (
        isinstance(entry, dict)
        and type(entry.get("seq")) is int
        and isinstance(entry.get(hash_field), str)
        and isinstance(entry.get("time"), str)
    )
    return entry if is_whole else None
