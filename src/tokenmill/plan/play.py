"""One simulated run, from a load of `bench` to a `Run`: what `bench.load.run` does on a live server, on virtual time.

Plan, player, definitions and names are bench's own. What differs is said in the result: `endpoint.simulated`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

from .. import __version__
from ..bench.load import measure
from ..bench.load.body import CHAT_APIS
from ..bench.load.context import KEPT_EVENTS, Context, Tally
from ..bench.load.plan import Call, Plan
from ..bench.load.player import Player
from ..bench.load.run import Load, Observe
from ..bench.load.stream import Exchange
from ..bench.load.timer import time_of
from ..bench.result import Run
from ..core.errors import Unavailable
from ..core.terms import Terms
from ..sim.loop import VirtualLoop, rare_collections
from ..sim.service import ServiceReport
from ..sim.timed import Trace
from .client import Ended, Serves, VirtualClient, usual_terms
from .prompts import Asked, Frame, PromptWriter

LONGEST_S = 1e9
"""Of virtual time: a run that goes on for longer hangs."""
STARTED_AT = "virtual time"


class Lives(Serves, Protocol):
    """`sim.service.Service`."""

    report: ServiceReport
    trace: Trace | None

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


Served = TypeVar("Served", bound=Lives)


@dataclass(frozen=True, slots=True)
class About:
    """What a result says of the service beside its figures. endpoint: facts of the deployment; warnings: of a service
    that has stopped, what a reader should know; real_replies: turns quote what was answered; digest_of: of the plan's
    bodies as they would be sent live; ended: is told of each request. api: of bench's endpoints, the one that the load
    is of; frame: what the model's chat template puts around messages, None where no model is named."""

    name: str = "simulation"
    endpoint: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    real_replies: bool = False
    terms_of: Callable[[Call], Terms] = usual_terms
    warnings: Callable[[Any], Sequence[str]] = lambda service: ()
    digest_of: Callable[[Plan, Load], str] | None = None
    ended: Ended | None = None
    api: str = "completions"
    frame: Frame | None = None


@dataclass(frozen=True, slots=True)
class Simulated(Generic[Served]):
    """A run, and the service that it was made on."""

    run: Run
    service: Served


def simulate(
    begin: Callable[[VirtualLoop, int], Served],
    load: Load,
    about: About,
    *,
    observe: Observe | None = None,
    repeat: int = 0,
    name: str | None = None,
    trace: Trace | None = None,
) -> Simulated[Served]:
    """Play `load` to a service that `begin` makes of a loop and a seed. `observe` is called once a second of virtual
    time; `trace` is told what happens."""
    loop = VirtualLoop(LONGEST_S)

    async def main() -> Simulated[Served]:
        service = begin(loop, load.seed)
        service.trace = trace
        await service.start()
        run = await _measure(service, loop, load, about, observe, repeat, name or about.name)
        return Simulated(run, service)

    return loop.run(main())


async def _measure(
    service: Lives, loop: VirtualLoop, load: Load, about: About, observe: Observe | None, repeat: int, name: str
) -> Run:
    plan = load.schedule.apply(load.make_plan(load.num_prompts, load.seed, load.schedule.request_rate))
    client = VirtualClient(
        service,
        name=f"bench-{load.seed}",
        timeout_s=about.timeout_s,
        terms_of=about.terms_of,
        keeps_tokens=about.real_replies,
        ended=about.ended,
    )
    frame = about.frame if about.api in CHAT_APIS else None
    if frame is not None:
        for roles in dict.fromkeys(tuple(message.role for message in call.messages) for call in plan.calls):
            frame(roles)  # what it cannot render is said before anything is sent
    writer = PromptWriter(
        load.seed, load.vocabulary, is_scripted=not about.real_replies, answered=client.answered, frame=frame
    )
    if load.num_warmups:
        # As live: text of another seed, which leaves nothing of this load in a prefix cache.
        other = load.seed + 7_919
        warm = load.make_plan(load.num_warmups, other, load.schedule.request_rate)
        await _warm_up(service, warm, PromptWriter(other, load.vocabulary, frame=frame), about)
    tally = Tally() if load.is_lean else None
    player: Player[Asked] = Player(
        plan, load.schedule, writer, client, load.give_up,
        time=time_of(loop), retry_policy=load.retry_policy, take=None if tally is None else _taking(tally, load),
    )  # fmt: skip
    with rare_collections():
        played = await player.play(observe)
    await client.close()
    await service.stop()
    context = _context(load, about, plan, name, repeat, player.num_rounds, tally)
    rows = measure.make_rows(player.plan, played, load.objectives)
    rows = rows if tally is None else sorted([*rows, *tally.rows], key=lambda row: row.index)
    remarks = [*plan.remarks, *about.warnings(service)]
    if about.api in CHAT_APIS and frame is None:
        remarks.append("Chat templates add no tokens here: --tokenizer names the model whose template does.")
    if writer.has_guessed:
        remarks.append("Tokens of quoted text are a guess, a quarter of its characters: --tokenizer counts them.")
    return measure.summarise(context, played, rows, remarks)


def _taking(tally: Tally, load: Load) -> Callable[[Call, Exchange, float], None]:
    """What is told of each call that has ended, and has the tally count it."""
    limit_s = load.objectives.get("itl_s")
    most = KEPT_EVENTS if limit_s is None else None

    def take(call: Call, exchange: Exchange, start_s: float) -> None:
        row = measure.row_of(call, exchange, start_s, load.objectives, most_events=most)
        tally.take(row, exchange, limit_s is not None and row.ok and measure.met(row, "itl_s", limit_s))

    return take


def _context(
    load: Load, about: About, plan: Plan, name: str, repeat: int, num_rounds: int, tally: Tally | None
) -> Context:
    return Context(
        name=name,
        started_at=STARTED_AT,
        objectives=load.objectives,
        schedule={**load.schedule.facts(), **load.retry_policy.facts(), "repeat": repeat},
        dataset={
            **plan.facts,
            "seed": plan.seed,
            "num_requests": len(plan.calls),
            "text": "tokens that their names decide",
            **({} if about.digest_of is None else {"digest": about.digest_of(plan, load)}),
            "plan_digest": plan.digest(),
            "num_rounds": num_rounds,
        },
        endpoint={"url": "simulated", "simulated": True, "api": about.api, **about.endpoint},
        environment={"simulated": True, "tokenmill": __version__},
        argv=load.argv,
        keep_event_times=load.keep_event_times,
        window=load.window,
        percentiles=load.percentiles,
        tally=tally,
    )


async def _warm_up(service: Lives, plan: Plan, writer: PromptWriter, about: About) -> None:
    """One after another. Raises Unavailable if one fails: the load would too."""
    client = VirtualClient(service, name="warm-up", timeout_s=about.timeout_s, terms_of=about.terms_of)
    for call in plan.calls:
        ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        exchange = Exchange(call.index, asyncio.get_running_loop().time())
        client.send(exchange, writer.write(replace(call, after=()), lambda index: None), ended.set_result)
        await ended
        if not exchange.ok:
            raise Unavailable(
                f"{about.name} failed the first request ({exchange.error}): {exchange.error_detail}", param="load"
            )
    await client.close()


def digest_of(requests: Iterable[Any]) -> str:
    """One hash of all that clients saw in a run: each request's times and results, to the last bit. Equal seeds give
    equal digests, whatever PYTHONHASHSEED and the machine. Of the rows of `bench.result.Run`, in their order; 16
    hexadecimal digits. Of floats the shortest text counts that reads back the same."""
    total = blake2b(digest_size=8)
    for row in requests:
        total.update(json.dumps(asdict(row), sort_keys=True).encode("utf8") + b"\n")
    return total.hexdigest()
