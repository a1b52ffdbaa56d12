"""Random operations on BlockManager against a naive model, with conservation checked after each.

The model keeps, per block, who holds it and the last step that touched it, and per key the block published under it; it
recomputes everything by looking at all blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenmill.core.cost import CostFitter
from tokenmill.kv.blocks.allocator import LeastRecentFirst, LeastValueFirst, Unreferenced
from tokenmill.kv.blocks.eviction import pick
from tokenmill.kv.blocks.hashing import extend_keys, root_key
from tokenmill.kv.blocks.manager import BlockManager

NUM_BLOCKS = 12


class Holder:
    """A sequence as the manager's callers see one: tokens of one block each, so that keys are prefixes."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.keys: list[bytes] = []
        extend_keys(self.keys, root_key("model", "", ""), tokens, 1)
        self.table: list[int] = []
        self.num_published = 0
        self.last_step = -1


class ManagerAgainstModel(RuleBasedStateMachine):
    new_unreferenced: Callable[[], Unreferenced] = LeastRecentFirst

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, 0, self.new_unreferenced())
        self.holders: list[Holder] = []
        self.step = 0
        self.ended = -1
        self.by_key: dict[bytes, int] = {}
        self.parents: dict[bytes, bytes] = {}
        self.touched = dict.fromkeys(range(NUM_BLOCKS), -1)

    def held(self) -> set[int]:
        return {block for holder in self.holders for block in holder.table}

    def idle(self) -> set[int]:
        return {block for block in range(NUM_BLOCKS) if block not in self.held() and self.touched[block] <= self.ended}

    def forget_evicted(self, reserved: list[int]) -> None:
        self.by_key = {key: block for key, block in self.by_key.items() if block not in reserved}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple))
    def arrive(self, tokens: tuple[int, ...]) -> None:
        """A sequence adopts the longest published prefix of its blocks."""
        holder = Holder(tokens)
        expected: list[int] = []
        for key in holder.keys:
            if key not in self.by_key:
                break
            expected.append(self.by_key[key])
        matched = self.manager.match(holder.keys, 0, len(holder.keys))
        assert matched == expected
        unheld = [block for block in matched if block in self.idle()]
        assert self.manager.num_cached_among(matched) == len(unheld)
        self.manager.adopt(matched)
        holder.table = list(matched)
        holder.num_published = len(matched)
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """A sequence reserves its next blocks, evicting only what nobody holds."""
        holder = data.draw(st.sampled_from(self.holders))
        room = min(len(holder.keys) - len(holder.table), self.manager.num_available)
        if room <= 0:
            return
        num_blocks = data.draw(st.integers(1, room))
        free = self.idle() - set(self.by_key.values())
        blocks = self.manager.reserve(num_blocks)
        assert set(blocks) <= self.idle() and len(set(blocks)) == num_blocks
        assert set(blocks) <= free or free <= set(blocks), "evicted while blocks were free"
        self.forget_evicted(blocks)
        holder.table += blocks
        holder.last_step = self.step

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """A sequence publishes its next blocks up to the first key that is taken."""
        holder = data.draw(st.sampled_from(self.holders))
        start, stop = holder.num_published, len(holder.table)
        new = self.manager.publish(holder.keys, holder.table, start, stop)
        for index in range(start, new):
            assert holder.keys[index] not in self.by_key
            self.by_key[holder.keys[index]] = holder.table[index]
            self.parents[holder.keys[index]] = holder.keys[index - 1] if index else b""
        assert new == stop or holder.keys[new] in self.by_key
        holder.num_published = new

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A sequence ends."""
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        for block in holder.table:
            self.touched[block] = max(self.touched[block], holder.last_step)
        self.manager.release(holder.table, holder.last_step)

    @precondition(lambda self: self.by_key)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """A published leaf turns out never to have been written; whoever holds it gives it up as well."""
        key = data.draw(st.sampled_from(sorted(self.by_key)))
        if any(self.parents[child] == key for child in self.by_key):
            return
        block = self.by_key.pop(key)
        self.manager.withdraw([block])
        for holder in [holder for holder in self.holders if block in holder.table[: holder.num_published]]:
            self.holders.remove(holder)
            for held in holder.table:
                self.touched[held] = max(self.touched[held], holder.last_step)
            self.manager.release(holder.table, holder.last_step)

    @rule(ends=st.booleans())
    def step_border(self, ends: bool) -> None:
        """A step is planned, or the oldest ones end."""
        if ends and self.ended < self.step - 1:
            self.ended += 1
            self.manager.end_step(self.ended)
        else:
            self.step += 1

    @invariant()
    def agrees(self) -> None:
        """Free, cached and held blocks are exactly those of the model, and add up."""
        self.manager.check([holder.table for holder in self.holders])
        cached = self.idle() & set(self.by_key.values())
        assert self.manager.num_cached == len(cached)
        assert self.manager.num_free == len(self.idle() - cached)
        assert self.manager.num_held == NUM_BLOCKS - len(self.idle())


class ManagerByValueAgainstModel(ManagerAgainstModel):
    """The same with a policy that values blocks by their use."""

    new_unreferenced = staticmethod(lambda: LeastValueFirst(pick("lfu"), CostFitter()))


TestManagerAgainstModel = ManagerAgainstModel.TestCase
TestManagerByValueAgainstModel = ManagerByValueAgainstModel.TestCase
for test in (TestManagerAgainstModel, TestManagerByValueAgainstModel):
    test.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True)
