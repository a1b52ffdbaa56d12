"""Fair sharing in the engine's scheduler: what tenants receive while they wait for it, over hundreds of seeds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ledger import FakeLedger
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.fairness import OUTPUT_SERVICE, TOLERANCE_STEPS
from tokenmill.core.sequence import Sequence, Status
from tokenmill.core.terms import Terms
from tokenmill.sched.policies import pick

SEEDS_PER_TEST = 40
BLOCK = 4


@dataclass
class Tenant:
    """A client that keeps `depth` requests waiting. `service` is counted here, from what the engine did: a prompt token
    once, when first computed; each token that it drew."""

    terms: Terms
    depth: int
    adapters: tuple[str, ...] = ("",)
    waiting: list[Sequence] = field(default_factory=list)
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    of_adapter: dict[str, float] = field(default_factory=dict)
    service: float = 0.0

    def note(self, seq: Sequence, start: int, end: int) -> None:
        computed, drawn = self.seen.get(seq.number, (0, 0))
        end = min(end, seq.num_prompt)
        service = max(0, end - max(start, computed)) + OUTPUT_SERVICE * (seq.num_output - drawn)
        self.seen[seq.number] = (max(end, computed), seq.num_output)
        self.service += service / self.terms.weight
        adapter = seq.request.adapter
        self.of_adapter[adapter] = self.of_adapter.get(adapter, 0.0) + service


@dataclass
class Run:
    """One engine with tenants that never cease to wait, and what they have received after each step."""

    config: EngineConfig
    tenants: list[Tenant]
    rng: random.Random
    max_prompt: int = 60
    max_tokens: int = 12
    service: list[list[float]] = field(default_factory=list)
    of_adapter: list[dict[str, float]] = field(default_factory=list)
    num_preemptions: int = 0

    def go(self, num_steps: int) -> None:
        fake = FakeLedger(self.config, pick(self.config))
        owner: dict[int, tuple[Tenant, Sequence]] = {}
        for _ in range(num_steps):
            for tenant in self.tenants:
                tenant.waiting = [seq for seq in tenant.waiting if seq.status is Status.WAITING]
                for adapter in tenant.adapters:
                    mine = [seq for seq in tenant.waiting if seq.request.adapter == adapter]
                    for _ in range(tenant.depth - len(mine)):
                        num_prompt = self.rng.randint(1, self.max_prompt)
                        num_cached = self.rng.choice([0, 0, num_prompt - 1]) // BLOCK * BLOCK
                        seq = fake.add(
                            num_prompt,
                            self.rng.randint(1, self.max_tokens),
                            num_cached=num_cached,
                            terms=tenant.terms,
                            adapter=adapter,
                        )
                        tenant.waiting.append(seq)
                        owner[seq.number] = (tenant, seq)
            rows = fake.plan()
            assert all(any(seq.status is Status.WAITING for seq in tenant.waiting) for tenant in self.tenants)
            assert rows, "the engine is idle although somebody waits"
            for number, num_tokens in rows:
                tenant, seq = owner[number]
                tenant.note(seq, seq.num_planned - num_tokens, seq.num_planned)
            fake.end()
            for number, _ in rows:
                tenant, seq = owner[number]
                tenant.note(seq, seq.num_planned, 0)
                if seq.status is Status.FINISHED:
                    self.num_preemptions += seq.num_preemptions
                    del owner[number]
            self.service.append([tenant.service for tenant in self.tenants])
            self.of_adapter.append(dict(self.tenants[0].of_adapter))


def widest(series: list[float]) -> float:
    """Over all intervals, the largest change."""
    return max(series) - min(series)


def make_run(seed: int, tenants: list[Tenant], num_blocks: int = 400) -> Run:
    rng = random.Random(seed)
    config = EngineConfig(
        full_groups(num_blocks),
        max_model_len=200,
        block_size=BLOCK,
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([16, 32, 64]),
        scheduling_policy=rng.choice(["short-prompts-first", "fcfs", "lpm"]),
    )
    return Run(config, tenants, rng)


def bound(run: Run, weight: float = 1.0) -> float:
    """What VTC promises: twice max(w_p * L_input, w_q * M), where M is the most tokens that run at once; and twice the
    tolerance within which the order of service decides."""
    config = run.config
    num_running = config.max_num_seqs * (run.max_prompt + run.max_tokens)
    num_running = min(num_running, config.groups[0].num_blocks * config.block_size)
    tolerance = TOLERANCE_STEPS * config.max_num_batched_tokens
    promised = max(run.max_prompt, OUTPUT_SERVICE * num_running)
    found = run.max_prompt + OUTPUT_SERVICE * run.max_tokens  # since prompts in chunks have their turns, too
    return 2 * min(promised, found) / weight + 2 * tolerance


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("first", range(0, 240, SEEDS_PER_TEST))
def test_tenants_that_wait_receive_the_same(first: int) -> None:
    """Over any interval in which both wait, whatever the depth of their queues, the lengths of their requests, what the
    cache serves and who is preempted: the difference stays within the bound."""
    num_preemptions = 0
    for seed in range(first, first + SEEDS_PER_TEST):
        rng = random.Random(f"depths {seed}")
        greedy, modest = Tenant(Terms("greedy"), 40), Tenant(Terms("modest"), rng.choice([9, 12]))
        run = make_run(seed, [greedy, modest], num_blocks=rng.choice([20, 400]))
        run.go(200)
        difference = widest([a - b for a, b in run.service])
        assert difference <= bound(run), f"seed {seed}: {difference} > {bound(run)}"
        num_preemptions += run.num_preemptions
    assert num_preemptions > 10


@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_tenants_receive_by_weight(weight: float) -> None:
    """Service divided by weight is what is kept even."""
    for seed in range(40):
        run = make_run(seed, [Tenant(Terms("a", weight=weight), 9), Tenant(Terms("b"), 9)])
        run.go(300)
        assert widest([a - b for a, b in run.service]) <= bound(run, min(1.0, weight)), f"seed {seed}"


def test_without_counters_the_greedy_one_takes_most() -> None:
    """The same load of one tenant under two names that the engine cannot tell apart: the order of arrival serves the
    longer queue."""
    greedy, modest = Tenant(Terms(), 40), Tenant(Terms(), 9)
    run = make_run(1, [greedy, modest])
    run.go(300)
    assert greedy.service > 3 * modest.service


def test_adapters_of_one_tenant_receive_the_same() -> None:
    """Within a tenant, beside another one: requests of an adapter do not shut out those of the next."""
    for seed in range(60):
        run = make_run(seed, [Tenant(Terms("a"), 9, ("", "x", "y")), Tenant(Terms("b"), 9)])
        run.go(300)
        for one, other in (("", "x"), ("x", "y")):
            difference = widest([each.get(one, 0.0) - each.get(other, 0.0) for each in run.of_adapter])
            assert difference <= bound(run), f"seed {seed}: {difference} > {bound(run)}"


def test_a_higher_class_goes_first_whatever_it_has_received() -> None:
    """Classes come before shares: the lower one runs on what is left, and all of it once the higher ceases."""
    config = EngineConfig(full_groups(400), max_model_len=200, max_num_seqs=2, max_num_batched_tokens=32)
    fake = FakeLedger(config, pick(config))
    low = [fake.add(20, terms=Terms("low", 2)) for _ in range(3)]
    high = [fake.add(20, priority=9, terms=Terms("high", 0)) for _ in range(6)]
    usual = [fake.add(20, priority=-9) for _ in range(3)]
    assert fake.serve() == [seq.number for seq in (*high, *usual, *low)]


def test_a_priority_is_worth_something_only_among_a_tenants_own() -> None:
    """A tenant that asks for the best priority for all that it sends has its share and no more."""
    config = EngineConfig(full_groups(400), max_model_len=200, max_num_seqs=2, max_num_batched_tokens=32)
    fake = FakeLedger(config, pick(config))
    for _ in range(60):
        fake.add(40, priority=-1000, terms=Terms("pushing"))
    late = fake.add(40, terms=Terms("modest"))
    order = fake.serve()
    assert order.index(late.number) < 5


def test_what_is_drawn_counts_at_once() -> None:
    """Not only as its request ends or another comes: while three rows draw for a tenant, the fourth is another's."""
    config = EngineConfig(full_groups(400), max_model_len=200, max_num_seqs=4, max_num_batched_tokens=8)
    fake = FakeLedger(config, pick(config))
    for _ in range(3):
        fake.add(4, 190, terms=Terms("long"))
    for _ in range(10):
        fake.step()
    own = [fake.add(4, 2, terms=Terms("long")) for _ in range(20)]
    others = [fake.add(4, 2, terms=Terms("other")) for _ in range(20)]
    while not all(seq.status is Status.FINISHED for seq in others):
        assert fake.step()
    assert sum(seq.status is Status.FINISHED for seq in own) <= 4
