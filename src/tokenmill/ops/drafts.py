"""Drafters without a model: what proposes the tokens of a sequence from what is written already. They see tokens only,
and change none: what they propose is verified. `reference_drafts` defines what is proposed; the native backend finds
the same in microseconds, whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..core.step import Drafts
from ..core.units import MiB

OCCURRENCES = 64
"""Places of a context that are looked at: the latest ones; in a corpus, ones that lie evenly among all in its order."""

OUTPUT_BYTES = 64 * MiB
"""For outputs of ended sequences and their index: about a million tokens."""

SEQUENCE_TOKEN_BYTES = 64
"""About what a token of a running sequence takes."""


class Wanted(NamedTuple):
    """tokens: what sequence `seq` goes on with; most: tokens to propose after these, 0: none."""

    seq: int
    tokens: Sequence[int]
    most: int


class Corpus(NamedTuple):
    """Texts that are drafted from, int32, little-endian and contiguous. tokens: a negative one, then those of a text,
    and so on, and a negative one at the end; places: of those that another of the same text follows, in the order of
    `contexts.sort_contexts`."""

    tokens: np.ndarray
    places: np.ndarray


class Drafter(Protocol):
    """For all sequences of a worker. Equal calls give equal drafts. One thread uses it."""

    def begin(self, seq: int, scope: str, expected: int, num_before: int, corpora: Sequence[int] = ()) -> None:
        """A sequence, forgotten first where it is known, whose tokens come with `propose`, about `expected` of them
        soon. Those from num_before on are its output. It is drafted for from outputs of its own scope and from these of
        the corpora alone."""
        ...

    def end(self, seq: int) -> None:
        """The sequence is over: what it has put out may be proposed to others. Unknown ones are fine."""
        ...

    def propose(self, rows: Sequence[Wanted]) -> list[Drafts | None]:
        """Of each row, by the first of the configured methods that knows anything; None: none does."""
        ...
