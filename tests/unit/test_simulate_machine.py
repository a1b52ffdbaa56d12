"""Hardware and software that a cluster's file names: tables, and machines by the kernels' benchmark of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenmill.core.cost import Costs, Work
from tokenmill.core.errors import ConfigError
from tokenmill.plan.config import read_machine
from tokenmill.sim.cluster_file import read_deployment
from tokenmill.sim.hardware import hardware_named
from tokenmill.sim.models import model_named
from tokenmill.sim.roofline import Roofline, Variant, coefficients_named
from tokenmill.sim.worker_file import Sources

SOURCES = Sources(lambda path: Costs(1.0), lambda path: model_named("dbrx"), read_machine)
MODEL = '[model]\nname = "qwen3-0.6b"\nprecision = "q4_1"\n[[workers]]\n'


@pytest.fixture
def report(tmp_path: Path) -> str:
    """Of a machine of 400 GOP/s and 25 GB/s."""
    path = tmp_path / "kernels.json"
    cases = [{"num_bytes": 1 << 28, "bandwidths": [2.5e10]}]
    path.write_text(json.dumps({"kind": "kernels", "peaks": {"int8": 4e11, "f32": 1e11}, "cases": cases}))
    return str(path)


def test_a_measured_machine_serves_in_a_cluster(report: str) -> None:
    """Its bandwidth makes its steps; how much KV it keeps has to be said."""
    text = f'{MODEL}hardware = "{report}"\nkv_blocks = 500\n'
    (worker,) = read_deployment(text, SOURCES).workers
    decode_s = worker.cost_model.predict(Work(1, 1, 0, 0, 1))
    read_s = model_named("qwen3-0.6b").num_parameters * 20 / 32 / 2.5e10
    assert read_s < decode_s < 2 * read_s
    with pytest.raises(ConfigError, match=r"workers\[0\].kv_blocks: is needed where no hardware says"):
        read_deployment(text.replace("kv_blocks = 500", ""), SOURCES)


def test_a_measured_machine_takes_no_gpu(report: str) -> None:
    """It stands on nodes that have none, and its price is told where it can be given."""
    text = f'{MODEL}count = 2\nhardware = "{report}"\nkv_blocks = 500\n[[topology.nodes]]\ncount = 2\n'
    assert [(each.node, each.gpus) for each in read_deployment(text, SOURCES).workers] == [("n0", ()), ("n1", ())]
    with pytest.raises(ConfigError, match=r"workers\[0\].price_hour_usd: no price of \S+kernels.json is known"):
        read_deployment(f"{text}[prices]\n", SOURCES)
    priced = text.replace("kv_blocks", "price_hour_usd = 0.5\nkv_blocks")
    assert read_deployment(f"{priced}[prices]\n", SOURCES).price_per_h == 1.0


def test_software_reaches_what_was_fitted_to_it() -> None:
    """`software` takes its coefficients; a name that is not there is told at its place."""
    text = '[model]\nname = "llama-3-8b"\n[[workers]]\nhardware = "a100"\nsoftware = "lmdeploy"\n'
    (worker,) = read_deployment(text, SOURCES).workers
    model, device = model_named("llama-3-8b"), hardware_named("a100")
    work = Work(8, 8, 8000, 8000, 8)
    assert worker.cost_model.predict(work) == Roofline(
        model, device, coefficients=coefficients_named("lmdeploy", Variant())
    ).predict(work)
    assert worker.cost_model.predict(work) != Roofline(model, device).predict(work)
    with pytest.raises(ConfigError, match=r"workers\[0\].software: 'lmdeplo' is unknown; did you mean 'lmdeploy'"):
        read_deployment(text.replace("lmdeploy", "lmdeplo"), SOURCES)
    with pytest.raises(ConfigError, match=r"workers\[0\].software: no such key"):
        read_deployment(f'{MODEL}costs = {{ step_s = 0.1 }}\nkv_blocks = 9\nsoftware = "usual"\n', SOURCES)


def test_reports_that_are_none_are_told_at_their_place(tmp_path: Path) -> None:
    """A file of something else, and one that is not there."""
    (tmp_path / "load.json").write_text('{"kind": "load"}')
    for name, message in (("load.json", "is no report of `tokenmill bench kernels"), ("none.json", "cannot be read")):
        with pytest.raises(ConfigError, match=rf"workers\[0\].hardware: .*{name} {message}"):
            read_machine(str(tmp_path / name), "workers[0].hardware")
    assert read_machine("h100") is hardware_named("h100")
