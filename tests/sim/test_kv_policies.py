"""Which block a tier gives up first: each policy keeps the rules of all, and does what its name says."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.core.tiers import BlockFacts
from tokenmill.kv.tiers.policies import REPLACEMENTS, pick
from tokenmill.kv.tiers.policies.cost import Reuse
from tokenmill.kv.tiers.replacement import Costs, Replacement, TierBlock, block_kinds

SIZE = 1000
COSTS = Costs(16, 1e-3, 1e-6)
KIND = block_kinds((SIZE,), COSTS)[0]


class Tier:
    """A tier with room for `most` blocks that gives up what its policy says; nobody's prompts are longer than it."""

    def __init__(self, policy: Replacement, most: int) -> None:
        self.policy, self.most = policy, most
        self.blocks: dict[str, TierBlock] = {}
        self.held: set[str] = set()
        self.gone: list[str] = []

    def ask(self, prompt: Iterable[str], now: float) -> int:
        """How many blocks at its head were there; all are then."""
        names, num_hits = list(prompt), 0
        while num_hits < len(names) and names[num_hits] in self.blocks:
            num_hits += 1
        for name in reversed(names[:num_hits]):
            block = self.blocks[name]
            block.num_uses, block.used_s = block.num_uses + 1, now
            self.policy.use(block, now)
        self.held = set(names)
        for depth, name in enumerate(names):
            if name not in self.blocks:
                self.add(name, names[depth - 1] if depth else "", depth, now)
        self.held = set()
        return num_hits

    def add(self, name: str, parent: str, depth: int, now: float) -> None:
        while len(self.blocks) >= self.most:
            assert self.give_up(now), "the tier is full of held blocks"
        facts = BlockFacts((0, name.encode()), parent.encode(), depth)
        block = self.blocks[name] = TierBlock(KIND, facts, 0, 0, now)
        if parent in self.blocks:
            self.blocks[parent].num_children += 1
        self.policy.add(block, now)

    def give_up(self, now: float) -> bool:
        block = self.policy.victim(lambda one: one.key.decode() not in self.held, now)
        if block is None:
            return False
        self.remove(block.key.decode())
        return True

    def remove(self, name: str) -> None:
        block = self.blocks.pop(name)
        self.policy.remove(block)
        parent = self.blocks.get(block.parent.decode())
        if parent is not None and parent.num_children:
            parent.num_children -= 1
            if not parent.num_children:
                self.policy.bare(parent)
        self.gone.append(name)


def chain(name: str, num: int) -> list[str]:
    return [f"{name}/{depth}" for depth in range(num)]


@pytest.mark.parametrize("name", sorted(REPLACEMENTS))
def test_a_block_outlives_those_that_follow_it(name: str) -> None:
    """Random prompts over a tree, some held, some dropped from the middle: never a held block, never one that others
    follow where there is another, every block of the tier in the end, and equally in equal runs."""

    def run(seed: int) -> list[str]:
        rng = random.Random(seed)
        tier = Tier(pick(name, 40 * SIZE), 40)
        now = 0.0
        for _ in range(600):
            now += rng.expovariate(1.0)
            prompt = chain(f"p{int(rng.paretovariate(0.7)) % 50}", rng.randint(1, 12))
            before = {key: block.num_children for key, block in tier.blocks.items()}
            num_gone = len(tier.gone)
            tier.ask(prompt, now)
            first = tier.gone[num_gone : num_gone + 1]
            assert not first or not before.get(first[0], 0)
            if tier.blocks and rng.random() < 0.05:
                tier.remove(rng.choice(sorted(tier.blocks)))
        tier.held = set(rng.sample(sorted(tier.blocks), len(tier.blocks) // 2))
        kept = set(tier.held)
        while tier.give_up(now):
            assert kept <= tier.blocks.keys()
        assert tier.blocks.keys() == kept
        tier.held = set()
        while tier.give_up(now):
            pass
        assert not tier.blocks and pick(name, 1).victim(lambda block: True, now) is None
        return tier.gone

    for seed in range(5):
        assert run(seed) == run(seed)


@pytest.mark.parametrize("name", ["cost", "lfu", "s3-fifo"])
def test_what_is_used_often_outlives_a_burst(name: str) -> None:
    """A system prompt asked a hundred times, now and then, is there after a burst of prompts that fills the tier
    thrice; LRU, which would lose it, does."""

    def num_left(name: str) -> int:
        tier = Tier(pick(name, 60 * SIZE), 60)
        rng = random.Random(2)
        now = 0.0
        for index in range(100):
            now += rng.expovariate(1.0)
            tier.ask([*chain("system", 10), f"user {index}"], now)
        for index in range(18):
            tier.ask(chain(f"once {index}", 10), now + index / 10)
        return sum(key.startswith("system") for key in tier.blocks)

    assert num_left(name) == 10
    assert num_left("lru") == 0


def test_least_frequently_used_ages() -> None:
    """What was used often long ago goes, once enough that is used now and then has come."""
    tier = Tier(pick("lfu", 20 * SIZE), 20)
    for index in range(30):
        tier.ask(["old"], float(index))
    for index in range(2000):
        tier.ask([f"new {index % 25}"], 100.0 + index)
    assert "old" not in tier.blocks


def test_s3_fifo_takes_back_what_it_gave_up_too_early() -> None:
    """A block that comes again after it went from the small queue is in the main one, and outlives the next burst."""
    tier = Tier(pick("s3-fifo", 50 * SIZE), 50)
    for index in range(49):
        tier.ask([f"main {index}"], 0.0)
        tier.ask([f"main {index}"], 0.0)
    tier.ask(["again"], 1.0)
    for index in range(20):
        tier.ask([f"once {index}"], 2.0)
    assert "again" not in tier.blocks
    tier.ask(["again"], 3.0)
    for index in range(30):
        tier.ask([f"more {index}"], 4.0)
    assert "again" in tier.blocks


def test_cost_keeps_what_takes_longest_to_compute() -> None:
    """Of two conversations asked at the same times, the one with the costlier end loses nothing first."""
    tier = Tier(pick("cost", 40 * SIZE), 40)
    for turn in range(3):
        tier.ask(chain("long", 30), 10.0 * turn)
        tier.ask(chain("short", 10), 10.0 * turn)
    tier.ask(["more 0", "more 1", "more 2"], 31.0)
    assert set(tier.gone[:3]) <= {f"short/{depth}" for depth in range(10)}


def test_cost_learns_a_pause() -> None:
    """Conversations pause for a minute and then go on, once; documents are never asked again. In a tier too small for
    all, LRU has lost each conversation by then. What is learnt in the first half saves more in the second."""

    def hits(name: str) -> int:
        rng = random.Random(1)
        tier = Tier(pick(name, 150 * SIZE), 150)
        found = 0
        due: list[tuple[float, int]] = []
        for index in range(6000):
            now = float(index)
            if index % 2:
                tier.ask(chain(f"document {index}", 4), now)
            else:
                tier.ask(chain(f"talk {index}", 4), now)
                due.append((now + 60 + rng.random(), index))
            while due and due[0][0] <= now:
                num = tier.ask(chain(f"talk {due.pop(0)[1]}", 5), now)
                found += num if index > 3000 else 0
        return found

    assert hits("lru") == 0
    assert hits("cost") > 1000


def test_reuse_is_measured() -> None:
    """Blocks used a second time after ten seconds or never, and then no more: the rate of the first age tells it, and
    falls behind the pause."""
    reuse = Reuse(4000)
    for index in range(40000):
        now = index / 100
        reuse.note(b"%d" % index, 1, now)
        if index >= 1000 and index % 4 == 0:
            reuse.note(b"%d" % (index - 1000), 2, now)
    assert reuse.rate(1, 0.0) == pytest.approx(0.25 / 10, rel=0.2)
    assert reuse.rate(1, 8.5) > 3 * reuse.rate(1, 0.0)
    assert reuse.rate(1, 30.0) < 0.1 * reuse.rate(1, 0.0)
    assert reuse.rate(2, 0.0) < 0.1 * reuse.rate(1, 0.0)


def test_reuse_of_a_large_tier_follows_few() -> None:
    """A tier of ten million blocks is learnt from a sample: what is remembered stays small."""
    reuse = Reuse(10_000_000)
    for index in range(300_000):
        reuse.note(b"%d" % index, 1, index / 1000)
    assert 50 < len(reuse._open) < 1000


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="cost"):
        pick("costs", 1)
