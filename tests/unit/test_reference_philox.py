"""Philox against the published known answers, and the mapping from a draw's name to the words of token ids."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.ops.reference_sample import philox4x32, race_words, words_of_ids


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


def test_words_name_the_draw():
    """Each of seed (both halves), choice, position and purpose changes the words; the same name gives the same ones,
    and ids share blocks of four."""

    def draw(seed=7, choice=1, position=2, purpose=0):
        return tuple(words_of_ids(seed, choice, position, purpose, 6).tolist())

    others = [draw(seed=8), draw(seed=7 + (1 << 40)), draw(choice=2), draw(position=3), draw(purpose=1)]
    assert len({draw(), *others}) == 6 and len(set(draw())) == 6
    assert draw() == draw()
    assert draw(seed=0, choice=0, position=0)[:4] == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


def test_words_of_a_race_have_upper_bytes_of_their_own():
    """Sixteen ids share a block of upper bytes, four a block of the others, and these are not the same."""
    words = race_words(0, 0, 0, 40)
    first = np.array([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], "<u4").view(np.uint8)
    assert (words[:16] >> 24).tolist() == first.tolist()
    rest = words_of_ids(0, 0, 0, 2, 40) >> 8
    assert (words & 0xFFFFFF).tolist() == rest.tolist()
    assert words[:7].tolist() == race_words(0, 0, 0, 7).tolist() != race_words(0, 1, 0, 7).tolist()


@pytest.mark.parametrize("words", [words_of_ids(3, 0, 0, 0, 20_000), race_words(3, 0, 0, 20_000)])
def test_words_cover_the_range(words):
    """Means and extremes of many words are those of 32 random bits."""
    words = words / 2**32
    assert 0 <= words.min() < 1e-3 and 1 - 1e-3 < words.max() < 1
    assert abs(words.mean() - 0.5) < 0.01 and abs((words < 0.25).mean() - 0.25) < 0.02
