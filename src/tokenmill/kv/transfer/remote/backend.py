"""What is asked of a store that others have a hand in: values by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class Backend(Protocol):
    """Calls are made on several threads at once; they raise OSError and EOFError, TimeoutError among them: each has a
    limit in seconds.

    name         as the log has it: without credentials
    num_threads  that are worth having, for calls of each kind
    batch_bytes  of values are asked for in one call, or one value
    look_names   are asked for in one call
    look_s       `has` takes at most so long, or the store is of no use
    """

    name: str
    num_threads: int
    batch_bytes: int
    look_names: int
    look_s: float

    def check(self, limit_s: float) -> None:
        """Whether it answers, and lets us in."""
        ...

    def has(self, names: Sequence[str], limit_s: float) -> list[bool]:
        """Of one prefix, in its order: what lies between two that are there may be taken to be there."""
        ...

    def get(
        self, names: Sequence[str], most_bytes: int, take: Callable[[int, memoryview], None], limit_s: float
    ) -> None:
        """`take(nth, value)` for each that is there; of one that has more bytes than that, whatever has another length.
        What it gets is valid during the call."""
        ...

    def put(self, values: Sequence[tuple[str, Buffer]], limit_s: float) -> list[bool]:
        """Which were taken: a store that is full takes none."""
        ...

    def delete(self, names: Sequence[str], limit_s: float) -> None: ...

    def close(self) -> None: ...
