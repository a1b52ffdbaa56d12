"""Compressed bodies are read within the bounds of plain ones; what is not read is named."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib

import pytest

from tokenmill.core.errors import BodyTooLarge, InvalidRequest, Overloaded, UnsupportedEncoding
from tokenmill.server.limits import decode_body

TEXTS = [b"", b"x", b'{"prompt": "hi"}' * 40_000, random.Random(1).randbytes(700_000)]


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def decode(encoding: str, data: bytes, limit: int = 1 << 20) -> tuple[bytes, int]:
    """The body, and how much of it was ever held."""
    held = 0

    def hold(more: int) -> None:
        nonlocal held
        held += more

    return asyncio.run(decode_body(encoding, data, limit, hold)), held


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_every_coding_gives_back_what_was_sent(text: bytes) -> None:
    assert decode("gzip", gzip.compress(text)) == (text, len(text))
    assert decode(" GZIP, identity", gzip.compress(text)) == (text, len(text))
    assert decode("deflate", zlib.compress(text)) == (text, len(text))
    assert decode("deflate", raw_deflate(text)) == (text, len(text))
    assert decode("identity", text) == (text, 0)


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "x"])
def test_other_codings_are_named(encoding: str) -> None:
    with pytest.raises(UnsupportedEncoding, match=encoding) as caught:
        decode(encoding, b"x")
    assert caught.value.status == 415


def test_a_bomb_is_never_unfolded_beyond_the_limit() -> None:
    held: list[int] = []
    with pytest.raises(BodyTooLarge):
        asyncio.run(decode_body("gzip", gzip.compress(bytes(1 << 28)), 1 << 20, held.append))
    assert sum(held) <= 1 << 20

    def full(more: int) -> None:
        raise Overloaded("full")

    with pytest.raises(Overloaded):
        asyncio.run(decode_body("gzip", gzip.compress(b"x"), 1 << 20, full))


def test_what_is_damaged_is_refused() -> None:
    whole = gzip.compress(TEXTS[2])
    for wrong in (b"", b"no gzip", whole[:-9], whole[: len(whole) // 2], whole + b"x", whole + whole, whole[10:]):
        with pytest.raises(InvalidRequest, match="gzip"):
            decode("gzip", wrong)
    with pytest.raises(InvalidRequest, match="deflate"):
        decode("deflate", b"\xff\xff")
