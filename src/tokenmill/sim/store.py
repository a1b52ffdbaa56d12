"""A toy store of KV blocks: what it holds of a block are the positions and tokens of its slots.

Transfers take a while, by choice of a seed some a long while, and some are lost: they fail after the slots that they
were to fill hold garbage. Whoever reads a block before its bytes are in, or has it written while it is copied, is found
out by the checks of `executor`.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..core.block import STATE, BlockKey, BlockMove
from ..core.config import EngineConfig
from ..core.effects import (
    DropBlocks,
    FetchBlocks,
    FindBlocks,
    NoteStepCosts,
    PinBlocks,
    PromoteBlocks,
    SaveBlocks,
    StoreOpened,
)
from ..core.errors import EngineFailed
from ..core.request import Request
from ..kv.blocks.hashing import extend_keys, root_key
from .toy_model import inputs_of, state_after

Slots = tuple[int, tuple[int, ...]]
"""What a block holds: its first position, and its tokens with the mark of their adapter."""

Stored = Mapping[tuple[int, BlockKey], Slots]
"""By the place of the KV group and the key."""

KVJob = FindBlocks | FetchBlocks | SaveBlocks | PromoteBlocks | DropBlocks | PinBlocks | NoteStepCosts
"""What an engine asks of a store."""

_GARBAGE = -9


class Pool(Protocol):
    """`moving`: blocks that transfers under way fill (True) or read (False). `sending`: how often each is read by
    others."""

    positions: array[int]
    tokens: array[int]
    moving: dict[int, bool]
    sending: dict[int, int]


@dataclass(slots=True)
class ToyStore:
    """`check`: raises the message it is given where the first argument is false."""

    pools: Sequence[Pool]
    block_size: int
    check: Callable[[bool, str], None]
    rng: random.Random
    failure_rate: float
    blocks: dict[tuple[int, BlockKey], Slots] = field(default_factory=dict)
    num_fetched: int = 0
    num_lost: int = 0

    def opened(self) -> StoreOpened:
        """Tells of most blocks: the others, which the executor has not heard of, are found by whoever looks anew."""
        known = [one for one in self.blocks if self.rng.random() < 0.8]
        keys = ([key for group, key in known if group == index] for index in range(len(self.pools)))
        return StoreOpened(tuple(tuple(group) for group in keys))

    async def run(self, job: KVJob) -> str:
        match job:
            case FindBlocks():
                return await self.find(job)
            case FetchBlocks():
                return await self.fetch(job)
            case SaveBlocks():
                return await self.save(job)
            case _:
                return ""  # of stores with tiers alone

    async def find(self, job: FindBlocks) -> str:
        await self._take_time()
        if self.rng.random() < self.failure_rate:
            raise EngineFailed("The store does not answer.")
        return "".join("01"[one in self.blocks] for one in job.wanted)

    async def fetch(self, job: FetchBlocks) -> str:
        await self._move(job.moves, is_filling=True)
        if self.rng.random() < self.failure_rate:
            self.num_lost += 1
            raise EngineFailed("The blocks were lost on their way.")
        for group, key, block in job.moves:
            first, tokens = self.blocks[group, key]
            slots = self._slots(block)
            self.pools[group].positions[slots] = array("q", range(first, first + self.block_size))
            self.pools[group].tokens[slots] = array("q", tokens)
        self.num_fetched += len(job.moves)
        return ""

    async def save(self, job: SaveBlocks) -> str:
        moves = [*job.moves, *(move for move in job.stored if move[:2] not in self.blocks)]
        before = [self._content(group, block) for group, _, block in moves]
        await self._move(moves, is_filling=False)
        is_lost = self.rng.random() < self.failure_rate
        if is_lost:
            moves, before = moves[: len(moves) // 2], before[: len(moves) // 2]
        for (group, key, block), content in zip(moves, before, strict=True):
            self.check(self._content(group, block) == content, f"block {block} was written while it was copied")
            positions, tokens = content
            self.blocks[group, key] = (positions[0], tuple(tokens))
        if is_lost:
            self.num_lost += 1
            raise EngineFailed("The disk is full.")
        return ""

    async def _take_time(self) -> None:
        await asyncio.sleep(self.rng.choice([0.0001, 0.003, 0.01, 0.2]))

    async def _move(self, moves: Sequence[BlockMove], *, is_filling: bool) -> None:
        """Takes the time of a step or two, or of many."""
        for group, _, block in moves:
            pool = self.pools[group]
            self.check(block not in pool.moving, f"block {block} is moved twice at once")
            pool.moving[block] = is_filling
            if is_filling:
                slots = self._slots(block)
                pool.positions[slots] = pool.tokens[slots] = array("q", [_GARBAGE]) * self.block_size
        await self._take_time()
        for group, _, block in moves:
            del self.pools[group].moving[block]

    def _slots(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def _content(self, group: int, block: int) -> tuple[array[int], array[int]]:
        pool, slots = self.pools[group], self._slots(block)
        return pool.positions[slots], pool.tokens[slots]


def keys_of(request: Request, answer: Sequence[int], config: EngineConfig) -> list[BlockKey]:
    """Of the full blocks of a request, prompt and answer."""
    keys: list[BlockKey] = []
    root = root_key(config.numerics_id, request.adapter, request.cache_salt)
    tokens = [*request.prompt_tokens, *request.output_tokens, *answer]
    extend_keys(keys, root, tokens, config.block_size, request.embeds)
    return keys


def blocks_of(
    request: Request, answer: Sequence[int], config: EngineConfig, mark: int
) -> dict[tuple[int, BlockKey], Slots]:
    """What these blocks hold in each KV group. `mark`: of the request's adapter."""
    tokens = [*request.prompt_tokens, *request.output_tokens, *answer]
    values = array("q", [value + mark for value in inputs_of(tokens, request.embeds)])
    found, size = dict[tuple[int, BlockKey], Slots](), config.block_size
    for index, key in enumerate(keys_of(request, answer, config)):
        end = (index + 1) * size
        for place, group in enumerate(config.groups):
            is_state = group.kind == STATE
            inside = (*(0,) * (size - 1), state_after(values[:end])) if is_state else tuple(values[end - size : end])
            found[place, key] = (index * size, inside)
    return found
