"""Faults of a simulated service, as its file says them: each at its time, or again and again by seed.

    crash      a worker's process is gone, or a node with all its workers and its KV store; it starts anew, cold
    freeze     it stands still for a while, and goes on
    slow       its steps take `factor` times as long; of a tier, its jobs
    leave      it takes no more requests, finishes those it has, and starts anew
    cut        one of its links to front ends breaks; both sides live on, and it joins again
    flap       links have the share `factor` of their bandwidth, 0: none
    partition  nothing that is sent to it or by it arrives for a while
    corrupt    the share `factor` of the blocks that are loaded from a tier has other bytes

Faults that come by seed strike one target after the other, with exponential gaps: failures that know nothing of each
other.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..core.tiers import DISK, REMOTE
from .cores import Host
from .fields import Fields
from .loop import VirtualLoop
from .shared_links import SharedLinks
from .tier_plan import TierHosts
from .tiers import Medium
from .timed import TimedExecutor
from .topology import Wiring
from .worker import Worker

KINDS = ("crash", "freeze", "slow", "leave", "cut", "flap", "partition", "corrupt")
_OF_WORKERS = ("crash", "freeze", "slow", "leave", "cut", "partition")
_FOR_S = {"freeze": 5.0, "slow": 60.0, "flap": 10.0, "partition": 10.0, "corrupt": 60.0}
_FACTOR = {"slow": 3.0, "flap": 0.0, "corrupt": 1.0}


@dataclass(frozen=True, slots=True)
class Fault:
    """where: its place in the file. target: a worker, node, link or tier; "": of faults by seed, any that the kind can
    strike, one by chance each time. mean_time_between_s: 0 of those that happen once, at `at_s`; else the first comes
    after `at_s`, and none after `until_s`."""

    where: str
    kind: str
    target: str = ""
    at_s: float = 0.0
    for_s: float = 0.0
    factor: float = 1.0
    mean_time_between_s: float = 0.0
    until_s: float = 0.0
    seed: int = 0


class Struck(NamedTuple):
    at_s: float
    kind: str
    target: str


def read_faults(fields: Fields, name: str = "faults") -> tuple[Fault, ...]:
    """From `[[faults]]`. Raises ConfigError, which names the field."""
    return tuple(_read_fault(each) for each in fields.tables(name))


def _read_fault(each: Fields) -> Fault:
    kind = each.text("kind", among=KINDS)
    is_again = each.has("mean_time_between_s")
    target = each.text("target", "" if is_again else None)
    at_s = each.number("at_s", 0.0 if is_again else None)
    for_s = each.number("for_s", _FOR_S[kind], is_open=True) if kind in _FOR_S else 0.0
    factor = 1.0
    if kind in _FACTOR:
        most = 1.0 if kind in ("flap", "corrupt") else float("inf")
        factor = each.number("factor", _FACTOR[kind], least=1.0 if kind == "slow" else 0.0, most=most)
    between_s = each.number("mean_time_between_s", is_open=True) if is_again else 0.0
    for key in ("until_s", "seed"):
        if not is_again and each.has(key):
            raise each.error(key, "is of faults that come again and again; give mean_time_between_s, or take it out")
    until_s = each.number("until_s") if each.has("until_s") else float("inf")
    seed = each.count("seed", 0) if is_again else 0
    each.end()
    return Fault(each.where, kind, target, at_s, for_s, factor, between_s, until_s, seed)


class FaultRunner:
    """Lets faults happen. workers: by name; nodes: worker -> its node; hosts: node -> the cores there. struck: what has
    happened so far, in order."""

    def __init__(
        self,
        faults: Sequence[Fault],
        loop: VirtualLoop,
        workers: Mapping[str, Worker],
        *,
        seed: int = 0,
        nodes: Mapping[str, str] | None = None,
        shared_links: SharedLinks | None = None,
        wiring: Wiring | None = None,
        tiers: TierHosts | None = None,
        hosts: Mapping[str, Host] | None = None,
    ) -> None:
        """Raises ConfigError for a target that is not there."""
        self.struck: list[Struck] = []
        self._faults = faults
        self._loop = loop
        self._workers = workers
        self._seed = seed
        self._nodes = nodes or {}
        self._shared_links = shared_links
        self._wiring = wiring
        self._tiers = tiers
        self._hosts = hosts or {}
        self._under: Counter[str] = Counter()
        for fault in faults:
            if fault.target or not fault.mean_time_between_s:
                self._check(fault)
            elif not self._targets(fault.kind):
                raise Fields({}, fault.where).error("kind", f"there is nothing here that {fault.kind} can strike")

    def start(self) -> None:
        for number, fault in enumerate(self._faults):
            self._loop.spawn(self._run(fault, number), f"fault {number}")

    async def _run(self, fault: Fault, number: int) -> None:
        await asyncio.sleep(max(0.0, fault.at_s - self._loop.time()))
        if not fault.mean_time_between_s:
            self._strike(fault, fault.target)
            return
        rng = random.Random(f"fault {number} {fault.seed} {self._seed}")
        targets = [fault.target] if fault.target else self._targets(fault.kind)
        while True:
            await asyncio.sleep(rng.expovariate(1 / fault.mean_time_between_s))
            if self._loop.time() > fault.until_s:
                return
            self._strike(fault, rng.choice(targets))

    # ---- targets ----

    def _targets(self, kind: str) -> list[str]:
        """What a fault of a kind strikes by chance."""
        if kind in _OF_WORKERS:
            return list(self._workers)
        if kind == "flap":
            return [] if self._wiring is None else [name for name in self._wiring.places if ".nic" in name]
        return self._tier_names() if self._tiers is not None else []

    def _tier_names(self) -> list[str]:
        assert self._tiers is not None
        kinds = [tier.kind for tier in self._tiers.specs.tiers]
        hosts = list(dict.fromkeys(self._tiers.host_of(name) for name in self._workers))
        shared = [REMOTE] if REMOTE in kinds else []
        return [f"{host}.{DISK}" for host in hosts if DISK in kinds] + shared

    def _known(self, kind: str) -> list[str]:
        nodes = list(dict.fromkeys(self._nodes.values()))
        of_tiers = self._tier_names() if self._tiers is not None else []
        if kind == "corrupt":
            return of_tiers
        if kind == "flap":
            return list(self._wiring.places) if self._wiring is not None else []
        return [*self._workers, *nodes, *(of_tiers if kind == "slow" else [])]

    def _check(self, fault: Fault) -> None:
        if fault.kind == "flap" and self._wiring is not None and self._wiring.links_of(fault.target):
            return
        known = self._known(fault.kind)
        if fault.target not in known:
            fields = Fields({"target": fault.target}, fault.where)
            if not known:
                raise fields.error("target", f"there is nothing here that {fault.kind} can strike")
            fields.text("target", among=known)

    def _struck_workers(self, target: str) -> list[Worker]:
        if target in self._workers:
            return [self._workers[target]]
        return [worker for name, worker in self._workers.items() if self._nodes.get(name) == target]

    # ---- strikes ----

    def _strike(self, fault: Fault, target: str) -> None:
        workers = [worker for worker in self._struck_workers(target) if worker.is_up]
        if not workers and (target in self._workers or target in self._nodes.values()) and fault.kind in _OF_WORKERS:
            return  # it is down already
        match fault.kind:
            case "crash":
                self._crash(workers, target)
            case "freeze":
                for worker in workers:
                    worker.hardware.freeze(fault.for_s)
            case "slow":
                self._slow(fault, target, workers)
            case "leave":
                for worker in workers:
                    worker.leave()
            case "cut":
                for worker in workers:
                    worker.cut()
            case "flap":
                assert self._wiring is not None
                self._choke(self._wiring.links_of(target), fault.factor, fault.for_s)
            case "partition":
                for worker in workers:
                    for link in worker.links.values():
                        link.hold(fault.for_s)
                if self._wiring is not None:
                    nics = [link for link in self._wiring.links_of(self._nodes.get(target, target)) if ".nic" in link]
                    self._choke(nics, 0.0, fault.for_s)
            case _:
                self._corrupt(fault, target)
        self.struck.append(Struck(self._loop.time(), fault.kind, target))

    def _crash(self, workers: Sequence[Worker], target: str) -> None:
        for worker in workers:
            worker.crash()
        machine = self._tiers.hosts.get(target) if self._tiers is not None and target not in self._workers else None
        if machine is not None and machine.is_up:
            machine.crash()
            machine.start()

    def _slow(self, fault: Fault, target: str, workers: Sequence[Worker]) -> None:
        host = self._hosts.get(target)
        if host is not None:
            host.slow(fault.factor)
            self._later(fault.for_s, f"slow {target}", partial(host.slow, 1.0))
            return
        for worker in workers:
            executor = worker.hardware.executor
            if isinstance(executor, TimedExecutor):
                executor.slowness = fault.factor
                what = f"slow {worker.incarnation}"
                self._later(fault.for_s, what, partial(setattr, executor, "slowness", 1.0))
            else:
                worker.hardware.slow(fault.for_s, fault.factor)
        for medium in self._media(target):
            medium.slowness = fault.factor
            self._later(fault.for_s, f"slow {target}", partial(setattr, medium, "slowness", 1.0))

    def _corrupt(self, fault: Fault, target: str) -> None:
        for medium in self._media(target):
            medium.spoil = fault.factor
            self._later(fault.for_s, f"corrupt {target}", partial(setattr, medium, "spoil", 0.0))

    def _media(self, target: str) -> list[Medium]:
        if self._tiers is None:
            return []
        host, _, kind = target.rpartition(".")
        found = self._tiers.media.get((host, kind))
        return [found] if found is not None else []

    def _choke(self, links: Sequence[str], share: float, for_s: float) -> None:
        shared_links = self._shared_links
        assert shared_links is not None
        for link in links:
            shared_links.set_share(link, share)
            self._later(for_s, link, partial(shared_links.set_share, link, 1.0))

    def _later(self, for_s: float, what: str, undo: Callable[[], None]) -> None:
        """Undo a fault, unless another of the same kind is on the same thing by then."""

        def end() -> None:
            self._under[what] -= 1
            if not self._under[what]:
                undo()

        self._under[what] += 1
        self._loop.call_later(for_s, end)
