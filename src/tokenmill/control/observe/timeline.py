"""The story of one request: spans, one after the other, and what happened in them. Times are seconds since it arrived.

    queue | prefill | decode                               in one engine
    queue | prefill | decode | held | prefill | decode     where the first engine went
    queue | prefill | decode | move | decode               where it went on in another, with its KV

A span is {"name", "start_s", "end_s" (null: it goes on), "engine", "events"}, an event {"name", "at_s", ...}: `chunk`s
of the prompt (or of all tokens, where they are computed again) and preemptions. Events, and when a resumed request got
tokens again, are known of engines on this machine whose steps are recorded.
"""

from __future__ import annotations

import logging
import mmap
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ...core.flight import CHUNK, NUM_EVENTS, SIZE, EventRecord, RequestRecord, find_request, read_event, read_header
from .requests import Life, Record

NUM_LIVES = 8
"""Of so many engines, the last ones, the files stay open."""
_NUM_SEQUENCES = 8192
_log = logging.getLogger(__name__)


class Ring:
    """One engine's. Events are read as they are asked for, each once."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self._next = 0  # event to be read
        self._events: OrderedDict[int, list[EventRecord]] = OrderedDict()  # of the sequences that came last

    def find(self, request_id: str) -> RequestRecord | None:
        return find_request(self.data, request_id)

    def events(self, seq: int) -> Sequence[EventRecord]:
        """In order; those that were overwritten before they were read are missing."""
        self._catch_up()
        return self._events.get(seq, ())

    def end_of(self, event: EventRecord) -> float:
        """When its step ended: it may have been read before that. 0: not yet, or not known."""
        now = read_event(self.data, event.number)
        return now.ended_s if now is not None and now.number == event.number else event.ended_s

    def _catch_up(self) -> None:
        while (event := read_event(self.data, self._next)) is not None and event.number >= self._next:
            if event.number > self._next:  # lapped: what is left begins behind the newest one
                newest = self._newest()
                self._next = max(self._next + 1, newest - NUM_EVENTS + 1)
                continue
            self._next += 1
            self._events.setdefault(event.seq, []).append(event)
            if len(self._events) > _NUM_SEQUENCES:
                self._events.popitem(last=False)

    def _newest(self) -> int:
        found = (read_event(self.data, number) for number in range(NUM_EVENTS))
        return max((event.number for event in found if event is not None), default=0)


class Rings:
    """The flight recorders of the engines on this machine, by the numbers of their lives. Their files are read while
    they are written, and after an engine has died: a file is mapped when its engine is ready, and the map stays good
    when the file is renamed or removed."""

    def __init__(self) -> None:
        self._rings: OrderedDict[int, Ring] = OrderedDict()

    def open(self, link: int, path: str) -> None:
        if not path:
            return
        try:
            with open(path, "rb") as file:
                data = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)
            read_header(data)
        except (OSError, ValueError) as error:
            _log.warning("The flight recorder's file %s cannot be read: %s.", path, error)
            return
        self._rings[link] = Ring(data)
        if len(self._rings) > NUM_LIVES:
            self._rings.popitem(last=False)

    def get(self, link: int) -> Ring | None:
        return self._rings.get(link)

    @property
    def links(self) -> list[int]:
        """Oldest first."""
        return list(self._rings)


def timeline(record: Record, rings: Rings) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    since = record.arrival_s

    def add(name: str, start_s: float, end_s: float, engine: int | None = None) -> None:
        ended = None if end_s < 0 else max(start_s, end_s) - since
        spans.append({"name": name, "start_s": start_s - since, "end_s": ended, "engine": engine, "events": []})

    given_s = record.lives[0].given_s if record.lives else -1.0
    queued_till_s = _scheduled(record, rings)
    queued_till_s = given_s if queued_till_s < 0 else queued_till_s
    add("queue", since, queued_till_s if queued_till_s >= 0 else record.ended_s)
    if record.lives and record.lives[0].route:
        event = {"name": "routed", "at_s": given_s - since, "why": record.lives[0].route, "to": record.lives[0].link}
        spans[0]["events"].append(event)
    for i, life in enumerate(record.lives):
        end_s = life.end_s if life.end_s >= 0 else record.ended_s
        begun_s = max(life.given_s, queued_till_s) if i == 0 else life.given_s
        first_s = _first_token(record, life, rings)
        if life.why:
            _add_move(add, spans, record, i)
            add("decode", life.given_s, end_s, life.link)
        elif first_s >= 0 and (end_s < 0 or first_s <= end_s):
            add("prefill", begun_s, first_s, life.link)
            add("decode", first_s, end_s, life.link)
        else:
            add("prefill", begun_s, end_s, life.link)
        if life.lost_s >= 0:
            is_last = i == len(record.lives) - 1
            add("held", life.lost_s, record.ended_s if is_last else record.lives[i + 1].given_s)
        _add_events(spans, record, life, rings.get(life.link))
    return spans


def _add_move(add: Callable[..., None], spans: list[dict[str, Any]], record: Record, number: int) -> None:
    """How it came into life `number`: from when it stopped in the one before."""
    before, life = record.lives[number - 1], record.lives[number]
    if before.lost_s < 0:
        add("move", before.left_s, life.given_s, life.link)
    event = {"name": "moved", "at_s": life.given_s - record.arrival_s, "why": life.why}
    spans[-1]["events"].append(event | {"from": before.link, "copied_tokens": life.num_copied})


def _scheduled(record: Record, rings: Rings) -> float:
    """When its first engine planned the first step with a row of it; -1: not yet, or not known. What the record says
    may be of a later one."""
    if not record.lives:
        return -1.0
    first = record.lives[0]
    if record.scheduled_s >= 0 and (first.lost_s < 0 or record.scheduled_s <= first.lost_s):
        return record.scheduled_s
    ring = rings.get(first.link)
    found = None if ring is None else ring.find(record.id)
    return -1.0 if found is None else found.scheduled_s


def _first_token(record: Record, life: Life, rings: Rings) -> float:
    """When this life gave its first token; -1: not yet, or not known."""
    if life is record.lives[0] or record.first_s >= life.given_s:
        return record.first_s
    ring = rings.get(life.link)
    found = None if ring is None else ring.find(record.id)
    if ring is None or found is None:
        return -1.0
    num_known = record.num_prompt + life.num_output
    lasts = (
        each for each in ring.events(found.seq) if each.kind == CHUNK and each.start + each.num_tokens >= num_known
    )
    last = next(lasts, None)
    return -1.0 if last is None else ring.end_of(last) or -1.0


def _add_events(spans: list[dict[str, Any]], record: Record, life: Life, ring: Ring | None) -> None:
    found = None if ring is None else ring.find(record.id)
    if ring is None or found is None:
        return
    own = [span for span in spans if span["engine"] == life.link]
    for event in ring.events(found.seq):
        at_s = event.at_s - record.arrival_s
        span = next((each for each in reversed(own) if each["start_s"] <= at_s), own[0])
        span["events"].append(_shown(event, ring, record.arrival_s))


def _shown(event: EventRecord, ring: Ring, since: float) -> dict[str, Any]:
    at = {"at_s": event.at_s - since, "step": event.step}
    if event.kind != CHUNK:
        return {"name": "preempted", **at, "lost_tokens": event.num_tokens}
    ended_s = ring.end_of(event)
    shown = {"name": "chunk", **at, "end_s": ended_s - since if ended_s else None}
    return {**shown, "start": event.start, "tokens": event.num_tokens}
