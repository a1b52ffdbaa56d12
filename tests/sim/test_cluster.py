"""A whole cluster under faults of all kinds, hundreds of times over: nobody loses a token, nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simtest.cluster import ClusterReport, run_seed
from tokenmill.cluster.events import Leaves, Stepped
from tokenmill.cluster.gateway import Gateway
from tokenmill.core.effects import FetchBlocks
from tokenmill.kv.connector.scheduler.transfers import Transfers
from tokenmill.sim.executor import Violation
from tokenmill.sim.loop import Deadlock, TimeLimit

NUM_SEEDS = 200
SEEDS_PER_TEST = 50
PATHS = (Path(__file__).resolve().parents[2] / "src", Path(__file__).resolve().parents[1])


def run_seed_or_tell(seed: int, kind: str) -> ClusterReport:
    try:
        return run_seed(seed, kind)
    except BaseException as error:
        error.add_note(f"Replay: PYTHONPATH=tests python -m simtest.cluster --kind {kind} --seed {seed}")
        raise


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_seed_holds(first: int) -> None:
    """Crashes, stopped and slow workers, links that break or stand still, drains: each request ends as it would alone,
    and engines and gateway have nothing left. A failure prints the command that repeats it."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        report = run_seed_or_tell(seed, "faults")
        totals.update(dict(report.ends))
        totals.update(report.faults)
        totals.update(resumed=report.num_resumed, let_go=report.num_let_go)
    wanted = ("stop", "length", "abort", "resumed", "let_go", "crash", "freeze", "slow", "cut", "hold", "leave")
    idle = [name for name in wanted if not totals[name]]
    assert not idle, f"seeds {first}... never exercised {idle}"


MOVING = [("splits", 0), ("moves", 0), *(("mixed", first) for first in range(0, NUM_SEEDS, SEEDS_PER_TEST))]


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize(("kind", "first"), MOVING)
def test_requests_that_move_hold(kind: str, first: int) -> None:
    """Prompts and answers in workers of their own, one and one or two and two; requests that change workers at random
    steps; and both, with pools that change and drains. Transfers are lost, workers and links fail: each request ends as
    it would alone, and no offer, ticket or block is left."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        report = run_seed_or_tell(seed, kind)
        totals.update(dict(report.ends))
        totals.update(moved=report.num_moved, unmoved=report.num_unmoved, pulled=report.num_pulled)
        totals.update(copied=report.num_copied, uncopied=report.num_uncopied)
    assert min(totals[name] for name in ("stop", "length", "abort", "moved", "unmoved", "pulled")) > 20, totals
    assert kind != "mixed" or min(totals["copied"], totals["uncopied"]) > 0, totals


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS // 2, SEEDS_PER_TEST))
def test_requests_hold_with_stores_that_crash_fail_and_lie(first: int) -> None:
    """As those that move; and KV stores of the machines lose, spoil and refuse blocks, end and come back, and tell
    front ends what is not so. Half of the clusters have no other way from worker to worker."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        report = run_seed_or_tell(seed, "tiers")
        totals.update(dict(report.ends))
        totals.update(moved=report.num_moved, fetched=report.num_fetched)
    assert min(totals[name] for name in ("stop", "length", "abort", "moved", "fetched")) > 20, totals


def test_what_a_worker_says_after_it_was_let_go_counts_for_nothing() -> None:
    """Workers that stand still wake up beside those that have their requests now."""
    totals: Counter[str] = Counter()
    for seed in range(30):
        report = run_seed_or_tell(seed, "zombies")
        totals.update(let_go=report.num_let_go, resumed=report.num_resumed)
    assert min(totals["let_go"], totals["resumed"]) > 20, totals


def test_runs_are_deterministic_under_any_hash_seed() -> None:
    """The digest of outputs and times is equal in processes with different string hashing."""
    command = [sys.executable, "-m", "simtest.cluster", "--seed", "14", "--count", "3"]
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS)), "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert run_seed(14, "faults").digest in outputs[0]


Plant = Callable[[pytest.MonkeyPatch], None]


def hear_a_zombie(patch: pytest.MonkeyPatch) -> None:
    """What a worker that was let go still says counts for those that have the requests now."""
    step = Gateway._step

    def permissive(self: Gateway, event: Stepped, now: float, effects: Any) -> None:
        if event.link not in self._links and self._links:
            entries, outputs = self._entries, event.step.outputs
            known = [
                each for each in outputs if each.request_id in entries and entries[each.request_id].link is not None
            ]
            for output in known:
                entry = entries[output.request_id]
                message = replace(event.step, outputs=(output._replace(attempt=entry.attempt),))
                step(self, Stepped(entry.link or 0, message), now, effects)
        else:
            step(self, event, now, effects)

    patch.setitem(Gateway._HANDLERS, Stepped, permissive)


def forget_requests_of_a_drained_worker(patch: pytest.MonkeyPatch) -> None:
    leaves = Gateway._stop_giving

    def forgetful(self: Gateway, event: Leaves, now: float, effects: Any) -> None:
        leaves(self, event, now, effects)
        if event.link in self._links:
            self._links[event.link].entries.clear()

    patch.setitem(Gateway._HANDLERS, Leaves, forgetful)


def never_release_what_was_fetched_for_nobody(patch: pytest.MonkeyPatch) -> None:
    end_fetch = Transfers.end_fetch

    def leaky(self: Transfers, event: Any, now: float) -> None:
        assert isinstance(event.job, FetchBlocks)
        fetch = self._fetches.get(event.job.number)
        if fetch is None or any(seq.number in self._state.loading for seq in fetch.sequences):
            end_fetch(self, event, now)

    patch.setattr(Transfers, "end_fetch", leaky)


PLANTS: list[Plant] = [
    hear_a_zombie,
    forget_requests_of_a_drained_worker,
    never_release_what_was_fetched_for_nobody,
]


KINDS = {hear_a_zombie: "zombies"}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(SEEDS_PER_TEST):
        try:
            run_seed(seed, KINDS.get(plant, "faults"))
        except (AssertionError, Violation, Deadlock, TimeLimit) as error:  # else the plant does not fit the code
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:150]}")
            return
    raise AssertionError(f"{SEEDS_PER_TEST} seeds did not notice {plant.__name__}")
