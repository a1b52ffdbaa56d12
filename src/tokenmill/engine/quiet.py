"""Whether all that an engine has are decodes that go on, so that it may leap over some (`leap`)."""

from __future__ import annotations

from ..core.request import IDLE_PRIORITY
from ..core.sequence import Sequence, Status
from .core import EngineCore


def may_leap(core: EngineCore, token: int) -> bool:
    """Whether all that goes on are decodes that draw `token`, with steps of the same rows in flight, and nothing else
    is under way."""
    state, config = core.state, core.config
    running, in_flight = state.running, state.in_flight
    if not running or not in_flight or len(state.by_id) != len(running) or state.released or core.has_jobs:
        return False
    if state.has_store or state.writes is not None or state.token_log is not None or core.is_recorded:
        return False
    if state.drafts or any([pool.num_quarantined for pool in state.blocks.pools]):
        return False
    if state.blocks.has_windows or not config.keeps_kv or state.service.is_shared or state.moving:
        return False
    num_rows, depth = len(running), len(in_flight)
    for step in in_flight:
        if step.is_void or step.num_more_tokens or step.sequences != running:
            return False
    return num_rows <= config.max_num_batched_tokens and all(_goes_on(seq, depth, token) for seq in running)


def _goes_on(seq: Sequence, depth: int, token: int) -> bool:
    request = seq.request
    return (
        seq.status is Status.RUNNING
        and seq.first_token_s >= 0
        and seq.rows_in_flight == seq.num_pending == depth
        and seq.num_planned == len(seq.tokens) + depth - 1
        and request.priority < IDLE_PRIORITY
        and request.terms.kv_share >= 1
        and request.pooling is None
        and not request.sampling.grammar
        and request.sampling.logprobs is None
        and token not in seq.stop_ids
    )
