"""A tenant that sends ten times its share, beside one that keeps to its own."""

from __future__ import annotations

import pytest
from greedy_neighbour import felt


@pytest.mark.parametrize("name", ["rows", "prompts"])
def test_a_greedy_tenant_is_hardly_felt_by_another(name: str) -> None:
    """The other's p99 TTFT rises by less than half, whether rows or the engine's time is what is short."""
    seen = felt(name, 0.8, range(3))
    assert seen.ratio < 1.5, seen.ratio


def test_it_is_the_shares_that_do_it() -> None:
    """The same load of callers that cannot be told apart: all wait for the greedy one's queue."""
    seen = felt("rows", 0.8, range(1), are_told_apart=False)
    assert seen.ratio > 3.0 or seen.num_refused > 20, (seen.ratio, seen.num_refused)
