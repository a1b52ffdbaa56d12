"""The KV pool's memory: shape, zero start, lazy commitment, release."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokenmill.core.block import KVGroup
from tokenmill.ops.kv_pool import HostPool


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def new_pool(group: KVGroup, num_blocks: int) -> HostPool:
    return HostPool(group, num_blocks, lambda data, group: data)


def test_blocks_are_copied_out_and_in():
    """Byte for byte, in the order asked for, and nothing beside them."""
    group = KVGroup("full", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4)
    pool, other = new_pool(group, 6), new_pool(group, 6)
    pool.data[:] = np.random.default_rng(1).integers(0, 256, pool.data.shape)
    other.copy_in([0, 5], pool.copy_out([4, 2]))
    assert (other.data[[0, 5]] == pool.data[[4, 2]]).all() and not other.data[1:5].any()
    assert pool.copy_out([]) == b""
    with pytest.raises(AssertionError):
        other.copy_in([1, 2], pool.copy_out([3]))


def test_shape_and_zeros():
    """One row of bytes per block, zero until written."""
    group = KVGroup("full", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4)
    pool = new_pool(group, 5)
    assert pool.data.shape == (5, group.bytes_per_block) and pool.data.dtype == np.uint8
    assert not pool.data.any()
    pool.data[3] = 7
    assert pool.data.sum() == 7 * group.bytes_per_block


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_follows_use():
    """A pool of many gigabytes costs nothing until blocks are written, and gives it all back when closed."""
    group = KVGroup("full", num_layers=32, num_kv_heads=8, head_dim=128)
    before = _resident_bytes()
    pool = new_pool(group, 2**32 // group.bytes_per_block)
    assert _resident_bytes() - before < 2**24
    blocks = 2**26 // group.bytes_per_block
    pool.data[:blocks] = 1
    grown = _resident_bytes() - before
    assert 2**26 <= grown < 2**27
    pool.close()
    assert _resident_bytes() - before < 2**24
    assert not pool.data[0].any(), "views stay readable"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_pages_are_committed_ahead_of_use():
    """A sixteenth of the pool beyond the blocks in use, page by page; what they hold stays as it is."""
    group = KVGroup("full", num_layers=32, num_kv_heads=8, head_dim=128)
    pool = new_pool(group, 2**30 // group.bytes_per_block)
    num_used = 2**25 // group.bytes_per_block
    pool.data[num_used - 1] = 7
    before, num_pages = _resident_bytes(), 0
    while pool.commit_ahead(num_used):
        num_pages += 1
    assert num_pages in (1, 32), "one where the system cannot"
    if num_pages > 1:
        assert 2**26 <= _resident_bytes() - before + 2**22 < 2**27
    assert (pool.data[num_used - 1] == 7).all() and not pool.data[num_used:].any()
    assert not pool.commit_ahead(10**9), "nothing is ahead of the last block"
    pool.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_blocks_give_their_memory_back():
    """What is given back takes none, and can be written again; the blocks beside it are as they were."""
    group = KVGroup("full", num_layers=32, num_kv_heads=8, head_dim=128)
    num_blocks = 2**27 // group.bytes_per_block
    pool = new_pool(group, num_blocks)
    before = _resident_bytes()
    pool.data[:] = 3
    pool.give_back([*range(1, num_blocks // 2), num_blocks - 1, *range(num_blocks // 2, num_blocks - 2)])
    assert _resident_bytes() - before < 2**24
    assert (pool.data[[0, num_blocks - 2]] == 3).all()
    pool.data[1:] = 5
    assert (pool.data[1:] == 5).all() and (pool.data[0] == 3).all()
    pool.close()
