"""Inputs of a sequence that are not token ids, such as what an encoder makes of an image or of speech.

    prompt_tokens     5   9   7   7   7   7   4            7: a placeholder, which says nothing
    embeds                    |--- start 2, num 4 ---|
    positions  time   0   1   2   2   2   2   4            of an image of 2 x 2 in three axes, (0, 0, 0), (0, 0, 1),
               row    0   1   2   2   3   3   4            (0, 1, 0), (0, 1, 1) from where a token would be: what comes
               column 0   1   2   3   2   3   4            after it has the position after the largest

They are known by the digest of their content: who computes has the content, or makes it, by this name. Block keys
cover it (`kv.blocks.hashing`), so that KV is shared where the content is equal and nowhere else. Positions of several
axes: M-RoPE (Qwen2-VL, arXiv 2409.12191).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Embeds:
    """Inputs in a row that belong together.

    start      place of the first of them in the prompt
    num        how many places they take; 0: they are seen by what comes from `start` on, and stand at no place
    digest     of their content: equal digests, equal content
    positions  of each of them, a number for each axis of the model's positions, counted from the one that a token would
               have in the place of the first; (): as tokens have them
    """

    start: int
    num: int
    digest: bytes
    positions: tuple[tuple[int, ...], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num


def check_embeds(embeds: Sequence[Embeds], num_prompt: int) -> None:
    """Assert that they stand in a prompt of so many tokens, in order and apart, with positions of as many axes."""
    for one in embeds:
        assert one.digest and 0 <= one.start < num_prompt and 0 <= one.num <= num_prompt - one.start, one
        assert len(one.positions) in (0, one.num), one
        assert all(number >= 0 for position in one.positions for number in position), one
    assert all(first.end <= second.start for first, second in pairwise(embeds)), embeds
    assert len({len(position) for one in embeds for position in one.positions}) <= 1, embeds


def positions_of(embeds: Sequence[Embeds], num_tokens: int, num_axes: int) -> list[tuple[int, ...]]:
    """The positions of the first so many inputs of a sequence, for a model whose positions have so many axes."""
    made: list[tuple[int, ...]] = []
    at = 0  # the position that a token would have now
    for one in embeds:
        for _ in range(one.start - len(made)):
            made.append((at,) * num_axes)
            at += 1
        made += [tuple(at + number for number in position) for position in one.positions]
        if one.positions:
            at += 1 + max(map(max, one.positions))
    while len(made) < num_tokens:
        made.append((at,) * num_axes)
        at += 1
    return made[:num_tokens]
