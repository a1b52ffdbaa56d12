"""The simulation's own test: each of these bugs, planted into the engine, is found by the seeds that the suite runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tokenmill.core.effects import JobEnded
from tokenmill.core.outputs import exported
from tokenmill.core.sequence import Sequence, Status
from tokenmill.core.step import Introduction
from tokenmill.engine import commit, state
from tokenmill.engine import state as check
from tokenmill.engine import step_builder as ledger
from tokenmill.engine.shell import EngineShell
from tokenmill.engine.state import EngineState
from tokenmill.engine.step_builder import StepBuilder
from tokenmill.kv.blocks import groups, manager
from tokenmill.kv.blocks.allocator import BlockAllocator
from tokenmill.kv.blocks.fetch import Claim
from tokenmill.kv.blocks.groups import KVBlocks
from tokenmill.kv.blocks.manager import BlockManager
from tokenmill.kv.blocks.radix import RadixTree
from tokenmill.kv.connector.scheduler import saves
from tokenmill.kv.connector.scheduler.saves import Saves, _Save
from tokenmill.kv.connector.scheduler.transfers import Transfers
from tokenmill.sched import scheduler
from tokenmill.sched.preemption import Preempter
from tokenmill.sim.run import run_seed

NUM_SEEDS = 25

Plant = Callable[[pytest.MonkeyPatch], None]


def forget_quarantine(patch: pytest.MonkeyPatch) -> None:
    release = BlockAllocator.release
    patch.setattr(BlockAllocator, "release", lambda self, blocks, last_step: release(self, blocks, -1))


def match_one_block_too_many(patch: pytest.MonkeyPatch) -> None:
    match = BlockManager.match
    patch.setattr(
        BlockManager, "match", lambda self, keys, start, stop: match(self, keys, start, min(stop + 1, len(keys)))
    )


def publish_one_token_too_early(patch: pytest.MonkeyPatch) -> None:
    publish = EngineState.publish
    patch.setattr(EngineState, "publish", lambda self, seq, end, step: publish(self, seq, end + 1, step))


def keep_blocks_of_failed_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "withdraw", lambda self, blocks: None)


def evict_what_is_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "use", lambda self, block: None)


def release_parents_first(patch: pytest.MonkeyPatch) -> None:
    release = BlockManager.release
    patch.setattr(BlockManager, "release", lambda self, blocks, last_step: release(self, blocks[::-1], last_step))


def lose_the_output_of_the_preempted(patch: pytest.MonkeyPatch) -> None:
    introduce = ledger._introduce

    def forgetful(seq: object) -> Introduction:
        return replace(introduce(seq), output_tokens=())

    patch.setattr(ledger, "_introduce", forgetful)


def plan_past_the_end(patch: pytest.MonkeyPatch) -> None:
    def each_wanted(sequences: list[Sequence]) -> list[int]:
        return [len(seq.tokens) + seq.num_pending - seq.num_planned for seq in sequences]

    patch.setattr(scheduler, "each_wanted", each_wanted)


def never_tell_the_worker_again(patch: pytest.MonkeyPatch) -> None:
    release = EngineState._release

    def keep_sent(self: EngineState, seq: object) -> None:
        num_sent = seq.num_sent
        release(self, seq)
        seq.num_sent = num_sent

    patch.setattr(EngineState, "_release", keep_sent)


def tell_the_worker_of_reserved_blocks_only(patch: pytest.MonkeyPatch) -> None:
    adopt = StepBuilder.adopt

    def silent(self: StepBuilder, seq: object, blocks: list[int]) -> None:
        adopt(self, seq, blocks)
        if seq.num_sent:
            seq.num_sent = len(seq.tables[0])

    patch.setattr(StepBuilder, "adopt", silent)


def serve_scored_prompts_from_the_cache(patch: pytest.MonkeyPatch) -> None:
    find_match = EngineState.find_match

    def greedy(self: EngineState, seq: object) -> list[int]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(state, "wants_scores", lambda seq: False)
            return find_match(self, seq)

    patch.setattr(EngineState, "find_match", greedy)


def preempt_with_a_row_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBuilder, "preempt", lambda self, seq: self._state.send_back(seq))
    fit = Preempter.fit

    def eager(self: Preempter, seq: object, matched: list[int], num_tokens: int) -> int:
        hidden = [(other, other.rows_in_flight) for other in self.running]
        for other, _ in hidden:
            other.rows_in_flight = 0
        fitting = fit(self, seq, matched, num_tokens)
        for other, count in hidden:
            other.rows_in_flight = count
        return fitting

    patch.setattr(Preempter, "fit", eager)


def call_failures_aborts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "FINISH_ERROR", "abort")


def sleep_through_messages(patch: pytest.MonkeyPatch) -> None:
    async def read(self: EngineShell) -> None:
        while True:
            self._inbox.append(await self._link.receive())

    patch.setattr(EngineShell, "_read", read)


def let_blocks_slide_too_early(patch: pytest.MonkeyPatch) -> None:
    hidden = groups.num_hidden_blocks
    for module in (groups, manager, check):
        patch.setattr(module, "num_hidden_blocks", lambda position, window, size: hidden(position + 1, window, size))


def hit_without_what_its_end_sees(patch: pytest.MonkeyPatch) -> None:
    hidden = manager.num_hidden_blocks
    patch.setattr(manager, "num_hidden_blocks", lambda position, window, size: hidden(position + size, window, size))


def reuse_what_slid_out_at_once(patch: pytest.MonkeyPatch) -> None:
    slide = KVBlocks.slide
    patch.setattr(KVBlocks, "slide", lambda self, tables, position, last_step: slide(self, tables, position, -1))


def publish_before_the_bytes_are_in(patch: pytest.MonkeyPatch) -> None:
    start = Transfers._start

    def hasty(self: Transfers, made: Claim) -> object:
        self._state.blocks.publish(made.keys, made.tables, len(made.keys))
        return start(self, made)

    patch.setattr(Transfers, "_start", hasty)


def free_what_is_on_its_way(patch: pytest.MonkeyPatch) -> None:
    """When the sequence that asked for it is cancelled."""
    start, leave = Transfers._start, EngineState.leave
    owners: list[Transfers] = []

    def watched(self: Transfers, made: Claim) -> object:
        owners.append(self)
        return start(self, made)

    def careless(self: EngineState, seq: Sequence) -> None:
        leave(self, seq)
        for owner in owners:
            for number, fetch in [*owner._fetches.items()]:
                if owner._state is self and fetch.sequences[0] is seq:
                    del owner._fetches[number]
                    owner._coming = {one: other for one, other in owner._coming.items() if other is not fetch}
                    self.blocks.release(fetch.claim.tables, -1)

    patch.setattr(Transfers, "_start", watched)
    patch.setattr(EngineState, "leave", careless)


def take_lost_blocks_for_good(patch: pytest.MonkeyPatch) -> None:
    end = Transfers.end_fetch
    patch.setattr(Transfers, "end_fetch", lambda self, event, now: end(self, replace(event, error=""), now))


def heed_an_end_twice(patch: pytest.MonkeyPatch) -> None:
    end = Transfers.end_fetch
    ended: dict[int, object] = {}

    def again(self: Transfers, event: object, now: float) -> None:
        number = event.job.number
        ended[number] = self._fetches.setdefault(number, ended.get(number))
        end(self, event, now)

    patch.setattr(Transfers, "end_fetch", again)


def share_blocks_that_may_never_be_written(patch: pytest.MonkeyPatch) -> None:
    fetch = Transfers.fetch
    patch.setattr(Transfers, "fetch", lambda self, seq, matched, steps: fetch(self, seq, matched, ()))


def save_under_the_wrong_key(patch: pytest.MonkeyPatch) -> None:
    items = RadixTree.items

    def shifted(self: RadixTree) -> list[tuple[bytes, int]]:
        found = items(self)
        return [(key, block) for (key, _), (_, block) in zip(found, found[1:] + found[:1], strict=True)]

    patch.setattr(RadixTree, "items", shifted)


def forget_what_waits_for_a_transfer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineState, "stop_loading", lambda self, seq: None)


def let_go_of_what_is_being_saved(patch: pytest.MonkeyPatch) -> None:
    add = Saves._add

    def careless(self: Saves, save: _Save, now: float) -> None:
        self._state.blocks.release(save.tables, save.last_step)
        save.tables = self._state.blocks.new_tables()
        add(self, save, now)

    patch.setattr(Saves, "_add", careless)


def end_twice_what_was_exported(patch: pytest.MonkeyPatch) -> None:
    end = Saves._end

    def again(self: Saves, save: _Save, now: float) -> None:
        end(self, save, now)
        if save.seq is not None:
            self._state.outbox.outputs += self._state.outbox.outputs[-1:]

    patch.setattr(Saves, "_end", again)


def heed_the_end_of_an_earlier_save(patch: pytest.MonkeyPatch) -> None:
    end = Saves.end_save

    def hasty(self: Saves, event: JobEnded, now: float) -> None:
        end(self, replace(event, job=replace(event.job, number=self._number)), now)

    patch.setattr(Saves, "end_save", hasty)


def say_that_all_was_saved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(saves, "exported", lambda seq, now, *, is_saved: exported(seq, now, is_saved=True))


def answer_before_it_is_saved(patch: pytest.MonkeyPatch) -> None:
    add = Saves._add

    def eager(self: Saves, save: _Save, now: float) -> None:
        add(self, save, now)
        if save.seq is not None and save.seq.status is Status.EXPORTING:
            self._state.leave(save.seq)
            self._state.outbox.outputs.append(exported(save.seq, now, is_saved=True))

    patch.setattr(Saves, "_add", eager)


PLANTS: list[Plant] = [
    forget_quarantine,
    match_one_block_too_many,
    publish_one_token_too_early,
    keep_blocks_of_failed_steps,
    evict_what_is_in_use,
    release_parents_first,
    lose_the_output_of_the_preempted,
    plan_past_the_end,
    never_tell_the_worker_again,
    tell_the_worker_of_reserved_blocks_only,
    serve_scored_prompts_from_the_cache,
    preempt_with_a_row_in_flight,
    call_failures_aborts,
    sleep_through_messages,
    let_blocks_slide_too_early,
    hit_without_what_its_end_sees,
    reuse_what_slid_out_at_once,
    publish_before_the_bytes_are_in,
    free_what_is_on_its_way,
    take_lost_blocks_for_good,
    heed_an_end_twice,
    share_blocks_that_may_never_be_written,
    save_under_the_wrong_key,
    forget_what_waits_for_a_transfer,
    let_go_of_what_is_being_saved,
    end_twice_what_was_exported,
    heed_the_end_of_an_earlier_save,
    say_that_all_was_saved,
    answer_before_it_is_saved,
]


# What takes a rare meeting of priorities, or of a transfer and a failing step: the search starts near one. Under others
# of these bugs some seeds never end: it starts at one that does.
FIRST_SEEDS = {
    keep_blocks_of_failed_steps: 26,
    tell_the_worker_of_reserved_blocks_only: 160,
    take_lost_blocks_for_good: 30,
    share_blocks_that_may_never_be_written: 140,
    heed_the_end_of_an_earlier_save: 60,
    say_that_all_was_saved: 40,
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation that passes with the bug in place would prove nothing without it."""
    plant(monkeypatch)
    first = FIRST_SEEDS.get(plant, 0)
    for seed in range(first, first + NUM_SEEDS):
        try:
            run_seed(seed)
        except BaseException as error:
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:150]}")
            return
    raise AssertionError(f"{NUM_SEEDS} seeds did not notice {plant.__name__}")
