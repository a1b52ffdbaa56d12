"""Models of a folder, loaded when a call names them: the shell of a `cluster.on_demand.ModelSchedule`, which decides.

Here are the calls that wait, the loads and unloads under way, and what is told of it all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...cluster.on_demand import Effects, ModelSchedule, Rules, State
from ...core.errors import BadCheckpoint, ModelNotFound, TokenmillError, Unavailable
from ...core.ports import Clock
from ...text.text_model import ModelInfo, TextModel
from .served import ServedModel

REFRESH_S = 1.0
"""The folder is read no more often."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listed:
    """A model that can be loaded. size_bytes: of its files; info: None where they cannot be read, as `why_not` says."""

    name: str
    path: str
    size_bytes: int
    modified_s: float
    info: ModelInfo | None = None
    why_not: str = ""


Load = Callable[[Listed, int], Awaitable[ServedModel]]
"""Has a model loaded beside those that are: it may take one of so many equal parts of what memory is left. Raises
TokenmillError, and Infeasible where it could be loaded if there were fewer others."""
Read = Callable[[Listed], tuple[TextModel, bool]]
"""A model's text, and whether it gives vectors instead of tokens, without loading it. Raises TokenmillError."""


class Models(Protocol):
    """Where models are while they are loaded."""

    def taken(self) -> set[str]:
        """Names of all others that calls may name."""
        ...

    def put_on_demand(self, model: ServedModel) -> None: ...

    async def end(self, model: ServedModel) -> None:
        """One that has no calls is unloaded."""
        ...


class OnDemand:
    """home: the model that answers calls which name none, if it is one of these; "": another does.
    list_models, read: are called in a thread."""

    def __init__(
        self,
        rules: Rules,
        models: Models,
        list_models: Callable[[], Mapping[str, Listed]],
        load: Load,
        read: Read,
        clock: Clock,
        home: str = "",
    ) -> None:
        self.home = home
        self.listed: dict[str, Listed] = {}
        self.loaded: dict[str, ServedModel] = {}
        self.schedule = ModelSchedule(rules, self._has_work)
        self.metrics = OnDemandMetrics(self)
        self._models = models
        self._list_models = list_models
        self._load_model = load
        self._read = read
        self._clock = clock
        self._tickets = count()
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._works: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._refreshed_s = -REFRESH_S
        self._refreshing = asyncio.Lock()

    # ---- what there is ----

    async def refresh(self) -> None:
        """Look for models that have come or gone."""
        async with self._refreshing:
            if self._clock.now() < self._refreshed_s + REFRESH_S:
                return
            self._refreshed_s = self._clock.now()
            try:
                self.take(await asyncio.to_thread(self._list_models))
            except TokenmillError as error:
                _log.error("Models are as they were: %s", error.message)

    def take(self, found: Mapping[str, Listed]) -> None:
        """What the folder holds. Names that other models have are left to these."""
        taken = self._models.taken() - {self.home, *self.loaded}
        self.schedule.set_names(name for name in found if name not in taken)
        self.listed = {name: found.get(name) or self.listed[name] for name in self.schedule.models}

    def find(self, name: str | None) -> str | None:
        """The model's own name; None: it is none of these. A name may carry the tag "latest"."""
        if name is None:
            return self.home or None
        return next((each for each in (name, name.removesuffix(":latest")) if each in self.schedule.models), None)

    async def read(self, listed: Listed) -> tuple[TextModel, bool]:
        """A Read."""
        return await asyncio.to_thread(self._read, listed)

    def state(self, name: str) -> State:
        return self.schedule.models[name].state

    def shown_state(self, name: str) -> str:
        """In the words that llama-server has: one that is about to be gone is gone."""
        model = self.schedule.models[name]
        return model.then if model.state is State.UNLOADING else model.state

    def failure(self, name: str) -> str:
        """Why it cannot be loaded, or could not the last time; "": it could, or nobody has tried."""
        failure = self.schedule.models[name].failure
        return self.listed[name].why_not or ("" if failure is None else failure.message)

    def expires_s(self, name: str) -> float | None:
        """When it is unloaded if no call comes, in seconds since 1970; None: not while its room is not needed."""
        model = self.schedule.models[name]
        if model.keep_s == float("inf"):
            return None
        left_s = model.keep_s if model.num_open else model.expires_s - self._clock.now()
        return time.time() + max(0.0, left_s)

    def _has_work(self, name: str) -> bool:
        model = self.loaded.get(name)
        return model is not None and model.num_open > 0

    # ---- calls ----

    def enter_at_once(self, name: str) -> bool:
        """Whether the model is loaded and takes the call: it stays loaded until the call leaves."""
        if not self.schedule.models[name].takes_calls:
            return False
        self.schedule.enter(next(self._tickets), name, self._clock.now())
        return True

    async def enter(self, name: str, *, is_asked: bool = False) -> None:
        """Waits until the model is loaded, which it stays until the call leaves. is_asked: an operator wants it, not a
        call. Raises TokenmillError where it cannot be had; BadCheckpoint, before any other makes room, for files that
        are seen to be damaged."""
        if self.listed[name].why_not:
            await self.refresh()
        if name not in self.listed:
            raise ModelNotFound(f"The model {name} has been taken away.", param="model", name=name)
        if why_not := self.listed[name].why_not:
            raise BadCheckpoint(why_not, param="model")
        ticket = next(self._tickets)
        entered = self._calls[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._do(self.schedule.enter(ticket, name, self._clock.now(), is_asked=is_asked))
            await asyncio.shield(entered)  # it is settled also while a client leaves
        except asyncio.CancelledError:
            if entered.done() and entered.exception() is None:  # it was let in at the very moment
                self.leave(name, None)
            raise
        finally:
            if self._calls.pop(ticket, None) is not None:
                self._do(self.schedule.give_up(ticket, self._clock.now()))

    def leave(self, name: str, keep_s: float | None) -> None:
        """A call is over that has entered. keep_s: for how long it wants the model kept; None: as usual."""
        self._do(self.schedule.leave(name, keep_s, self._clock.now()))

    async def unload(self, name: str, within_s: float) -> int:
        """Have it unloaded when its calls have ended; those that have not `within_s` later are ended. Returns their
        number. Raises InvalidRequest where it is not loaded."""
        self._do(self.schedule.unload(name, self._clock.now()))
        num_ended = 0
        try:
            async with asyncio.timeout(within_s):
                await self._until_told_is_done(name)
        except TimeoutError:
            if (model := self.loaded.get(name)) is not None:
                num_ended = model.num_open
                model.end_calls()
            await self._until_told_is_done(name)
        return num_ended

    async def _until_told_is_done(self, name: str) -> None:
        while (model := self.schedule.models.get(name)) is not None and (
            model.is_told or model.state is State.UNLOADING
        ):
            self._changed.clear()
            await self._changed.wait()

    # ---- what the schedule decides, carried out ----

    def _do(self, effects: Effects) -> None:
        for name in effects.unload:
            self._work(self._unload(name), f"unload {name}")
        for name in effects.load:
            self._work(self._load(name), f"load {name}")
        for ticket in effects.admitted:
            _settle(self._calls.pop(ticket, None), None)
        for ticket, error in effects.refused:
            _settle(self._calls.pop(ticket, None), error)
        if self._timer is not None:
            self._timer.cancel()
        now = self._clock.now()
        due_s = self.schedule.next_due_s(now)
        self._timer = (
            None if due_s is None else asyncio.get_running_loop().call_later(max(0.0, due_s - now), self._tick)
        )
        self._changed.set()

    def _tick(self) -> None:
        self._do(self.schedule.ticked(self._clock.now()))

    def _work(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._works.add(task)
        task.add_done_callback(self._works.discard)

    async def _load(self, name: str) -> None:
        rules, start_s = self.schedule.rules, self._clock.now()
        num_sharing = max(1, rules.max_loaded - self.schedule.num_with_memory + 1) if rules.max_loaded else 1
        try:
            model = await self._load_model(self.listed[name], num_sharing)
        except (TokenmillError, OSError) as found:
            error = found if isinstance(found, TokenmillError) else BadCheckpoint(f"{name} cannot be read: {found}.")
            _log.warning("The model %s cannot be loaded: %s", name, error.message)
            error.message = error.message.replace(self.listed[name].path, name)  # where it lies is the operator's
            self.metrics.count(name, "failed")
            self._do(self.schedule.failed(name, error, self._clock.now()))
            return
        self.loaded[name] = model
        self._models.put_on_demand(model)
        load_s = self._clock.now() - start_s
        _log.info("The model %s is loaded after %.2f s.", name, load_s)
        self.metrics.count(name, "loaded", load_s)
        self._do(self.schedule.loaded(name, self._clock.now()))

    async def _unload(self, name: str) -> None:
        model = self.loaded.pop(name)
        await self._models.end(model)
        told = self.schedule.models[name]
        why = "idle" if told.then is State.SLEEPING else "asked" if told.is_told else "room"
        _log.info("The model %s is unloaded (%s).", name, why)
        self.metrics.count(name, why)
        self._do(self.schedule.unloaded(name, self._clock.now()))

    async def close(self) -> None:
        """Calls that wait are told that the server stops; models are the registry's to close."""
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls.values():
            _settle(call, Unavailable("The server is shutting down."))
        self._calls.clear()
        for work in list(self._works):
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)


def _settle(call: asyncio.Future[None] | None, error: TokenmillError | None) -> None:
    if call is None or call.done():
        return
    if error is None:
        call.set_result(None)
    else:
        call.set_exception(error)


class OnDemandMetrics:
    """A collector. Labels are names of models that were loaded, and there are no more than the folder has had."""

    def __init__(self, on_demand: OnDemand) -> None:
        self._on_demand = on_demand
        self._counts: dict[tuple[str, str], int] = {}
        self._load_s: dict[str, float] = {}

    def count(self, name: str, what: str, load_s: float = 0.0) -> None:
        self._counts[name, what] = self._counts.get((name, what), 0) + 1
        if load_s:
            self._load_s[name] = self._load_s.get(name, 0.0) + load_s

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        schedule = self._on_demand.schedule
        loads = CounterMetricFamily("tokenmill:model_loads", "Loads on demand", labels=("model_name", "outcome"))
        unloads = CounterMetricFamily("tokenmill:model_unloads", "Unloads", labels=("model_name", "reason"))
        for (name, what), number in self._counts.items():
            family = loads if what in ("loaded", "failed") else unloads
            family.add_metric((name, what), float(number))
        yield loads
        yield unloads
        seconds = CounterMetricFamily("tokenmill:model_load_seconds", "Time of loads", labels=("model_name",))
        for name, load_s in self._load_s.items():
            seconds.add_metric((name,), load_s)
        yield seconds
        states = GaugeMetricFamily("tokenmill:models", "Models of the folder", labels=("state",))
        found = [self._on_demand.shown_state(name) for name in schedule.models]
        for state in (State.UNLOADED, State.LOADING, State.LOADED, State.SLEEPING):
            states.add_metric((state,), float(found.count(state)))
        yield states
        yield GaugeMetricFamily("tokenmill:model_waiting_calls", "Calls that wait for a model", schedule.num_waiting)
