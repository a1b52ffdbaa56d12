"""Names for KV: a block, its key, a sequence's ordered list of blocks (block table), and the layout of one block.

This file and `kv/blocks` know block *ids*. The backend owns block *bytes* (`ops.kv_pool`); neither side imports the
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

KV_DTYPES = ("f16", "bf16", "f32", "int8")

FULL, WINDOW, LATENT, STATE, CROSS = "full", "window", "latent", "state", "cross"
"""Kinds of KV groups: their layers see all positions before them, or a window of them; or they see all and keep, for
all heads together, one vector a token that serves as key and, its first channels, as value; or all that they keep of
what came before is a state of fixed size (linear attention, Mamba, arXiv 2312.00752); or they see what an encoder has
made of other inputs (cross attention; Whisper, arXiv 2212.04356)."""

STATE_WINDOW = 2
"""What goes on from a position needs the block of the position before it, with the state there, and its own."""

KEY_BYTES = 16
BlockKey = bytes
"""Chained 128-bit hash of (parent key, tokens and content in their places, numerics id, adapter, salt): within one KV
group, equal key = interchangeable KV."""

BlockMove = tuple[int, BlockKey, int]
"""A block that is copied between a pool and a store: the place of its KV group, its key there, its id here."""


def split_keys(keys: bytes) -> Iterator[BlockKey]:
    """Keys that were joined."""
    return (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))


def cut_moves(moves: Iterable[BlockMove], block_bytes: Sequence[int], most_bytes: int) -> list[tuple[BlockMove, ...]]:
    """Runs of at most `most_bytes`, of one block at least. block_bytes: of each KV group."""
    runs: list[list[BlockMove]] = []
    room = 0
    for move in moves:
        if not runs or room < block_bytes[move[0]]:
            runs.append([])
            room = most_bytes
        runs[-1].append(move)
        room -= block_bytes[move[0]]
    return [tuple(run) for run in runs]


NO_BLOCK = -1

LATEST_TOKENS = 64
"""Of an answer, the latest state that is published is so many tokens old at most, and a block."""


@dataclass(slots=True, eq=False)
class Checkpoints:
    """Behind which blocks of a sequence its state stays: every `interval` of them, at the last full one of its prompt,
    where its prompt leaves what was cached before (SGLang's branching points), and, one at a time, at the latest whole
    64 tokens of its answer. So a sequence has few, however long it is.

    latest   index and block of that last kind
    """

    interval: int
    num_prompt: int
    num_shared: int = 0
    latest: tuple[int, int] | None = None

    def keeps(self, num_blocks: int) -> bool:
        """Whether the state after so many blocks stays."""
        return num_blocks in (self.num_prompt, self.num_shared) or num_blocks % self.interval == 0

    def is_latest(self, num_blocks: int, block_size: int) -> bool:
        """Whether it stays until the next one of these."""
        return num_blocks > self.num_prompt and num_blocks % max(1, LATEST_TOKENS // block_size) == 0


@dataclass(slots=True, eq=False)
class BlockTable:
    """Ordered physical block ids of one sequence in one KV group; append-only while RUNNING. NO_BLOCK: of a group of
    states, no state is kept at the end of that block.

    num_released   leading entries whose blocks were given back, since no query to come sees them; they read 0
    num_published  leading blocks that were offered to other sequences: of a group that sees everything, all of them
                   are in the prefix tree
    checkpoints    of a group of states: its `Checkpoints`
    """

    ids: list[int] = field(default_factory=list)
    num_released: int = 0
    num_published: int = 0
    checkpoints: Checkpoints | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def held(self) -> list[int]:
        """The ids that the sequence holds."""
        held = self.ids[self.num_released :]
        return held if self.checkpoints is None else [block for block in held if block != NO_BLOCK]

    @property
    def num_held(self) -> int:
        return len(self.ids) - self.num_released if self.checkpoints is None else len(self.held)


def num_hidden_blocks(position: int, window: int, block_size: int) -> int:
    """Leading blocks that no query at `position` or after it sees, when one sees `window` positions, its own included
    (0: all)."""
    return max(0, position - window + 1) // block_size if window else 0


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """What an engine knows of what layers keep of a sequence, a KV group: they share one block table.

    kind             FULL, WINDOW, LATENT, STATE or CROSS
    num_blocks       blocks in the group's pool
    window           positions that a query of these layers sees at most, its own included; 0: all
    bytes_per_block  what a block takes in memory; 0: unknown, as in a toy model
    interval         of a STATE group: blocks from one checkpoint to the next

    A block of a STATE group is the state after the last computed position of the block, written in place from token to
    token. Where the block ends it is a checkpoint: it stays as it is, the next block begins from it, and so does
    whoever has a hit that ends there. A row that covers several blocks leaves one in each that has a place in the
    table (`Checkpoints`). A row with drafts has a place in each: whoever computes keeps the state behind each draft and
    leaves, in the block where the last right one is, the state there.

    A block of the CROSS group holds what the encoder makes of one content (`core.embeds`), whole. It is in no table:
    who computes is told of a sequence's blocks as it is introduced.
    """

    kind: str
    num_blocks: int
    window: int = 0
    bytes_per_block: int = 0
    interval: int = 0

    def __post_init__(self) -> None:
        assert self.kind in (FULL, WINDOW, LATENT, STATE, CROSS), self
        assert (self.kind == STATE) == (self.interval > 0), self
        assert (self.kind in (WINDOW, STATE)) == (self.window > 0), self
        assert self.kind != STATE or self.window == STATE_WINDOW, self

    @property
    def num_bytes(self) -> int:
        """Of the whole pool."""
        return self.num_blocks * self.bytes_per_block


def full_groups(num_blocks: int, bytes_per_block: int = 0) -> tuple[KVGroupSpec, ...]:
    """The groups of a model whose layers all see everything; without blocks, of one that keeps no KV."""
    return (KVGroupSpec(FULL, num_blocks, bytes_per_block=bytes_per_block),)


def window_group(num_blocks: int, window: int, bytes_per_block: int = 0) -> KVGroupSpec:
    """The group of layers that see `window` positions."""
    return KVGroupSpec(WINDOW, num_blocks, window, bytes_per_block)


def state_group(num_blocks: int, interval: int, bytes_per_block: int = 0) -> KVGroupSpec:
    """The group of layers that keep a state, with a checkpoint every `interval` blocks."""
    return KVGroupSpec(STATE, num_blocks, STATE_WINDOW, bytes_per_block, interval)


def cross_group(num_blocks: int, bytes_per_block: int = 0) -> KVGroupSpec:
    """The group of an encoder's outputs (EngineConfig.encoder)."""
    return KVGroupSpec(CROSS, num_blocks, bytes_per_block=bytes_per_block)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table, and what the bytes of one block mean.

    window     positions that a query of any of these layers sees at most, its own included; 0: all
    layers     which of the model's layers they are, in order; empty: all, or none where num_layers is 0
    table      place of their block table among a sequence's tables
    value_dim  of a latent group: channels of a key, the first ones, that are the value too; 0: values are apart
    state_values   of a group of states: float32 values that a layer keeps
    key_exponents  of int8, for each layer and then each channel of its KV heads: keys are stored divided by 2 to the
               power of it; empty: 0

    One block holds, for each layer in turn, K as [num_kv_heads, head_dim, block_size] (token innermost, so that a
    vector lane is a token) and then V as [num_kv_heads, block_size, head_dim] (channel innermost): all layers of a
    block are one contiguous range, which is what transfers and tiers move.

    int8: K is [num_kv_heads, head_dim / 4, block_size, 4 channels] and V [num_kv_heads, block_size / 4, head_dim,
    4 tokens] (fours that are not full are padded); a byte of K is code + 128, one of V the code, both of what
    Ops.write_kv makes of the channels. After them come the
    scales, float32: of K, then of V, each [num_kv_heads, block_size]. A scale belongs to one token and head, so that it
    is known when these are written and depends on nothing else.

    A latent group (DeepSeek-V2, arXiv 2405.04434) has one KV head and holds, for each layer in turn, only
    [block_size, head_dim], channel innermost; of int8 these are codes, after which come the scales, float32
    [block_size].

    A group of states holds, for each layer in turn, what ops.api.StateGeometry says, float32; dtype is f32, and there
    are no KV heads. It is that of one position, not of block_size.

    A group without layers holds nothing: its blocks say which prefixes are there, of a model that keeps states alone.
    They have four bytes a token, so that they can be moved and kept as others.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "f16"
    window: int = 0
    layers: tuple[int, ...] = ()
    table: int = 0
    value_dim: int = 0
    state_values: int = 0
    key_exponents: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        assert len(self.layers) in (0, self.num_layers), self
        assert not self.key_exponents or self.dtype == "int8", self
        widths = {len(exponents) for exponents in self.key_exponents}
        assert len(self.key_exponents) in (0, self.num_layers) and widths <= {self.num_kv_heads * self.head_dim}, self
        assert (self.name == LATENT) == (self.value_dim > 0), self
        assert (self.name == STATE) == (self.state_values > 0), self
        assert not self.value_dim or (self.num_kv_heads == 1 and self.value_dim <= self.head_dim), self

    @property
    def bytes_per_value(self) -> int:
        """Without scales."""
        return {"f16": 2, "bf16": 2, "f32": 4, "int8": 1}[self.dtype]

    @property
    def bytes_per_layer_block(self) -> int:
        """K and V of one layer of one block, with scales and padding."""
        if self.state_values:
            return 4 * self.state_values
        if self.value_dim:
            scale_bytes = 4 if self.dtype == "int8" else 0
            return self.block_size * (self.head_dim * self.bytes_per_value + scale_bytes)
        if self.dtype == "int8":
            keys = -(-self.head_dim // 4) * 4 * self.block_size
            values = -(-self.block_size // 4) * 4 * self.head_dim
            return self.num_kv_heads * (keys + values + 2 * 4 * self.block_size)
        return 2 * self.num_kv_heads * self.head_dim * self.block_size * self.bytes_per_value

    @property
    def bytes_per_block(self) -> int:
        return self.num_layers * self.bytes_per_layer_block or 4 * self.block_size

    def layers_of(self, num_layers: int) -> Sequence[int]:
        """Numbers of its layers, in a model of so many."""
        return self.layers if len(self.layers) == self.num_layers else range(num_layers)

    @property
    def bytes_per_token(self) -> int:
        """0 of states, which do not grow."""
        return 0 if self.state_values else self.bytes_per_block // self.block_size
