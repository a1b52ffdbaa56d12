"""A draft model: a smaller model beside the target that draws what may come next (speculative decoding, Leviathan et
al., arXiv 2211.17192). It races with the same exponential times as the target, those of (seed, choice, position, id),
by which two distributions draw alike as often as can be without knowing each other (Daliri et al., arXiv 2408.07978).

Its KV lies in a pool of its own that has a block for each block of the target's group of layers that see everything,
and goes by the same block tables: sharing, preemption and release follow by themselves. Nobody but this file knows
which blocks have it. For each block it is kept

    tokens_BP    the tokens whose KV the drafter has written there; NONE behind them
    chain_B      a hash of all tokens before the block

so a sequence has the drafter's KV as far as these agree with what it is, whoever wrote it, and whatever became of the
block meanwhile. What is missing (a prompt, KV that came from elsewhere, drafts that were rejected) is computed before
its next draft, at most CATCH_UP tokens a step. A sequence that still misses some has no drafts. KV is a function of
the tokens before it, bit for bit, so several sequences may write the same block.

It goes on as long as a further token is likely to pay. Where the drafter's step takes a share s of the target's, and n
drafts are right with probabilities p (all before them included), a token comes in (1 + n s) / (1 + sum of p) of a step;
the next draft makes that less if it is right with more than s (1 + sum of p) / (1 + n s).

A step is followed by one thread, that which computes it, in the order of the plans.

    S sequences  T tokens  B blocks  P positions of a block
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..core.sampling import FILTERS
from ..core.speculation import DRAFT_MODEL
from ..core.step import Drafts, Introduction, StepPlan
from ..models.loader import Model
from ..ops.api import Ops, StepBatch, StepLimits
from ..ops.draws import COLUMN_DTYPES, Draws, SampleBatch, Scores
from ..ops.kv_pool import KVPool
from .memory import step_limits

CATCH_UP = 128
"""Tokens a step that the drafter computes behind the target, all sequences together: it must not hold up the rest."""

MOST_SEQUENCES = 64
"""That are drafted for in a step: no step verifies drafts of more."""

USUAL_SHARE, NEW = 0.3, 0.1
"""What a step of the drafter takes of one of the target, until it is measured; what a measured one counts."""

PATIENCE, LONGEST_REST, LONGEST_OF_ALL = 4, 32, 128
"""Proposals that may stay unused before there are fewer, for a sequence and in all; steps until it is tried again,
at most. For all it costs a prompt."""

NONE = -1

_COLUMNS = tuple(name for name in COLUMN_DTYPES if name != "position" and name not in FILTERS)


@dataclass(slots=True, eq=False)
class _Rest:
    """num_unused: proposals in a row of which nothing was verified: the engine does not find them worth it. num_left:
    steps until there is another."""

    num_unused: int = 0
    num_left: int = 0

    def note_step(self, has_drafts: bool) -> bool:
        """A step with drafts or without any; whether drafts are to be proposed after it."""
        if has_drafts:
            self.num_unused = self.num_left = 0
        elif self.num_left:
            self.num_left -= 1
        return not self.num_left

    def note_proposal(self, longest: int) -> None:
        self.num_unused += 1
        if self.num_unused > PATIENCE:
            self.num_left = min(1 << min(self.num_unused - PATIENCE, 10), longest)


@dataclass(slots=True, eq=False)
class _Sequence:
    """What is known of a sequence.

    tokens     its first num_tokens are the prompt and what was drawn
    table      its first num_blocks are blocks of the target's group
    num_valid  leading tokens whose KV the drafter has
    chain      of the tokens before the block of position num_valid
    """

    tokens: np.ndarray
    num_tokens: int
    num_prompt: int
    how: dict[str, float | int]
    filters: dict[str, float | int]
    table: np.ndarray
    num_blocks: int = 0
    num_valid: int = 0
    chain: int = 0
    rest: _Rest = field(default_factory=_Rest)


@dataclass(slots=True, eq=False)
class _Run:
    """A sequence's part in the drafting after a step. most: tokens to draft at most. inputs: to be computed next, from
    position `start` on."""

    row: int
    seq: _Sequence
    most: int
    start: int
    inputs: np.ndarray
    chance: float = 1.0
    num_right: float = 0.0
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def take(self, token: int, chance: float, share: float) -> bool:
        """Draft what was drawn, if it is worth it; whether the next token is to be drafted, too. share: what a step
        of the drafter takes of one of the target."""
        self.chance *= chance
        if self.chance * (1 + len(self.tokens) * share) < share * (1 + self.num_right):
            return False
        self.num_right += self.chance
        self.tokens.append(token)
        self.chances.append(chance)
        self.start = self.seq.num_tokens + len(self.tokens) - 1
        self.inputs = np.array([token], np.int32)
        return len(self.tokens) < self.most


class DraftModel:
    """model         the drafter, with one KV group
    pool          of as many blocks as the target's group has, and one for each sequence of a call, for what is not kept
    num_tables    block tables of a sequence, of which the first is that of the target's group
    target_vocab  ids below this may be drafted
    most_drafts   tokens of a proposal
    p_min         nor is a token drafted that is right with a lower probability, where those before it are
    """

    def __init__(
        self,
        ops: Ops,
        model: Model,
        pool: KVPool,
        limits: StepLimits,
        *,
        num_tables: int,
        target_vocab: int,
        most_drafts: int,
        p_min: float = 0.0,
    ) -> None:
        self.pool = pool
        self.weights_bytes = model.num_bytes
        self._limits = limits
        self._block_size = pool.group.block_size
        self._num_blocks = num_blocks = pool.num_blocks - limits.max_seqs
        self._num_tables = num_tables
        self._max_tokens = min((limits.max_blocks_per_seq - 1) * self._block_size, model.config.max_context)
        self._vocab_size = min(target_vocab, model.config.vocab_size)
        self._most_drafts = most_drafts
        self._p_min = p_min
        self._target_s = self._own_s = 0.0
        self._rest = _Rest()
        self._program = ops.compile(lambda recorder, batch: model.forward(recorder, pool.kv, batch), limits)
        self._drawn = np.zeros(limits.max_logit_rows, np.int32)
        self._tokens_BP = np.full((num_blocks, self._block_size), NONE, np.int32)
        self._chain_B = np.zeros(num_blocks, np.int64)
        self._sequences: dict[int, _Sequence] = {}

    @property
    def kv_bytes(self) -> int:
        return self.pool.num_blocks * self.pool.group.bytes_per_block

    @property
    def scratch_bytes(self) -> int | None:
        return self._program.scratch_bytes

    def forget_blocks(self, blocks: Sequence[int]) -> None:
        """Let the memory of these blocks go, which no sequence has."""
        ids = list(blocks)
        self._tokens_BP[ids] = NONE
        self.pool.give_back(ids)

    def propose(self, plan: StepPlan, drawn: Sequence[tuple[int, ...]], step_s: float) -> dict[int, Drafts]:
        """What may follow the tokens that each row of a step has drawn, by row. To be called for every step that has
        not failed, in order. step_s: what it took."""
        self._follow(plan, drawn)
        if plan.rows and all([row.num_tokens == 1 + len(row.drafts) for row in plan.rows]):
            self._target_s = _faded(self._target_s, step_s)
        is_resting = not self._rest.note_step(any([row.drafts for row in plan.rows]))
        going, num_drafting = ([], 0) if is_resting else self._runs(plan, drawn)
        drafting, share = going[:num_drafting], self._share
        while going:
            began_s, is_usual = time.perf_counter(), all([len(run.inputs) <= 2 for run in going])
            drafts = self._call(going, num_drafting)
            if is_usual:
                self._own_s = _faded(self._own_s, time.perf_counter() - began_s)
            going = [
                run
                for run, (token, chance) in zip(going, drafts, strict=False)
                if token < self._vocab_size and chance >= self._p_min and run.take(token, chance, share)
            ]
            num_drafting = len(going)
        for run in drafting:
            run.seq.rest.note_proposal(LONGEST_REST)
        if drafting:
            self._rest.note_proposal(LONGEST_OF_ALL)
        return {run.row: Drafts(tuple(run.tokens), DRAFT_MODEL, tuple(run.chances)) for run in drafting if run.tokens}

    # ---- what is known ----

    def _follow(self, plan: StepPlan, drawn: Sequence[tuple[int, ...]]) -> None:
        for seq in plan.released:
            self._sequences.pop(seq, None)
        for row, tokens in zip(plan.rows, drawn, strict=True):
            if row.intro is not None:
                self._introduce(row.seq, row.intro)
            known = self._sequences.get(row.seq)
            if known is None:
                continue
            if row.blocks:
                num_new = len(row.blocks) // self._num_tables
                end = known.num_blocks + num_new
                known.table[known.num_blocks : end] = row.blocks[:num_new]
                known.num_blocks = end
            if tokens and not self._append(known, row.start + row.num_tokens - len(row.drafts), tokens):
                del self._sequences[row.seq]

    def _introduce(self, number: int, intro: Introduction) -> None:
        self._sequences.pop(number, None)
        known = (*intro.prompt_tokens, *intro.output_tokens)
        if not intro.embeds and max(known) < self._vocab_size:
            self._sequences[number] = _new_sequence(intro, self._limits.max_blocks_per_seq, self._block_size)

    def _append(self, known: _Sequence, end: int, tokens: tuple[int, ...]) -> bool:
        """False where they cannot be followed: one was not drawn or is not in the drafter's vocabulary, or a step has
        failed before."""
        num_tokens = end + len(tokens)
        is_known = end == known.num_tokens and num_tokens <= len(known.tokens)
        if not (is_known and min(tokens) >= 0 and max(tokens) < self._vocab_size):
            return False
        known.tokens[end:num_tokens] = tokens
        known.num_tokens = num_tokens
        return True

    def _advance(self, known: _Sequence) -> None:
        """Find how far its blocks have the drafter's KV; the last token is always computed."""
        size, last = self._block_size, known.num_tokens - 1
        while known.num_valid < last and (index := known.num_valid // size) < known.num_blocks:
            block, begin = known.table[index], index * size
            if self._chain_B[block] != known.chain:
                return
            here = known.tokens[begin : min(begin + size, last)]
            is_other = self._tokens_BP[block, : len(here)] != here
            num_equal = int(is_other.argmax()) if is_other.any() else len(here)
            self._reach(known, max(begin + num_equal, known.num_valid))
            if num_equal < size:
                return

    def _reach(self, known: _Sequence, num_valid: int) -> None:
        """It has the drafter's KV so far."""
        size = self._block_size
        for index in range(known.num_valid // size, num_valid // size):
            known.chain = _chained(known.chain, known.tokens[index * size : (index + 1) * size])
        known.num_valid = num_valid

    # ---- what is drafted ----

    def _runs(self, plan: StepPlan, drawn: Sequence[tuple[int, ...]]) -> tuple[list[_Run], int]:
        """Those that draft, in the order of the plan, and how many; then one that only catches up, if there is one and
        room for it. Drafts end where their block ends: what is behind it goes to one spare block, which is not kept."""
        size, room = self._block_size, self._limits.max_tokens
        runs: list[_Run] = []
        late: _Run | None = None
        for row, tokens in enumerate(drawn):
            known = self._sequences.get(plan.rows[row].seq) if tokens else None
            if known is None or known.num_tokens > self._max_tokens:
                continue
            if not known.rest.note_step(bool(plan.rows[row].drafts)):
                continue
            self._advance(known)
            num_new = known.num_tokens - known.num_valid
            most = min(self._most_drafts, -known.num_tokens % size, self._max_tokens - known.num_tokens)
            run = _Run(row, known, most, known.num_valid, known.tokens[known.num_valid : known.num_tokens])
            if most > 0 and num_new <= room and len(runs) < self._limits.max_logit_rows:
                runs.append(run)
                room -= num_new
            elif late is None and num_new > size:
                late = run
        num_drafting = len(runs)
        if late is not None and room > 0:
            late.inputs = late.inputs[:room]
            runs.append(late)
        for spare, run in enumerate(runs, self._num_blocks):
            run.seq.table[run.seq.num_blocks] = spare  # behind the sequence's blocks; what is there is not kept
        return runs, num_drafting

    @property
    def _share(self) -> float:
        """Of a step of the target's, what one of the drafter's takes."""
        return self._own_s / self._target_s if self._own_s and self._target_s else USUAL_SHARE

    def _call(self, runs: list[_Run], num_drafting: int) -> list[tuple[int, float]]:
        """Compute the inputs of all runs; what the first ones draw, and how sure the drafter is of them: the
        probability of what it takes for the most likely token, which is the one drawn where a request is greedy."""
        ends_S1 = np.cumsum([0, *(len(run.inputs) for run in runs)], dtype=np.int32)
        starts_S = np.array([run.start for run in runs], np.int32)
        counts_S = np.diff(ends_S1)
        context_lens_S = starts_S + counts_S
        width = -(-int(context_lens_S.max()) // self._block_size)
        batch = StepBatch(
            tokens_T=np.concatenate([run.inputs for run in runs]),
            positions_T=np.arange(ends_S1[-1], dtype=np.int32) + np.repeat(starts_S - ends_S1[:-1], counts_S),
            row_starts_S1=ends_S1,
            context_lens_S=context_lens_S,
            block_tables_SB=np.array([run.seq.table[:width] for run in runs]),
            logit_rows_L=ends_S1[1 : num_drafting + 1] - np.int32(1),
        )
        drafting = runs[:num_drafting]
        slots_L = np.arange(num_drafting, dtype=np.int32)
        scores = Scores.of(np.ones(num_drafting, np.int32))
        draws = Draws(_how(drafting), slots_L, np.empty(num_drafting, np.int32), self._drawn, scores=scores)
        self._program(batch, draws if drafting else None)
        for run in runs:
            self._note(run)
        return list(zip(draws.tokens_L.tolist(), np.exp(scores.top_logprobs_Ln.ravel()).tolist(), strict=True))

    def _note(self, run: _Run) -> None:
        """Its inputs have been computed."""
        size, known, start = self._block_size, run.seq, run.start
        end = min(start + len(run.inputs), known.num_blocks * size)
        for position in (start, *range(start - start % size + size, end, size)) if start < end else ():
            block, at = known.table[position // size], position % size
            here = run.inputs[position - start : end - start][: size - at]
            if not at:
                self._chain_B[block] = known.chain
            self._tokens_BP[block, at : at + len(here)] = here
            self._tokens_BP[block, at + len(here) :] = NONE
            if position < known.num_tokens:
                self._reach(known, position + len(here))


def _new_sequence(intro: Introduction, max_blocks: int, block_size: int) -> _Sequence:
    params, known = intro.sampling, (*intro.prompt_tokens, *intro.output_tokens)
    tokens = np.empty(max(len(known), max_blocks * block_size), np.int32)
    tokens[: len(known)] = known
    how = {name: getattr(params, name) for name in _COLUMNS if name not in ("seed", "choice")}
    return _Sequence(
        tokens,
        len(known),
        len(intro.prompt_tokens),
        how | {"seed": intro.seed % 2**64, "choice": intro.choice},
        {name: getattr(params, name) for name, (_, off) in FILTERS.items() if getattr(params, name) != off},
        np.zeros(max_blocks, np.int32),
    )


def _how(runs: Sequence[_Run]) -> SampleBatch:
    """How these draw what comes next: as their sequences, but for what changes logits before that."""
    columns = {f"{name}_L": np.array([run.seq.how[name] for run in runs], COLUMN_DTYPES[name]) for name in _COLUMNS}
    filters: dict[str, np.ndarray] = {}
    if any(run.seq.filters for run in runs):
        for name, (_, off) in FILTERS.items():
            filters[name] = np.array([run.seq.filters.get(name, off) for run in runs], COLUMN_DTYPES[name])
    positions = [run.seq.num_tokens + len(run.tokens) - run.seq.num_prompt for run in runs]
    return SampleBatch(**columns, position_L=np.array(positions, np.int32), filters=filters)


def _faded(known_s: float, new_s: float) -> float:
    return known_s + NEW * (new_s - known_s) if known_s else new_s


def _chained(chain: int, tokens: np.ndarray) -> int:
    return hash((chain, tokens.tobytes()))


def drafter_limits(model: Model, target: StepLimits, block_size: int) -> StepLimits:
    """Of the steps of a drafter beside a target with such limits: one block more than there is in a table of the
    target's, for what comes behind it."""
    limits = step_limits(
        model.config,
        max_model_len=target.max_blocks_per_seq * block_size,
        max_num_batched_tokens=MOST_SEQUENCES + CATCH_UP,
        max_num_seqs=min(target.max_seqs, MOST_SEQUENCES),
        block_size=block_size,
    )
    return replace(limits, max_seqs=limits.max_logit_rows + 1, max_blocks_per_seq=limits.max_blocks_per_seq + 1)
