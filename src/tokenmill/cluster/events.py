"""The events of a gateway, and the effects it wants carried out.

    Joined    an engine is ready and has its adapters     Left     an engine is gone, with all that it had
    Leaves    an engine finishes what it has, then goes
    Opened    the choices of a call                       GivenUp  a client wants no more of a choice
    Ticked    time has passed: deadlines may be due
    Stepped   what an engine reports after a step         Closed   no engine will come any more

The gateway's shell carries `Effects` out, in the order of the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.errors import TokenmillError
from ..core.events import Output, Ready, StepOutputs
from ..core.policy import ENTERS, Verdict
from ..core.request import Request


@dataclass(frozen=True, slots=True)
class Joined:
    """`link`: a number that no engine has had before."""

    link: int
    ready: Ready


@dataclass(frozen=True, slots=True)
class Left:
    """Of an engine that never joined too: then it could not be started."""

    link: int


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


@dataclass(frozen=True, slots=True)
class Closed:
    failure: TokenmillError


GatewayEvent = Joined | Left | Leaves | Opened | GivenUp | Ticked | Stepped | Closed


class Ended(NamedTuple):
    """The last word on a request. `reason`: how it ended for its client. `output`: counts and times, or None where no
    engine ever had it. `last_token_s`: when its last tokens came; -1: none came. `now_s`: when it ended."""

    request: Request
    output: Output | None
    reason: str
    last_token_s: float
    now_s: float


@dataclass(slots=True)
class Effects:
    """submits    (link, request): to be sent before anything that follows
    aborts     (link, request id)
    outputs    for those who wait for them
    firsts     requests that have got their first token now, and the seconds since they arrived
    forecasts  seconds that a first token that came now was expected to take, and that it took
    gaps       when requests last got tokens -> how many of them got some now
    ended      requests that are over
    resumed    requests that a dead engine had and that go on elsewhere or later
    poisoned   requests that were ended because they end engines
    expired    those that ended because their time was over
    refused    why the engine that wanted to join may not serve; "" where it may
    """

    submits: list[tuple[int, Request]] = field(default_factory=list)
    aborts: list[tuple[int, str]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    firsts: list[tuple[Request, float]] = field(default_factory=list)
    forecasts: list[tuple[float, float]] = field(default_factory=list)
    gaps: dict[float, int] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    resumed: int = 0
    poisoned: int = 0
    expired: int = 0
    refused: str = ""
