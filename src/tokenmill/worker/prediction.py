"""What the caller of a request expects of its answer, as a drafter: OpenAI's `prediction`.

The answer is at one place of the expected text, or at none. It begins at the beginning. Where the next token is another
one, what the answer ends with is looked for, up to 16 tokens of it, and first behind where the answer left the text: a
change leaves out, puts in or writes anew, and then goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ..core.speculation import PREDICTION
from ..core.step import Drafts

_CONTEXTS = (1, 2, 4, 8, 16)
"""Tokens that are looked for."""

_AROUND = 4096
"""Tokens of the text that are looked at, to either side: microseconds, however long it is."""


class Prediction:
    """tokens: the expected text; output: what there is of the answer."""

    def __init__(self, tokens: Sequence[int], output: Sequence[int]) -> None:
        self._tokens = array("i", tokens)
        self._bytes = self._tokens.tobytes()
        self._end = array("i")  # of the answer
        self._at = self._left = 0  # where the answer is, and where it was last
        self._num_matched = 1  # tokens before it that match; 0: it is nowhere. The beginning counts as one
        if output:
            self.follow(output)

    def follow(self, drawn: Sequence[int]) -> None:
        """The answer goes on with these."""
        more = array("i", drawn)
        self._end = (self._end + more)[-_CONTEXTS[-1] :]
        if self._num_matched and self._tokens[self._at : self._at + len(more)] == more:
            self._at = self._left = self._at + len(more)
            self._num_matched += len(more)
        else:
            self._find()

    def propose(self, most: int) -> Drafts | None:
        """At most so many tokens that may follow. The more have matched, the likelier they go on to; many are sure to,
        as those of other drafters are that were never seen to go on otherwise."""
        if not self._num_matched or self._at >= len(self._tokens):
            return None
        tokens = tuple(self._tokens[self._at : self._at + most])
        chances = [round(1 - 0.5**num, 4) for num in range(self._num_matched, self._num_matched + len(tokens))]
        return Drafts(tokens, PREDICTION, tuple(chances))

    def _find(self) -> None:
        left, self._num_matched = self._left, 0
        for length in _CONTEXTS:
            if length > len(self._end) or (place := self._end_of(self._end[-length:].tobytes(), left)) < 0:
                return
            self._at = self._left = place
            self._num_matched = length

    def _end_of(self, context: bytes, left: int) -> int:
        """Where the context ends in the text: the first time at or behind the token `left`, else the last time before
        it; below 0: nowhere. No token is looked for in the middle of others."""
        text, size, num_bytes = self._bytes, self._tokens.itemsize, len(context)
        first, last = max(0, left - _AROUND) * size, (left + _AROUND) * size
        begin = max(0, (left + 1) * size - num_bytes)
        at = text.find(context, begin, last)
        while at >= 0 and at % size:
            at = text.find(context, at + 1, last)
        if at < 0:
            at = text.rfind(context, first, begin + num_bytes - 1)
            while at >= 0 and at % size:
                at = text.rfind(context, first, at + num_bytes - 1)
        return -1 if at < 0 else (at + num_bytes) // size
