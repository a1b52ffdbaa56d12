"""What policies decide, what they may look at, and when they are asked.

    Order       which waiting sequence is served next           as one arrives, and again if the order asks for it
    Chunks      how much of a step unfinished prompts may take  once a step
    Preemption  which running sequence gives its blocks back    when blocks run out
    Eviction    which cached block is given up                  as nobody holds a block any more
    Admission   which call enters now                           as one comes

A policy chooses and changes nothing: whoever asks it carries the choice out. What it sees are the live objects, through
types that have no way to write, so that nothing is copied. It reads no clock and draws no random number: `now` is
handed in, and what is measured comes from the results of steps, which a replay has too.

Policies are chosen by name (`sched.policies`, `kv.blocks.eviction`), or are in a file of one's own
(`core.config`). Of admissions the server has one and a library the other (`cluster.admission`).
docs/develop/write-a-policy.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .config import EngineConfig
from .cost import Costs
from .request import Request
from .terms import USUAL, Terms


class Waiting(NamedTuple):
    """A sequence that waits to run.

    request     what was asked for: priority, arrival in seconds, prompt
    num_tokens  known tokens: the prompt, and output where it was preempted
    num_cached  of these, what the prefix cache would serve now
    arrived     the clock of work (core.work) as it arrived
    now         seconds, on the clock that `request.arrival_s` was read from
    work_done   the clock of work now
    costs       of steps, as measured so far
    """

    request: Request
    num_tokens: int
    num_cached: int
    arrived: int
    now: float
    work_done: int = 0
    costs: Costs = Costs()


class Order(Protocol):
    """Order of service, within one priority, of requests that have no target for their first token. The waiting
    sequences are a heap by (priority, due, arrival).

    summary        which sequence is next, for the help of the flag
    num_refreshed  sequences whose place is asked for again at each step that has room for one. 0: a place is fixed on
                   arrival, which costs a step nothing
    patience       units of work (core.work) for which each token of a prompt lets others pass. 0: none. The front end
                   orders what waits there by it, since it knows no more of what is to come
    """

    @property
    def summary(self) -> str: ...

    @property
    def num_refreshed(self) -> int: ...

    @property
    def patience(self) -> int: ...

    def due(self, waiting: Waiting) -> float:
        """When it should be served, on the clock of work, where requests with a target stand too
        (`sched.policies.slack`); the lowest is next. To keep anyone from waiting for ever, let it grow with `arrived`
        and bound what else it depends on."""
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

        `running` is by priority, then by arrival. The choice is among those behind `asking`, of which there is one at
        least: so the first of all gets what it needs, and somebody always goes on. One that has a row in flight is
        held back and asked about again at the next step: let the choice depend on what changes slowly."""
        ...


class CachedBlock(Protocol):
    """A block of the prefix cache, to be looked at.

    number    blocks published in its pool before it: what was published later has a higher one
    depth     blocks before it in its prompt
    num_uses  sequences that computed it or had a hit on it
    """

    @property
    def number(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def num_uses(self) -> int: ...


class Measured(Protocol):
    """What steps have cost. attention: seconds for a token to attend to one block of positions, as a share of what the
    rest of the token takes; 0 until it is known."""

    @property
    def attention(self) -> float: ...


class Eviction(Protocol):
    """Which cached block is given up first: of those that no other hangs below, the one of least value. The value is
    asked for as nobody holds the block any more, and stays until it is held again. Of equal ones, the least recently
    used is given up.

    summary  which block that is, for the help of the flag
    """

    @property
    def summary(self) -> str: ...

    def value(self, block: CachedBlock, age: float, attention: float) -> float:
        """`age`: the value of the block that was given up last, 0 before the first. Where it is added to what the block
        is worth (at least 0), age only grows, and what is not used is given up in the end, whatever it was worth
        (GreedyDual: Young 1994, Cao & Irani 1997). A value without it does not change while the block is not used.
        `attention`: see Measured."""
        ...


class Newcomer(NamedTuple):
    """A call that asks to be let in.

    num_tokens   of the prompt of its first choice
    num_choices  in all
    num_held     token ids that are held for it, as long as it is open
    terms        what it may expect
    since_s      seconds since it arrived
    """

    client: str
    priority: int = 0
    num_tokens: int = 0
    num_choices: int = 1
    num_held: int = 0
    terms: Terms = USUAL
    since_s: float = 0.0


class Forecast(NamedTuple):
    """Of a call that would enter now. Seconds from now; 0: nothing is known.

    wait_s        until its first step
    ttft_s        until its first token
    tpot_s        for each further token
    ttft_upper_s, tpot_upper_s  the same two, but for one in twenty, as forecasts have been off lately
    """

    wait_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    ttft_upper_s: float = 0.0
    tpot_upper_s: float = 0.0


class Refusal(NamedTuple):
    """reason   one word, for counters
    message  what is the matter
    retry_s  seconds after which there may be room
    in_turn  whether refused calls are told to come back one after another
    """

    reason: str
    message: str
    retry_s: float
    in_turn: bool = False


class Verdict(NamedTuple):
    """What an admission says of a call.

    refusal   why it may not enter; None: it may
    forecast  what it may expect, where that was asked for
    need      the largest share of one of its bounds that it is expected to take: above 1 it misses one
    """

    refusal: Refusal | None = None
    forecast: Forecast = Forecast()
    need: float = 0.0


ENTERS = Verdict()


class OpenCalls(Protocol):
    """What a gateway has open.

    num_open    choices
    num_tokens  token ids held for them
    choice_s    seconds for which a choice, on average, takes all of what it needs most
    """

    @property
    def num_open(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def choice_s(self) -> float: ...

    def num_open_of(self, client: str) -> int: ...

    def num_tokens_of(self, client: str) -> int: ...

    def forecast(self, newcomer: Newcomer, now: float) -> Forecast:
        """What the first choice of a call may expect."""
        ...

    def wait_s(self, newcomer: Newcomer, now: float) -> float:
        """Roughly its wait, at a fraction of what a forecast costs."""
        ...

    def tpot_target_s(self, terms: Terms) -> float:
        """What the time of a token of a call with these terms is held to: its own target, or a shorter one of the
        choices that draw, of its class or a better one; 0: there is none."""
        ...

    def shed_s(self, priority_class: int, now: float) -> float:
        """For how long calls of a class are turned away, because a better one is not served in time; 0: they are
        not."""
        ...


class Admission(Protocol):
    """Which call enters now."""

    def judge(self, newcomer: Newcomer, calls: OpenCalls, now: float) -> Verdict: ...
