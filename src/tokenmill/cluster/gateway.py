"""A gateway between clients and engines: which engine has which request, and what happens to it when the engine dies.

Pure: `handle(event, now) -> Effects`. Its shell (`server.client`) has the streams, tasks and links. `request_queue`
decides what may come in and whose turn it is, `placing` which engine gets it; this file keeps the record.

    Opened -> waits in the request queue -> has a slot -> an engine has it -> over
                                        ^               |
                                        '---- held <----' its engine has died

A request stays in the record until an engine confirms its end, even after its client has left or a stop string has
ended it. So counts are true, and a stuck engine cannot look idle. The requests of a dead engine keep their slots. With
the tokens they have, they go to the next engine that is ready: before all that wait, even if the engine's queue is
full. Requests that were over for their clients are not resumed.

Several engines may serve at once if they give equal answers; others are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ..core.errors import EXPIRED, EngineFailed, Overloaded
from ..core.events import FINISH_ABORT, FINISH_ERROR, FINISH_MOVED, Output, Ready
from ..core.policy import Admission, Newcomer, Verdict
from ..core.work import PATIENCE
from .admission import Everybody, judged
from .entry import Deadlines, Entry, StartLimit
from .events import (
    Closed,
    Effects,
    Ended,
    EngineMessage,
    GatewayEvent,
    GivenUp,
    Joined,
    Leaves,
    Left,
    Opened,
    Pooled,
    Stepped,
    Ticked,
)
from .length_predictor import LengthPredictor
from .links import EngineLink, incompatibility
from .moves import FETCH, NewTicket
from .placing import Placing, Reviews
from .pools import Pools
from .request_queue import RequestQueue
from .totals import Totals

_POISON = "The engine ended each time that it ran this request, also with no other beside it; the request is given up."
_OTHER_MODEL = "The engine that ran this request has been replaced by one that would give other answers."
_NEVER_BACK = "The engine stopped while the request was running and could not be started again."


class Gateway:
    """request_queue        what is open: requests whose end no engine has yet confirmed, and those that no engine has
    totals      the state of all engines together
    is_shared   many clients use the engines, and have slots in turn
    admission   who may enter
    pools       whether a request is computed by two engines
    lengths     predicts how long answers will be
    reviews     by which policy running requests go to other engines
    router      which engine gets a request
    start_limit  how long engines may fail to start

    new_ticket: makes a secret that nobody can guess, by which one engine may have KV of another; None: none may.
    """

    def __init__(self, patience: int = PATIENCE, new_ticket: NewTicket = None) -> None:
        self.request_queue = RequestQueue(patience, self.num_output)
        self.totals = Totals()
        self.is_shared = False
        self.admission: Admission = Everybody()
        self._deadlines = Deadlines()
        self._entries: dict[str, Entry] = {}
        self.lengths = LengthPredictor()
        self.pools = Pools(self.lengths)
        self.placing = self._placing = Placing(self.request_queue, self._entries, self.pools, new_ticket)
        self.router = self._placing.router
        self._moves = self._placing.moves
        self.reviews = Reviews(self._placing)
        self._links = self._placing.links
        self._held = self._placing.held
        self._last_ready: Ready | None = None
        self.start_limit = StartLimit()
        self.progress_s = 0.0

    @property
    def ready(self) -> Ready | None:
        """The facts of the engines; None while none takes requests."""
        return next((link.ready for link in self._links.values() if not link.is_leaving), None)

    @property
    def next_due_s(self) -> float | None:
        """When a Ticked is wanted; None: at no time."""
        dues = [self._deadlines.next_s, self._moves.next_s]
        if self.reviews.is_wanted and self._entries:
            dues.append(self.reviews.next_s)
        return min((each for each in dues if each is not None), default=None)

    @property
    def num_open(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has."""
        return self.request_queue.num_waiting + len(self._held)

    def link(self, number: int) -> EngineLink | None:
        """An engine that serves."""
        return self._links.get(number)

    def num_open_at(self, link: int) -> int:
        """Requests that an engine has."""
        return len(self._links[link].entries) if link in self._links else 0

    def waits_for(self, adapter: str) -> bool:
        """Whether a request that no engine has names the adapter."""
        return self.request_queue.waits_for(adapter) or any(
            each.request.adapter == adapter for each in self._held.values()
        )

    def uses(self, adapter: str) -> bool:
        """Whether an open request names the adapter."""
        return any(entry.request.adapter == adapter for entry in self._entries.values())

    def num_output(self, request_id: str) -> int:
        """Tokens that have come for an open request."""
        self.request_queue.catch_up()
        entry = self._entries.get(request_id)
        return 0 if entry is None else len(entry.request.output_tokens) + len(entry.tokens)

    def stalled_s(self, now: float) -> float:
        """Seconds since the last step while there is work; 0 when idle."""
        return max(0.0, now - self.progress_s) if self._entries else 0.0

    def judge(self, newcomer: Newcomer, now: float) -> Verdict:
        """Whether a call may enter now, and if not, when it is to come back."""
        return judged(self.admission, newcomer, self.request_queue, now)

    def handle(self, event: GatewayEvent, now: float) -> Effects:
        """`now`: seconds on the clock that engines stamp their messages with."""
        effects = Effects()
        self._HANDLERS[type(event)](self, event, now, effects)
        return effects

    def check(self) -> None:
        """Assert what must hold between events; slow, for tests."""
        assert self.request_queue.num_open == len(self._entries), (self.request_queue.num_open, len(self._entries))
        num_waiting = sum(self.request_queue.is_waiting(name) for name in self._entries)
        num_given = sum(len(link.entries) for link in self._links.values())
        assert num_waiting + len(self._held) + num_given == len(self._entries), (num_waiting, self._held, num_given)
        self._moves.check()
        self._placing.check()

    # ---- engines come and go ----

    def _join(self, event: Joined, now: float, effects: Effects) -> None:
        ready = event.ready
        for link in self._links.values():
            if reason := incompatibility(ready, link.ready):
                effects.refused = reason
                return
        self.start_limit.join(event.start_s)
        if incompatibility(ready, self._last_ready):
            for entry in [each for each in self._held.values() if each.tokens]:
                self._fail(entry, _OTHER_MODEL, now, effects)
        self._last_ready = ready
        if self._entries:
            self.progress_s = now
        self._placing.join(event.link, ready, effects)
        self.totals.join(event.link, ready.num_pool_blocks, ready.stats)
        self._share()
        self._placing.place(now, effects)

    def _stop_giving(self, event: Leaves, now: float, effects: Effects) -> None:
        link = self._links.get(event.link)
        if link is not None:
            link.is_leaving = True
            self._moves.retreat(link, now, effects)
            self._share()
            self.reviews.review(now, effects)

    def _leave(self, event: Left, now: float, effects: Effects) -> None:
        link = self._links.pop(event.link, None)
        if link is None:
            if not self._links and self.start_limit.is_over(now, len(self._entries)):
                for entry in list(self._entries.values()):
                    self._fail(entry, _NEVER_BACK, now, effects)
            return
        convicted = self._placing.leave(link, event.cause, now, effects)
        for entry in link.entries.values():
            entry.link = None
            if entry.ending is not None:
                self._end(entry, entry.last_word(FINISH_ABORT, now), now, effects)
            elif entry.request.id in convicted:
                effects.poisoned += 1
                self._fail(entry, _POISON, now, effects)
            else:
                effects.resumed += 1
                if entry.request.id in self._placing.suspects:
                    self._moves.drop(entry, now, effects, "it is tried alone")
                self._moves.hand_over(entry, now, effects)
        self.totals.leave(link.number)
        self.pools.leave(link.number)
        self._share()
        self._placing.place(now, effects)

    def _share(self) -> None:
        if self.is_shared:
            self._placing.share()

    def _close(self, event: Closed, now: float, effects: Effects) -> None:
        self._links.clear()  # what moves, too, is over with its request
        for entry in list(self._entries.values()):
            self._fail(entry, event.failure.message, now, effects, event.failure.kind)

    # ---- requests ----

    def _open(self, event: Opened, now: float, effects: Effects) -> None:
        requests = event.requests
        if not self._entries:
            self.progress_s = max(self.progress_s, requests[0].arrival_s)
        for request in requests:
            assert request.id not in self._entries, f"request id {request.id} is in use"
            self._entries[request.id] = Entry(request)
            if request.terms.timeout_s or request.terms.queue_s:
                self._deadlines.add(request, self._entries)
        first, verdict = requests[0], event.verdict
        if verdict.refusal is None and verdict.need:
            self.request_queue.pressure.note(first.terms.priority_class, verdict.need, now)
        if verdict.forecast.ttft_s and verdict.refusal is None:
            entry = self._entries[first.id]
            entry.opened_s, entry.told = now, verdict.forecast
        self.request_queue.join(requests, event.client)
        self._placing.place(now, effects)

    def _give_up(self, event: GivenUp, now: float, effects: Effects) -> None:
        entry = self._entries.get(event.request_id)
        if entry is None or entry.ending is not None:
            return
        self._moves.drop(entry, now, effects)
        entry.ending = event.reason
        if entry.link is not None:
            effects.aborts.append((entry.link, event.request_id))
        elif self.request_queue.is_waiting(event.request_id):
            self._end(entry, None, now, effects)
        else:
            self._end(entry, entry.last_word(FINISH_ABORT, now), now, effects)

    def _tick(self, event: Ticked, now: float, effects: Effects) -> None:
        self._moves.tick(now, effects)
        if now >= self.reviews.next_s:
            self.reviews.review(now, effects)
        for due in self._deadlines.take(now):
            entry = self._entries.get(due.request_id)
            if entry is None or entry.ending is not None:
                continue
            if due.is_end:
                effects.expired += 1
                self._time_out(entry, now, effects)
            elif self.request_queue.is_waiting(due.request_id):  # one that it has, an engine ends itself
                effects.expired += 1
                self._compare(entry, now, effects)
                self._fail(entry, EXPIRED, now, effects, Overloaded.kind)

    def _time_out(self, entry: Entry, now: float, effects: Effects) -> None:
        """What it has is its answer; without any it has failed."""
        word = entry.timed_out(now)
        effects.outputs.append(word)
        self._moves.drop(entry, now, effects)
        entry.ending = word.finish_reason
        if entry.link is not None:
            effects.aborts.append((entry.link, entry.request.id))
        else:
            self._end(entry, word, now, effects)

    def _step(self, event: Stepped, now: float, effects: Effects) -> None:
        step, number = event.step, event.link
        link = self._links.get(number)
        if link is None:
            return
        heard_s, now, entries = now, step.now_s, link.entries
        gaps, tell = effects.gaps, effects.outputs.append
        for output in step.outputs:
            entry = entries.get(output[0])
            if entry is None or output.attempt != entry.attempt:
                if output.finish_reason is not None:
                    self._moves.hear_end(number, output, now, effects)
                continue
            tokens = output.tokens
            if tokens:
                if len(entry.tokens) <= entry.num_given:  # not has_progressed, without the price of a property
                    link.start(entry, output.num_cached)
                last_s, entry.last_token_s = entry.last_token_s, now
                if last_s >= 0:
                    gaps[last_s] = gaps.get(last_s, 0) + 1
                else:
                    entry.note_first(output, now)
                    self.request_queue.start(entry.request, output.num_cached, now, entry.tokens)
                    self._compare(entry, now, effects)
                    effects.firsts.append((entry.request, now - entry.request.arrival_s))
                entry.tokens.extend(tokens)
            if entry.num_lives > 1:
                output = entry.as_first_life(output)
            if output.finish_reason is None:
                if entry.ending is None:
                    tell(output)
            elif output.finish_reason == FINISH_MOVED or self._moves.is_saved(entry, output):
                self._hand_over(entry, output, now, effects)
            else:
                if output.error_kind == Overloaded.kind and not entry.tokens:
                    self._compare(entry, now, effects)
                self._end(entry, output, now, effects)
        if step.stats.num_steps != link.stats.num_steps:
            self.progress_s = now
        self._placing.step(link, step.stats)
        self.totals.step(number, step.stats, heard_s)
        self.request_queue.step(self.totals.sums, now, number, step.stats)
        suspects = self._placing.suspects
        if suspects.trials and (tried := suspects.trials.get(number)) is not None and tried.has_progressed:
            suspects.clear(tried)
        if len(self._moves):
            self._moves.send_queued(effects)
        if self._held or self.request_queue.num_waiting:
            self._placing.place(now, effects)

    def _hand_over(self, entry: Entry, output: Output, now: float, effects: Effects) -> None:
        """Its engine has stopped it and gives it away, with these as its last tokens."""
        output = output._replace(finish_reason=None, is_saved=False)
        if entry.ending is not None:
            self._end(entry, output._replace(finish_reason=FINISH_ABORT), now, effects)
            return
        if output.tokens:
            effects.outputs.append(output)
        self._moves.hand_over(entry, now, effects)

    def _tell(self, event: EngineMessage, now: float, effects: Effects) -> None:
        self._placing.hear(event.link, event.message, now, effects)
        for ended in effects.moved:
            if ended.why != FETCH and ended.pause_s and not ended.error:
                self.pools.note_handoff(ended.pause_s)

    def _pool(self, event: Pooled, now: float, effects: Effects) -> None:
        link = self._links.get(event.link)
        if link is not None:
            link.pool = event.pool
            self.pools.note_links(self._links.values())
            self._placing.place(now, effects)

    def _compare(self, entry: Entry, now: float, effects: Effects) -> None:
        """Its first token has come, as was forecast or not; or it would have come later than now."""
        if not entry.told.ttft_s:
            return
        took_s = now - entry.opened_s
        self.request_queue.calibration.note(entry.told.ttft_s, took_s, entry.request.terms.ttft_s)
        effects.forecasts.append((entry.told.ttft_s, took_s))

    def _fail(self, entry: Entry, message: str, now: float, effects: Effects, kind: str = EngineFailed.kind) -> None:
        """End it with an error that no engine gave."""
        self._end(entry, entry.last_word(FINISH_ERROR, now, error=message, error_kind=kind), now, effects)

    def _end(self, entry: Entry, output: Output | None, now: float, effects: Effects) -> None:
        """Strike it from all books. `output`: the last word on it; None: it was given up before an engine had it."""
        request = entry.request
        del self._entries[request.id]
        self._placing.strike(entry, now, effects)
        if output is not None and output.is_saved and not request.handoff:  # for another engine alone
            output = output._replace(is_saved=False)
        if entry.told.tpot_s and entry.tpot_s:
            self.request_queue.tpot_calibration.note(entry.told.tpot_s, entry.tpot_s, request.terms.tpot_s)
        reason = entry.ending or (FINISH_ABORT if output is None else output.finish_reason) or ""
        if output is not None and entry.ending is None:
            effects.outputs.append(output)
        num_tokens = len(request.output_tokens) + len(entry.tokens)
        effects.lengths.extend(self.lengths.note(request, num_tokens, reason, entry.guess))
        self.request_queue.end(request, 0 if output is None else output.num_output, reason)
        effects.ended.append(Ended(request, output, reason, entry.last_token_s, now, entry.link, entry.tokens))

    _HANDLERS: ClassVar[dict[type, Callable[[Any, Any, float, Effects], None]]] = {
        Joined: _join,
        Leaves: _stop_giving,
        Left: _leave,
        Opened: _open,
        GivenUp: _give_up,
        Ticked: _tick,
        Stepped: _step,
        EngineMessage: _tell,
        Pooled: _pool,
        Closed: _close,
    }
