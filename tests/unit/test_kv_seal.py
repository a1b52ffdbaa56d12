"""Sealed blocks: what was changed, moved or is of others does not open."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.kv.transfer.seal import CORRUPT, FOREIGN, OVERHEAD, SHORT, STALE, BadSeal, Seal, derive, load_key

KEY = b"k" * 32
BLOCK = (1, b"0123456789abcdef")
SUM = 0x7FEDCBA987654321
DATA = bytes(range(256)) * 5


def sealed_by(seal: Seal, block: tuple[int, bytes] = BLOCK, data: bytes = DATA) -> bytearray:
    sealed = bytearray(len(data) + OVERHEAD)
    seal.seal(block, SUM, data, sealed)
    return sealed


def why_not(seal: Seal, sealed: bytes | bytearray, block: tuple[int, bytes] = BLOCK) -> str:
    with pytest.raises(BadSeal) as caught:
        seal.open(block, sealed, bytearray(len(DATA)))
    return str(caught.value)


def test_what_was_sealed_opens_for_all_who_have_the_key() -> None:
    """Another process, with another key of its own, gets the same bytes and the checksum; neither is there in clear."""
    sealed = sealed_by(Seal(KEY, "kv", "model"))
    out = bytearray(len(DATA))
    assert Seal(KEY, "kv", "model").open(BLOCK, sealed, out) == SUM
    assert out == DATA
    assert DATA[:16] not in sealed and SUM.to_bytes(8, "little") not in sealed


def test_the_same_block_is_never_sealed_alike() -> None:
    """Nonces and writers differ, so that equal blocks do not show as equal."""
    seal = Seal(KEY, "kv", "model")
    first, second = sealed_by(seal), sealed_by(seal)
    assert first[28:40] != second[28:40] and first[48:] != second[48:]
    assert sealed_by(Seal(KEY, "kv", "model"))[12:28] != first[12:28]


def test_every_flipped_bit_of_the_front_is_seen() -> None:
    """The head is covered, mark to mask; so are the ends of the data and the tag."""
    seal = Seal(KEY, "kv", "model", epoch=3)
    sealed = sealed_by(seal)
    for at in [*range(64), len(sealed) - 17, len(sealed) - 1]:
        for bit in range(8):
            broken = bytearray(sealed)
            broken[at] ^= 1 << bit
            assert why_not(seal, broken) == (FOREIGN if at < 4 else STALE if at < 12 else CORRUPT), (at, bit)


def test_what_is_short_swapped_or_of_others_does_not_open() -> None:
    """Length, key, group, numerics id, purpose, cluster key, epoch."""
    seal = Seal(KEY, "kv", "model")
    sealed = sealed_by(seal)
    assert why_not(seal, sealed[:-1]) == SHORT
    assert why_not(seal, sealed + b"\0") == SHORT
    assert why_not(seal, b"") == SHORT
    assert why_not(seal, bytes(len(sealed))) == FOREIGN
    assert why_not(seal, sealed, (1, b"0123456789abcdeF")) == CORRUPT
    assert why_not(seal, sealed, (0, BLOCK[1])) == CORRUPT
    assert why_not(Seal(KEY, "kv", "another model"), sealed) == CORRUPT
    assert why_not(Seal(KEY, "disk", "model"), sealed) == CORRUPT
    assert why_not(Seal(b"K" * 32, "kv", "model"), sealed) == CORRUPT
    assert why_not(Seal(KEY, "kv", "model", epoch=1), sealed) == STALE
    forged = bytearray(sealed)
    forged[4] = 1
    assert why_not(Seal(KEY, "kv", "model", epoch=1), forged) == CORRUPT


def test_noise_does_not_open() -> None:
    """A thousand random values, with the right mark and length."""
    seal, draw = Seal(KEY, "kv", "model"), random.Random(5)
    for _ in range(1000):
        noise = b"TMK\x01" + bytes(8) + draw.randbytes(len(DATA) + OVERHEAD - 12)
        assert why_not(seal, noise) == CORRUPT


def test_a_key_is_a_file_of_its_owner(tmp_path: Path) -> None:
    """Others may not read it, it is long enough, and who has none is told how to make one."""
    path = tmp_path / "kv.key"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_key(str(path))
    path.touch(0o600)
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="head -c 32 /dev/urandom") as caught:
        load_key(str(path))
    assert caught.value.param == "kv_key_file"
    path.write_bytes(b"x" * 44 + b"\n")
    key = load_key(str(path))
    assert len(key) == 32 and key != b"x" * 32
    path.write_bytes(b"x" * 44)
    assert load_key(str(path)) == key
    os.chmod(path, 0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_key(str(path))


def test_derived_keys_are_those_of_the_standard() -> None:
    """HKDF-Expand as cryptography's has it; parts of a purpose cannot run into each other."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

    info = b"\x02\0\0\0ab\x01\0\0\0c"
    assert derive(KEY, b"ab", b"c", num_bytes=80) == HKDFExpand(SHA256(), 80, info).derive(KEY)
    assert derive(KEY, b"ab", b"c") != derive(KEY, b"a", b"bc")
