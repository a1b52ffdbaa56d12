"""What shared tiers said of blocks, for a while: others write there and take away, so that it is never certain."""

from __future__ import annotations

from collections import OrderedDict

from ...core.tiers import NO_PLACE, TierKey


class Remembered:
    """present_s, absent_s: how long it is believed that a tier has a block, or has it not; num: most blocks."""

    def __init__(self, present_s: float, absent_s: float, num: int) -> None:
        self._present_s = present_s
        self._absent_s = absent_s
        self._num = num
        self._places: OrderedDict[tuple[str, TierKey], tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, tier: str, block: TierKey, now: float) -> int | None:
        """The place there; NO_PLACE: it is not there; None: that is not known."""
        place, until = self._places.get((tier, block), (None, 0.0))
        if place is None or until > now:
            return place
        del self._places[tier, block]
        return None

    def note(self, tier: str, block: TierKey, place: int, now: float) -> None:
        self._places.pop((tier, block), None)
        self._places[tier, block] = place, now + (self._absent_s if place == NO_PLACE else self._present_s)
        if len(self._places) > self._num:
            self._places.popitem(last=False)

    def forget(self, tier: str, block: TierKey) -> int:
        """Its place, if that was known."""
        return self._places.pop((tier, block), (NO_PLACE, 0.0))[0]
