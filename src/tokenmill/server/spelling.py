"""Whether an unknown field is a known one misspelled. Pure.

A field that nobody reads changes nothing, which is what its sender wants only if it was meant for somebody else. So a
name that is nearly a known one is taken for a mistake, and one that other servers read is not.
"""

from __future__ import annotations

from collections.abc import Iterable

OTHERS = frozenset(
    {
        "content", "context", "ec_transfer_params", "inputs", "instruction", "mode", "models", "speed", "texts",
        "top_a", "top_k", "top_n", "top_p", "typ_p",
    }
)  # fmt: skip
"""Fields of other endpoints and servers whose names are nearly those of fields here."""

_MIN_CHARS = 4
_MIN_CHARS_OF_TWO = 9


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` seems to be meant for: the same but for case, dashes and underscores; or another by a
    letter too many, too few, wrong or in its neighbour's place, by two of these in a long name."""
    if name in OTHERS or len(name) < _MIN_CHARS:
        return None
    plain, letters = _plain(name), set(name.lower())
    near: list[tuple[int, str]] = []
    for other in known:
        if len(other) < _MIN_CHARS or abs(len(other) - len(name)) > 2:
            continue
        most = 2 if len(other) >= _MIN_CHARS_OF_TWO else 1
        if len(letters ^ set(other.lower())) > 2 * most:  # the quick way: one change makes two letters differ at most
            continue
        changes = (
            0 if _plain(other) == plain else next((n for n in range(1, most + 1) if _within(name, other, n)), None)
        )
        if changes is not None:
            near.append((changes, other))
    return min(near)[1] if near else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _within(first: str, second: str, changes: int) -> bool:
    """Whether so many changes of a letter make one of the other; a swap of neighbours is one."""
    same = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        same += 1
    first, second = first[same:], second[same:]
    if not first or not second or not changes:
        return len(first) + len(second) <= changes
    return (
        _within(first[1:], second[1:], changes - 1)
        or _within(first[1:], second, changes - 1)
        or _within(first, second[1:], changes - 1)
        or (first[:2] == second[1::-1] and len(second) > 1 and _within(first[2:], second[2:], changes - 1))
    )
