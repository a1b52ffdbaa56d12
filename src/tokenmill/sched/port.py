"""What the scheduler asks of the engine core, which owns every sequence and block."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Protocol

from ..core.cost import Costs
from ..core.sequence import Sequence
from ..kv.blocks.groups import Match


class SchedulerPort(Protocol):
    """Steps are composed by looking at sequences and by these calls alone."""

    @property
    def no_match(self) -> Match: ...

    def find_match(self, seq: Sequence) -> Match:
        """Published blocks that would carry the sequence's planned part on from a block border; changes nothing."""
        ...

    def num_available_blocks(self, matched: Match) -> List[int]:
        """Blocks of each KV group that can be handed out beside `matched`."""
        ...

    def num_extendable(self, matched: Match) -> int:
        """By how many blocks a sequence's tables can grow after `matched`."""
        ...

    def reconsider(self, seq: Sequence) -> None:
        """Ask the order of service anew when a waiting sequence is due."""
        ...

    @property
    def step_number(self) -> int:
        """Of the step in the making."""
        ...

    @property
    def costs(self) -> Costs:
        """Of steps, as measured so far."""
        ...

    @property
    def num_targeted(self) -> int:
        """Unfinished sequences that have a target for a time."""
        ...

    def begins_s(self) -> float:
        """When the step in the making is expected to begin: after those in flight."""
        ...

    @property
    def num_loading(self) -> int:
        """Sequences that will run when their KV has come."""
        ...

    def fetch(self, seq: Sequence, matched: Match) -> bool:
        """WAITING -> LOADING, if stored KV carries the head of the queue further than `matched`; tells whether it
        does."""
        ...

    def admit(self, seq: Sequence) -> None:
        """WAITING -> RUNNING: the head of the queue joins the running list at its place."""
        ...

    def can_encode(self, seq: Sequence) -> bool:
        """Whether the encoder's group has blocks for the contents of a waiting one."""
        ...

    def adopt(self, seq: Sequence, matched: Match) -> None:
        """Carry the planned part on over matched blocks; a row of the same step follows."""
        ...

    def preempt(self, seq: Sequence) -> None:
        """RUNNING -> WAITING: leaves the running list and gives its blocks back. It has no row in flight."""
        ...

    def add_row(self, seq: Sequence, num_tokens: int) -> None:
        """Plan the next tokens of the sequence in this step; the blocks they need are available."""
        ...

    def add_decodes(self, sequences: List[Sequence]) -> None:
        """As `add_row` of one token of each, for which there is room in its last block."""
        ...

    def add_drafts(self, most: int) -> None:
        """Let rows of this step verify what was proposed for their sequences, as far as it pays: at most so many tokens
        together, and as many as a row has room for in its sequence's last block and one more, which is taken only where
        it is to spare: nobody gives way for drafts. What is not verified now is dropped."""
        ...
