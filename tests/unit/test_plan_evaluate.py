"""`tokenmill.plan.evaluate`: figures, a verdict on the SLO and a price; what cannot be built is a result; what is wrong
in itself is an error; the command line says the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.main import main
from tokenmill.core.errors import ConfigError
from tokenmill.plan import evaluate, read_config
from tokenmill.plan.load import read_load

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
        (CPU, {"num_prompts": 5, "attainment": 0}, None, "attainment is a share above 0"),
        (CPU, {"sweep_rates": [1, 2]}, None, "sweep-rates is of several runs"),
        (CPU, {"find_goodput": True}, SLO, "find-goodput is of several runs"),
        (CPU, {"lean": True, "warmup": 0.1}, None, "--lean has no --warmup"),
        ("none.toml", None, None, "none.toml cannot be read"),
    ],
)
def test_what_is_wrong_in_itself_is_an_error(config: Any, load: Any, slo: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        evaluate(config, load, slo)


@pytest.mark.parametrize("attainment", [0, -1, 1.5, float("nan")])
def test_a_share_that_cannot_be_met_is_an_error(attainment: float) -> None:
    with pytest.raises(ConfigError, match="attainment is a share above 0 and up to 1"):
        evaluate(CPU, slo=SLO, attainment=attainment)


def test_a_limit_counts_to_its_last_digit() -> None:
    found = evaluate(CPU, {"num_prompts": 5}, {"ttft": 1234.56789, "tpot_p90": 1_234_567})
    assert found.run.slo.objectives == {"ttft_s": 1234.56789 / 1000}
    assert found.load is not None and [goal.limit_s for goal in found.load.goals] == [1234.567]


def test_a_table_takes_what_the_command_line_takes() -> None:
    """The name and the share count; what is of several runs and of what is printed does nothing; all requests within
    the limit are not within a limit that half of them miss."""
    table = {**CPU["load"], "repeats": 3, "fail_above": 0.1, "min-rate": 2, "metric_percentiles": [75]}
    found = evaluate({**CPU, "load": {**table, "name": "mine"}})
    assert found.run.name == "mine" and found.run.num_requests == 40
    assert evaluate(CPU, {**table, "name": "mine"}, name="other").run.name == "other"
    ttft = {"ttft": found.run.ttft_s.p50 * 1000}
    half = {**table, "attainment": 0.25}
    assert evaluate(CPU, half, ttft).meets_slo and not evaluate(CPU, table, ttft).meets_slo
    assert not evaluate(CPU, half, ttft, attainment=0.9).meets_slo


def test_a_lean_load_has_figures_and_no_verdict() -> None:
    """Who asks for one is told; without an SLO there is none to ask for."""
    table = {**CPU["load"], "lean": True}
    found = evaluate(CPU, table, SLO)
    assert found.run.num_ok == 40 and not found.run.requests and found.run.slo.attainment == 1.0
    with pytest.raises(ConfigError, match="leave lean out"):
        _ = found.meets_slo
    assert evaluate(CPU, table).probe is None


def test_a_large_load_is_lean_unless_it_is_judged() -> None:
    for num, goodput, is_lean in ((99_999, None, False), (100_000, None, True), (100_000, ["ttft:5"], False)):
        assert read_load({"num_prompts": num}, goodput=goodput)[0].is_lean is is_lean
    assert not read_load({"num_prompts": 100_000, "lean": False})[0].is_lean


def test_a_run_that_nobody_judges_takes_any_share(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text("[[workers]]\nkv_blocks = 512\ncosts = { step_s = 0.01 }\n[load]\nnum_prompts = 5\n")
    assert main(["simulate", str(path), "--request-rate", "2", "--goodput", "ttft:500", "--attainment", "0"]) == 0


def test_a_sweep_reads_the_cluster_once(tmp_path: Path) -> None:
    """From a pipe too, which is empty when it is read again."""
    out, (end, begin) = tmp_path / "swept.json", os.pipe()
    os.write(begin, b"[[workers]]\nkv_blocks = 512\ncosts = { step_s = 0.01 }\n[load]\nnum_prompts = 5\n")
    os.close(begin)
    try:
        code = main(["simulate", f"/dev/fd/{end}", "--sweep", "workers[0].count=1,2", "--json", str(out)])
    finally:
        os.close(end)
    told = json.loads(out.read_text())
    assert code == 0 and not told.get("left_out") and [run["num_ok"] for run in told["runs"]] == [5, 5]
    assert told["runs"][1]["endpoint"]["cluster"] == f"/dev/fd/{end}"


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
