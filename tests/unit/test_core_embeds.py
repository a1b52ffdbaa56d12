"""Inputs that are no token ids: their positions, and where they may stand."""

from __future__ import annotations

import pytest

from tokenmill.core.embeds import Embeds, check_embeds, positions_of

GRID = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1))


def test_positions_go_on_after_the_largest() -> None:
    """The example of core/embeds.py, and a second image right behind the first."""
    assert positions_of((), 3, 1) == [(0,), (1,), (2,)]
    image = Embeds(2, 4, b"image", GRID)
    assert positions_of((image,), 8, 3) == [
        (0, 0, 0), (1, 1, 1), (2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3), (4, 4, 4), (5, 5, 5),
    ]  # fmt: skip
    two = positions_of((image, Embeds(6, 4, b"other", GRID)), 11, 3)
    assert two[6:] == [(4, 4, 4), (4, 4, 5), (4, 5, 4), (4, 5, 5), (6, 6, 6)]
    assert positions_of((image,), 4, 3) == two[:4], "those of a part of a prompt are those of the whole"
    plain = (Embeds(1, 2, b"speech"), Embeds(3, 0, b"encoded"))
    assert positions_of(plain, 3, 2) == [(0, 0), (1, 1), (2, 2)], "without positions they have those of tokens"


@pytest.mark.parametrize(
    "embeds",
    [
        (Embeds(0, 1, b""),),
        (Embeds(4, 0, b"x"),),
        (Embeds(2, 3, b"x"),),
        (Embeds(1, 2, b"x"), Embeds(2, 1, b"y")),
        (Embeds(1, 2, b"x", ((0, 0),)),),
        (Embeds(1, 1, b"x", ((-1, 0),)),),
        (Embeds(0, 1, b"x", ((0, 0),)), Embeds(1, 1, b"x", ((0,),))),
    ],
)
def test_what_cannot_stand_in_a_prompt_is_found(embeds: tuple[Embeds, ...]) -> None:
    """A prompt of four: no digest, beyond its end, on top of each other, not as many positions, not as many axes."""
    with pytest.raises(AssertionError):
        check_embeds(embeds, 4)
