"""What is simulated: a cluster's file or its tables with all that they name, read once, and the policies that override
them.

Calibrations, checkpoints, measured machines and topologies are named as paths from the file's folder; checkpoints also
by alias or hub name. Of a checkpoint only the shape is needed, from itself or from what `tokenmill inspect --json` said
of it elsewhere, so that a model need not be where it is simulated.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.cost import CostModel
from ..core.errors import ConfigError
from ..formats.checkpoint import open_checkpoint
from ..formats.hub import local_model
from ..models.config import ModelConfig
from ..models.encoder_config import EncoderConfig
from ..models.summary import model_summary
from ..sim.acceptance import Acceptance, Recorded, read_record
from ..sim.calibrated import Calibrated
from ..sim.cluster_file import parse, read_deployment
from ..sim.deployment import Deployment
from ..sim.fields import Fields
from ..sim.hardware import Hardware, hardware_named, measured_hardware
from ..sim.loop import VirtualLoop
from ..sim.models import ModelShape, read_model
from ..sim.service import Service
from ..sim.topology import Topology, read_topology
from ..sim.worker_file import Sources
from .policies import ChosenPolicies, read_policies

_UNITS = ("title", "source", "name")


def shape_of(config: ModelConfig, name: str) -> ModelShape:
    """Of a decoder's config. Values of latent attention may be narrower than keys: their mean counts. Windows are not
    known to the cost model, which takes every layer to see all."""
    latent, moe = config.latent, config.moe
    num_moe = sum(layer.is_moe for layer in config.layers)
    head_dim, num_kv_heads = config.head_dim, config.num_kv_heads
    if latent is not None:
        head_dim, num_kv_heads = (latent.nope_dim + latent.value_dim) // 2, config.num_heads
    return ModelShape(
        name,
        config.num_layers,
        config.width,
        config.num_heads,
        num_kv_heads,
        head_dim,
        config.ffn_width if num_moe < config.num_layers else 0,
        config.vocab_size,
        is_gated=config.family.gated,
        is_tied=config.tied_embeddings,
        num_dense_layers=config.num_layers - num_moe if moe is not None else 0,
        num_experts=0 if moe is None else moe.routing.num_experts,
        num_chosen=0 if moe is None else moe.routing.top_k,
        num_shared=0 if moe is None else round(moe.shared_width / moe.expert_width),
        expert_ffn=0 if moe is None else moe.expert_width,
        query_rank=config.query_rank,
        kv_rank=0 if latent is None else latent.latent_dim,
        rope_dim=0 if latent is None else latent.rope_dim,
        title=name,
        source="its checkpoint, by tokenmill inspect",
    )


def shape_facts(config: ModelConfig) -> dict[str, Any]:
    """What `inspect --json` says of it under `shape`: the keys of a table of `[model.shape]` in a cluster's file."""
    shape = asdict(shape_of(config, ""))
    return {key: value for key, value in shape.items() if key not in _UNITS}


def read_shape(path: str) -> ModelShape:
    """Of a checkpoint (an alias, a file, a folder), or of a `.json` file that `inspect --json` printed. Raises
    ConfigError, BadCheckpoint or FetchError."""
    if path.endswith(".json"):
        return _from_facts(path)
    checkpoint = open_checkpoint(local_model(path))
    config = model_summary(checkpoint).config
    if isinstance(config, EncoderConfig):
        raise ConfigError(f"model.checkpoint: {path} gives vectors, not tokens", param="model.checkpoint")
    return shape_of(config, Path(path).name)


def _from_facts(path: str) -> ModelShape:
    try:
        facts = json.loads(Path(path).read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.checkpoint: {path} cannot be read: {error}", param="model.checkpoint") from None
    table = facts.get("shape") if isinstance(facts, Mapping) else None
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"model.checkpoint: {path} has no shape; write it by `tokenmill inspect MODEL --json`",
            param="model.checkpoint",
        )
    name = Path(str(facts.get("model", path))).name
    return read_model(Fields({**table, "title": name, "source": f"tokenmill inspect, {path}"}, "shape"), name)


def sources_beside(folder: Path) -> Sources:
    """Reads them; each raises ConfigError for what cannot be read."""

    def calibration(name: str) -> CostModel:
        path = folder / name
        return Calibrated.from_json(_text(path, "write one by tokenmill calibrate"), str(path))

    def shape(name: str) -> ModelShape:
        return read_shape(_beside(folder, name))

    def hardware(name: str, where: str) -> Hardware:
        return read_machine(_beside(folder, name), where)

    def topology(name: str) -> Topology:
        path = folder / name
        tables = parse(_text(path, "give [[nodes]] there"), str(path))
        try:
            return read_topology(Fields(tables))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}") from None

    def acceptance(name: str) -> Acceptance:
        path = folder / name
        text = _text(path, "write one by tokenmill draft acceptance")
        return Recorded(read_record(text.splitlines(), str(path)))

    return Sources(calibration, shape, hardware, topology, acceptance)


def read_machine(name: str, where: str = "hardware") -> Hardware:
    """Of the table, or, where `name` ends in `.json`, of a file that `tokenmill bench kernels --json` wrote; how much
    memory that machine has is not in it. Raises ConfigError, at `where`."""
    if not name.endswith(".json"):
        return hardware_named(name, where)
    try:
        report = json.loads(Path(name).read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {name} cannot be read: {error}", param=where) from None
    return measured_hardware(report if isinstance(report, dict) else {}, name, where=where)


def _text(path: Path, hint: str) -> str:
    try:
        return path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{path} cannot be read: {reason}; {hint}") from None


def _beside(folder: Path, name: str) -> str:
    """The path of a file or folder there, else the name as it is, which may be one of the cache's."""
    path = folder / Path(name).expanduser()
    return str(path) if path.exists() else name


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
