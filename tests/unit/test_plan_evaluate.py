"""`tokenmill.plan.evaluate`: figures, a verdict on the SLO and a price; what cannot be built is a result; what is wrong
in itself is an error; the command line says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.main import main
from tokenmill.core.errors import ConfigError
from tokenmill.plan import evaluate, read_config

CPU: dict[str, Any] = {
    "workers": [{"kv_blocks": 512, "costs": {"step_s": 0.01, "token_s": 1e-4}, "price_hour_usd": 3.6}],
    "load": {"num_prompts": 40, "request_rate": 10, "random_input_len": 32, "random_output_len": 8},
}
GPU: dict[str, Any] = {"model": {"name": "llama-3-70b"}, "workers": [{"hardware": "h100"}]}
SLO = {"ttft": 200, "tpot_p90": 50}


def with_workers(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**base, "workers": [{**base["workers"][0], **changes}]}


def test_a_load_that_is_kept_up_with_meets_its_slo() -> None:
    """By the objectives of requests and the percentiles of a rate; a stricter limit is missed by the same run."""
    found = evaluate(CPU, slo=SLO)
    assert not found.infeasible and found.meets_slo and found.probe is not None and found.probe.attainment == 1.0
    assert found.run.num_ok == 40 and sum(found.service.report.steps.values())
    missed = evaluate(CPU, slo={"tpot": 5})
    assert not missed.meets_slo and missed.probe is not None and missed.probe.attainment == 0.0
    assert missed.run.output_tokens == found.run.output_tokens == 320
    assert found.cost_usd == pytest.approx(found.run.duration_s / 1000)


def test_a_queue_that_grows_meets_nothing() -> None:
    assert not evaluate(CPU, {**CPU["load"], "request_rate": 500, "num_prompts": 4000}, SLO).meets_slo


def test_a_load_of_ones_own_and_no_slo() -> None:
    found = evaluate(CPU, {"num_prompts": 5, "concurrency": 1, "random_output_len": 3})
    assert (found.run.num_requests, found.run.output_tokens) == (5, 15)
    assert found.probe is None and not found.meets_slo


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (GPU, "weights"),
        (with_workers(GPU, tensor_parallel=7), "heads"),
        (with_workers(GPU, tensor_parallel=8, kv_blocks=10_000_000), "do not fit beside the weights"),
        ({**CPU, "tiers": [{"kind": "host", "bytes": 64}], "workers": [{**CPU["workers"][0], "kv_token_bytes": 1e3}]},
         "hold none"),
        ({**with_workers(GPU, tensor_parallel=8), "topology": {"nodes": [{"name": "n0", "gpus": 4}]}}, "fit on"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_a_result(config: dict[str, Any], says: str) -> None:
    """It says why, meets nothing, costs nothing, and has no figures that could be mistaken for some."""
    found = evaluate(config, CPU["load"], SLO)
    assert says in found.infeasible and not found.meets_slo and found.cost_usd is None
    with pytest.raises(AssertionError, match=says):
        _ = found.run


@pytest.mark.parametrize(
    ("config", "load", "slo", "says"),
    [
        (with_workers(CPU, cout=2), None, None, "cout"),
        ({**GPU, "model": {"name": "llama-9"}}, None, None, "llama-9"),
        (CPU, {"request_rat": 4}, None, "did you mean request-rate"),
        (CPU, None, {"ttf": 4}, "ttf"),
        ("none.toml", None, None, "none.toml cannot be read"),
    ],
)
def test_what_is_wrong_in_itself_is_an_error(config: Any, load: Any, slo: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        evaluate(config, load, slo)


def test_the_command_line_says_the_same(tmp_path: Path) -> None:
    """Of a file with its load, by policies of one's choice."""
    path, out = tmp_path / "two.toml", tmp_path / "run.json"
    path.write_text(
        "[[workers]]\ncount = 2\nkv_blocks = 512\ncosts = { step_s = 0.01, token_s = 1e-4 }\n"
        "[load]\nnum_prompts = 30\nrequest_rate = 20\nrandom_output_len = 8\n"
    )
    assert main(["simulate", str(path), "--policy", "round_robin", "--goodput", "ttft:200", "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    run = json.loads(json.dumps(evaluate(read_config(path, policies=["round_robin"]), slo={"ttft": 200}).run.to_json()))
    assert {**told, "argv": []} == run
