"""Requests that move between engines, at any moment and through any failure, give what they give alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from simtest.moves import Report, run_moves
from tokenmill.core.block import full_groups
from tokenmill.core.errors import EngineFailed
from tokenmill.core.moves import EndMove, KVSource, PullBlocks, SendBlocks
from tokenmill.kv.connector.scheduler import kv_export, kv_import
from tokenmill.sim.executor import Violation
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.peers import ToyNetwork, ToyPeer
from tokenmill.sim.toy_model import ToyPool

SEEDS = range(60)
SEEDS_PER_TEST = 20


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("first", SEEDS[::SEEDS_PER_TEST])
def test_moved_requests_are_their_solo_runs_and_no_block_is_lost(first: int) -> None:
    """Over the seeds moves with and without KV, losses, preemptions, cancellations and copies of prefixes happen."""
    total = Report()
    for seed in range(first, first + SEEDS_PER_TEST):
        report = run_moves(seed)
        for name in ("num_moves", "num_warm", "num_pulled", "num_lost", "num_prefetched", "num_preemptions"):
            setattr(total, name, getattr(total, name) + getattr(report, name))
        for reason, number in report.ends.items():
            total.ends[reason] = total.ends.get(reason, 0) + number
    assert total.num_moves > 100 and total.num_warm > 25 and total.num_pulled > 150, total
    assert total.num_lost > 10 and total.num_prefetched > 50 and total.num_preemptions > 1, total
    assert total.ends.keys() >= {"length", "stop", "abort", "internal_error"}, total


def test_a_ticket_is_forgotten_when_its_pull_has_ended() -> None:
    """A move that is over while KV is waited for fails the jobs of both ends, and neither keeps anything of it."""
    loop = VirtualLoop()
    network = ToyNetwork()
    (group,) = full_groups(4)
    one, two = (
        ToyPeer(network, name, f"{name}.1", [ToyPool(group, 4)], 4, lambda holds, message: None) for name in "ab"
    )

    async def main() -> None:
        sending = loop.create_task(one.send(SendBlocks(0, "t", ((0, 0, 1),), 4, False)))
        source = KVSource("a", "a.1", "a", "a", "t")
        pulling = loop.create_task(two.pull(PullBlocks(0, source, 0, ((2, 3),), is_final=True)))
        await asyncio.sleep(0.01)
        for peer, job in ((two, pulling), (one, sending)):
            peer.end(EndMove("t"))
            with pytest.raises(EngineFailed, match="The move is over"):
                await job

    loop.run(main())
    for peer in (one, two):
        assert not (peer._given_up or peer._pulling or peer._boards), peer.address


def test_a_run_is_repeated_exactly() -> None:
    assert run_moves(5) == run_moves(5)


def _send_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is sent while steps still write it."""
    send = kv_export.KVExports._send

    def early(
        self: kv_export.KVExports, offer: kv_export._Export, seq: kv_export.Sequence, num: int, *, is_last: bool
    ) -> None:
        more = 0 if is_last else min(1, len(seq.tables[0]) - num)
        send(self, offer, seq, num + more, is_last=is_last)

    monkeypatch.setattr(kv_export.KVExports, "_send", early)


def _free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks go back while their peer still reads them."""

    def settle(self: kv_export.KVExports, offer: kv_export._Export) -> None:
        if offer.is_over and offer in self._ending:
            for pool, held in zip(self._state.blocks.pools, offer.held, strict=True):
                pool.release(held, -1)
            self._ending.remove(offer)

    monkeypatch.setattr(kv_export.KVExports, "_settle", settle)


def _free_when_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks go back while they are still filled."""

    def depart(self: kv_import.KVImports, seq: kv_import.Sequence) -> None:
        pull = self._by_seq.pop(seq.number, None)
        if pull is not None:
            self._give_back(pull)

    monkeypatch.setattr(kv_import.KVImports, "_depart", depart)


def _believe_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token more is taken for computed than has come."""
    monkeypatch.setattr(
        kv_import,
        "num_usable",
        lambda blocks, pull, seq: min(pull.num_tokens + 1, len(seq.tokens) - 1) if pull.made else 0,
    )


def _forget_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token that the source drew is not told."""
    go_on = kv_import.KVImports.go_on

    def shorter(self: kv_import.KVImports, event: kv_import.Continue, now: float) -> None:
        go_on(self, kv_import.Continue(event.request_id, event.attempt, event.tokens[:-1]), now)

    monkeypatch.setattr(kv_import.KVImports, "go_on", shorter)


@pytest.mark.parametrize(
    "plant", [_send_unfinished, _free_at_once, _free_when_aborted, _believe_too_much, _forget_the_last]
)
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, Violation)):
        for seed in SEEDS:
            run_moves(seed)
