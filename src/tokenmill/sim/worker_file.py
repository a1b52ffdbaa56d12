"""The workers of a cluster's file: what a step takes there, how much KV they keep and how their engines batch.

What a step takes comes from one of three: `hardware`, by the roofline of the model's shape and what `software` reaches
of the peaks; `calibration`, a file that was fitted to live steps; `costs`, the coefficients of core.cost.Costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.block import full_groups
from ..core.config import BLOCK_SIZE, STEPS_IN_FLIGHT, EngineConfig
from ..core.cost import CostModel, Costs
from ..core.errors import ConfigError, Infeasible
from ..kv.blocks.eviction import EVICTIONS
from ..sched.policies import SCHEDULING_POLICIES
from .acceptance import Acceptance, no_acceptance, read_drafts
from .calibrated import Calibrated
from .deployment import WorkerPlan
from .fields import Fields
from .hardware import Hardware, hardware_named
from .models import KV_BYTES, WEIGHT_BYTES, ModelShape, model_named, read_model
from .parts import PartsPlan, Placer, no_topology, read_cold
from .roofline import ALONE, Parallel, Precision, Roofline, coefficients_named, variant_of
from .topology import Topology

POOLS = ("mixed", "prefill", "decode")
LONGEST = 131072
"""Tokens of a sequence where nobody says, if so many fit."""
GPU_BATCHED_TOKENS, LARGE_GPU_BATCHED_TOKENS, LARGE_GPU_BYTES = 2048, 8192, 70 * 2**30
"""Tokens of a step on a GPU where nobody says, as vLLM serves; on large ones more. Our own default is of a CPU."""
MOST_WORKERS = 100_000
"""Of a table: more would fill memory before anything is said."""
_LAWS = ("hardware", "calibration", "costs")
_SPREAD = ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel", "expert_overlap")
"""The fields of roofline.Parallel, in its order."""
_PLACES = {
    "parallel.tensor": "tensor_parallel",
    "parallel.pipeline": "pipeline_parallel",
    "parallel.expert": "expert_parallel",
    "parallel.overlapped": "expert_overlap",
}


@dataclass(frozen=True, slots=True)
class Model:
    """shape: None where the file tells the costs of steps and KV itself."""

    name: str
    shape: ModelShape | None = None
    precision: Precision = field(default_factory=Precision)

    @property
    def numerics_id(self) -> str:
        return f"{self.name} {self.precision.weights} {self.precision.kv}"


@dataclass(frozen=True, slots=True)
class Sources:
    """What a file may name beside the tables. calibration: the cost model in such a file; shape: of a checkpoint;
    hardware: of the table or of a file, by its name and the place of the field; topology, acceptance: in such a file.
    All raise ConfigError."""

    calibration: Callable[[str], CostModel]
    shape: Callable[[str], ModelShape]
    hardware: Callable[[str, str], Hardware] = hardware_named
    topology: Callable[[str], Topology] = no_topology
    acceptance: Callable[[str], Acceptance] = no_acceptance


def read_model_section(fields: Fields, sources: Sources) -> Model:
    """From `[model]`: name (of the table), checkpoint, or the figures of `[model.shape]`; precisions."""
    weights = fields.text("precision", "bf16", among=tuple(WEIGHT_BYTES))
    kv = fields.text("kv_precision", "bf16", among=tuple(KV_BYTES))
    ways = [each for each in ("name", "checkpoint", "shape") if fields.has(each)]
    if "checkpoint" in ways and len(ways) > 1:
        raise fields.error("checkpoint", f"a model is named once; take {ways[0]} out, or this")
    shape: ModelShape | None = None
    name = fields.text("name", "model")
    if "shape" in ways:
        shape = read_model(fields.table("shape"), name)
    elif "checkpoint" in ways:
        name = fields.text("checkpoint")
        shape = sources.shape(name)
    elif "name" in ways:
        shape = model_named(name, fields.at("name"))
        name = shape.name
    fields.end()
    return Model(name, shape, Precision(weights, kv))


def read_engine(fields: Fields, usual: Mapping[str, Any], sources: Sources) -> dict[str, Any]:
    """Settings of engines that the table has, over those there are already, by the names of EngineConfig; and, where
    something drafts, its `acceptance`."""
    found = dict(usual)
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "steps_in_flight"):
        if fields.has(name):
            found[name] = fields.count(name, least=1)
    if fields.has("max_num_waiting"):
        found["max_num_waiting"] = fields.count("max_num_waiting", least=1)
    if fields.has("enable_prefix_caching"):
        found["enable_prefix_caching"] = fields.flag("enable_prefix_caching")
    if fields.has("scheduling_policy"):
        asked = fields.text("scheduling_policy", among=tuple(SCHEDULING_POLICIES))
        found["scheduling_policy"] = SCHEDULING_POLICIES[asked]
    if fields.has("eviction_policy"):
        found["eviction_policy"] = fields.text("eviction_policy", among=tuple(EVICTIONS))
    if fields.has("speculative_config"):
        drafting = read_drafts(fields.table("speculative_config"), sources.acceptance)
        found["speculation"], found["acceptance"] = drafting
    fields.end()
    return found


@dataclass(frozen=True, slots=True)
class Group:
    """One table of workers. devices: of the hardware of each, 0 without any."""

    plans: tuple[WorkerPlan, ...]
    devices: int
    hardware: Hardware | None


def read_group(
    fields: Fields,
    model: Model,
    engine: Mapping[str, Any],
    prices: Mapping[str, float],
    first: int,
    sources: Sources,
    parts: PartsPlan,
    placer: Placer,
) -> Group:
    """From one `[[workers]]`, whose first worker is number `first` of all. Raises ConfigError, which names the
    field."""
    count = fields.count("count", 1, least=1, most=MOST_WORKERS)
    name = fields.text("name", "w")
    pool = fields.text("pool", "mixed", among=POOLS)
    cost_model, hardware, parallel = _read_cost_model(fields, model, sources)
    # Stages work on a step each, and one more is planned meanwhile.
    settings = {
        "steps_in_flight": max(STEPS_IN_FLIGHT, parallel.pipeline + 1),
        **_usual(cost_model, hardware),
        **engine,
    }
    settings = read_engine(fields.table("engine"), settings, sources)
    acceptance = settings.pop("acceptance", None)
    block_size = settings.get("block_size", BLOCK_SIZE)
    num_blocks, token_bytes = _read_kv(fields, model, cost_model, block_size)
    settings.setdefault("max_model_len", min(LONGEST, num_blocks * block_size))
    config = EngineConfig(
        groups=full_groups(num_blocks, round(token_bytes * block_size)),
        numerics_id=model.numerics_id,
        chosen_experts=_chosen(model, cost_model),
        **settings,
    )
    devices = parallel.num_devices if hardware is not None else 0
    price = _read_price(fields, hardware, prices) * max(1, devices)
    weight_bytes = model.shape.weight_bytes(model.precision.weights) if model.shape is not None else 0.0
    cold = read_cold(fields, parts, weight_bytes)
    # The first life is warm unless it is said otherwise.
    start_s = fields.number("start_s", 0.0)
    threads = fields.count("threads", 1, least=1)
    num_gpus = 0 if hardware is not None and hardware.is_cpu else devices
    placed = placer.place(fields, num_gpus, count)
    fields.end()
    plans = tuple(
        WorkerPlan(
            f"{name}{first + number}",
            pool,
            config,
            cost_model,
            node,
            start_s,
            price,
            gpus,
            threads,
            cold,
            acceptance,
        )
        for number, (node, gpus) in enumerate(placed)
    )
    return Group(plans, devices, hardware)


def _read_cost_model(fields: Fields, model: Model, sources: Sources) -> tuple[CostModel, Hardware | None, Parallel]:
    given = [each for each in _LAWS if fields.has(each)]
    if len(given) != 1:
        what = "give one of " if not given else "what steps take is said once; keep one of "
        raise fields.error(given[-1] if given else "hardware", f"{what}{', '.join(_LAWS)}")
    parallel = Parallel(
        fields.count("tensor_parallel", 1, least=1),
        fields.count("pipeline_parallel", 1, least=1),
        fields.count("data_parallel", 1, least=1),
        fields.flag("expert_parallel"),
        fields.flag("expert_overlap"),
    )
    if given != ["hardware"]:
        for key, value, alone in zip(_SPREAD, parallel, ALONE, strict=True):
            if value != alone:
                raise fields.error(key, f"is of hardware: {given[0]} has what steps take on all devices; take it out")
    if given == ["costs"]:
        return _read_costs(fields.table("costs")), None, parallel
    if given == ["calibration"]:
        try:
            return sources.calibration(fields.text("calibration")), None, parallel
        except ConfigError as error:
            raise fields.error("calibration", error.message) from None
    if model.shape is None:
        raise ConfigError(
            "model.name: a model is needed where workers have hardware, such as llama-3-8b", param="model"
        )
    hardware = sources.hardware(fields.text("hardware"), fields.at("hardware"))
    coefficients = coefficients_named(
        fields.text("software", "usual"), variant_of(hardware, model.shape), fields.at("software")
    )
    try:
        return Roofline(model.shape, hardware, parallel, model.precision, coefficients), hardware, parallel
    except ConfigError as error:
        raise _placed(fields, error) from None


def _usual(cost_model: CostModel, hardware: Hardware | None) -> dict[str, int]:
    """The settings of engines where nobody says: of the one that a cost model was calibrated on, and what suits a
    GPU."""
    if hardware is not None and not hardware.is_cpu:
        is_large = hardware.memory_bytes >= LARGE_GPU_BYTES
        return {"max_num_batched_tokens": LARGE_GPU_BATCHED_TOKENS if is_large else GPU_BATCHED_TOKENS}
    if not isinstance(cost_model, Calibrated):
        return {}
    names = ("block_size", "max_num_seqs", "max_num_batched_tokens")
    return {name: getattr(cost_model.machine, name) for name in names if getattr(cost_model.machine, name)}


def _chosen(model: Model, cost_model: CostModel) -> float:
    """The share of a layer's experts that a token chooses, which engines fit their costs with."""
    if model.shape is not None:
        return model.shape.chosen
    if isinstance(cost_model, Calibrated):
        return cost_model.machine.chosen_experts
    return cost_model.chosen if isinstance(cost_model, Costs) else 0.0


def _read_costs(fields: Fields) -> Costs:
    """Coefficients, in seconds, and a share."""
    seconds = {name: fields.number(name, 0.0) for name in Costs._fields if name != "chosen"}
    costs = Costs(**seconds, chosen=fields.number("chosen", 0.0, most=1.0))
    fields.end()
    if not costs.is_known:
        raise fields.error("step_s", "a step takes time; give step_s, row_s or token_s")
    return costs


def _read_kv(fields: Fields, model: Model, cost_model: CostModel, block_size: int) -> tuple[int, float]:
    """Blocks of KV, and the bytes of a token."""
    token_bytes = model.shape.kv_bytes(model.precision.kv) if model.shape is not None else 0.0
    token_bytes = fields.number("kv_token_bytes", token_bytes)
    most = 0
    if isinstance(cost_model, Roofline) and cost_model.hardware.memory_bytes:
        share = fields.number("memory_share", 0.9, most=1.0, is_open=True)
        try:
            most = cost_model.num_kv_blocks(block_size, share)
        except ConfigError as error:
            raise _placed(fields, error) from None
    has_blocks, has_bytes = fields.has("kv_blocks"), fields.has("kv_cache_memory_bytes")
    if has_blocks and has_bytes:
        raise fields.error("kv_blocks", "KV is sized once; keep this or kv_cache_memory_bytes")
    if has_blocks:
        num_blocks, name = fields.count("kv_blocks", least=1), "kv_blocks"
    elif has_bytes:
        name = "kv_cache_memory_bytes"
        size = fields.size(name, least=1)
        if not token_bytes:
            raise fields.error("kv_token_bytes", "is needed to tell how many blocks that memory holds")
        num_blocks = int(size // (token_bytes * block_size))
        if not num_blocks:
            raise fields.error(name, f"a block takes {token_bytes * block_size:.0f} bytes; give more", Infeasible)
    elif most:
        return most, token_bytes
    elif (
        isinstance(cost_model, Calibrated)
        and cost_model.machine.num_blocks
        and block_size == cost_model.machine.block_size
    ):
        return cost_model.machine.num_blocks, token_bytes
    else:
        raise fields.error("kv_blocks", "is needed where no hardware says how much memory there is")
    if most and num_blocks > most:
        raise fields.error(name, f"{num_blocks} blocks do not fit beside the weights; {most} do", Infeasible)
    return num_blocks, token_bytes


def _read_price(fields: Fields, hardware: Hardware | None, prices: Mapping[str, float]) -> float:
    """Dollars an hour of a device, or of a worker without one; 0.0 where it is not known."""
    if fields.has("price_hour_usd"):
        return fields.number("price_hour_usd", is_open=True)
    if hardware is None:
        return 0.0
    return prices.get(hardware.name, hardware.price_hour_usd)


def _placed(fields: Fields, error: ConfigError) -> ConfigError:
    """The error of a cost model, at its place in the file."""
    where, _, what = error.message.partition(": ")
    return fields.error(_PLACES.get(where, "hardware"), what, type(error))
