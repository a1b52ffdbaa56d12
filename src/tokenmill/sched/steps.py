"""A step between its plan and its commit, and what an engine counts of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.cost import Work
from ..core.sequence import Sequence
from ..core.step import PlanRow
from ..core.tiers import TIERS
from ..kv.blocks.manager import BlockManager


@dataclass(slots=True, eq=False)
class Step:
    """A step in the making or in flight. `ends[i]`: num_computed of `sequences[i]` once the step is committed.
    `num_more_tokens`: those of its rows beyond one of each, `num_drafts` of which are drafts; `num_context`,
    `num_more_positions`: what comes before the first token of each row, and before the others (core.cost).
    `preempted`: sequences that gave their blocks back as it was composed, and how many computed tokens each lost.
    `is_ahead`: where there is speculation, it was planned while as many others were in flight as may be."""

    number: int
    rows: list[PlanRow] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    published: list[tuple[BlockManager, int]] = field(default_factory=list)
    released: tuple[int, ...] = ()
    num_more_tokens: int = 0
    num_context: int = 0
    num_more_positions: int = 0
    num_drafts: int = 0
    preempted: list[tuple[int, int]] = field(default_factory=list)
    is_void: bool = False
    is_ahead: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.rows) + self.num_more_tokens

    @property
    def work(self) -> Work:
        num_positions = self.num_context + self.num_more_positions
        return Work(len(self.rows), self.num_tokens, num_positions, self.num_context)


@dataclass(slots=True, eq=False)
class Counters:
    """Totals since the engine started, named as in EngineStats, and facts of its last step."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_corrupted: int = 0
    num_constrained: int = 0
    num_grammar_failures: int = 0
    num_expired: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0
    generation_tokens: int = 0
    external_queries: int = 0
    external_hits: int = 0
    external_recomputed: int = 0
    external_missed: int = 0
    fetch_s: float = 0.0
    kv_written: int = 0
    kv_unwritten: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    last_step_tokens: int = 0
    last_step_s: float = 0.0
    tier_hits: list[int] = field(default_factory=lambda: [0] * len(TIERS))
