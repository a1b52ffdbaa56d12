"""What no model of ours uses yet runs in the simulator, through all that happens to KV, and gives what it gives alone.

run      preemption, prefix hits, a store, failing steps, clients that go away
moves    from engine to engine, with KV
tiers    KV in tiers that lose and spoil it, engines that are killed
cluster  engines that die, behind the gateway
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pytest

from simtest import cluster, moves, tier_run
from simtest.cluster_kinds import make_deaths
from tokenmill.core import block
from tokenmill.core.block import KEY_BYTES, cross_group, state_group
from tokenmill.core.embeds import Embeds
from tokenmill.core.sequence import Sequence
from tokenmill.core.speculation import SpeculationConfig
from tokenmill.core.step import RowResult
from tokenmill.engine import commit
from tokenmill.engine.state import EngineState
from tokenmill.engine.step_builder import StepBuilder
from tokenmill.kv.blocks import encoder, hashing
from tokenmill.kv.blocks.encoder import EncoderLedger
from tokenmill.sim import executor, run
from tokenmill.sim.executor import ToyExecutor, Violation
from tokenmill.sim.toy_model import solo_answer
from tokenmill.sim.workload import VOCAB_SIZE, Arrival, Scenario, known_blocks, make_scenario

NUM_SEEDS = 12
NUM_DRAFTS = 4


def drafting(scenario: Scenario) -> Scenario:
    """Its executors propose drafts. Answers come back in later prompts, so that blocks that were written with drafts
    are read by others."""
    config = replace(scenario.config, speculation=SpeculationConfig(num_speculative_tokens=NUM_DRAFTS))
    arrivals = sorted((*scenario.arrivals, *_next_turns(scenario)), key=lambda arrival: arrival.at_s)
    drafter = scenario.drafter._replace(most=NUM_DRAFTS)
    return replace(scenario, drafter=drafter, config=config, arrivals=tuple(arrivals))


def _next_turns(scenario: Scenario) -> Iterator[Arrival]:
    for arrival in scenario.arrivals:
        request = arrival.requests[0]
        prompt = (*request.prompt_tokens, *solo_answer(request, VOCAB_SIZE).tokens, 1)
        if len(prompt) < scenario.config.max_model_len:
            again = replace(request, id=f"{request.id} again", prompt_tokens=prompt, output_tokens=(), seed=1)
            yield Arrival(arrival.at_s + 0.3, (again,))


GRID = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1))
CONTENTS = (
    Embeds(0, 4, b"an image", GRID),
    Embeds(0, 4, b"another", GRID),
    Embeds(0, 3, b"speech"),
    Embeds(0, 0, b"x"),
)
PLACEHOLDER = 3


def embedding(scenario: Scenario) -> Scenario:
    """Half of the calls have content in their prompts, among them other content at the same places."""
    rng = random.Random(f"embeds {scenario.config} {len(scenario.arrivals)}")
    arrivals = []
    for arrival in scenario.arrivals:
        prompt, embeds = list(arrival.requests[0].prompt_tokens), list[Embeds]()
        for place in (1, 7, 11) if rng.random() < 0.5 else ():
            one = replace(rng.choice(CONTENTS), start=place)
            if one.end <= len(prompt) and place < len(prompt):
                embeds.append(one)
                prompt[place : one.end] = [PLACEHOLDER] * one.num
        arrivals.append(
            Arrival(
                arrival.at_s,
                tuple(replace(each, prompt_tokens=tuple(prompt), embeds=tuple(embeds)) for each in arrival.requests),
            )
        )
    return stored_anew(replace(scenario, arrivals=tuple(arrivals)))


def stored_anew(scenario: Scenario) -> Scenario:
    """Where there is a store, it holds half of what the requests compute."""
    if scenario.stored is None:
        return scenario
    rng = random.Random(0)
    known = known_blocks(scenario).items()
    return replace(scenario, stored={place: slots for place, slots in known if rng.random() < 0.5})


def stateful(scenario: Scenario) -> Scenario:
    """Some layers of its model keep a state of fixed size, beside others or alone."""
    config, rng = scenario.config, random.Random(f"states {scenario.config}")
    state = state_group(rng.choice([3, 8, 30]), rng.choice([1, 2, 5, 20]), config.groups[0].bytes_per_block)
    groups = rng.choice([(state,), (*config.groups, state), (state, *config.groups)])
    return stored_anew(replace(scenario, config=replace(config, groups=groups)))


def encoding(scenario: Scenario) -> Scenario:
    """Its model has an encoder, with room for few contents at a time."""
    group = cross_group(random.Random(f"encoder {scenario.config}").choice([2, 3, 4]))
    return embedding(replace(scenario, config=replace(scenario.config, encoder=group)))


TOYS: dict[str, Callable[[Scenario], Scenario]] = {
    "drafts": drafting,
    "embeds": embedding,
    "states": stateful,
    "drafts of states": lambda scenario: drafting(stateful(scenario)),
    "encoder": encoding,
}


def run_in(place: str, toy: Callable[[Scenario], Scenario], seed: int) -> Counter[str]:
    """One seed, which checks itself; what happened in it."""
    counts: Counter[str] = Counter()
    scenario = toy(make_scenario(seed))
    if place == "run":
        report = run.run_scenario(scenario, failure_seed=seed)
        counts.update(
            ends=sum(number for _, number in report.ends),
            preempted=report.stats.num_preemptions,
            hits=report.stats.prefix_hits,
            fetched=report.num_fetched,
            failures=report.num_failures,
        )
    elif place == "moves":
        moved = moves.run_moves(seed, scenario=scenario)
        counts.update(ends=sum(moved.ends.values()), warm=moved.num_warm, pulled=moved.num_pulled)
    elif place == "tiers":
        tiered = tier_run.run_tiers(seed, scenario=scenario)
        counts.update(ends=sum(tiered.ends.values()), fetched=tiered.counts["fetched"], saved=tiered.counts["saved"])
    else:
        deaths = make_deaths(seed)
        died = cluster.run_cluster(replace(deaths, scenario=toy(deaths.scenario)), seed)
        counts.update(ends=sum(number for _, number in died.ends), lost=died.num_left, resumed=died.num_resumed)
    return counts


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ToyExecutor]]:
    """Those that are made."""
    made: list[ToyExecutor] = []
    init = ToyExecutor.__init__

    def make(self: ToyExecutor, *args: Any, **how: Any) -> None:
        init(self, *args, **how)
        made.append(self)

    monkeypatch.setattr(executor.ToyExecutor, "__init__", make)
    yield made


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("place", ["run", "moves", "tiers", "cluster"])
def test_toys_give_what_they_give_alone(place: str, toy: str) -> None:
    """Every request of every seed ends as it would alone, and all that is to happen does."""
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        counts += run_in(place, TOYS[toy], seed)
    wanted = {
        "run": ("ends", "preempted", "hits", "fetched", "failures"),
        "moves": ("ends", "warm", "pulled"),
        "tiers": ("ends", "fetched", "saved"),
        "cluster": ("ends", "lost", "resumed"),
    }
    assert all(counts[name] for name in wanted[place]), counts


def test_drafts_make_fewer_steps(executors: list[ToyExecutor]) -> None:
    """Drafts are verified, some accepted and some not; what is accepted needs no step of its own."""
    scenarios = [replace(make_scenario(seed), failure_rate=0.0) for seed in range(NUM_SEEDS // 2)]
    plain = sum(run.run_scenario(each).stats.num_steps for each in scenarios)
    assert not sum(each.num_drafted for each in executors)
    drafted = sum(run.run_scenario(drafting(each)).stats.num_steps for each in scenarios)
    num_accepted, num_drafted = (
        sum(each.num_accepted for each in executors),
        sum(each.num_drafted for each in executors),
    )
    assert 100 < num_accepted < num_drafted and drafted < plain


def test_a_drafter_that_lies_is_soon_not_believed(executors: list[ToyExecutor]) -> None:
    """It says of its drafts what a good one does. They cost next to nothing here: an unlikely one is worth it, too."""
    verified = []
    for right in (0.8, 0.0):
        executors.clear()
        for seed in range(NUM_SEEDS // 2):
            scenario = replace(make_scenario(seed), failure_rate=0.0, drafter=executor.ToyDrafter(right=right))
            run.run_scenario(drafting(scenario))
        verified.append(sum(each.num_drafted for each in executors))
    assert 0 < verified[1] < 0.4 * verified[0], verified


Plant = Callable[[pytest.MonkeyPatch], None]


def keep_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    accept = commit._accept

    def keep(state: EngineState, seq: Any, result: RowResult) -> RowResult:
        end, accepted = seq.num_planned + NUM_DRAFTS, accept(state, seq, result)
        seq.num_computed = seq.num_planned = min(end, len(seq.tokens) - 1 + (len(result.tokens) == 1))
        return accepted

    patch.setattr(commit, "_accept", keep)


def publish_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    """A block whose last position holds what was written for a draft that was wrong."""
    accept = commit._accept

    def publish(state: EngineState, seq: Any, result: RowResult) -> RowResult:
        accepted = accept(state, seq, result)
        num_full = min(len(seq.tokens) // state.config.block_size, len(seq.tables[0].ids))
        if num_full > seq.tables[-1].num_published:
            state.publish(seq, num_full, None)
        return accepted

    patch.setattr(commit, "_accept", publish)


def draft_beyond_the_block(patch: pytest.MonkeyPatch) -> None:
    add = StepBuilder.add_drafts

    def beyond(self: StepBuilder, most: int) -> None:
        size, self._block_size = self._block_size, 10**6
        add(self, most)
        self._block_size = size

    patch.setattr(StepBuilder, "add_drafts", beyond)


def draft_beside_other_rows(patch: pytest.MonkeyPatch) -> None:
    add = StepBuilder.add_drafts

    def also(self: StepBuilder, most: int) -> None:
        rows = len(self.step.rows)
        add(self, most)
        for index in range(rows):
            self.step.sequences[index].num_pending += bool(self.step.rows[index].drafts)

    patch.setattr(StepBuilder, "add_drafts", also)


def leave_contents_out_of_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hashing, "_contents", lambda embeds, block_size: {})


def give_checkpoints_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "STATE_WINDOW", 1)


def share_what_another_content_made(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(encoder, "blake2b", lambda data, digest_size: blake2b(data[:KEY_BYTES], digest_size=digest_size))


def leave_encoded_out_of_rows(patch: pytest.MonkeyPatch) -> None:
    take = EncoderLedger.take

    def lazily(self: EncoderLedger, seq: Sequence, recent: Any) -> None:
        take(self, seq, recent)
        seq.unencoded = ()

    patch.setattr(EncoderLedger, "take", lazily)


PLANTS: dict[Plant, Callable[[Scenario], Scenario]] = {
    keep_rejected_drafts: drafting,
    publish_rejected_drafts: drafting,
    draft_beyond_the_block: drafting,
    draft_beside_other_rows: drafting,
    leave_contents_out_of_keys: embedding,
    give_checkpoints_back: stateful,
    share_what_another_content_made: encoding,
    leave_encoded_out_of_rows: encoding,
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some seed of the suite fails."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, Violation, IndexError, KeyError)):
        for seed in range(NUM_SEEDS):
            run_in("run", PLANTS[plant], seed)
