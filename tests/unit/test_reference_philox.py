"""Philox against the published known answers, and the mapping from a draw's name to its uniform number."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.ops.philox import philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, expected):
    """The three vectors its authors publish for ten rounds of Philox4x32."""
    assert philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32)).tolist() == [expected]


def test_uniform_names_the_draw():
    """Each of seed (both halves), choice, position and purpose changes the number; the same name gives the same one."""

    def draw(seed=7, choice=1, position=2, purpose=0):
        return float(uniform(np.array([seed], np.uint64), np.array([choice]), np.array([position]), purpose)[0])

    others = [draw(seed=8), draw(seed=7 + (1 << 40)), draw(choice=2), draw(position=3), draw(purpose=1)]
    assert len({draw(), *others}) == 6
    assert draw() == draw()
    assert draw(seed=0, choice=0, position=0) == (0x6627E8D5 >> 8) / 2**24


def test_uniform_covers_the_interval():
    """Means and extremes of many draws are those of [0, 1)."""
    count = 20_000
    draws = uniform(np.full(count, 3, np.uint64), np.zeros(count, np.int32), np.arange(count), 0)
    assert 0 <= draws.min() < 1e-3 and 1 - 1e-3 < draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01 and abs((draws < 0.25).mean() - 0.25) < 0.02
