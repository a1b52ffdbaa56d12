"""What is simulated: a cluster's file or its tables, read once, and the policies that come before what they say."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..sim.cluster_file import parse, read_deployment
from ..sim.deployment import Deployment
from ..sim.loop import VirtualLoop
from ..sim.service import Service
from .policies import ChosenPolicies, read_policies
from .sources import sources_beside

Changes = Mapping[str, Any]
"""Dotted keys of a cluster's file -> what they are set to."""
NAME = "simulation"
"""Of what has no file."""


@dataclass(frozen=True, slots=True)
class Config:
    """A service as it can be built. name and facts are for results; folder: from which its own load's paths are taken.
    Of the policies, those of engines and stores are in the deployment already. fast_path: several steps at once where
    nothing can happen between them."""

    deployment: Deployment
    name: str = NAME
    folder: Path = Path()
    facts: Mapping[str, Any] = field(default_factory=dict)
    policies: ChosenPolicies = field(default_factory=lambda: ChosenPolicies({}))
    fast_path: bool = True

    def begin(self, loop: VirtualLoop, seed: int) -> Service:
        return Service(self.deployment, loop, seed=seed, set_up=self.policies.set_up, fast_path=self.fast_path)


def read_config(
    cluster: Path | str | Mapping[str, Any],
    *,
    path: Path | None = None,
    changes: Changes | None = None,
    policies: ChosenPolicies | Iterable[str] = (),
    fast_path: bool = True,
) -> Config:
    """From a cluster's file, or from its tables. path: the file that the tables were read from (`read_tables`), whose
    name and folder count; without one, paths are of the working folder. changes: made to the tables; policies: as
    `--policy` takes them. Raises Infeasible for parts that do not fit together, such as weights into
    memory, and ConfigError for all else, both with the field."""
    chosen = policies if isinstance(policies, ChosenPolicies) else read_policies(policies)
    name, told, folder = NAME, {"model": NAME}, Path()
    if isinstance(cluster, Mapping):
        tables: Mapping[str, Any] = cluster
    else:
        path = Path(cluster)
        tables = read_tables(path)
    if path is not None:
        name, folder = path.stem, path.parent
        told = {"model": path.stem, "cluster": str(path)}
    if changes:
        tables = with_changes(tables, changes)
    deployment = chosen.deployment(read_deployment(tables, sources_beside(folder)))
    facts: dict[str, Any] = {**told, **dict(deployment.facts)}
    if deployment.price_per_h:
        facts["price_hour_usd"] = deployment.price_per_h
    if chosen.facts():
        facts["policies"] = chosen.facts()
    return Config(deployment, name, folder, facts, chosen, fast_path)


def read_tables(path: Path) -> dict[str, Any]:
    """Of a cluster's file, which may be a pipe: several configurations of it are made of one reading. Raises
    ConfigError."""
    try:
        text = path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{path} cannot be read: {reason}.", param="cluster") from None
    return parse(text, str(path))


_STEP = re.compile(r"([A-Za-z0-9_-]+)((?:\[\d+\])*)")


def with_changes(tables: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """A copy of a file's tables with the values of dotted keys set: "engine.max_num_seqs", "workers[0].count". Tables
    on the way that are not there are made: whoever reads the file knows which keys there are. Raises ConfigError."""
    changed = copy.deepcopy(dict(tables))
    for key, value in changes.items():
        path: list[str | int] = []
        for part in key.split("."):
            found = _STEP.fullmatch(part)
            if found is None:
                raise ConfigError(
                    f"--sweep: {key} is no key such as engine.max_num_seqs or workers[0].count.", param=key
                )
            path.append(found[1])
            if path[0] == "load":
                raise ConfigError(
                    f"--sweep: {key} is of the load, and all runs of a sweep have the very same.", param=key
                )
            path += [int(index) for index in re.findall(r"\d+", found[2])]
        _set(changed, path, value, key)
    return changed


def _set(table: Any, path: Sequence[str | int], value: Any, key: str) -> None:
    """Sets one value in nested tables."""
    for step, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(step, int):
            if not isinstance(table, list) or step >= len(table):
                raise ConfigError(f"--sweep: there is no {key}: it counts from 0.", param=key)
        elif not isinstance(table, dict):
            raise ConfigError(f"--sweep: {key} is in a list: say which, as in workers[0].count.", param=key)
        if following is None:
            table[step] = value
        elif isinstance(step, int):
            table = table[step]
        else:
            table = table.setdefault(step, {})
