"""The one message between engine and worker: a `StepPlan` out, a `StepResult` back.

A plan is self-contained: a worker needs nothing but earlier plans to run it. It speaks of sequences by number, never
of requests, policies or time. A plan of zero rows is legal.

Row geometry, for a row with start = 5 and three tokens:

    position        0 1 2 3 4 | 5 6 7      tokens = (t5, t6, t7)
    KV              read        written, then read causally
    sample          the logits of position 7 draw token 8
    score           the logits of 5, 6, 7 score the known tokens 6, 7, 8 (prompt logprobs)
    drafts (d8, d9) the logits of 8 and 9 draw, too: token 9 if token 8 is d8, and then token 10 if token 9 is d9

What is made anew for every row of every step is a NamedTuple, the cheapest thing that cannot be changed.

Plans are applied in order of `step`, within one as: forget `released`, take introductions and table deltas of all rows,
write the KV of all rows, then read. So a row may read what another row of the same step writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from .embeds import Embeds
from .request import PoolingParams, SamplingParams


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a worker must know of a sequence before its first row here (first run, or resumed after preemption).

    The worker forgets whatever it held under the same number and starts from this.
    `prompt_tokens` and `output_tokens` rebuild penalty counts; `eos_token_ids` and `sampling.stop_token_ids` are masked
    until `sampling.min_tokens` outputs exist; `sampling.grammar` was prepared before. With `pooling` the one output is
    a vector, and all else is unused. `adapter`: digest of its LoRA adapter, "" for none. `bad_words`, `dry_breakers`:
    as in Request, and so are `embeds`: what has its place in a row is the input there, whatever the row's tokens are.
    `encoded`: of each of `embeds`, the block of the encoder's group with what the encoder makes of it; `unencoded`: the
    ones among these blocks that are to be filled in this step, before any row. `slow_s`: what RowResult last said of
    it. `draft_scope`: drafts for it are made of its own text and of outputs of sequences with the same. `corpora`: and
    of these, by index in the configuration. `prediction`: and of these tokens.
    """

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    choice: int
    eos_token_ids: tuple[int, ...]
    pooling: PoolingParams | None = None
    adapter: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[int, ...] = ()
    slow_s: float = 0.0
    embeds: tuple[Embeds, ...] = ()
    encoded: tuple[int, ...] = ()
    unencoded: tuple[int, ...] = ()
    draft_scope: str = ""
    corpora: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()


class PlanRow(NamedTuple):
    """One sequence's share of a step.

    seq        the sequence's number; at most one row of it in a step
    start      position of the first token of the row; KV of [0, start) is in place or written by this same step
    tokens     input token ids, placeholders where the sequence has embeds; empty exactly when `from_step` is set
    from_step  the single input token is the one drawn for this sequence in that (possibly unfinished) step; else -1
    blocks     physical ids appended to the worker's tables of this sequence, as many for each KV group, one group after
               the other; with `intro` they are the whole tables. An id of 0 may stand where no query will look
    intro      present on a sequence's first row
    sample     draw a token from the logits of the last position; of a pooling sequence, give its vector
    score      report logprobs of the known prompt token after each position p of the row with p + 1 < prompt length
    drafts     of a row that samples: tokens that may follow the one it draws. They are inputs after `tokens`, and
               verified: each is accepted that equals what is drawn in its place, up to the first that does not. What is
               written for the others is written again by later rows
    """

    seq: int
    start: int
    tokens: tuple[int, ...]
    from_step: int = -1
    blocks: tuple[int, ...] = ()
    intro: Introduction | None = None
    sample: bool = False
    score: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return (1 if self.from_step >= 0 else len(self.tokens)) + len(self.drafts)


plan_row: Callable[[tuple[Any, ...]], PlanRow] = partial(tuple.__new__, PlanRow)
"""A row of all its fields in order, at a third of what calling the class costs."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All rows of one step. `released`: sequences the worker forgets before running the rows; some may be unknown to
    it, and one of them may be introduced again by this very step."""

    step: int
    rows: tuple[PlanRow, ...]
    released: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([row.num_tokens for row in self.rows])


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log probability of `token` under the raw logits, its rank (1 = most likely), and the top alternatives in
    order of falling probability (ties: lower id first)."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Drafts(NamedTuple):
    """Tokens that a drafter of the worker proposes to follow those that its row has drawn.

    source   the drafter's name
    chances  of each token, how likely the drafter takes it to be right where all before it are
    """

    tokens: tuple[int, ...]
    source: str
    chances: tuple[float, ...]

    def after(self, num_tokens: int) -> Drafts | None:
        """What is left behind so many of them."""
        if num_tokens >= len(self.tokens):
            return None
        return Drafts(self.tokens[num_tokens:], self.source, self.chances[num_tokens:])


class RowResult(NamedTuple):
    """What one row gave.

    tokens           drawn tokens; none unless the row sampled, several where drafts were accepted: these and one more
    logprobs         one entry per drawn token where the request wants them
    prompt_logprobs  one entry per scored position, in order
    vector           the output of a pooling sequence, float32 in the machine's byte order
    is_corrupted     the row's logits or vector are not finite, and it gives nothing else
    error            nor does a row that could not be drawn from; a sentence for the user
    is_invalid       who asked for it can mend that
    spent_s          processor time that its grammar took beyond what is usual
    lacks_mask          its mask was not made; it is to be drawn in another step
    slow_s           where something was spent: what all slow masks of the sequence have taken, which is bounded
    drafts           proposed to follow `tokens`, by a worker that can verify them
    """

    seq: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    vector: bytes = b""
    is_corrupted: bool = False
    error: str = ""
    is_invalid: bool = False
    spent_s: float = 0.0
    lacks_mask: bool = False
    slow_s: float = 0.0
    drafts: Drafts | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the plan's rows; `duration_s` is the worker's own measure of the step, and `late_s` what
    it took in this for tokens of earlier steps that its drafter had missed, which says nothing of such steps."""

    step: int
    rows: tuple[RowResult, ...]
    duration_s: float = 0.0
    late_s: float = 0.0
