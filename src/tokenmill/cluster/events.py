"""The events of a gateway, and the effects it wants carried out.

    Joined    an engine is ready and has its adapters     Left     an engine is gone, with all that it had
    Leaves    an engine finishes what it has, then goes
    Opened    the choices of a call                       GivenUp  a client wants no more of a choice
    Ticked    time has passed: deadlines may be due
    Stepped   what an engine reports after a step         EngineMessage     what it says else
    Pooled    an engine serves in another pool from now   Closed   no engine will come any more

The gateway's shell carries `Effects` out, in the order of the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from ..core.errors import TokenmillError
from ..core.events import Output, Ready, StepOutputs, ToEngine
from ..core.kv_events import KVEvents
from ..core.moves import Moved, Prefetched, Staged
from ..core.policy import ENTERS, Verdict
from ..core.request import Request
from ..core.tiers import TierEvents
from .length_predictor import ObservedLength


class Cause(Enum):
    """Of an engine's end, as far as its end tells.

    FAULT    a crash, a hang, or more memory than there was: what it ran may have done it
    OUTSIDE  a signal that somebody sent: what it ran has nothing to do with it
    UNKNOWN  its link has ended: it may have crashed or been killed, its machine or the network may be gone
    """

    FAULT = auto()
    OUTSIDE = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Joined:
    """`link`: a number that no engine has had before. `start_s`: what its start took."""

    link: int
    ready: Ready
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Left:
    """Of an engine that never joined too: then it could not be started."""

    link: int
    cause: Cause = Cause.UNKNOWN


@dataclass(frozen=True, slots=True)
class Leaves:
    """It gets no further request."""

    link: int


@dataclass(frozen=True, slots=True)
class Opened:
    """`client`: whose call it is; clients take turns. `verdict`: what the admission said of it."""

    requests: Sequence[Request]
    client: str = ""
    verdict: Verdict = ENTERS


@dataclass(frozen=True, slots=True)
class GivenUp:
    """`reason`: how the choice ended for its client: a stop string is "stop"."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ticked:
    pass


@dataclass(frozen=True, slots=True)
class Stepped:
    link: int
    step: StepOutputs


Pace = tuple[float, int, float, int]
"""Of a step that is told later: when it was heard of, the engine's link, seconds, tokens."""

Telling = Staged | Moved | Prefetched | KVEvents | TierEvents
"""What engines say beside steps that the gateway is to hear."""


@dataclass(frozen=True, slots=True)
class EngineMessage:
    link: int
    message: Telling


@dataclass(frozen=True, slots=True)
class Pooled:
    """What it has stays there."""

    link: int
    pool: str


@dataclass(frozen=True, slots=True)
class Closed:
    failure: TokenmillError


GatewayEvent = Joined | Left | Leaves | Opened | GivenUp | Ticked | Stepped | EngineMessage | Pooled | Closed


class Ended(NamedTuple):
    """The last word on a request. `reason`: how it ended for its client. `output`: counts and times, or None where no
    engine ever had it. `last_token_s`: when its last tokens came; -1: none came. `now_s`: when it ended. `link`: the
    engine that had it last; None: none had it then. `tokens`: that were drawn."""

    request: Request
    output: Output | None
    reason: str
    last_token_s: float
    now_s: float
    link: int | None = None
    tokens: Sequence[int] = ()


class MoveEnded(NamedTuple):
    """A request went from one engine to another, or did not. `num_tokens`: whose KV the target got, for whatever reason
    the rest was computed. `error`: why it failed; "": it did not. `pause_s`: from when the source stopped until the
    target had it; 0: the source did not stop."""

    request: Request
    why: str
    source: int
    target: int
    num_tokens: int
    error: str
    pause_s: float


class CopyEnded(NamedTuple):
    """A prefix was copied from one engine's cache to another's, or was to be; without a source, from the tiers of its
    store. `error`: why it was not; "": it was."""

    source: int | None
    target: int
    num_tokens: int
    error: str
    took_s: float


@dataclass(slots=True)
class Effects:
    """aborts     (link, request id): to be sent before anything that follows
    submits    (link, request)
    tells      (link, message)
    routes     (link, request id, why that one), of requests for which there was a choice
    outputs    for those who wait for them
    firsts     requests that have got their first token now, and the seconds since they arrived
    forecasts  seconds that a first token that came now was expected to take, and that it took
    gaps       when requests last got tokens -> how many of them got some now
    ended      requests that are over
    resumed    requests that a dead engine had and that go on elsewhere or later
    poisoned   requests that were ended because they end engines
    expired    those that ended because their time was over
    moved      requests whose move to another engine is over
    copied     prefixes whose copy to another engine is over
    rerouted   requests that waited in one engine and were given to another
    lengths    of answers that have ended
    refused    why the engine that wanted to join may not serve; "" where it may
    """

    aborts: list[tuple[int, str]] = field(default_factory=list)
    submits: list[tuple[int, Request]] = field(default_factory=list)
    tells: list[tuple[int, ToEngine]] = field(default_factory=list)
    routes: list[tuple[int, str, str]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    firsts: list[tuple[Request, float]] = field(default_factory=list)
    forecasts: list[tuple[float, float]] = field(default_factory=list)
    gaps: dict[float, int] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    resumed: int = 0
    poisoned: int = 0
    expired: int = 0
    moved: list[MoveEnded] = field(default_factory=list)
    copied: list[CopyEnded] = field(default_factory=list)
    rerouted: int = 0
    lengths: list[ObservedLength] = field(default_factory=list)
    refused: str = ""
