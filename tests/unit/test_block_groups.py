"""KVBlocks by example: what slides out of a window, and which hits two groups can serve together."""

from __future__ import annotations

import random

import pytest

from tokenmill.core.block import BlockTable, full_groups, num_hidden_blocks, window_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.events import Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import RowResult, StepResult
from tokenmill.engine.core import EngineCore
from tokenmill.kv.blocks.groups import KVBlocks
from tokenmill.kv.blocks.hashing import extend_keys, root_key

SIZE = 4
TOKENS = tuple(range(64))
KEYS: list[bytes] = []
extend_keys(KEYS, root_key("model", "", ""), TOKENS, SIZE)


def both(num_full: int = 16, num_window: int = 16, window: int = 6) -> KVBlocks:
    return KVBlocks((*full_groups(num_full), window_group(num_window, window)), SIZE)


def computed(blocks: KVBlocks, num_blocks: int, step: int = 0) -> tuple[BlockTable, ...]:
    """Tables of a sequence whose first blocks were computed in `step`, published, and slid."""
    tables = blocks.new_tables()
    blocks.extend(tables, num_blocks)
    blocks.publish(KEYS, tables, num_blocks)
    blocks.slide(tables, num_blocks * SIZE, step)
    return tables


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6, 8, 9, 17])
def test_hidden_blocks_are_those_no_query_sees(window: int) -> None:
    """Against the definition: position p sees p - window + 1 .. p."""
    for position in range(40):
        seen = {p // SIZE for later in range(position, position + 40) for p in range(max(0, later - window + 1), later)}
        seen.add(position // SIZE)
        assert num_hidden_blocks(position, window, SIZE) == min(seen)
    assert num_hidden_blocks(1000, 0, SIZE) == 0


def test_a_window_gives_back_what_slid_out_and_the_other_group_keeps_it() -> None:
    """Blocks given back are quarantined until their step has ended, then cached, since they were published."""
    blocks = both()
    full, local = computed(blocks, 5)
    assert local.num_released == 3 and local.ids[:3] == [0, 0, 0] and len(local) == len(full) == 5
    assert blocks.pools[1].num_held == 5 and blocks.pools[0].num_held == 5
    blocks.check([(full, local)])
    blocks.end_step(0)
    assert (blocks.pools[1].num_held, blocks.pools[1].num_cached, blocks.pools[0].num_held) == (2, 3, 5)
    blocks.check([(full, local)])


def test_a_hit_needs_all_of_one_group_and_the_end_of_the_other() -> None:
    """With window 6 and blocks of 4, a hit of five blocks reads the last two in the group with a window."""
    blocks = both()
    owner = computed(blocks, 5)
    match = blocks.match(KEYS, blocks.new_tables(), 8)
    assert match.num_blocks == 5 and [len(ids) for ids in match.blocks] == [5, 2]
    assert match.blocks[0] == owner[0].ids and match.blocks[1] == owner[1].ids[3:]
    tables = blocks.new_tables()
    blocks.adopt(tables, match, -1)
    assert tables[1].ids == [0, 0, 0, *match.blocks[1]] and tables[1].num_released == 3
    blocks.check([owner, tables])
    blocks.release(tables, -1)
    blocks.check([owner])


def test_a_hit_ends_where_the_window_is_whole() -> None:
    """Evicting a block of the window group shortens the hit to the last end that does not see it."""
    blocks = both(num_window=6)
    owner = computed(blocks, 6)
    blocks.release(owner, 0)
    blocks.end_step(0)
    taken = blocks.pools[1].reserve(1)  # Evicts what slid out first; it was given back last block first: block 3.
    for stop, longest in ((8, 6), (5, 3), (4, 3), (3, 3), (2, 2)):
        assert blocks.match(KEYS, blocks.new_tables(), stop).num_blocks == longest
    blocks.pools[1].release(taken, -1)


def test_a_full_group_that_lost_blocks_bounds_the_hit() -> None:
    """The longest prefix that every group can serve."""
    blocks = both()
    first = computed(blocks, 3)
    tables = blocks.new_tables()
    blocks.extend(tables, 5)
    blocks.pools[1].publish(KEYS, tables[1].ids, 3, 5)
    match = blocks.match(KEYS, blocks.new_tables(), 8)
    assert match.num_blocks == 3 and match.blocks[0] == first[0].ids and match.blocks[1] == first[1].ids[1:]


@pytest.mark.parametrize("seed", range(30))
def test_groups_agree_on_the_longest_prefix_that_all_can_serve(seed: int) -> None:
    """Several windows in any order, each pool having lost some blocks: against trying every end."""
    rng = random.Random(seed)
    windows = rng.choice([(0, 6, 11), (6, 0, 3), (9, 5), (13, 2, 6), (3, 0, 0, 17)])
    groups = tuple(window_group(16, window) if window else full_groups(16)[0] for window in windows)
    blocks = KVBlocks(groups, SIZE)
    published = []
    for window, pool in zip(windows, blocks.pools, strict=True):
        num_full = rng.randint(6, 12)
        gone = set() if not window else {index for index in range(num_full) if rng.random() < 0.15}
        ids = pool.reserve(num_full)
        for index in range(num_full):
            if index not in gone:
                pool.publish(KEYS, ids, index, index + 1)
        published.append(set(range(num_full)) - gone)

    def serves(end: int) -> bool:
        seen = [range(num_hidden_blocks(end * SIZE, window, SIZE), end) for window in windows]
        return all(have.issuperset(need) for have, need in zip(published, seen, strict=True))

    for stop in range(13):
        match = blocks.match(KEYS, blocks.new_tables(), stop)
        assert match.num_blocks == max(end for end in range(stop + 1) if serves(end))
        for window, found in zip(windows, match.blocks, strict=True):
            hidden = num_hidden_blocks(match.num_blocks * SIZE, window, SIZE)
            assert len(found) == match.num_blocks - hidden


def test_a_hit_in_mid_prompt_counts_what_its_own_tables_hold() -> None:
    """Tables that end in the window of the hit need only the blocks after their end."""
    blocks = both()
    computed(blocks, 5)
    tables = blocks.new_tables()
    blocks.adopt(tables, blocks.match(KEYS, tables, 3), -1)
    match = blocks.match(KEYS, tables, 4)
    assert match.num_blocks == 1 and [len(ids) for ids in match.blocks] == [1, 1]
    blocks.adopt(tables, match, -1)
    assert tables[1].num_released == num_hidden_blocks(16, 6, SIZE)


def test_a_long_sequence_holds_a_window_and_what_is_in_flight() -> None:
    """However long it grows; and a pool that a fifth of it would fill is enough."""
    window, prompt, num_output, in_flight = 10, 100, 200, 2
    config = EngineConfig(
        groups=(*full_groups(80), window_group(10, window)),
        max_model_len=310,
        block_size=SIZE,
        max_num_batched_tokens=16,
        steps_in_flight=in_flight,
    )
    core = EngineCore(config)
    request = Request("r", tuple(range(prompt)), SamplingParams(), num_output, 1)
    assert not core.handle(Submit((request,)), 0.0).outputs
    pool = core.state.blocks.pools[1]
    finished, num_steps, most_held = False, 0, 0
    plans = []
    while not finished:
        while (plan := core.plan(0.0)) is not None:
            plans.append(plan)
            written = sum(planned.num_tokens for planned in plans)
            assert pool.num_held <= -(-(window + written) // SIZE) + 2, plan
            most_held = max(most_held, pool.num_held)
        plan = plans.pop(0)
        row = plan.rows[0]
        outputs = core.commit(StepResult(plan.step, (RowResult(0, (7,) if row.sample else ()),)), 0.0).outputs
        core.check()
        finished = any(output.finish_reason for output in outputs)
        num_steps += 1
    assert most_held <= 10 < 300 // SIZE and num_steps > num_output
    assert core.stats().num_preemptions == 0 and core.stats().num_held_blocks == 0
