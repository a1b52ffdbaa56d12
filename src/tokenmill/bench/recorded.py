"""The command line as results record it: what to type to repeat a run, without its secrets."""

from __future__ import annotations

from collections.abc import Sequence

_SECRET = ("--api-key", "--greedy-key", "--refused-key", "--header")


def without_secrets(argv: Sequence[str]) -> list[str]:
    """The words of a command line, the values of secret options replaced by '...'. Doing it twice changes nothing."""
    shown = list(argv)
    for i, word in enumerate(shown):
        if word.startswith(tuple(f"{option}=" for option in _SECRET)):
            shown[i] = word.partition("=")[0] + "=..."
        elif i and shown[i - 1] in _SECRET:
            shown[i] = "..."
    return shown
