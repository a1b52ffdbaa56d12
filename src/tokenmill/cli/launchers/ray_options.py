"""Flags of `--launcher ray`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from ...core.errors import ConfigError
from ...core.options import check, option, size
from ..worker_options import SECRET_VARIABLE, ListenOptions


def _resources(text: str) -> dict[str, float]:
    try:
        given = json.loads(text)
        return {str(name): float(number) for name, number in given.items()}
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f'must be JSON such as {{"gpu_type": 1}}, got {text!r}.') from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """What `--launcher ray` asks Ray for. Raises ConfigError."""

    ray_address: str | None = option(
        None, "the cluster's address, or auto (default: RAY_ADDRESS, else a cluster of this machine)", metavar="ADDRESS"
    )
    ray_placement: str = option(
        "SPREAD", "how workers lie on machines (default: SPREAD)", choices=("SPREAD", "PACK", "STRICT_SPREAD")
    )
    ray_memory: int | None = option(
        None, "memory that a worker asks Ray for (default: none is asked for)", read=size, metavar="SIZE"
    )
    ray_resources: Mapping[str, float] | None = option(
        None, "what else a worker asks Ray for, as JSON", read=_resources, metavar="JSON"
    )

    def __post_init__(self) -> None:
        check(self)


def near(options: RayOptions, listen: ListenOptions, environ: MutableMapping[str, str]) -> ListenOptions:
    """Where workers of Ray join. Those of a cluster of this machine alone need to be told nothing: they join by the
    loopback address, with a secret of this run where `environ` has none. Raises ConfigError where others are meant and
    nothing says at which address they reach this machine."""
    if options.ray_address is not None or environ.get("RAY_ADDRESS"):
        if listen.listen_workers is None:
            message = "--launcher ray needs --listen-workers HOST:PORT, at which Ray's machines reach this one."
            raise ConfigError(message, param="listen_workers")
        return listen
    environ.setdefault(SECRET_VARIABLE, secrets.token_urlsafe(32))
    return listen if listen.listen_workers is not None else replace(listen, listen_workers=("127.0.0.1", 0))
