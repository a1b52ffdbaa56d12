"""What the experts of several engines computed, as if they were one engine. Pure."""

from __future__ import annotations

from ..core.experts import ExpertLoad, WeightReads

_Tokens = tuple[tuple[int, ...], ...]


class ExpertTotals:
    """`load`: summed over all engines that have served, since they joined; None: their model has no experts, or none
    has joined. Engines of a gateway have the same model."""

    def __init__(self) -> None:
        self.load: ExpertLoad | None = None
        self._of: dict[int, ExpertLoad] = {}

    def join(self, link: int, before: ExpertLoad | None) -> None:
        """What the engine counted `before` is not counted here."""
        if before is None:
            return
        self._of[link] = before
        if self.load is None:
            reads = None if before.reads is None else WeightReads()
            self.load = ExpertLoad(before.layers, tuple(tuple(0 for _ in each) for each in before.tokens), reads=reads)

    def leave(self, link: int) -> None:
        """What it did stays counted."""
        self._of.pop(link, None)

    def note(self, link: int, load: ExpertLoad) -> None:
        """What an engine has counted by now. Raises ValueError where that cannot follow what it said before."""
        before = self._of.get(link)
        if before is None:
            return
        if load.layers != before.layers or [*map(len, load.tokens)] != [*map(len, before.tokens)]:
            raise ValueError("An engine tells of other experts than it had.")
        assert self.load is not None
        self._of[link] = load
        num_steps = self.load.num_steps + load.num_steps - before.num_steps
        reads = _sum_of_reads(self.load.reads, load.reads, before.reads)
        self.load = ExpertLoad(load.layers, _sum(self.load.tokens, load.tokens, before.tokens), num_steps, reads)


def _sum_of_reads(whole: WeightReads | None, now: WeightReads | None, before: WeightReads | None) -> WeightReads | None:
    """The same; engines may keep weights on disk or not."""
    if now is None:
        return whole
    parts = zip(whole or WeightReads(), now, before or WeightReads(), strict=True)
    return WeightReads._make(a + b - c for a, b, c in parts)


def _sum(whole: _Tokens, now: _Tokens, before: _Tokens) -> _Tokens:
    """whole + now - before"""
    return tuple(
        tuple(a + b - c for a, b, c in zip(*rows, strict=True)) for rows in zip(whole, now, before, strict=True)
    )
