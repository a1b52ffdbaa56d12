"""The requests that are open, and the last that ended, and how each is shown. The registry knows what the front end
knows: when each came, which engine got it when, when its first token came, how it ended. What happened inside an engine
is in that engine's flight recorder.

A record is written when its request comes, is given to an engine, gets its first token, loses its engine and ends;
never with a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...cluster.events import Ended, MoveEnded
from ...core.errors import InvalidRequest
from ...core.events import FINISH_ERROR
from ...core.request import Request
from ...core.terms import Terms

NUM_ENDED = 500
"""So many ended requests are kept."""


@dataclass(slots=True, eq=False)
class Life:
    """A request's time in one engine.

    num_output  tokens that it brought along
    lost_s      when the engine went; -1: it did not
    left_s      when the engine stopped it, for another to go on; -1: it did not
    why         for which it came from another engine that had it until then (`cluster.moves`); "": it did not
    num_copied  tokens whose KV it brought along from there
    route       why it was given to this one of several engines, where there was a choice
    """

    link: int
    given_s: float
    num_output: int
    lost_s: float = -1.0
    left_s: float = -1.0
    why: str = ""
    num_copied: int = 0
    route: str = ""

    @property
    def end_s(self) -> float:
        """-1: it is the last one, or nothing has ended it."""
        return self.lost_s if self.lost_s >= 0 else self.left_s


@dataclass(slots=True, eq=False)
class Record:
    """One request. Times are seconds of the front end's monotonic clock; -1: not yet, or never. `reason`: how it ended
    for its client; "": it is open. has_failed: by no fault of its client. `arriving`: what would be its next life,
    while the engine that has it goes on. `root`: of the call, whose choices share all but the end of their ids."""

    id: str
    client: str
    terms: Terms
    adapter: str
    num_prompt: int
    max_tokens: int
    arrival_s: float
    opened_s: float
    lives: list[Life] = field(default_factory=list)
    arriving: Life | None = None
    scheduled_s: float = -1.0
    first_s: float = -1.0
    last_s: float = -1.0
    ended_s: float = -1.0
    num_cached: int = 0
    num_output: int = 0
    num_preemptions: int = 0
    reason: str = ""
    error: str = ""
    has_failed: bool = False

    @property
    def root(self) -> str:
        return self.id.rpartition("-")[0]

    @property
    def num_resumptions(self) -> int:
        """How often it went on elsewhere because its engine had gone."""
        return sum(life.lost_s >= 0 for life in self.lives[:-1])

    @property
    def num_moves(self) -> int:
        """How often it went on elsewhere while its engine lived."""
        return sum(bool(life.why) for life in self.lives)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s < 0 else self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Of a request that has ended."""
        if self.num_output < 2 or self.first_s < 0 or self.last_s < self.first_s:
            return None
        return (self.last_s - self.first_s) / (self.num_output - 1)

    @property
    def is_attained(self) -> bool | None:
        """Whether it met its targets; None: it had none, or its client left before the first token."""
        ttft_s, tpot_s = self.ttft_s, self.tpot_s
        if not (self.terms.ttft_s or self.terms.tpot_s):
            return None
        if self.has_failed:
            return False
        if ttft_s is None:
            return None
        if self.terms.ttft_s and ttft_s > self.terms.ttft_s:
            return False
        return not (self.terms.tpot_s and tpot_s is not None and tpot_s > self.terms.tpot_s)


class RequestRegistry:
    """listeners: called with each record as it ends."""

    def __init__(self, num_ended: int = NUM_ENDED) -> None:
        self.listeners: list[Callable[[Record], None]] = []
        self._open: dict[str, Record] = {}
        self._ended: deque[Record] = deque(maxlen=num_ended)

    def __iter__(self) -> Iterator[Record]:
        """Those that are open, oldest first."""
        return iter(self._open.values())

    @property
    def ended(self) -> Sequence[Record]:
        """Oldest first."""
        return self._ended

    def find(self, request_id: str) -> Record | None:
        """By its id, open or ended."""
        found = self._open.get(request_id)
        return found or next((each for each in reversed(self._ended) if each.id == request_id), None)

    def of_call(self, root: str) -> list[Record]:
        """All choices of a call that are known, in order."""
        found = [each for each in (*self._ended, *self._open.values()) if each.root == root]
        return sorted(found, key=lambda each: (len(each.id), each.id))

    # ---- what the engine client tells ----

    def opened(self, requests: Sequence[Request], client: str, now: float) -> None:
        for request in requests:
            self._open[request.id] = Record(
                request.id, client, request.terms, request.adapter, len(request.prompt_tokens), request.max_tokens,
                request.arrival_s, now,
            )  # fmt: skip

    def given(self, link: int, request: Request, now: float) -> None:
        """An engine gets it."""
        record = self._open.get(request.id)
        if record is None:
            return
        life = Life(link, now, len(request.output_tokens))
        if request.source is not None and record.lives and record.lives[-1].end_s < 0:
            record.arriving = life
        else:
            record.lives.append(life)

    def routed(self, link: int, request_id: str, reason: str) -> None:
        """Why that engine got it."""
        record = self._open.get(request_id)
        if record is not None and record.lives and record.lives[-1].link == link:
            record.lives[-1].route = reason

    def moved(self, moved: MoveEnded, now: float) -> None:
        """It goes on in another engine, or does not."""
        record = self._open.get(moved.request.id)
        if record is None:
            return
        life, record.arriving = record.arriving, None
        if life is None or life.link != moved.target or moved.error:
            return
        if record.lives[-1].end_s < 0:
            record.lives[-1].left_s = now - moved.pause_s
        life.given_s, life.why, life.num_copied = now, moved.why, moved.num_tokens
        record.lives.append(life)

    def first(self, request: Request, since_arrival_s: float) -> None:
        """Its first token has come."""
        record = self._open.get(request.id)
        if record is not None:
            record.first_s = request.arrival_s + since_arrival_s

    def engine_left(self, link: int, now: float) -> None:
        for record in self._open.values():
            if record.lives and record.lives[-1].link == link and record.lives[-1].end_s < 0:
                record.lives[-1].lost_s = now

    def close(self, ended: Ended) -> None:
        record = self._open.pop(ended.request.id, None)
        if record is None:
            return
        record.reason, record.ended_s, record.last_s = ended.reason, ended.now_s, ended.last_token_s
        output = ended.output
        record.has_failed = ended.reason == FINISH_ERROR and (
            output is None or output.error_kind != InvalidRequest.kind
        )
        if output is not None:
            record.num_output, record.error = output.num_output, output.error
            record.num_cached = min(output.num_cached, record.num_prompt)
            if output.timing is not None:
                record.scheduled_s, record.first_s = output.timing.scheduled_s, output.timing.first_token_s
                record.num_preemptions = output.timing.num_preemptions
        self._ended.append(record)
        for listener in self.listeners:
            listener(record)


WAITING, HELD, PREFILL, DECODE, ENDED = "waiting", "held", "prefill", "decode", "ended"
"""No engine has it yet; its engine went and no other has it yet; no token yet; tokens come."""


def state_of(record: Record) -> str:
    if record.reason:
        return ENDED
    if not record.lives:
        return WAITING
    if record.lives[-1].lost_s >= 0:
        return HELD
    return PREFILL if record.first_s < 0 else DECODE


def summary(record: Record, now: float, unix_s: float, count_output: Callable[[str], int]) -> dict[str, Any]:
    """`unix_s`: of the moment `now`. `count_output`: tokens of an open request."""
    is_open = not record.reason
    num_output = count_output(record.id) if is_open else record.num_output
    first_given_s = record.lives[0].given_s if record.lives else -1.0
    queued_till_s = record.scheduled_s if record.scheduled_s >= 0 else first_given_s
    terms = record.terms
    return {
        "id": record.id,
        "object": "request",
        "call": record.root,
        "state": state_of(record),
        "tenant": terms.tenant,
        "client": record.client,
        "priority_class": terms.priority_class,
        "profile": terms.profile,
        "adapter": record.adapter,
        "engine": record.lives[-1].link if record.lives else None,
        "prompt_tokens": record.num_prompt,
        "cached_tokens": None if is_open else record.num_cached,
        "output_tokens": num_output,
        "max_tokens": record.max_tokens,
        "arrived": unix_s - (now - record.arrival_s),
        "age_s": (now if is_open else record.ended_s) - record.arrival_s,
        "queue_s": None if queued_till_s < 0 else queued_till_s - record.arrival_s,
        "ttft_s": record.ttft_s,
        "tpot_s": _running_tpot_s(record, num_output, now) if is_open else record.tpot_s,
        "ttft_target_s": terms.ttft_s or None,
        "tpot_target_s": terms.tpot_s or None,
        "attained": None if is_open else record.is_attained,
        "num_preemptions": None if is_open else record.num_preemptions,
        "num_resumptions": record.num_resumptions,
        "num_moves": record.num_moves,
        "lives": [
            {
                "engine": life.link,
                "start_s": life.given_s - record.arrival_s,
                "end_s": None if life.end_s < 0 else life.end_s - record.arrival_s,
                "ended_by": "loss" if life.lost_s >= 0 else "move" if life.left_s >= 0 else None,
                "why": life.why or None,
                "route": life.route or None,
                "copied_tokens": life.num_copied,
            }
            for life in record.lives
        ],
        "finish_reason": record.reason or None,
        "error": record.error or None,
    }


def _running_tpot_s(record: Record, num_output: int, now: float) -> float | None:
    if record.first_s < 0 or num_output < 2:
        return None
    return max(0.0, now - record.first_s) / (num_output - 1)
