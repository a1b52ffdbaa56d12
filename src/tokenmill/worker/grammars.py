"""Which tokens the grammars of running sequences allow: masks that are made beside the steps.

    event loop   prepare: a sequence is introduced     collect: its token of step k is known
                              |                                  |
    own thread                start: copy the grammar's          advance: take the token,
                              matcher, take what was             make the mask of step k + 1
                              drawn before, first mask                |
    step                                                         k + 1 computes, and draws by it

One thread makes all masks; a step waits for one only at the draw of its row. Of the masks that are asked for together,
those of sequences that have cost least come first, and once slow ones have taken STEP_S the rest are not made: their
rows draw anything, and the engine has these sequences draw in another step. Masks of a step are asked for twice, for
sequences that it introduces and for tokens of the step before, so it waits for STEP_S and the mask that goes beyond it
twice at most. A mask is a function of the grammar and of the tokens drawn, so a sequence that is introduced again goes
on as if it had never left; what its slow masks have taken is told with it. Grammars are prepared before a sequence that
has one is introduced (`core.effects.PrepareGrammar`), so that nothing slow is left to do beside the steps; which ones
are kept is this file's business.

The draws of a row with drafts have a mask each: that behind a draft is what follows if the draft is taken. The matcher
takes the drafts and is rolled back, before the tokens that were drawn are known. Behind a draft that the grammar does
not allow, that ends the answer or that is too slow, a draw may give anything: `known` says that it is of no use. What
drafts cost is charged, but fails no sequence. Where a grammar leaves no choice, it drafts itself: what must come is
known with a mask, and proposed with the token that is drawn by it.

What cannot go on (an error of the library, masks that take too long, no token left) lets its row draw anything: its
error is read when that row's step is collected, and the token is dropped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from weakref import WeakSet

import numpy as np

from ..core.errors import InvalidRequest
from ..core.speculation import MOST_SPECULATIVE_TOKENS
from ..core.step import Drafts, Introduction
from ..ops.api import Ops
from ..ops.draws import ALWAYS, Mask
from ..text.grammar.matcher import (
    BYTES_PER_TOKEN,
    COPY_BYTES,
    MATCHER_BYTES,
    GrammarFailed,
    Matcher,
    Vocabulary,
    heap_bytes,
    trim_heap,
)

MAX_KEPT = 64
"""Grammars whose matchers are kept for further sequences."""

MAX_GROWN_BYTES = MAX_KEPT * MATCHER_BYTES
"""What the heap may grow by before they are dropped. It is measured, because a grammar's size does not tell what is
found out about it."""

STEP_S = 0.02
"""Processor time that slow masks asked for together may take before the others of them are put off: one that fails for
its price takes about as much."""

_SLOW_S = 0.0002
"""Of a mask: longer than what only reads what is known. Half a microsecond more may have taken 200 bytes."""

SPENT_S = 0.06
_SPENT_PER_TOKEN_S = 0.002
"""Processor time that the slow tokens of a sequence may take together. No bound holds for one alone: on a virtual
machine that is held up, one of tens of microseconds is counted with tens of milliseconds now and then."""

_COSTLY_S = 0.01
"""Of slow masks: who has had less did not fill the heap, and neither have all since it was measured."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DraftMasks:
    """Of a row with drafts: the masks of the draws behind each of them. The row's first draw is of output position
    `position`, and its mask is the sequence's own. known: so many of the draws behind are by what the grammar allows;
    it stands once the step has ended."""

    position: int
    tokens: tuple[int, ...]
    masks: Sequence[Mask]
    known: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Constrained:
    """A sequence that follows a grammar. The thread of `Grammars` writes it; others read how it stands and charge what
    was spent, once a draw by the mask has ended.

    allowed   bits of the tokens that its settings allow; None: all
    ends      bits of its end tokens
    hides_end its end tokens are allowed only where nothing else is
    tokens    what was drawn, and max_tokens the most there can be
    is_over   no mask is wanted any more
    is_invalid  what `error` says is for the caller to mend
    lacks_mask   its next mask was not made: if it is to draw, then in another step, where it is introduced anew
    slow_s    processor time of its slow tokens, those before it was introduced included
    spent_s   of all that was slow, its beginning and drafts too
    drafts    of its next row, where their masks are still to be made
    forced    what must come next, where that is more than one token and may be drafted
    """

    grammar: str
    mask: Mask
    tokens: list[int]
    allowed: np.ndarray | None
    end_ids: frozenset[int]
    ends: np.ndarray
    hides_end: bool
    max_tokens: float
    slow_s: float
    matcher: Matcher | None = None
    is_over: bool = False
    error: str = ""
    is_invalid: bool = False
    lacks_mask: bool = False
    spent_s: float = 0.0
    drafts: DraftMasks | None = None
    forced: Sequence[int] = ()
    _charged_s: float = 0.0

    def charge(self) -> float:
        """What was spent since this was asked last."""
        spent_s = self.spent_s - self._charged_s
        self._charged_s += spent_s
        return spent_s

    def follow_up(self, drawn: Sequence[int]) -> Drafts | None:
        """What must come after the tokens that were drawn next, as far as that was known before."""
        num_drawn, forced = len(drawn), self.forced
        if num_drawn >= len(forced) or [*forced[:num_drawn]] != [*drawn]:
            return None
        following = tuple(forced[num_drawn:])
        return Drafts(following, SOURCE, (1.0,) * len(following))


SOURCE = "grammar"

_MOST_FORCED = 2 * MOST_SPECULATIVE_TOKENS
"""A text that must come may have ten thousands of tokens. So many are enough for the row that draws the next of them
with drafts, and for the one behind it."""

_NO_TOKEN = (-1,)

Work = tuple[Constrained, Sequence[int] | DraftMasks | None]
"""A sequence and the tokens that it has drawn, one below 0 where none will come; or its drafts; None: it begins."""


def grammar_bytes(vocab_size: int, num_seqs: int) -> int:
    """At most, about: of the vocabulary, and of matchers and masks of so many sequences and of those that are kept."""
    return vocab_size * BYTES_PER_TOKEN + MAX_KEPT * MATCHER_BYTES + num_seqs * (COPY_BYTES + vocab_size // 8)


@dataclass(slots=True, eq=False)
class Grammars:
    """load: makes the vocabulary, once. drafts: whether to find out what a grammar forces, to be drafted. Any thread
    may ask for the vocabulary and prepare; one calls the rest."""

    ops: Ops
    vocab_size: int
    load: Callable[[], Vocabulary]
    drafts: bool = False
    _vocabulary: Vocabulary | None = None
    _prepared: OrderedDict[str, Matcher] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _loading: threading.Lock = field(default_factory=threading.Lock)
    _work: SimpleQueue[Sequence[Work] | None] = field(default_factory=SimpleQueue)
    _thread: threading.Thread | None = None
    _begun: list[Work] = field(default_factory=list)
    _live: WeakSet[Constrained] = field(default_factory=WeakSet)
    _floor_bytes: int = 0
    _unmeasured_s: float = 0.0
    _has_garbage: bool = False

    def prepare(self, grammar: str) -> float:
        """Have its matcher and first mask ready for sequences to come. Returns the processor time that this took, the
        vocabulary aside; 0 where it was ready. Raises InvalidRequest."""
        if self._kept(grammar) is not None:
            return 0.0
        self.vocabulary()
        began_s = time.thread_time()
        try:
            self._keep(grammar, self._build(grammar))
        except GrammarFailed as error:
            raise InvalidRequest(str(error), param="grammar") from None
        return time.thread_time() - began_s

    def vocabulary(self) -> Vocabulary:
        """Loaded when it is first asked for. Raises BadCheckpoint, and InvalidRequest where the model has no end."""
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self.load()
                assert self._vocabulary.vocab_size == self.vocab_size, self._vocabulary.vocab_size
                self._floor_bytes = heap_bytes()
        return self._vocabulary

    def introduce(self, intro: Introduction, allowed_ids: np.ndarray) -> Constrained:
        """A sequence to come, whose first mask is made once it is handed over. `allowed_ids`: of its settings, none for
        all."""
        params = intro.sampling
        ends = np.array([token for token in intro.eos_token_ids if token < self.vocab_size], np.int32)
        one = Constrained(
            params.grammar,
            Mask(self.vocab_size),
            list(intro.output_tokens),
            self._bits(allowed_ids) if len(allowed_ids) else None,
            frozenset(ends.tolist()),
            self._bits(ends),
            params.ignore_eos,
            params.max_tokens or math.inf,
            intro.slow_s,
        )
        self._live.add(one)
        self._begun.append((one, None))
        return one

    def take_drafts(self, one: Constrained, position: int, drafts: tuple[int, ...]) -> DraftMasks:
        """Masks for the draws behind the drafts of a row, which are made once the tokens before it are known.
        `position`: the output position of the row's first draw."""
        masks = DraftMasks(position, drafts, [Mask(self.vocab_size) for _ in drafts])
        self._begun.append((one, masks))
        return masks

    def hand_over(self) -> None:
        """What was introduced, and the drafts that were taken, since the last time."""
        if self._begun:
            begun, self._begun = self._begun, []
            self._do(begun)

    def advance(self, drawn: Sequence[Work]) -> None:
        """Of a step: its constrained sequences, each with its tokens."""
        self._do(drawn)

    def give_up(self, one: Constrained) -> None:
        """No token of it will come: what waits for its mask goes on."""
        self._do([(one, _NO_TOKEN)])

    def close(self) -> None:
        """Nothing waits for a mask after this."""
        self.hand_over()
        for one in list(self._live):
            self.give_up(one)
        self._work.put(None)
        if self._thread is not None:
            self._thread.join()

    # ---- on any thread that prepares, and on that of masks ----

    def _kept(self, grammar: str) -> Matcher | None:
        with self._lock:
            if grammar in self._prepared:
                self._prepared.move_to_end(grammar)
                return self._prepared[grammar].copy()
        return None

    def _keep(self, grammar: str, matcher: Matcher) -> None:
        with self._lock:
            self._prepared[grammar] = matcher
            while len(self._prepared) > MAX_KEPT:
                self._prepared.popitem(last=False)
        self._drop_if_full()

    def _drop_if_full(self) -> bool:
        """Drop all kept grammars if the heap has grown much; whether it had."""
        with self._lock:
            grown_bytes = (now_bytes := heap_bytes()) - self._floor_bytes
            self._floor_bytes = min(self._floor_bytes, now_bytes)
            if grown_bytes <= MAX_GROWN_BYTES:
                return False
            self._prepared.clear()
            self._floor_bytes = heap_bytes()
            return True

    def _build(self, grammar: str) -> Matcher:
        return self.vocabulary().matcher(grammar)

    def _bits(self, ids: np.ndarray) -> np.ndarray:
        mask = Mask(self.vocab_size)
        mask.allow(ids)
        return mask.words

    # ---- on the thread of masks ----

    def _do(self, works: Sequence[Work]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tokenmill-masks", daemon=True)
            self._thread.start()
        self._work.put(works)

    def _run(self) -> None:
        while (works := self._work.get()) is not None:
            self._serve(works)
            if self._has_garbage and self._work.empty():
                self._has_garbage = False
                trim_heap()

    def _serve(self, works: Sequence[Work]) -> None:
        """What was asked for together. Draws behind drafts wait for the others."""
        spent_s = 0.0
        for one, what in sorted(works, key=_cost):
            if isinstance(what, DraftMasks):
                one.drafts = what
                if one.is_over:
                    self._drop_drafts(one)
            elif one.is_over:
                continue
            elif what is not None and (what[0] < 0 or not one.end_ids.isdisjoint(what)):
                self._let_go(one)
            elif spent_s > STEP_S or (what is not None and len(one.tokens) + len(what) >= one.max_tokens):
                one.lacks_mask = True  # which is of no use where nothing follows
                self._let_go(one)
            else:
                spent_s += self._guard(one, what)
        for one, _ in works:
            if one.drafts is not None and one.drafts.position == len(one.tokens):
                spent_s += self._look_ahead(one, one.drafts, STEP_S - spent_s)

    def _guard(self, one: Constrained, tokens: Sequence[int] | None) -> float:
        """Make a mask; the processor time, where that was slow. An error ends the sequence and nothing else."""
        began_s = time.thread_time()
        try:
            if tokens is None:
                self._start(one)
            else:
                one.tokens += tokens
                self._take(one, tokens)
            if not self._narrow(one, one.mask):
                raise GrammarFailed("The grammar allows none of the tokens of allowed_token_ids here.")
            if self.drafts:
                self._find_forced(one)
        except GrammarFailed as error:
            one.error, one.is_invalid = str(error), True
        except Exception as error:
            log.exception("A mask could not be made.")
            one.error = f"The tokens that may come next could not be found: {type(error).__name__}."
        taken_s = time.thread_time() - began_s
        taken_s = taken_s if taken_s >= _SLOW_S else 0.0
        one.spent_s += taken_s
        if one.error:
            if one.spent_s > _COSTLY_S:
                self._forget(one)
            self._let_go(one)
        else:
            self.ops.publish(one.mask, len(one.tokens) + 1)
        return taken_s

    def _forget(self, one: Constrained) -> None:
        """It has failed at a price. Copies share what was found out about its grammar."""
        self._has_garbage = True
        with self._lock:
            self._prepared.pop(one.grammar, None)

    def _start(self, one: Constrained) -> None:
        if frozenset(self.vocabulary().eos_token_ids) != one.end_ids:
            raise GrammarFailed("The end tokens of the request are not those of the model.")
        one.matcher = self._kept(one.grammar)
        if one.matcher is None:
            self._keep(one.grammar, matcher := self._build(one.grammar))
            one.matcher = matcher.copy()
        if one.tokens:
            self._take(one, one.tokens)
        else:
            one.matcher.fill(*one.mask.place)

    def _take(self, one: Constrained, tokens: Sequence[int]) -> None:
        """Those that it has drawn since; the last one is a step of its matcher."""
        if one.matcher is None:  # drafts have led it where it could not go on
            self._make_anew(one).fill(*one.mask.place)
            return
        *before, last = tokens
        try:
            if before:
                one.matcher.follow(before)
            self._count(one, one.matcher.step(last, *one.mask.place))
        except GrammarFailed as error:
            self._start_afresh(one, error)

    def _count(self, one: Constrained, taken_s: float) -> None:
        """What a token has cost. Raises GrammarFailed where the sequence has taken more than its share."""
        if taken_s < _SLOW_S:
            return
        one.slow_s += taken_s
        if one.slow_s > SPENT_S + _SPENT_PER_TOKEN_S * len(one.tokens):
            raise GrammarFailed(f"This grammar took {one.slow_s:.2g} s of processor time. Make it simpler.")
        self._unmeasured_s += taken_s
        if self._unmeasured_s > _COSTLY_S:
            self._unmeasured_s = 0.0
            if self._drop_if_full() and one.slow_s > _COSTLY_S:
                self._weigh(one)

    def _weigh(self, one: Constrained) -> None:
        """Find out whether the heap is full of what this one's matcher holds: only that is its fault. Raises
        GrammarFailed."""
        before_bytes = heap_bytes()
        one.matcher = None
        if before_bytes - heap_bytes() > MAX_GROWN_BYTES // 2:
            raise GrammarFailed(f"Grammars take more than {MAX_GROWN_BYTES >> 20} MiB. Make this one simpler.")
        self._make_anew(one).fill(*one.mask.place)

    def _start_afresh(self, one: Constrained, error: GrammarFailed) -> None:
        """Copies of a matcher share what the library found out about the grammar, and that is bounded. One that starts
        from nothing has all room to itself, so that no sequence fails for what others did before."""
        if not error.is_out_of_room:
            raise error
        self._make_anew(one).fill(*one.mask.place)

    def _make_anew(self, one: Constrained) -> Matcher:
        one.matcher = matcher = self._build(one.grammar)
        self._keep(one.grammar, matcher.copy())
        matcher.follow(one.tokens)
        return matcher

    def _find_forced(self, one: Constrained) -> None:
        words = one.mask.words
        is_single = np.count_nonzero(words) == 1 and int(words.max()).bit_count() == 1
        one.forced = one.matcher.forced()[:_MOST_FORCED] if is_single and one.matcher is not None else ()

    def _look_ahead(self, one: Constrained, drafts: DraftMasks, most_s: float) -> float:
        """Make the masks behind drafts, in about that time at most; what of it was slow. An error ends the drafts and
        nothing else."""
        try:
            return self._follow_drafts(one, drafts, most_s)
        except Exception as error:
            if not isinstance(error, GrammarFailed):
                log.exception("The masks of drafts could not be made.")
            one.matcher = None  # it is made anew for the next token
            return 0.0
        finally:
            self._drop_drafts(one)

    def _follow_drafts(self, one: Constrained, drafts: DraftMasks, most_s: float) -> float:
        assert one.matcher is not None
        num_taken, spent_s, mask = 0, 0.0, one.mask
        for token, following in zip(drafts.tokens, drafts.masks, strict=True):
            if spent_s > most_s or token in one.end_ids or not _allows(mask, token):
                break
            taken_s = one.matcher.step(token, *following.place)
            num_taken += 1
            if taken_s >= _SLOW_S:
                spent_s += taken_s
            if not self._narrow(one, following):
                break
            drafts.known, mask = num_taken, following
        one.spent_s += spent_s
        one.matcher.roll_back(num_taken)
        return spent_s

    def _drop_drafts(self, one: Constrained) -> None:
        """No mask is waited for any more: those that are not known let their draws be anything."""
        if one.drafts is not None:
            for mask in one.drafts.masks:
                self.ops.publish(mask, ALWAYS)
            one.drafts = None

    def _narrow(self, one: Constrained, mask: Mask) -> bool:
        """By what else its settings say; whether that leaves a token."""
        words = mask.words
        if one.hides_end and any(_allows(mask, end) for end in one.end_ids):
            others = words & ~one.ends
            if others.any():
                words[:] = others
        if one.allowed is not None:
            words &= one.allowed
        return one.allowed is None or bool(words.any())

    def _let_go(self, one: Constrained) -> None:
        one.is_over = True
        one.matcher, one.forced = None, ()
        one.mask.words[:] = 2**32 - 1
        self.ops.publish(one.mask, ALWAYS)
        self._drop_drafts(one)


def _allows(mask: Mask, token: int) -> bool:
    return bool(int(mask.words[token >> 5]) >> (token & 31) & 1)


def _cost(work: Work) -> tuple[float, int]:
    """What a sequence has cost; those that have gone on for long without first."""
    one, _ = work
    return one.slow_s, -len(one.tokens)
