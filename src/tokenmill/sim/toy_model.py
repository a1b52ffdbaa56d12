"""The toy model of simulations: its next token is a hash of all tokens before. `executor` runs it over KV, whose slots
are kept here by group.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from ..core.block import KVGroupSpec
from ..core.embeds import Embeds, positions_of
from ..core.request import Request, SamplingParams
from ..core.step import Introduction, TokenLogprob


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
        self.kind = group.kind
        self.window = group.window
        self.reach: dict[int, dict[int, ToySequence]] = {}
        self.positions = array("q", [-1]) * (group.num_blocks * block_size)
        self.tokens = array("q", [-1]) * (group.num_blocks * block_size)
        self.block_size = block_size
        self.moving: dict[int, bool] = {}
        self.sending: dict[int, int] = {}


@dataclass(slots=True, eq=False)
class ToyEncoder:
    """What the encoder has made: of a block of its group, the digest of the content. `reach`: as in ToyPool."""

    contents: dict[int, bytes] = field(default_factory=dict)
    reach: dict[int, dict[int, ToySequence]] = field(default_factory=dict)

    def fill(self, intro: Introduction) -> None:
        found = {block: one.digest for one, block in zip(intro.embeds, intro.encoded, strict=False)}
        self.contents.update((block, found[block]) for block in intro.unencoded)

    def has(self, intro: Introduction) -> bool:
        """Whether the blocks of a sequence are those of its contents."""
        return all(
            self.contents.get(block) == one.digest for one, block in zip(intro.embeds, intro.encoded, strict=False)
        )


def give_back(pools: Sequence[ToyPool], blocks: Sequence[Sequence[int]]) -> bool:
    """What these blocks of each pool held is gone. False where a step in flight sees one of them."""
    for pool, ids in zip(pools, blocks, strict=True):
        for block in ids:
            if any(block in reach for reach in pool.reach.values()):
                return False
            size = pool.block_size
            begin, end = block * size, (block + 1) * size
            pool.positions[begin:end] = pool.tokens[begin:end] = array("q", [-1]) * size
    return True


def mark_of(adapter: str) -> int:
    """What an adapter adds to the tokens it stores."""
    return int.from_bytes(blake2b(adapter.encode(), digest_size=4).digest(), "little") << 24 if adapter else 0


NUM_AXES = 3
"""Of the toy model's positions."""


def inputs_of(tokens: Sequence[int], embeds: Sequence[Embeds] = ()) -> array[int]:
    """What stands for the first inputs of a sequence: tokens, with a mark of the content and of the position wherever
    these are not a token's that comes after as many."""
    values = array("q", tokens)
    if embeds:
        contents = {one.start + at: (one.digest, at) for one in embeds for at in range(one.num)}
        seen = {one.start: one.digest for one in embeds if not one.num}
        for place, position in enumerate(positions_of(embeds, len(values), NUM_AXES)):
            if place in contents or place in seen or set(position) != {place}:
                marks = repr((contents.get(place), seen.get(place), position)).encode()
                values[place] += int.from_bytes(blake2b(marks, digest_size=4).digest(), "little") << 24
    return values


def state_after(values: array[int]) -> int:
    """The state of layers that keep one, after these inputs."""
    return int.from_bytes(blake2b(values.tobytes(), digest_size=7).digest(), "little")


def draw(vocab_size: int, intro: Introduction, prefix: array[int], position: int) -> int:
    """The toy model and its sampler: the token after `prefix`, as output number `position`.

    A greedy draw depends on the prefix and the grammar alone; others on seed, choice and position too. Stop tokens are
    masked until min_tokens outputs exist, as a real sampler masks them.
    """
    state = blake2b(prefix.tobytes(), digest_size=8)
    sampling = intro.sampling
    if sampling.temperature > 0:
        state.update(f"{intro.seed}:{intro.choice}:{position}".encode())
    state.update(sampling.grammar.encode())
    token = int.from_bytes(state.digest(), "little") % vocab_size
    if position < sampling.min_tokens:
        masked = {*intro.eos_token_ids, *sampling.stop_token_ids}
        while token in masked:
            token = (token + 1) % vocab_size
    return token


def logprob(vocab_size: int, prefix: array[int], token: int) -> TokenLogprob:
    """A made-up but reproducible score of `token` after `prefix`."""
    digest = blake2b(prefix.tobytes() + token.to_bytes(8, "little"), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    return TokenLogprob(token, -(value % 1000) / 100.0, 1 + value % vocab_size)


@dataclass(frozen=True, slots=True)
class SoloAnswer:
    """What a request gives when it runs alone, from its prompt to its end."""

    tokens: tuple[int, ...]
    finish_reason: str
    stop_token: int | None
    prompt_logprobs: tuple[TokenLogprob, ...]


def introduction(request: Request) -> Introduction:
    """What a worker must be told of a new request."""
    return Introduction(
        request.prompt_tokens,
        request.output_tokens,
        request.sampling,
        request.seed,
        request.choice,
        request.end_token_ids,
        adapter=request.adapter,
        embeds=request.embeds,
    )


def solo_answer(request: Request, vocab_size: int) -> SoloAnswer:
    """The new tokens (without the stop token) of a request run alone, counted after its `output_tokens`."""
    intro = introduction(request)
    sampling: SamplingParams = request.sampling
    stops = {*intro.eos_token_ids, *sampling.stop_token_ids}
    prefix = inputs_of(request.prompt_tokens, request.embeds) + array("q", request.output_tokens)
    num_before = len(request.output_tokens)
    scores: tuple[TokenLogprob, ...] = ()
    if sampling.prompt_logprobs is not None and not num_before:
        prompt = request.prompt_tokens
        scores = tuple(logprob(vocab_size, prefix[: p + 1], prompt[p + 1]) for p in range(len(prompt) - 1))
    tokens: list[int] = []
    for position in range(num_before, request.max_tokens):
        token = draw(vocab_size, intro, prefix, position)
        if token in stops and position >= sampling.min_tokens:
            return SoloAnswer(tuple(tokens), "stop", token, scores)
        prefix.append(token)
        tokens.append(token)
    return SoloAnswer(tuple(tokens), "length", None, scores)
