"""Which models of a folder are in memory: what is loaded for whom, what is unloaded, and who waits. Pure.

A model is loaded when a call names it. It is unloaded when it has had no call for as long as it is kept, or when
another needs its room: among models without open calls the least recently used. Where all have open calls, the one that
was loaded first takes no further calls: it is unloaded when those that it has are over, and its new ones wait. Models
get room in the order in which the first call that waits for each came, and calls that wait for one model share its
load. So neither a model that is always busy nor a crowd of calls for others keeps a call out for ever.

    UNLOADED --call--> LOADING --> LOADED --room is needed, or told to--> UNLOADING --> UNLOADED
                          |          |
                        fails      idle for as long as it is kept --> UNLOADING --> SLEEPING --call--> LOADING
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from ..core.errors import Infeasible, InvalidRequest, Overloaded, TokenmillError, Unavailable

FAILED_S = 10.0
"""For so long after a load that failed, calls for the model are told why at once: a file that is damaged must not cost
other models their room again and again."""
BUSY_LOOK_S = 0.1
"""After which a model is looked at again that has work beside its calls."""


class State(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"
    UNLOADING = "unloading"


HAS_MEMORY = (State.LOADING, State.LOADED, State.UNLOADING)


@dataclass(frozen=True, slots=True)
class Rules:
    """max_loaded   models in memory at once; 0: as many as it holds
    idle_s       a model without calls is kept so long, and calls may ask for less; math.inf: until room is needed
    max_waiting  calls that wait for models; more are refused
    max_wait_s   a call waits no longer
    autoload     whether calls load; else they only wake what sleeps
    """

    max_loaded: int = 4
    idle_s: float = math.inf
    max_waiting: int = 512
    max_wait_s: float = 300.0
    autoload: bool = True


@dataclass(slots=True)
class Model:
    """num_open    calls that it has now
    waiting     tickets of calls that wait for it, with the time at which they give up
    keep_s, expires_s   for how long the last call wants it kept; until when that is, while it has none
    used_s      when its last call ended
    turn        order in which models were loaded
    is_leaving  it takes no further calls, because room is needed
    is_told     the same, because an operator said so
    max_beside  it can be loaded beside so many others at most, as a load that found too little memory has shown
    """

    name: str
    state: State = State.UNLOADED
    then: State = State.UNLOADED
    num_open: int = 0
    waiting: dict[int, float] = field(default_factory=dict)
    keep_s: float = math.inf
    expires_s: float = math.inf
    used_s: float = 0.0
    turn: int = 0
    is_leaving: bool = False
    is_told: bool = False
    max_beside: float = math.inf
    failure: TokenmillError | None = None
    failed_s: float = -math.inf

    @property
    def takes_calls(self) -> bool:
        return self.state is State.LOADED and not self.is_leaving and not self.is_told


@dataclass(slots=True)
class Effects:
    """What the shell must do: models to load and to unload, calls that may go on, and calls that are refused."""

    load: list[str] = field(default_factory=list)
    unload: list[str] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    refused: list[tuple[int, TokenmillError]] = field(default_factory=list)


class ModelSchedule:
    """has_work: whether a model computes, also for calls whose answer is over."""

    def __init__(self, rules: Rules, has_work: Callable[[str], bool] = lambda name: False) -> None:
        self.rules = rules
        self.models: dict[str, Model] = {}
        self._has_work = has_work
        self._num_turns = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(each.waiting) for each in self.models.values())

    @property
    def num_with_memory(self) -> int:
        return sum(each.state in HAS_MEMORY for each in self.models.values())

    def set_names(self, names: Iterable[str]) -> None:
        """What there is now. A model that is gone is forgotten once it is not in memory and nobody waits for it."""
        there = dict.fromkeys(names)
        for name in there:
            self.models.setdefault(name, Model(name))
        for model in [each for each in self.models.values() if each.name not in there]:
            if model.state not in HAS_MEMORY and not model.waiting:
                del self.models[model.name]

    # ---- calls ----

    def enter(self, ticket: int, name: str, now: float, *, is_asked: bool = False) -> Effects:
        """A call comes; tickets are numbers in order of arrival. is_asked: an operator wants the model loaded, whatever
        the rules say of calls. Raises Overloaded where too many wait, InvalidRequest where calls load nothing, and what
        kept the model from being loaded a moment ago."""
        model = self.models[name]
        if model.takes_calls:
            model.num_open += 1
            return Effects(admitted=[ticket])
        will_be = model.then if model.state is State.UNLOADING else model.state
        if will_be is State.UNLOADED and not is_asked and not model.waiting:
            if not self.rules.autoload:
                raise InvalidRequest(
                    f"The model {name} is not loaded, and calls load none here (--no-models-autoload); an operator "
                    "loads it by POST /models/load.",
                    param="model",
                )
            if model.failure is not None and now < model.failed_s + FAILED_S:
                raise model.failure
        if self.num_waiting >= self.rules.max_waiting:
            raise Overloaded(
                f"{self.num_waiting} calls wait for models to be loaded; retry later.",
                retry_after_s=5.0,
                reason="models",
            )
        model.waiting[ticket] = now + self.rules.max_wait_s
        return self._decide(now)

    def leave(self, name: str, keep_s: float | None, now: float) -> Effects:
        """A call that was admitted is over. keep_s: for how long it wants the model kept; None: as usual."""
        model = self.models[name]
        model.num_open -= 1
        model.used_s = now
        self._keep(model, keep_s, now)
        return self._decide(now)

    def give_up(self, ticket: int, now: float) -> Effects:
        """A call that waits has gone."""
        for model in self.models.values():
            model.waiting.pop(ticket, None)
        return self._decide(now)

    def unload(self, name: str, now: float) -> Effects:
        """An operator wants a model unloaded. Its calls go on, new ones wait. Raises InvalidRequest where it is not in
        memory."""
        model = self.models[name]
        if model.state not in HAS_MEMORY:
            raise InvalidRequest(f"The model {name} is not loaded.", param="model")
        model.is_told = model.state is not State.UNLOADING
        return self._decide(now)

    # ---- what came of effects ----

    def loaded(self, name: str, now: float) -> Effects:
        model = self.models[name]
        self._num_turns += 1
        model.state, model.turn, model.used_s = State.LOADED, self._num_turns, now
        model.failure, model.max_beside = None, math.inf
        self._keep(model, None, now)
        effects = Effects()
        _admit(model, effects)  # also where it is to leave: for these it was loaded
        return self._decide(now, effects)

    def failed(self, name: str, error: TokenmillError, now: float) -> Effects:
        """Where others have memory that this one lacks, it waits until there are fewer; else its calls are told why."""
        model = self.models[name]
        num_beside = self.num_with_memory - 1
        model.state, model.is_told, effects = State.UNLOADED, False, Effects()
        if isinstance(error, Infeasible) and num_beside and model.waiting:
            model.max_beside = num_beside - 1
        else:
            model.failure, model.failed_s, model.max_beside = error, now, math.inf
            effects.refused = [(ticket, error) for ticket in model.waiting]
            model.waiting.clear()
        return self._decide(now, effects)

    def unloaded(self, name: str, now: float) -> Effects:
        model = self.models[name]
        model.state, model.is_leaving, model.is_told = model.then, False, False
        return self._decide(now)

    def ticked(self, now: float) -> Effects:
        """Calls have waited too long, or models were idle for long enough."""
        effects = Effects()
        for model in self.models.values():
            for ticket in [each for each, until_s in model.waiting.items() if until_s <= now]:
                del model.waiting[ticket]
                message = f"The model {model.name} could not be loaded within {self.rules.max_wait_s:g} s; retry later."
                effects.refused.append((ticket, Unavailable(message, retry_after_s=10.0, param="model")))
        return self._decide(now, effects)

    def next_due_s(self, now: float) -> float | None:
        """When it must be `ticked`; None: not until something happens."""
        due = [until_s for each in self.models.values() for until_s in each.waiting.values()]
        for each in self.models.values():
            if each.state is State.LOADED and not each.num_open:
                due.append(now + BUSY_LOOK_S if self._is_due(each, now) else each.expires_s)
        first_s = min(due, default=math.inf)
        return None if first_s == math.inf else first_s

    # ---- decisions ----

    def _keep(self, model: Model, keep_s: float | None, now: float) -> None:
        idle_s = self.rules.idle_s
        model.keep_s = idle_s if keep_s is None or keep_s < 0 else min(keep_s, idle_s)
        model.expires_s = now + model.keep_s

    def _is_due(self, model: Model, now: float) -> bool:
        return model.is_leaving or model.is_told or model.expires_s <= now

    def _is_idle(self, model: Model) -> bool:
        return model.state is State.LOADED and not model.num_open and not self._has_work(model.name)

    def _decide(self, now: float, effects: Effects | None = None) -> Effects:
        effects = effects or Effects()
        for model in self.models.values():
            if self._is_idle(model) and (model.is_told or model.expires_s <= now):
                self._end(model, State.UNLOADED if model.is_told else State.SLEEPING, effects)
        head = self._load(effects)
        leaving = set() if head is None else {each.name for each in self._victims(head)}
        for model in self.models.values():
            model.is_leaving = model.name in leaving
            if model.is_leaving and self._is_idle(model):
                self._end(model, State.UNLOADED, effects)
            elif model.takes_calls:
                _admit(model, effects)
        return effects

    def _load(self, effects: Effects) -> Model | None:
        """Begins to load, in turn, what is waited for; returns the first for which there is no room. None behind it
        takes the room that it needs."""
        for model in sorted(
            (each for each in self.models.values() if each.waiting), key=lambda each: min(each.waiting)
        ):
            if model.state in HAS_MEMORY:
                continue
            if self._excess(model) > 0:
                return model
            model.state = State.LOADING
            effects.load.append(model.name)
        return None

    def _excess(self, model: Model) -> float:
        """How many models have memory beyond those that this one can be loaded beside."""
        return self.num_with_memory - min(
            self.rules.max_loaded - 1 if self.rules.max_loaded else math.inf, model.max_beside
        )

    def _victims(self, head: Model) -> Iterator[Model]:
        """Whose memory it gets. What is being unloaded, or loaded for others, is waited for."""
        num_going = sum(each.state is State.UNLOADING for each in self.models.values())
        loaded = [each for each in self.models.values() if each.state is State.LOADED]
        idle = sorted((each for each in loaded if self._is_idle(each)), key=lambda each: (each.used_s, each.turn))
        busy = sorted((each for each in loaded if not self._is_idle(each)), key=lambda each: each.turn)
        for index, model in enumerate((*idle, *busy)):
            if index < self._excess(head) - num_going:
                yield model

    def _end(self, model: Model, then: State, effects: Effects) -> None:
        model.state, model.then = State.UNLOADING, then
        effects.unload.append(model.name)


def _admit(model: Model, effects: Effects) -> None:
    effects.admitted += model.waiting
    model.num_open += len(model.waiting)
    model.waiting.clear()
