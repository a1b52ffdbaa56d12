"""The flight recorders of the engines on this machine, read from their files while they are written, and after an
engine has died. A file is mapped when its engine is ready; the map stays good when the file is renamed or removed."""

from __future__ import annotations

import logging
import mmap
from collections import OrderedDict
from collections.abc import Sequence

from ...core.flight import NUM_EVENTS, SIZE, EventRecord, RequestRecord, find_request, read_event, read_header

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
    """By the numbers of engines' lives."""

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
