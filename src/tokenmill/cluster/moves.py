"""Requests on their way from one engine to another, with their KV. Pure.

    split    QUEUED  -> STAGING ------------> PULLING -> over     one engine computes the prompt, another the answer
    split    SAVING  ----------------------------------> over     the same where KV goes by way of tiers
    migrate             STAGING -> YIELDING -> PULLING -> over    an engine goes on while its KV is copied
    fetch                                      PULLING -> over    a new request takes cached KV from another engine

    QUEUED    the prompt is computed; no engine has room for the answer yet
    SAVING    the prompt is computed, and its KV put where the target's KV store finds it: an answer of one token
    STAGING   the target copies what KV there is; the source computes on
    YIELDING  the target has nearly all: the source was asked to stop
    PULLING   the source has stopped. The target has the request, copies the rest and then runs it

Until PULLING the request is the source's, in all books; from then on, the target's. Outputs are told apart by their
attempt, so what the source may still say, or a target that was given up, changes nothing. Whatever fails, the request
goes on: at its source as if nothing had been, at the target, which computes what it cannot copy, or as one whose engine
has died. Each offer of KV is released once, when its move is over. A request whose move failed rests for a while.

Splitting: DistServe (Zhong et al., 2024), Splitwise (Patel et al., 2024). Migrating: Llumnix (Sun et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from ..core.errors import InvalidRequest
from ..core.events import FINISH_LENGTH, FromEngine, Output
from ..core.moves import Continue, KVSource, Moved, Offer, Release, Staged, Yield
from ..core.request import EXPORT, IMPORT, Request
from .entry import Entry
from .events import Effects, MoveEnded
from .links import EngineLink

NewTicket = Callable[[], str] | None

SPLIT, FETCH = "split", "fetch"
"""Why a request moves, beside the reasons of `rescheduling`."""

STAGING_S = 5.0
"""A target that has not staged a running request by then has no room for it. A prompt is waited for as long where its
engine and that of the answer may wait for each other."""
REST_S = 2.0
"""For so long a request stays where it is after its move has failed, and twice as long each further time."""


class Stage(Enum):
    QUEUED = auto()
    SAVING = auto()
    STAGING = auto()
    YIELDING = auto()
    PULLING = auto()


@dataclass(slots=True, eq=False)
class Move:
    """source, target  numbers of the links; target -1: none yet
    attempt         which the target's outputs will have
    num_sent        tokens of the answer that the target was sent with it
    begun_s         when it began; held_s: when the source stopped, -1: not yet
    error           why the target gets no KV, though it goes on; "": it does
    """

    entry: Entry
    why: str
    ticket: str
    source: int
    stage: Stage
    begun_s: float
    target: int = -1
    attempt: int = -1
    num_sent: int = 0
    held_s: float = -1.0
    error: str = ""


class Moves:
    """links       engines that serve, by number
    held        requests that no engine has, though one had
    new_ticket  makes a ticket nobody can guess; None: nothing is moved
    find_target  for the answer of a split request, whose tokens have been sent or not: who computes it; None: nobody
                 has room now. It must not be the source.
    given       told which engine a request goes on in
    """

    def __init__(
        self,
        links: dict[int, EngineLink],
        held: dict[str, Entry],
        new_ticket: NewTicket,
        find_target: Callable[[Entry, int, bool], EngineLink | None],
        given: Callable[[Request, int], None],
    ) -> None:
        self._links = links
        self._held = held
        self._new_ticket = new_ticket
        self._find_target = find_target
        self._given = given
        self._of: dict[str, Move] = {}
        self._queued: dict[str, Move] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    @property
    def next_s(self) -> float | None:
        """When `tick` has something to do; None: never."""
        return min((move.begun_s + STAGING_S for move in self._of.values() if self._may_end(move)), default=None)

    def at(self, link: int) -> Iterator[Move]:
        """Those that have begun and have this engine at one of their ends."""
        return (move for move in self._of.values() if link in (move.source, move.target))

    def can_send(self, link: EngineLink) -> bool:
        """Whether others can get KV from it."""
        return self._new_ticket is not None and bool(link.ready.worker.kv_address)

    def can_move(self, entry: Entry, now: float) -> bool:
        """Whether a request may be moved that some engine has: it is over for nobody and moves nowhere, and has not
        lately failed to."""
        request = entry.request
        return (
            entry.link is not None
            and entry.ending is None
            and now >= entry.rests_until_s
            and request.id not in self._of
            and request.pooling is None
            and not request.handoff
        )

    # ---- moves begin ----

    def split(self, entry: Entry, source: EngineLink, num_hit: int, now: float, effects: Effects) -> None:
        """Let this engine compute the prompt and the first token; `find_target` says who goes on. `num_hit`: tokens
        that it is expected to have in its prefix cache."""
        if not self.can_send(source):
            self._begin(entry, SPLIT, source, Stage.SAVING, now)
            most = len(entry.request.output_tokens) + len(entry.tokens) + 1
            effects.submits.append((source.number, replace(entry.submission(), handoff=EXPORT, max_tokens=most)))
            source.give(entry, num_hit)
            entry.num_splits += 1
            return
        move = self._begin(entry, SPLIT, source, Stage.QUEUED, now)
        effects.submits.append((source.number, replace(entry.submission(), yields=move.ticket)))
        source.give(entry, num_hit)
        entry.num_splits += 1
        self._send_on(move, effects)

    def migrate(self, entry: Entry, target: EngineLink, why: str, now: float, effects: Effects) -> None:
        """Move a request that draws tokens to another engine."""
        assert entry.link is not None and self.can_move(entry, now), entry
        source = self._links[entry.link]
        move = self._begin(entry, why, source, Stage.STAGING, now)
        effects.tells.append((source.number, Offer(move.ticket, entry.request.id)))
        self._submit(move, target, effects)

    def fetch(
        self, entry: Entry, link: EngineLink, peer: EngineLink, keys: Sequence[bytes], now: float, effects: Effects
    ) -> None:
        """Give a request to an engine that takes KV of these blocks of its prompt from another one's cache."""
        move = self._begin(entry, FETCH, peer, Stage.PULLING, now)
        move.target, move.held_s = link.number, now
        effects.tells.append((peer.number, Offer(move.ticket, "", tuple(keys))))
        request = replace(entry.submission(), source=self._source(move))
        move.attempt = entry.attempt
        effects.submits.append((link.number, request))
        effects.tells.append((link.number, Continue(request.id, request.attempt, ())))
        link.give(entry, len(keys) * link.ready.block_size)

    def _begin(self, entry: Entry, why: str, source: EngineLink, stage: Stage, now: float) -> Move:
        assert self._new_ticket is not None and entry.request.id not in self._of, entry
        move = self._of[entry.request.id] = Move(entry, why, self._new_ticket(), source.number, stage, now)
        if stage is Stage.QUEUED:
            self._queued[entry.request.id] = move
        return move

    def _submit(self, move: Move, target: EngineLink, effects: Effects) -> None:
        request: Request = replace(move.entry.copy_for_another(), source=self._source(move))
        move.target, move.attempt, move.num_sent = target.number, request.attempt, len(move.entry.tokens)
        move.stage = Stage.STAGING
        self._queued.pop(move.entry.request.id, None)
        target.expect(move.entry)
        effects.submits.append((target.number, request))

    def _source(self, move: Move) -> KVSource:
        worker = self._links[move.source].ready.worker
        return KVSource(worker.id, worker.incarnation, worker.kv_address, worker.host, move.ticket)

    def _resume(self, move: Move, now: float, effects: Effects) -> bool:
        """Give it to who goes on with what lies in tiers; whether there is somebody."""
        entry = move.entry
        target = self._find_target(entry, move.source, True)
        if target is None:
            return False
        move.target, is_there = target.number, not move.error
        request = entry.submission()
        effects.submits.append((target.number, replace(request, handoff=IMPORT) if is_there else request))
        target.give(entry, entry.num_given_tokens - 1 if is_there else 0)
        self._given(entry.request, target.number)
        size = target.ready.block_size
        num_tokens = (entry.num_given_tokens - 1) // size * size if is_there and size else 0
        self._end(move, now, effects, num_tokens, move.error)
        return True

    def _send_on(self, move: Move, effects: Effects, must: bool = False) -> bool:
        """Give a split request to who goes on with it, if there is room, or anyhow; whether there is somebody."""
        target = self._find_target(move.entry, move.source, must)
        if target is not None:
            self._submit(move, target, effects)
        return target is not None

    # ---- what engines say ----

    def hear(self, link: int, message: FromEngine, now: float, effects: Effects) -> None:
        """Staged or Moved, of the target."""
        assert isinstance(message, Staged | Moved), message
        move = self._of.get(message.request_id)
        if move is None or move.target != link or move.attempt != message.attempt:
            return
        if isinstance(message, Moved) and move.stage is Stage.PULLING:
            self._end(move, now, effects, message.num_tokens, message.error)
        elif isinstance(message, Moved) and move.stage is Stage.YIELDING:
            move.error = message.error  # the source may have stopped: the target computes what it lacks
        elif isinstance(message, Moved):
            self._cancel(move, now, effects, message.error or "it was not taken")
        elif move.stage is Stage.STAGING and move.why != SPLIT:
            move.stage = Stage.YIELDING
            effects.tells.append((move.source, Yield(move.ticket, message.request_id, move.entry.attempt)))

    def hear_end(self, link: int, output: Output, now: float, effects: Effects) -> None:
        """An engine ended a request in an attempt that is not its present one: a target that would not have it."""
        move = self._of.get(output.request_id)
        if move is not None and (move.target, move.attempt) == (link, output.attempt):
            assert move.stage is not Stage.PULLING, move
            self._cancel(move, now, effects, output.error or f"it ended there: {output.finish_reason}", is_there=False)

    def is_saved(self, entry: Entry, output: Output) -> bool:
        """Whether this end of a request is no end: its engine has computed the prompt for another one, or would not
        have it as it was given, so that another is to say what it has against it."""
        move = self._of.get(entry.request.id)
        if move is None or move.stage is not Stage.SAVING:
            return False
        if output.error_kind == InvalidRequest.kind:
            move.error = output.error
            return True
        if output.finish_reason != FINISH_LENGTH:
            return False
        if output.error or len(entry.request.output_tokens) + len(entry.tokens) >= entry.request.max_tokens:
            return False
        move.error = "" if output.is_saved else "its KV was not saved"
        return True

    def hand_over(self, entry: Entry, now: float, effects: Effects) -> None:
        """The source has stopped, or is no more, and all its tokens have come: the target goes on, or where there is
        none, whoever gets it next."""
        source = None if entry.link is None else self._links.get(entry.link)
        if source is not None:
            source.take_back(entry)
        entry.link = None
        request_id = entry.request.id
        move = self._of.get(request_id)
        if move is not None and move.stage is Stage.SAVING and source is not None and self._resume(move, now, effects):
            return
        if move is not None and move.stage is Stage.QUEUED and source is not None:
            self._send_on(move, effects, must=True)
        if move is None or move.stage not in (Stage.STAGING, Stage.YIELDING):
            if move is not None:
                self._end(move, now, effects, 0, "no engine had room")
            self._held[request_id] = entry
            return
        target = self._links[move.target]
        target.forget(request_id)
        entry.attempt, entry.num_given = move.attempt, len(entry.tokens)
        target.give(entry, entry.num_given_tokens - 1)  # it copies KV of nearly all
        self._given(entry.request, target.number)
        rest = tuple(entry.tokens[move.num_sent :])
        effects.tells.append((target.number, Continue(request_id, move.attempt, rest)))
        move.stage, move.held_s = Stage.PULLING, now
        if move.error:
            self._end(move, now, effects, 0, move.error)

    # ---- moves end ----

    def lose(self, link: int, now: float, effects: Effects) -> None:
        """An engine has gone. What it was to get stays where it is; what it had is the gateway's to judge."""
        for move in [each for each in self._of.values() if each.target == link]:
            if move.stage is Stage.PULLING:
                self._end(move, now, effects, 0, "its target has gone")
            else:
                self._cancel(move, now, effects, "its target has gone", is_there=False)

    def drop(self, entry: Entry, now: float, effects: Effects, error: str = "it is over") -> None:
        """The request is over, or is to go on otherwise."""
        move = self._of.get(entry.request.id)
        if move is not None and move.stage is Stage.PULLING:
            self._end(move, now, effects, 0, error)
        elif move is not None:
            self._cancel(move, now, effects, error)

    def retreat(self, link: EngineLink, now: float, effects: Effects) -> None:
        """An engine gets nothing more: what is only on its way there stays where it is."""
        for request_id in list(link.arriving):
            self._cancel(self._of[request_id], now, effects, "its target leaves")

    def tick(self, now: float, effects: Effects) -> None:
        for move in [each for each in self._of.values() if self._may_end(each)]:
            if now >= move.begun_s + STAGING_S:
                self._cancel(
                    move,
                    now,
                    effects,
                    "its target had no room in time" if move.why != SPLIT else "its prompt took too long",
                )

    def send_queued(self, effects: Effects) -> None:
        """Room may have come for the answers of split requests. Where there is none for one, there is none for those of
        the same source that are no smaller: they are not looked at."""
        refused: dict[int, int] = {}
        for move in list(self._queued.values()):
            num_tokens = move.entry.num_tokens
            if num_tokens < refused.get(move.source, num_tokens + 1) and not self._send_on(move, effects):
                refused[move.source] = num_tokens

    def _may_end(self, move: Move) -> bool:
        """What its source still computes, and would go on with; and a prompt whose source keeps room for answers of
        other engines. That room may be what the prompt waits for, while they wait for what is kept for its answer."""
        if move.stage is not Stage.STAGING or move.why != SPLIT:
            return move.stage is Stage.STAGING
        return bool(self._links[move.source].arriving)

    def _cancel(self, move: Move, now: float, effects: Effects, error: str, is_there: bool = True) -> None:
        """It has not come to the target and will not. `is_there`: the target has been given it."""
        target = self._links.get(move.target)
        if target is not None and move.stage is not Stage.QUEUED:
            target.forget(move.entry.request.id)
            if is_there:
                effects.aborts.append((move.target, move.entry.request.id))
        entry = move.entry
        entry.num_failed_moves += 1
        entry.rests_until_s = now + REST_S * 2 ** min(entry.num_failed_moves - 1, 8)
        self._end(move, now, effects, 0, error)

    def _end(self, move: Move, now: float, effects: Effects, num_tokens: int, error: str) -> None:
        del self._of[move.entry.request.id]
        self._queued.pop(move.entry.request.id, None)
        if move.source in self._links and move.stage is not Stage.SAVING:
            effects.tells.append((move.source, Release(move.ticket)))
        pause_s = now - move.held_s if move.held_s >= 0 else 0.0
        effects.moved.append(
            MoveEnded(move.entry.request, move.why, move.source, move.target, num_tokens, error, pause_s)
        )

    def check(self) -> None:
        """Assert what must hold between events; slow, for tests."""
        arriving = {number: set(link.arriving) for number, link in self._links.items()}
        for name, move in self._of.items():
            entry = move.entry
            assert entry.request.id == name and entry.ending is None and name not in self._held, move
            if move.stage is Stage.PULLING:
                assert entry.link == move.target and entry.attempt == move.attempt, move
            else:
                assert entry.link == move.source and entry.attempt != move.attempt, move
            if move.stage in (Stage.STAGING, Stage.YIELDING):
                arriving[move.target].remove(name)
            assert move.stage is not Stage.QUEUED or (move.why == SPLIT and move.target < 0), move
            assert (name in self._queued) == (move.stage is Stage.QUEUED), move
        assert not any(arriving.values()) and self._queued.keys() <= self._of.keys(), arriving
