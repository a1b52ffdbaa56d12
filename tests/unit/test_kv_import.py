"""What a core does with KV that it is to pull: what it asks for, and what it makes of the answers."""

from __future__ import annotations

import json
from dataclasses import replace

from tokenmill.core.block import full_groups, window_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import Effects, JobEnded
from tokenmill.core.events import Submit
from tokenmill.core.kv_events import STORED, KVEvent, KVEvents, WatchKV
from tokenmill.core.moves import Continue, KVSource, Moved, Prefetch, Prefetched, PullBlocks, Pulled, Staged
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import Status
from tokenmill.engine.core import EngineCore
from tokenmill.kv.connector.scheduler.kv_import import NO_CACHE, NO_ROOM, NO_USE

SOURCE = KVSource("w", "life", "address", "host", "ticket")
CONFIG = EngineConfig(full_groups(16), 64, block_size=4, max_num_seqs=2)


def moved(name: str, prompt_logprobs: int | None = None) -> Request:
    return Request(name, tuple(range(21)), SamplingParams(prompt_logprobs=prompt_logprobs), 8, seed=0, source=SOURCE)


def job_of(effects: Effects) -> PullBlocks:
    (job,) = effects.jobs
    assert isinstance(job, PullBlocks)
    return job


def pulled(core: EngineCore, job: PullBlocks, result: Pulled) -> Effects:
    return core.handle(JobEnded(job, json.dumps(result)), 1.0)


def test_kv_with_holes_that_are_seen_is_not_used() -> None:
    """Of layers with a window, a source leaves out what its own end will not see; it may never get to that end."""
    core = EngineCore(EngineConfig((window_group(16, 8),), 64, block_size=4))
    first = job_of(core.handle(Submit((moved("a"),)), 0.0))
    second = job_of(pulled(core, first, Pulled(12, 12, False, ((0, 0), (0, 1), (0, 2)))))
    assert second.start == 3
    told = core.handle(JobEnded(second, error="lost", error_kind="kind"), 1.0)
    assert told.answers == (Moved("a", 0, 0, "lost"),)
    assert core.handle(Continue("a"), 2.0).answers == (Moved("a", 0, 0),)
    assert core.state.by_id["a"].status is Status.WAITING and core.stats().num_held_blocks == 0


def test_kv_that_came_before_its_source_was_lost_is_used() -> None:
    core = EngineCore(CONFIG)
    first = job_of(core.handle(Submit((moved("a"),)), 0.0))
    second = job_of(pulled(core, first, Pulled(12, 12, False)))
    core.handle(JobEnded(second, error="lost", error_kind="kind"), 1.0)
    assert core.handle(Continue("a"), 2.0).answers == (Moved("a", 0, 12),)
    assert core.state.by_id["a"].num_computed == 12
    core.check()


def test_a_destination_says_why_it_takes_nothing() -> None:
    core = EngineCore(CONFIG)
    assert core.handle(Submit((moved("scores", prompt_logprobs=1),)), 0.0).answers == (Moved("scores", 0, 0, NO_USE),)
    assert core.handle(Submit((moved("second"),)), 0.0).answers == ()
    assert core.handle(Submit((moved("third"),)), 0.0).answers == (Moved("third", 0, 0, NO_ROOM),)


def test_staged_is_told_once_all_that_was_there_has_come() -> None:
    core = EngineCore(CONFIG)
    job = job_of(core.handle(Submit((moved("a"),)), 0.0))
    effects = pulled(core, job, Pulled(4, 13, False))
    assert effects.answers == ()
    effects = pulled(core, job_of(effects), Pulled(12, 13, False))
    assert effects.answers == (Staged("a", 0, 12),)


def test_an_engine_without_work_tells_of_what_it_was_to_copy() -> None:
    """Before it says that it has it; nothing else would tell until it has a step."""
    core = EngineCore(CONFIG)
    core.handle(WatchKV(True), 0.0)
    keys = (b"a" * 16, b"b" * 16)
    job = job_of(core.handle(Prefetch(5, keys, SOURCE), 0.0))
    answers = pulled(core, job, Pulled(8, 8, True)).answers
    assert answers == (KVEvents(1, (KVEvent(STORED, b"".join(keys)),)), Prefetched(5, 2))
    core.check()
    assert core.stats().num_held_blocks == 0


def test_an_engine_without_a_prefix_cache_copies_no_prefixes() -> None:
    core = EngineCore(replace(CONFIG, enable_prefix_caching=False))
    effects = core.handle(Prefetch(5, (b"a" * 16,), SOURCE), 0.0)
    assert effects.answers == (Prefetched(5, 0, NO_CACHE),) and not effects.jobs
