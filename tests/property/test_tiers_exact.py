"""Several engines share one KV store over virtual tiers, by seed: whatever is evicted, spoilt, lost or killed, every
request has the tokens that it has alone. The bugs below, planted, are found by the same seeds."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable

import pytest

from simtest.tier_run import TierReport, Trouble, run_tiers
from tokenmill.kv.blocks import fetch
from tokenmill.kv.blocks.manager import BlockManager
from tokenmill.kv.connector.scheduler import load_or_recompute, overlapped_load, transfers
from tokenmill.kv.connector.scheduler import load_or_recompute as rates
from tokenmill.kv.connector.scheduler.overlapped_load import OverlappedLoad
from tokenmill.kv.connector.scheduler.tiers import TierCatalogue
from tokenmill.kv.connector.scheduler.transfers import Transfers
from tokenmill.kv.connector.scheduler.writes import Writes
from tokenmill.sim import tier_store
from tokenmill.sim.tiers import TierFaults

NUM_SEEDS = 120
SEEDS_PER_TEST = 30
NUM_PLANTED = 160
WORST = Trouble(deaths=2, crashes=2, spoil=0.1, faults=TierFaults(0.1, 0.1, 0.1, 0.2, 0.2))

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failures by choice are not worth their tracebacks."""
    caplog.set_level(logging.CRITICAL)


def run_or_tell(seed: int, trouble: Trouble | None = None) -> TierReport:
    try:
        return run_tiers(seed, trouble)
    except BaseException as error:
        error.add_note(f"Replay: simtest.tier_run.run_tiers({seed}, {trouble})")
        raise


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_seed_holds(first: int) -> None:
    """Half of the requests' prefixes come again, on other engines or after their blocks were evicted."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        report = run_or_tell(seed)
        totals += report.ends + report.counts
    wanted = ("stop", "length", "abort", "failures", "fetched", "saved", "kv_written", "kv_unwritten")
    assert all(totals[name] for name in wanted), totals


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("first", [1000, 1020, 1040])
def test_the_worst_of_all_at_once(first: int) -> None:
    """Blocks go wrong in the tiers and on their way; engines and store die: each wrong one is noticed."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + 20):
        report = run_or_tell(seed, WORST)
        totals += report.ends + report.counts
    assert totals["bad"] and totals["external_missed"] and totals["fetched"], totals


def compute_while_loading(patch: pytest.MonkeyPatch) -> None:
    """Wherever it is possible at all, in the smallest pieces."""
    computing = TierCatalogue._computing
    patch.setattr(TierCatalogue, "_computing", lambda self, *args: computing(self, *args)._replace(ahead_s=0.0))
    patch.setattr(overlapped_load, "MOST_WAITING", 1000)
    patch.setattr(overlapped_load, "TAIL_BYTES", 8192)
    patch.setattr(rates, "NUM_KNOWN", 0)
    patch.setattr(load_or_recompute, "CLEARLY", 1e9)


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(
    ("first", "trouble"),
    [*((first, None) for first in (2000, 2040, 2064, 2085)), (1010, WORST), (1067, WORST)],
    ids=lambda value: {None: "any", WORST: "worst"}.get(value, str(value)),
)
def test_heads_that_are_computed_while_tails_load(
    first: int, trouble: Trouble | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few seeds have tails to load behind a head; of the ten from each of these some do."""
    compute_while_loading(monkeypatch)
    num_published, publish = 0, OverlappedLoad._publish

    def counted(self: OverlappedLoad, *args: object) -> None:
        nonlocal num_published
        num_published += 1
        publish(self, *args)

    monkeypatch.setattr(OverlappedLoad, "_publish", counted)
    for seed in range(first, first + 10):
        run_or_tell(seed, trouble)
    assert num_published > 2


def believe_every_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transfers, "parted", lambda moves, event: (list(moves), []))


def compare_no_checksums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tier_store, "sum_of", lambda block, content: 1)


def sum_without_the_key(patch: pytest.MonkeyPatch) -> None:
    """What is swapped for another sound block is not noticed."""
    sum_of = tier_store.sum_of
    patch.setattr(tier_store, "sum_of", lambda block, content: sum_of((0, b""), content))


def publish_what_has_not_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transfers, "num_in", lambda made, left: len(made.keys))


def run_with_a_part(patch: pytest.MonkeyPatch) -> None:
    """As if all had come, although some did not."""
    end = Transfers._end

    def hasty(self: Transfers, fetched: object) -> None:
        fetched.left, fetched.is_over = set(), False
        end(self, fetched)

    patch.setattr(Transfers, "_end", hasty)


def save_before_it_is_committed(patch: pytest.MonkeyPatch) -> None:
    take = Writes._take
    patch.setattr(Writes, "_take", lambda self, unsettled: take(self, set()))


def hand_out_what_is_being_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "begin_copy", lambda self, blocks: None)
    patch.setattr(BlockManager, "end_copy", lambda self, blocks: None)


def save_under_the_key_of_another(patch: pytest.MonkeyPatch) -> None:
    take = Writes._take

    def shifted(self: Writes, unsettled: object) -> tuple:
        moves = take(self, unsettled)
        ids = [block for _, _, block in moves]
        return tuple((*move[:2], block) for move, block in zip(moves, ids[1:] + ids[:1], strict=True))

    patch.setattr(Writes, "_take", shifted)


def wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    """An answer that comes late wakes nobody."""
    patch.setattr(TierCatalogue, "end_lookup", lambda self, event, now: None)


def keep_transfers_that_nobody_ends(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a transfer that is over are not given back."""
    end = Transfers._end

    def forgetful(self: Transfers, fetched: object) -> None:
        if fetched.is_over:
            self._state.blocks.release, release = (lambda tables, step: None), self._state.blocks.release
            end(self, fetched)
            self._state.blocks.release = release
        else:
            end(self, fetched)

    patch.setattr(Transfers, "_end", forgetful)


def share_what_may_never_be_written(patch: pytest.MonkeyPatch) -> None:
    claim = fetch.claim
    patch.setattr(transfers, "claim", lambda blocks, keys, end, unsettled: claim(blocks, keys, end, set()))


def publish_a_tail_before_it_is_in(patch: pytest.MonkeyPatch) -> None:
    compute_while_loading(patch)
    meet = OverlappedLoad._meet

    def hasty(self: OverlappedLoad, tail: object) -> None:
        place = tail.seq.num_planned // self._state.config.block_size
        if place in tail.blocks:
            tail.left.clear()
        meet(self, tail)

    patch.setattr(OverlappedLoad, "_meet", hasty)


def keep_a_tail_that_hangs_on_a_failed_step(patch: pytest.MonkeyPatch) -> None:
    compute_while_loading(patch)
    publish = OverlappedLoad._publish

    def forgetful(self: OverlappedLoad, tail: object, place: int) -> None:
        in_flight, self._state.in_flight = self._state.in_flight, ()
        publish(self, tail, place)
        self._state.in_flight = in_flight

    patch.setattr(OverlappedLoad, "_publish", forgetful)


def give_blocks_back_that_are_being_filled(patch: pytest.MonkeyPatch) -> None:
    compute_while_loading(patch)

    def hasty(self: OverlappedLoad, tail: object) -> None:
        if tail.is_over and self._tail is tail:
            self._state.blocks.pools[0].release(list(tail.blocks.values()), -1)
            tail.blocks.clear()
            self._tail = None if not tail.jobs else tail

    patch.setattr(OverlappedLoad, "_settle", hasty)


PLANTS: list[Plant] = [
    believe_every_block,
    compare_no_checksums,
    sum_without_the_key,
    publish_what_has_not_come,
    run_with_a_part,
    save_before_it_is_committed,
    hand_out_what_is_being_copied,
    save_under_the_key_of_another,
    wait_for_ever,
    keep_transfers_that_nobody_ends,
    share_what_may_never_be_written,
    publish_a_tail_before_it_is_in,
    keep_a_tail_that_hangs_on_a_failed_step,
    give_blocks_back_that_are_being_filled,
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    seeds = random.Random(1).sample(range(2000), NUM_PLANTED)
    for seed in seeds:
        try:
            run_tiers(seed, WORST)
        except BaseException as error:
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:150]}")
            return
    raise AssertionError(f"{NUM_PLANTED} seeds did not notice {plant.__name__}")
