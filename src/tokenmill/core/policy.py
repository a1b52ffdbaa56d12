"""What policies decide, what they may look at, and when they are asked.

    Order       which waiting sequence is served next          as one arrives; if it asks for it, at every step again
    Chunks      how much of a step unfinished prompts may take  once a step
    Preemption  which running sequence gives its blocks back    when blocks run out

A policy chooses and changes nothing: whoever asks it carries the choice out. What it sees are the live objects, through
types that have no way to write, so that nothing is copied. It reads no clock and draws no random number: `now` is
handed in. Equal inputs give equal choices, so that a replay repeats them.

Policies are chosen by name (`sched.policies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .config import EngineConfig
from .request import Request


class Waiting(NamedTuple):
    """A sequence that waits to run.

    request     what was asked for: priority, arrival in seconds, prompt
    num_tokens  known tokens: the prompt, and output where it was preempted
    num_cached  of these, what the prefix cache would serve now
    arrived     the clock of work (core.work) as it arrived
    now         seconds, on the clock that `request.arrival_s` was read from
    """

    request: Request
    num_tokens: int
    num_cached: int
    arrived: int
    now: float


class Order(Protocol):
    """Order of service, within one priority. The waiting sequences are a heap by (priority, due, arrival).

    num_refreshed  sequences whose place is asked for again at each step. 0: a place is fixed on arrival, which costs
                   a step nothing
    """

    @property
    def num_refreshed(self) -> int: ...

    def due(self, waiting: Waiting) -> float:
        """When it should be served, on a scale of the policy's own; the lowest is next. To keep anyone from waiting for
        ever, let it grow with `arrived` and bound what else it depends on."""
        ...


class Chunks(Protocol):
    """How much of a step goes to prompts that do not end in it."""

    def most_tokens(self, config: EngineConfig, num_decodes: int) -> int:
        """Tokens of the next step that they may take together. `num_decodes` sequences take one token each."""
        ...


class Running(Protocol):
    """A sequence that runs, to be looked at. Fields as in core.sequence.Sequence."""

    @property
    def number(self) -> int: ...

    @property
    def request(self) -> Request: ...

    @property
    def num_prompt(self) -> int: ...

    @property
    def num_output(self) -> int: ...

    @property
    def num_computed(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...


class Preemption(Protocol):
    """Who gives way when blocks run out."""

    def victim(self, running: Sequence[Running], asking: int) -> int:
        """Place in `running` of the sequence that is preempted for the one at place `asking`.

        `running` is by priority, then by arrival. The choice is from `asking` (which then waits itself) to the end, so
        that the first of all is never preempted and somebody always goes on."""
        ...
