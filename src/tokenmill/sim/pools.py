"""What a toy executor keeps: its sequences, and the slots of each KV group."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ..core.block import KVGroupSpec
from ..core.step import Introduction


@dataclass(slots=True, eq=False)
class ToySequence:
    """What the toy worker keeps of a sequence. `drawn_in`: step -> the position of the output drawn in it."""

    intro: Introduction
    tables: tuple[list[int], ...]
    outputs: list[int] = field(default_factory=list)
    drawn_in: dict[int, int] = field(default_factory=dict)


class ToyPool:
    """The slots of one KV group. `reach`: step in flight -> block -> a sequence of it that sees the block."""

    def __init__(self, group: KVGroupSpec, block_size: int) -> None:
        self.window = group.window
        self.reach: dict[int, dict[int, ToySequence]] = {}
        self.positions = array("q", [-1]) * (group.num_blocks * block_size)
        self.tokens = array("q", [-1]) * (group.num_blocks * block_size)
        self.moving: dict[int, bool] = {}
        self.sending: dict[int, int] = {}
