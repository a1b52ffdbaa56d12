"""Block keys: what they cover, and that nothing else matters."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from tokenmill.core.embeds import Embeds
from tokenmill.kv.blocks.hashing import KEY_BYTES, extend_keys, root_key


def keys_of(tokens: list[int], root: bytes, block_size: int = 4) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root, tokens, block_size)
    return keys


def test_keys_cover_full_blocks_only_and_chain() -> None:
    """A key names the whole prefix: a change in block 0 changes every key, a change in the tail changes none."""
    root = root_key("id", "", "")
    keys = keys_of(list(range(11)), root)
    assert len(keys) == 2 and all(len(key) == KEY_BYTES for key in keys)
    data = b"".join(token.to_bytes(4, "little") for token in range(8))
    first = blake2b(root + data[:16], digest_size=KEY_BYTES).digest()
    assert keys == [first, blake2b(first + data[16:], digest_size=KEY_BYTES).digest()]
    assert keys_of([*range(8), 99, 98], root) == keys
    changed = keys_of([9, *range(1, 11)], root)
    assert changed[0] != keys[0] and changed[1] != keys[1]


def test_keys_grow_as_tokens_do() -> None:
    """Extending in pieces gives the keys of extending at once."""
    root = root_key("id", "", "")
    tokens = list(range(100, 137))
    keys: list[bytes] = []
    for length in (3, 4, 9, 20, 37):
        extend_keys(keys, root, tokens[:length], 4)
    assert keys == keys_of(tokens, root)


def test_numerics_adapter_and_salt_separate() -> None:
    """KV is shared only within one numerics id, adapter and salt; fields cannot run into each other."""
    roots = [
        root_key(*fields) for fields in [("a", "", ""), ("", "a", ""), ("", "", "a"), ("a", "b", ""), ("ab", "", "")]
    ]
    assert len(set(roots)) == len(roots)


def test_large_token_ids() -> None:
    """Ids up to 2**32 - 1 are hashed whole."""
    root = root_key("id", "", "")
    assert keys_of([2**32 - 1], root, 1) != keys_of([2**16 - 1], root, 1)


def with_embeds(*embeds: Embeds) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key("id", "", ""), [7] * 16, 4, embeds)
    return keys


def test_keys_cover_content_from_its_place_on() -> None:
    """What is no token counts with digest, place, length and positions, in its blocks and all after them; blocks before
    it have the keys that they have without it."""
    image = Embeds(5, 5, b"image")
    grid = replace(image, positions=((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)))
    late = replace(grid, positions=(*grid.positions[:3], (2, 0), (2, 1)))
    others = [
        image,
        replace(image, digest=b"other"),
        replace(image, start=6),
        replace(image, num=4),
        replace(image, num=0),
        grid,
        late,
    ]
    keys = [with_embeds(), *map(with_embeds, others)]
    assert {each[0] for each in keys} == {keys[0][0]}
    assert len({each[1] for each in keys}) == len(keys) - 1, "positions in block 2 are not known by block 1"
    assert all(len({each[block] for each in keys}) == len(keys) for block in (2, 3))
    assert with_embeds(image) == with_embeds(Embeds(5, 5, b"image"))


def test_keys_with_content_grow_as_tokens_do() -> None:
    """Extending in pieces gives the keys of extending at once, wherever the content lies."""
    embeds = (Embeds(2, 3, b"a", ((0, 0), (0, 1), (1, 0))), Embeds(9, 0, b"b"), Embeds(9, 4, b"c"))
    keys: list[bytes] = []
    for length in (3, 4, 10, 13, 16):
        extend_keys(keys, root_key("id", "", ""), [7] * length, 4, embeds)
    assert keys == with_embeds(*embeds)
