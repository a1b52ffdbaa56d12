"""What an API makes of an answer: the ports that every API's folder implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..api.pieces import Work
from ..core.errors import TokenmillError
from ..text.choice import Choice, Piece
from .answer import Answer


class Chunks(Protocol):
    """One answer's stream. Each method gives bytes to be sent at once, or none.

    is_plain  `text` may write a piece that does not end its choice, whatever it is
    """

    is_plain: bool

    def start(self) -> bytes:
        """Before any piece; the first output has come."""
        ...

    def text(self, choice: Choice, piece: Piece) -> bytes:
        """The quick way for nothing but text: called only while `is_plain`."""
        ...

    def piece(self, choice: Choice, piece: Piece) -> Work[bytes]:
        """Any piece. One with a finish_reason is the last of its choice."""
        ...

    def end(self) -> bytes:
        """After the last piece of all choices: what makes the stream complete."""
        ...

    def failure(self, error: TokenmillError) -> bytes:
        """In place of all that was still to come."""
        ...


class Shape(Protocol):
    """prefix      of the ids that answers get, with the character behind it
    media_type  of streams
    """

    @property
    def prefix(self) -> str: ...

    @property
    def media_type(self) -> str: ...

    def whole(self, answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
        """The JSON body of an answer that is not streamed; `pieces` per choice."""
        ...

    def chunks(self, answer: Answer) -> Chunks: ...
