"""Workers as Ray actors: Ray chooses machines, keeps count of their processors and memory, and restarts what dies.

One actor a worker. The actor supervises a child process, `tokenmill worker`, which connects to the front end by itself:
requests, tokens and KV go over tokenmill's own links, and nothing of a request passes through Ray. Each worker is a
bundle of one placement group, so that an autoscaler sees what is wanted before there is a machine for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from ...core.errors import ConfigError, EngineFailed
from ...plugins.load import OFF, ON, are_on
from ...plugins.load import VARIABLE as PLUGINS
from ..worker_options import SECRET_VARIABLE
from .child import FAILED, RUNNING, WorkerChild
from .ray_options import RayOptions

if TYPE_CHECKING:
    from ...core.events import Ready
    from ...net.tcp import Credentials
    from ...server.client import EngineClient

LOOK_S = 2.0
UNREACHABLE = "unreachable"
_NUM_TRIES, _TRY_S = 50, 0.1
_NAMESPACE = "tokenmill"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """How a worker is started, wherever that is.

    model      as `tokenmill worker` takes it
    arguments  its other flags, but those that follow from which worker it is and where the front end is
    env        over the environment that it finds: the secret that it shares with the front end, and whether plug-ins
               are on
    """

    model: str
    arguments: Sequence[str]
    env: Mapping[str, str] = field(repr=False)

    def of(self, name: str, pool: str, address: str) -> list[str]:
        return [self.model, f"--connect={address}", f"--worker-id={name}", f"--pool={pool}", *self.arguments]


def worker_command(model: str, arguments: Sequence[str], credentials: Credentials) -> WorkerCommand:
    """`model`: as this process was given it."""
    where = os.path.abspath(model) if os.path.exists(model) else model
    env = {SECRET_VARIABLE: os.fsdecode(credentials.secret), PLUGINS: ON if are_on() else OFF}
    return WorkerCommand(where, arguments, env)


def _remove(folder: str) -> None:
    """Ray's processes, which are on their way out, may still write there."""
    for _ in range(_NUM_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(_TRY_S)


class _Actor:
    """What runs on the machine that Ray chose."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self._child = WorkerChild(arguments, env)

    def status(self) -> dict[str, object]:
        return self._child.status()


class RayWorkers:
    """An engines.Launcher. pools: of each worker, where it serves. num_cpus: that each asks Ray for. Entering joins
    the cluster, or starts one of this machine, which takes seconds. Raises ConfigError where there is no Ray."""

    joins = True

    def __init__(self, options: RayOptions, command: WorkerCommand, pools: Sequence[str], num_cpus: float) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of what it will do later
        try:
            import ray
        except ImportError:
            raise ConfigError("--launcher ray needs Ray: pip install 'tokenmill[ray]'.", param="launcher") from None
        self._ray = ray
        self._options = options
        self._command = command
        self._pools = pools
        self._num_cpus = num_cpus
        self._actors: list[Any] = []
        self._states: dict[int, str] = {}
        self._has_head = True  # as far as it answers
        self._held = contextlib.ExitStack()
        self.summary = f"{len(pools)} by Ray"

    def __enter__(self) -> Self:
        address = self._options.ray_address or os.environ.get("RAY_ADDRESS")
        with contextlib.ExitStack() as held:
            own: dict[str, Any] = {}
            if address is None:
                folder = tempfile.mkdtemp(prefix="tm-ray-")
                held.callback(_remove, folder)
                own = {"include_dashboard": False, "_temp_dir": folder}
                # A signal to all processes, as systemd sends it, ends Ray before this process lets it go.
                os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
            held.callback(self._ray.shutdown)
            try:
                self._ray.init(
                    address=address or "local",
                    namespace=_NAMESPACE,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **own,
                )
            except (OSError, RuntimeError, ValueError) as error:
                raise ConfigError(f"Ray at {address or 'this machine'}: {error}", param="ray_address") from error
            held.callback(self._let_go)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    async def run(self, client: EngineClient, complete: Callable[[Ready], Ready], address: str) -> None:
        """Ask for the actors, and tell of what becomes of them. Raises EngineFailed where Ray's process of this machine
        (the raylet) has ended: without it no actor is reached or started again, and Ray cannot be begun anew here. So
        it does where neither Ray's head nor any actor answers."""
        await asyncio.to_thread(self._start, address)
        while await self._is_node_alive():
            await self._look()
            await asyncio.sleep(LOOK_S)
        raise EngineFailed("Ray's process of this machine (raylet) has ended: start the server again.")

    async def drain(self, within_s: float) -> None:
        """Workers that save KV do so when they leave."""

    def keep_flight(self) -> None:
        """Each worker does that by itself, where it runs."""

    def statuses(self) -> list[dict[str, Any]]:
        """Of all actors, where they answer. Waits for them."""
        return list(self._ray.get([actor.status.remote() for actor in self._actors]))

    async def _is_node_alive(self) -> bool:
        """By what Ray's head says of this machine; where it says nothing, by whether an actor still answers."""
        try:
            here = self._ray.get_runtime_context().get_node_id()
            nodes = await asyncio.to_thread(self._ray.nodes)
        except (self._ray.exceptions.RayError, OSError, RuntimeError) as error:
            if self._has_head:
                log.warning("Ray's head does not answer: %s", error)
            self._has_head = False
            return not self._states or any(state != UNREACHABLE for state in self._states.values())
        self._has_head = True
        return any(node["NodeID"] == here and node["Alive"] for node in nodes)

    def _start(self, address: str) -> None:
        ray, options, resources = self._ray, self._options, dict(self._options.ray_resources or {})
        bundle = {"CPU": self._num_cpus, **resources}
        if options.ray_memory:
            bundle["memory"] = options.ray_memory
        group = ray.util.placement_group(
            [bundle] * len(self._pools), strategy=options.ray_placement, name=f"tokenmill-{os.getpid()}"
        )
        self._held.callback(ray.util.remove_placement_group, group)
        make = ray.remote(
            max_restarts=-1, max_concurrency=2, num_cpus=self._num_cpus, resources=resources,
            memory=options.ray_memory,
        )(_Actor)  # fmt: skip
        for number, pool in enumerate(self._pools):
            where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, number)
            arguments = self._command.of(f"ray-{number}", pool, address)
            actor = make.options(name=f"tokenmill-{os.getpid()}-{number}", scheduling_strategy=where)
            self._actors.append(actor.remote(arguments, dict(self._command.env)))
        if not group.wait(LOOK_S):
            log.warning("Ray has no room yet for %d workers of %s; they start as it has.", len(self._pools), bundle)

    async def _look(self) -> None:
        """Tell of what has changed. Raises ConfigError where no worker can ever be started."""
        why = ""
        for number, actor in enumerate(self._actors):
            try:
                status = await asyncio.wait_for(actor.status.remote(), LOOK_S)
            except (TimeoutError, self._ray.exceptions.RayError):
                status = {"state": UNREACHABLE}
            before, state = self._states.get(number, RUNNING), str(status["state"])
            self._states[number] = state
            why = status.get("why", "")
            if state != before:
                log.warning("Worker %d of Ray is %s%s", number, state, f": {why}" if why else ".")
        if self._states and all(state == FAILED for state in self._states.values()):
            raise ConfigError(f"No worker can be started: {why}")

    def _let_go(self) -> None:
        """A worker ends with its actor."""
        actors, self._actors = self._actors, []
        for actor in actors:
            self._ray.kill(actor, no_restart=True)
