"""Fits a cost model of steps to what clients saw of a server (`token_times`), and replays runs by it: what the clients
would have seen of a simulated server with this model. Of the server's settings nothing can be seen from outside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any, NamedTuple

from ...bench.load.fidelity import Fidelity, compare
from ...bench.load.recorded_load import RecordedLoad
from ...core.config import BLOCK_SIZE
from ...core.errors import ConfigError
from ...core.step_records import LogFacts, Machine
from ...sim.calibrated import Beside, Calibrated, Line
from ...sim.cluster_file import read_deployment
from ...sim.worker_file import Sources
from ..fidelity import on_deployment
from .cost_model import TOKEN_KNOTS as USUAL_KNOTS
from .cost_model import fit_cost_model
from .observed import Observed
from .token_times import read_run, steps_of, ways_of

Json = dict[str, Any]

LEAST_STEPS = 100
TOKEN_KNOTS = tuple(sorted({*USUAL_KNOTS, *range(8)}))
"""Loads of few clients draw few rows, and what a kernel takes for each number of them differs."""
NUM_BLOCKS = 65536
"""Of KV: how much a server has cannot be seen; this much is never short."""
READ_S = 0.0002
"""Before the next of several calls that come at once is with the engine: an idle one begins with the first."""


@dataclass(frozen=True, slots=True)
class Live:
    """A run of a live server: its result, its load, and the file that it is of."""

    name: str
    result: Json
    load: RecordedLoad


class Fit(NamedTuple):
    """cost_model, and what it says of each run that it was fitted to."""

    cost_model: Calibrated
    errors: tuple[Fidelity, ...]


def replay(cost_model: Calibrated, live: Live, tables: Mapping[str, Any]) -> Json:
    """The result of the load on a service with this cost model. tables: of a cluster's file, of which any name of a
    calibration is it."""

    def shape(name: str) -> Any:
        raise AssertionError(name)

    return on_deployment(read_deployment(tables, Sources(lambda name: cost_model, shape)), {})(live.load, 1.0).to_json()


def errors_of(cost_model: Calibrated, live: Live, tables: Mapping[str, Any]) -> Fidelity:
    return compare(live.name, [live.result], [replay(cost_model, live, tables)])


def fit(lives: Sequence[Live], machine: Machine, tables: Mapping[str, Any]) -> Fit:
    """The cost model of the server that these runs were made on, each a span of time of its own. Raises ConfigError for
    runs that show no steps."""
    facts = LogFacts(**{each.name: getattr(machine, each.name) for each in fields(Machine)})
    seen = [steps_of(read_run(live.result, live.name), machine.max_num_batched_tokens) for live in lives]
    spans = [[Observed(step) for step in each.steps] for each in seen if each.steps]
    num = sum(map(len, spans))
    if num < LEAST_STEPS:
        told = f"The runs show {num} steps from begin to end; a law needs {LEAST_STEPS}."
        raise ConfigError(f"{told} Measure several clients at once, for longer.", param="black_box")
    cost_model = fit_cost_model(spans, facts, TOKEN_KNOTS).cost_model
    ways_s = [way_s for each in seen for way_s in ways_of(each.alone, cost_model)]
    # The same for all: else short prompts that come at once with long ones would pass them.
    front = Line(max(READ_S, median(ways_s or [0.0])), num=len(ways_s))
    # Calls are read one after the other; what they are under way besides passes, and takes no core.
    cost_model = replace(cost_model, front=front, beside=Beside(request_s=READ_S, num=max(1, front.num)))
    return Fit(cost_model, tuple(errors_of(cost_model, live, tables) for live in lives))


def machine_of(lives: Sequence[Live], max_num_seqs: int | None, max_num_batched_tokens: int) -> Machine:
    """Raises ConfigError for runs of different servers."""
    endpoints = {(str(live.result["endpoint"].get("url")), str(live.result["endpoint"].get("model"))) for live in lives}
    if len(endpoints) > 1:
        (url, model), (other_url, other_model) = sorted(endpoints)[:2]
        told = f"The runs are of different endpoints: {model} at {url} and {other_model} at {other_url}."
        raise ConfigError(f"{told} Calibrate each alone.", param="black_box")
    most = max(round(live.result["max_in_flight"]) for live in lives)
    for value, name in ((max_num_seqs, "max-num-seqs"), (max_num_batched_tokens, "max-num-batched-tokens")):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1.", param=name.replace("-", "_"))
    return Machine(
        model=endpoints.pop()[1],
        numerics_id="black box",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=max_num_seqs or max(256, most),
        max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs or 1),
    )


def tables_of(calibration: str, machine: Machine, prefix_caching: bool) -> Json:
    """Of a cluster's file with one worker of this server's settings."""
    engine = {
        "steps_in_flight": 1,
        "scheduling_policy": "fcfs",
        "enable_prefix_caching": prefix_caching,
        "max_num_waiting": 1_000_000,
    }
    no_gateway = {"admission": "off", "max_queue_s": 0.0, "shares_rows": False}
    return {"admission": no_gateway, "workers": [{"calibration": calibration, "engine": engine}]}


def file_of(calibration: str, prefix_caching: bool) -> str:
    tables = tables_of(calibration, Machine(), prefix_caching)
    (worker,) = tables["workers"]
    lines = ["[admission]", *_lines(tables["admission"]), "", "[[workers]]", *_lines({"calibration": calibration})]
    return "\n".join([*lines, "[workers.engine]", *_lines(worker["engine"]), ""])


def _lines(table: Json) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in table.items()]
