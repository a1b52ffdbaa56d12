"""Observers of plug-ins: told what happened, after it has, on a thread of their own.

What they are told are copies of numbers and names: no text, no token and nothing that a request depends on, so no
answer changes by them. The event loop puts an event into a bounded queue and goes on; where an observer is slower than
events come, events are dropped and counted. One that raises is logged once and told nothing more. Engines are other
processes, so no step waits for an observer; the front end's interpreter is shared with it, so it should do little.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric

from ...cluster.events import Ended
from ...core.errors import ConfigError, TokenmillError
from ...core.events import Output, StepOutputs
from ...core.request import Request
from ...plugins.groups import OBSERVERS
from ...plugins.load import are_on, bad_plugin, load_plugin, plugin_names
from .observers import Observer

log = logging.getLogger(__name__)
MOST_WAITING = 4096
"""Events that an observer may be behind."""
CLOSE_S = 2.0
"""How long a server that stops waits for room in its queue, and then for its end."""


class RequestOpened(NamedTuple):
    """A choice of a call was let in.

    model              as the server calls it
    tenant             whose it is; "": nobody's in particular
    num_prompt_tokens  of its prompt
    max_tokens         that it may draw at most
    """

    model: str
    request_id: str
    tenant: str
    num_prompt_tokens: int
    max_tokens: int


class RequestEnded(NamedTuple):
    """It is over. reason: "stop", "length", "abort" (its client left), "error" or another way in which it ended for its
    client. Times are seconds since it arrived, -1 where it did not come to that.

    num_cached_tokens  of its prompt, served from the prefix cache
    queue_s            until the first step that had a row of it
    ttft_s             until its first token
    e2e_s              until its end
    """

    model: str
    request_id: str
    tenant: str
    reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_s: float
    ttft_s: float
    e2e_s: float


class StepDone(NamedTuple):
    """An engine made a step.

    num_tokens   that it computed
    step_s       that it took
    num_running  requests in the batch after it; num_waiting: that wait in that engine
    kv_usage     share of KV blocks that requests hold
    """

    model: str
    num_tokens: int
    step_s: float
    num_running: int
    num_waiting: int
    kv_usage: float


class PluginObserver:
    """What a plug-in derives from; it defines what it wants to hear. Made without arguments as the server starts. All
    calls are made on one thread, one after the other, in the order in which things happened."""

    def request_opened(self, event: RequestOpened) -> None:
        return

    def request_ended(self, event: RequestEnded) -> None:
        return

    def step_done(self, event: StepDone) -> None:
        return

    def close(self) -> None:
        """The server stops."""
        return


Event = RequestOpened | RequestEnded | StepDone


class Feed:
    """The queue of one observer, and the thread that empties it.

    num_told  events that it was told
    """

    def __init__(self, name: str, observer: PluginObserver, most_waiting: int = MOST_WAITING) -> None:
        self.name = name
        self.num_told = 0
        self._num_refused = 0
        self._num_lost = 0
        self._observer = observer
        self._events: queue.Queue[Event | None] = queue.Queue(most_waiting)
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=f"observer {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, event: Event) -> None:
        """Returns at once."""
        if not self._has_failed:
            try:
                self._events.put_nowait(event)
                return
            except queue.Full:
                pass
        self._num_refused += 1

    @property
    def num_dropped(self) -> int:
        """Events that there was no room for, or that came to one that had failed."""
        return self._num_refused + self._num_lost

    def close(self) -> None:
        """Waits twice CLOSE_S at most for what it has not been told yet."""
        with suppress(queue.Full):
            self._events.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("The observer %s does not end: the server stops without it.", self.name)

    def _run(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._tell(event)
                self.num_told += 1
            self._observer.close()
        except Exception:
            self._has_failed = True
            log.exception("The observer %s failed: it is told nothing more.", self.name)
            self._num_lost += 1
            while self._events.get() is not None:  # so that `close` finds room
                self._num_lost += 1

    def _tell(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._observer.step_done(event)
        elif isinstance(event, RequestEnded):
            self._observer.request_ended(event)
        else:
            self._observer.request_opened(event)


class PluginEvents(Observer):
    """What a client of engines tells, as events of the model that they serve."""

    def __init__(self, model: str, feeds: Sequence[Feed]) -> None:
        self._model = model
        self._feeds = feeds

    def opened(self, requests: Sequence[Request], client: str) -> None:
        for request in requests:
            num_prompt = len(request.prompt_tokens)
            self._put(RequestOpened(self._model, request.id, request.terms.tenant, num_prompt, request.max_tokens))

    def sending(self, outputs: Sequence[Output], step: StepOutputs | None) -> None:
        if step is not None:
            stats = step.stats
            self._put(
                StepDone(
                    self._model,
                    stats.last_step_tokens,
                    stats.last_step_s,
                    stats.num_running,
                    stats.num_waiting,
                    stats.kv_usage,
                )
            )

    def ended(self, ended: Ended) -> None:
        request, output, arrival_s = ended.request, ended.output, ended.request.arrival_s
        timing = None if output is None else output.timing
        scheduled_s, first_s = (-1.0, -1.0) if timing is None else (timing.scheduled_s, timing.first_token_s)
        self._put(
            RequestEnded(
                self._model,
                request.id,
                request.terms.tenant,
                ended.reason,
                len(request.prompt_tokens),
                0 if output is None else output.num_cached,
                0 if output is None else output.num_output,
                scheduled_s - arrival_s if scheduled_s >= 0 else -1.0,
                first_s - arrival_s if first_s >= 0 else -1.0,
                ended.now_s - arrival_s,
            )
        )

    def _put(self, event: Event) -> None:
        for feed in self._feeds:
            feed.put(event)


class PluginObserverMetrics:
    """A collector."""

    def __init__(self, model_name: str, feeds: Sequence[Feed]) -> None:
        self._labels = (model_name, "0")
        self._feeds = feeds

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "engine", "observer", "outcome")
        family = CounterMetricFamily("tokenmill:observer_events", "Events for observers of plug-ins", labels=labels)
        for feed in self._feeds:
            family.add_metric((*self._labels, feed.name, "told"), feed.num_told)
            family.add_metric((*self._labels, feed.name, "dropped"), feed.num_dropped)
        yield family


def observer_class(name: str) -> type[PluginObserver]:
    """The plug-in of this name. Raises ConfigError."""
    found = load_plugin(OBSERVERS, name, type, param="observers")
    if found is None:
        known = f"installed are: {', '.join(plugin_names(OBSERVERS)) or 'none'}" if are_on() else "plug-ins are off"
        raise ConfigError(f"--observer {name}: no plug-in has this name; {known}.", param="observers")
    if not issubclass(found, PluginObserver):
        why = f"{found.__name__} does not derive from {PluginObserver.__module__}.{PluginObserver.__name__}."
        raise bad_plugin(OBSERVERS, name, why, "observers")
    return found


def make_feed(name: str) -> Feed:
    """Raises ConfigError for an observer that cannot be made."""
    made = observer_class(name)
    try:
        return Feed(name, made())
    except TokenmillError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise bad_plugin(OBSERVERS, name, f"{made.__name__}() failed: {what}", "observers") from error
