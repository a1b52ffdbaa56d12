"""What must hold of an engine between calls. Slow: for tests and simulations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol

from ..core.block import num_hidden_blocks
from ..core.sequence import Sequence, Status
from ..kv.blocks.groups import Tables
from ..kv.connector.scheduler.saves import Saves
from ..sched.admission import blocks_for
from ..sched.rank import seniority
from .state import EngineState


class Holder(Protocol):
    """What holds blocks beside the sequences that run."""

    def tables(self) -> Iterator[Tables]: ...


def check_state(state: EngineState, saves: Saves, holders: Iterable[Holder]) -> None:
    """Assert that sequences, blocks, steps and transfers in flight and counts agree."""
    state.blocks.check(
        (*(seq.tables for seq in state.running), *chain.from_iterable(each.tables() for each in holders))
    )
    assert state.running == sorted(state.running, key=seniority), "running is out of order"
    in_flight: dict[int, int] = {}
    drafting: set[int] = set()
    for step in state.in_flight:
        for row, seq in zip(step.rows, step.sequences, strict=True):
            if not step.is_void and seq.status is not Status.FINISHED:
                assert seq.number not in drafting, seq
                in_flight[seq.number] = in_flight.get(seq.number, 0) + 1
                if row.drafts:
                    drafting.add(seq.number)
    num_waiting = num_exporting = 0
    for seq in state.by_id.values():
        if seq.status is Status.EXPORTING:
            assert not len(seq.tables[0]) and saves.has(seq), seq
            num_exporting += 1
            continue
        num_known = len(seq.tokens) + seq.num_pending
        assert 0 <= seq.num_computed <= seq.num_planned < num_known + (seq.number in drafting), seq
        assert seq.rows_in_flight == in_flight.get(seq.number, 0), seq
        assert seq.num_output + seq.num_pending <= seq.request.max_tokens, seq
        assert len({len(table) for table in seq.tables}) == 1, seq
        assert all(max(table.num_published, table.num_released) <= len(table) for table in seq.tables), seq
        if seq.status is Status.RUNNING:
            _check_running(state, seq)
        else:
            num_waiting += seq.status is Status.WAITING
            assert (seq.status is Status.LOADING) == (seq.number in state.loading), seq
            assert seq.status is not Status.FINISHED and not len(seq.tables[0]) and not seq.rows_in_flight, seq
    assert num_waiting == len(state.waiting)
    state.encoder.check((*state.running, *state.loading.values()))
    state.service.check(state.by_id.values())
    assert state.by_id or not len(state.settings)
    adapters = [seq.request.adapter for seq in state.by_id.values() if seq.request.adapter]
    state.adapters.check({digest: adapters.count(digest) for digest in adapters})
    assert num_waiting + len(state.running) + len(state.loading) + num_exporting == len(state.by_id)


def _check_running(state: EngineState, seq: Sequence) -> None:
    config = state.config
    assert seq.rows_in_flight or seq.num_computed == seq.num_planned, seq
    num_blocks = blocks_for(seq.num_planned, config.block_size) if config.keeps_kv else 0
    assert len(seq.tables[0]) == num_blocks, seq
    for group, table in zip(config.groups, seq.tables, strict=True):
        assert table.num_released == num_hidden_blocks(seq.num_planned, group.window, config.block_size), seq
