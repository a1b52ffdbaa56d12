"""A cluster's file (TOML) -> the deployment that is simulated. docs/operate/simulate.md says every key.

    [model]        which model, in which precision         [[workers]]   what computes it
    [engine]       how engines batch and cache             [router]      who gets a request; [admission], [slo],
    [network]      messages and wires                                    [tenants.NAME]: who may enter
    [topology]     links that are shared                   [[tiers]]     of KV below the workers' own
    [host]         cores that are shared                   [[faults]]    what fails
    [prices]       of devices                              [load]        options of the load

A key that nobody knows, a value that cannot be and parts that do not fit are errors of one line that name the field.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..core.cost import CostModel
from ..core.errors import ConfigError
from .calibrated import Calibrated
from .deployment import LAN, Deployment, read_gateway
from .fields import Fields
from .hardware import hardware_named
from .models import ModelShape
from .network import Shape
from .parts import PartsPlan, Placer, read_parts
from .roofline import Roofline
from .worker_file import Group, Model, Sources, read_engine, read_group, read_model_section


def _no_calibration(path: str) -> CostModel:
    raise ConfigError("calibrations cannot be read here")


def _no_checkpoint(path: str) -> ModelShape:
    raise ConfigError("model.checkpoint: checkpoints cannot be read here; name a model", param="model.checkpoint")


NO_SOURCES = Sources(_no_calibration, _no_checkpoint)


def parse(text: str, name: str = "cluster file") -> dict[str, Any]:
    """The tables of a file. Raises ConfigError for what is no TOML."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{name} is no TOML: {error}") from None


def read_deployment(table: Mapping[str, Any] | str, sources: Sources = NO_SOURCES) -> Deployment:
    """From a file's text or its tables. Raises ConfigError, which names the field."""
    fields = Fields(parse(table) if isinstance(table, str) else table)
    model = read_model_section(fields.table("model"), sources)
    engine = read_engine(fields.table("engine"), {}, sources)
    prices = _read_prices(fields.table("prices"))
    parts = read_parts(fields, sources.topology)
    groups = _read_workers(fields, model, engine, prices, sources, parts)
    is_priced = fields.has("prices")
    gateway = read_gateway(fields)
    shape = _read_network(fields.table("network"))
    if parts.tiers is not None:
        parts.tiers.config(groups[0].plans[0].config)  # a block must fit; who finds out later has run for nothing
    if parts.cores.front is None:
        # A calibration knows what its machine's front end computed.
        cost_models = [plan.cost_model for group in groups for plan in group.plans]
        if parts.cores.calibration:
            try:
                cost_models = [sources.calibration(parts.cores.calibration)]
            except ConfigError as error:
                raise ConfigError(f"host.calibration: {error.message}", param="host.calibration") from None
        front = next((cost_model for cost_model in cost_models if isinstance(cost_model, Calibrated)), None)
        if front is not None and parts.cores.calibration:
            front = front.beside_threads(groups[0].plans[0].site.threads)
        parts = replace(parts, cores=replace(parts.cores, front=front))
    load = fields.table("load")
    deployment = Deployment(
        tuple(plan for group in groups for plan in group.plans),
        shape,
        parts=parts,
        gateway=gateway,
        facts=_facts(model, groups),
        load=load.plain,
    )
    fields.end()
    if is_priced:
        _check_prices(groups)
    return deployment


def _read_workers(
    fields: Fields,
    model: Model,
    engine: Mapping[str, Any],
    prices: Mapping[str, float],
    sources: Sources,
    parts: PartsPlan,
) -> list[Group]:
    groups: list[Group] = []
    placer = Placer(parts.topology)
    tables = fields.tables("workers")
    if not tables:
        raise fields.error("workers", "at least one [[workers]] is needed")
    for each in tables:
        first = sum(len(group.plans) for group in groups)
        groups.append(read_group(each, model, engine, prices, first, sources, parts, placer))
    names = [plan.name for group in groups for plan in group.plans]
    for number, (each, group) in enumerate(zip(tables, groups, strict=True)):
        if any(names.count(plan.name) > 1 for plan in group.plans[:1]):
            raise each.error("name", f"there are two workers {group.plans[0].name!r}; give each group its own name")
        one, zero = group.plans[0].config, groups[0].plans[0].config
        if (one.block_size, one.groups[0].bytes_per_block) != (zero.block_size, zero.groups[0].bytes_per_block):
            where = "engine.block_size" if one.block_size != zero.block_size else "kv_token_bytes"
            raise each.error(where, f"workers[{number}] would keep other blocks than workers[0]; make them equal")
    pools = [group.plans[0].pool for group in groups]
    for pool, other in (("prefill", "decode"), ("decode", "prefill")):
        if pool in pools and not {other, "mixed"} & set(pools):
            what = f"workers of pool {pool!r} need some of pool {other!r}, or mixed ones"
            raise tables[pools.index(pool)].error("pool", what)
    return groups


def _read_network(fields: Fields) -> Shape:
    """Of messages, and of the wire of each host where there is no topology."""
    shape = Shape(
        latency_s=fields.number("latency_s", LAN.latency_s),
        jitter_s=fields.number("jitter_s", 0.0),
        late_rate=fields.number("late_rate", 0.0, most=1.0),
        late_s=fields.number("late_s", 0.0),
        byte_s=1 / fields.number("bytes_s", 1 / LAN.byte_s, is_open=True),
    )
    fields.end()
    return shape


def _read_prices(fields: Fields) -> dict[str, float]:
    """Dollars an hour of a device, by the name of its hardware."""
    prices = {}
    for name in fields.names:
        hardware = hardware_named(name, fields.at(name))
        prices[hardware.name] = fields.number(name, is_open=True)
    fields.end()
    return prices


def _check_prices(groups: list[Group]) -> None:
    """Who has a section of prices asks for costs."""
    for number, group in enumerate(groups):
        if not group.plans[0].price_per_h:
            device = group.hardware
            name = device.name if device is not None else "these workers"
            in_table = device is not None and not device.is_cpu
            where = f"prices.{name}" if in_table else f"workers[{number}].price_hour_usd"
            raise ConfigError(f"{where}: no price of {name} is known; give dollars an hour", param=where)


def _facts(model: Model, groups: list[Group]) -> tuple[tuple[str, str], ...]:
    """What there is, to be printed."""
    facts: list[tuple[str, str]] = []
    if model.shape is not None:
        shape, precision = model.shape, model.precision
        size = shape.weight_bytes(precision.weights) / 2**30
        active = f", {shape.num_active / 1e9:.1f} active" if shape.num_experts else ""
        facts.append(
            (
                "model",
                f"{model.name}: {shape.num_parameters / 1e9:.2f} billion parameters{active}, {size:.1f} GiB in "
                f"{precision.weights}, {shape.kv_bytes(precision.kv) / 1024:.1f} KiB of KV a token",
            )
        )
    for group in groups:
        plan, config = group.plans[0], group.plans[0].config
        where = "calibrated" if group.hardware is None else f"{group.devices} x {group.hardware.name}"
        num_blocks = config.groups[0].num_blocks
        num_tokens = num_blocks * config.block_size
        price = f", {plan.price_per_h:.2f} $ an hour" if plan.price_per_h else ""
        names = f"workers {plan.name}..{group.plans[-1].name}" if len(group.plans) > 1 else f"worker {plan.name}"
        most = f"{config.max_num_seqs} sequences and {config.max_num_batched_tokens} tokens a step"
        if config.speculation is not None:
            most += f", {config.speculation.num_speculative_tokens} drafts of each sequence at most"
        kept = f"{num_blocks} blocks of KV ({num_tokens} tokens)"
        facts.append((names, f"{len(group.plans)} {plan.pool}, each {where}{price}: {kept}, {most}"))
        if isinstance(plan.cost_model, Roofline):
            facts.append((f"steps of {names}", plan.cost_model.coefficients.uncertainty))
    return tuple(facts)
