"""The cluster's file: what it says becomes a deployment, and what cannot be is one line that names the field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.core.cost import Work
from tokenmill.core.errors import ConfigError
from tokenmill.core.step_records import Machine
from tokenmill.core.terms import Terms
from tokenmill.plan.config import sources_beside, with_changes
from tokenmill.sim.calibrated import Calibrated, Curve
from tokenmill.sim.cluster_file import NO_SOURCES, parse, read_deployment
from tokenmill.sim.roofline import Roofline

EXAMPLES = sorted((Path(__file__).parents[2] / "deploy/simulate").glob("*.toml"))

USUAL = """
[model]
name = "llama-3-8b"
[[workers]]
count = 2
hardware = "h100-sxm"
"""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_read(path: Path) -> None:
    deployment = read_deployment(path.read_text(), sources_beside(path.parent))
    assert deployment.workers and deployment.facts and deployment.load


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


def test_a_step_of_a_gpu_has_the_tokens_of_one() -> None:
    for hardware, num_tokens in (("h100-sxm", 8192), ("l40s", 2048)):
        deployment = read_deployment(USUAL.replace("h100-sxm", hardware))
        assert {each.config.max_num_batched_tokens for each in deployment.workers} == {num_tokens}
    said = read_deployment(USUAL + "[engine]\nmax_num_batched_tokens = 77")
    assert said.workers[0].config.max_num_batched_tokens == 77


def test_what_is_said_is_there() -> None:
    deployment = read_deployment(
        USUAL
        + """
        [workers.engine]
        max_num_seqs = 7
        [[workers]]
        name = "p"
        pool = "prefill"
        costs = { step_s = 0.01, token_s = 1e-4 }
        kv_blocks = 100
        price_hour_usd = 3
        cold_start_s = 20
        start_s = 3
        [engine]
        max_num_seqs = 32
        max_num_batched_tokens = 2048
        enable_prefix_caching = false
        scheduling_policy = "priority"
        [router]
        routing_policy = "least_load"
        disaggregation = "never"
        [admission]
        shares_rows = false
        [slo]
        ttft_ms = 500
        [tenants.gold]
        weight = 2
        [prices]
        h100 = 2.5
        [network]
        latency_s = 0.001
        [load]
        request_rate = 3.0
        """
    )
    one, two, prefill = deployment.workers
    assert [each.name for each in deployment.workers] == ["w0", "w1", "p2"]
    assert (one.config.max_num_seqs, prefill.config.max_num_seqs) == (7, 32)
    assert two.config.max_num_batched_tokens == 2048 and not two.config.enable_prefix_caching
    assert two.config.scheduling_policy == "fcfs"
    assert isinstance(one.cost_model, Roofline) and prefill.cost_model.predict(Work(1, 10, 0)) == pytest.approx(0.011)
    assert one.config.groups[0].bytes_per_block == 16 * 131072  # 32 layers, 8 KV heads of 128, two of 16 bits
    assert prefill.config.groups[0].num_blocks == 100 and prefill.pool == "prefill"
    assert prefill.cold is not None and prefill.cold.begin_s == 20 and prefill.start_s == 3
    assert deployment.price_per_h == 2 * 2.5 + 3
    gateway = deployment.gateway
    assert gateway is not None and gateway.routing_policy == "least_load" and gateway.disaggregation == "never"
    assert not gateway.shares_rows
    assert gateway.terms["gold"].ttft_s == 0.5 and gateway.terms["gold"].weight == 2 and gateway.terms[""].ttft_s == 0.5
    assert deployment.shape.latency_s == 0.001 and deployment.load == {"request_rate": 3.0}


PLACED = """
[topology]
[[topology.nodes]]
name = "n"
count = 3
gpus = 8
"""


def test_workers_take_the_gpus_of_nodes_in_turn() -> None:
    """Two of four devices on a node."""
    text = USUAL.replace("count = 2", "count = 3\ntensor_parallel = 4") + PLACED
    deployment = read_deployment(text)
    assert deployment.parts.topology is not None
    placed = [(each.node, each.gpus) for each in deployment.workers]
    names = list(deployment.parts.topology.nodes)
    assert placed == [(names[0], (0, 1, 2, 3)), (names[0], (4, 5, 6, 7)), (names[1], (0, 1, 2, 3))]
    with pytest.raises(ConfigError, match=r"workers\[0\].count: of 25 workers"):
        read_deployment(USUAL.replace("count = 2", "count = 25") + PLACED)


def test_who_is_no_known_tenant_has_what_all_may_expect() -> None:
    """Requests of no tenant and of one without a table have `[slo]`; what a request says itself goes before."""
    gateway = read_deployment(USUAL + "[slo]\nttft_ms = 500\n[tenants.gold]\nttft_ms = 100\n").gateway
    assert gateway is not None
    tenants = ("", "other", "gold")
    found = [gateway.terms_of(Terms(tenant)) for tenant in tenants]
    assert found == [Terms("", ttft_s=0.5), Terms("other", ttft_s=0.5), Terms("gold", ttft_s=0.1)]
    own = Terms("other", ttft_s=3.0)
    assert gateway.terms_of(own) == own
    plain = read_deployment(USUAL + "[tenants.gold]\nttft_ms = 100\n").gateway
    assert plain is not None and plain.terms_of(Terms("other")) == Terms("other")


def test_a_calibration_says_what_its_engine_was() -> None:
    """Its KV and batches are the usual ones, and its front end's computing counts."""
    curve = Curve((0.0,), (1e-4,))
    machine = Machine("m", "n", "", "", 0, 32, 77, 5, 99, chosen_experts=0.25)
    cost_model = Calibrated(machine, 0.01, 0.0, 0.0, curve, curve, curve)
    sources = replace(NO_SOURCES, calibration=lambda name: cost_model)
    text = "[[workers]]\ncalibration = 'c.json'\n"
    deployment = read_deployment(text + "[engine]\nmax_num_seqs = 4", sources)
    config = deployment.workers[0].config
    assert (config.block_size, config.groups[0].num_blocks) == (32, 77)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (4, 99)
    assert deployment.parts.cores.front is cost_model and config.chosen_experts == 0.25
    costs = "[[workers]]\nkv_blocks = 9\ncosts = { step_s = 1, experts_s = 1, chosen = 0.5 }"
    assert read_deployment(costs, NO_SOURCES).workers[0].config.chosen_experts == 0.5
    other = replace(cost_model, step_s=0.5)
    sources = replace(NO_SOURCES, calibration=lambda name: other if name == "o.json" else cost_model)
    front = read_deployment(text + "[host]\ncalibration = 'o.json'", sources).parts.cores.front
    assert isinstance(front, Calibrated) and front.step_s == 0.5
    assert read_deployment(text + "kv_blocks = 9", sources).workers[0].config.groups[0].num_blocks == 9


def test_parts_are_read() -> None:
    deployment = read_deployment(
        USUAL
        + """
        [[tiers]]
        kind = "host"
        bytes = "64GiB"
        [[faults]]
        kind = "crash"
        target = "w1"
        at_s = 10
        [host]
        cores = 4
        front_token_s = 3e-5
        """
    )
    parts = deployment.parts
    assert parts.tiers is not None and parts.tiers.tiers[0].num_bytes == 64 * 2**30
    assert parts.faults[0].target == "w1" and parts.cores.cores == 4 and parts.cores.front is not None


def test_memory_bounds_the_blocks() -> None:
    """80 GiB less 10 % and 2 GiB, less 15 GiB of weights, at 128 KiB a token."""
    (one, _) = read_deployment(USUAL).workers
    assert 22_000 < one.config.groups[0].num_blocks < 29_000
    smaller = read_deployment(USUAL + 'kv_cache_memory_bytes = "1GiB"\n').workers[0]
    assert smaller.config.groups[0].num_blocks == 2**30 // (16 * 131072)


BAD = {
    "no TOML": ("[model", "is no TOML"),
    "no workers": ('[model]\nname = "llama-3-8b"', "workers: at least one"),
    "no model": ('[[workers]]\nhardware = "h100"', "model.name: a model is needed"),
    "too many workers": (USUAL.replace("count = 2", "count = 1000000000"), "workers[0].count: 100000 at most"),
    "unknown section": (USUAL + "[enginee]\nblock_size = 16", "enginee: no such key; did you mean 'engine'?"),
    "unknown key": (USUAL + "[engine]\nmax_seqs = 16", "engine.max_seqs: no such key; did you mean 'max_num_seqs'?"),
    "unknown model": (USUAL.replace("3-8b", "3-9b"), "model.name: 'llama-3-9b' is unknown; did you mean"),
    "unknown hardware": (USUAL.replace("h100-sxm", "h1000"), "workers[0].hardware: 'h1000' is unknown; did you mean"),
    "unknown policy": (USUAL + '[router]\nrouting_policy = "kv"', "router.routing_policy: 'kv' is unknown"),
    "wrong type": (USUAL + '[engine]\nblock_size = "16"', "engine.block_size: a whole number"),
    "no workers in a group": (USUAL.replace("count = 2", "count = 0"), "workers[0].count: a whole number of 1 or more"),
    "does not fit": (USUAL.replace("3-8b", "3-405b"), "workers[0].hardware: llama-3-405b takes"),
    "too much KV": (USUAL + "kv_blocks = 1000000", "workers[0].kv_blocks: 1000000 blocks do not fit"),
    "KV twice": (USUAL + 'kv_blocks = 10\nkv_cache_memory_bytes = "1GiB"', "workers[0].kv_blocks: KV is sized once"),
    "heads": (USUAL + "tensor_parallel = 3", "workers[0].tensor_parallel: llama-3-8b has 32 heads"),
    "halves": (USUAL + "expert_overlap = true", "workers[0].expert_overlap: only the all-to-all of experts"),
    "costs of several devices": (
        "[[workers]]\ncosts = { step_s = 1 }\nkv_blocks = 9\ntensor_parallel = 2",
        "workers[0].tensor_parallel: is of hardware: costs has what steps take on all devices",
    ),
    "overlap of a calibration": (
        "[[workers]]\ncalibration = 'c.json'\nkv_blocks = 9\nexpert_overlap = true",
        "workers[0].expert_overlap: is of hardware: calibration has",
    ),
    "two laws": (USUAL + "costs = { step_s = 1 }", "workers[0].costs: what steps take is said once"),
    "no law": (USUAL + "[[workers]]\ncount = 1", "workers[1].hardware: give one of hardware, calibration, costs"),
    "no KV": (USUAL + "[[workers]]\ncosts = { step_s = 1 }", "workers[1].kv_blocks: is needed"),
    "nothing costs": (USUAL + "[[workers]]\ncosts = {}\nkv_blocks = 9", "workers[1].costs.step_s: a step takes time"),
    "more than all experts": (
        "[[workers]]\ncosts = { step_s = 1, experts_s = 1, chosen = 2 }\nkv_blocks = 9",
        "workers[0].costs.chosen: a number that is 0 or more and at most 1",
    ),
    "prefill alone": (USUAL + 'pool = "prefill"', "workers[0].pool: workers of pool 'prefill' need some"),
    "unlike blocks": (
        USUAL + '[[workers]]\nhardware = "h100"\n[workers.engine]\nblock_size = 32',
        "workers[1].engine.block_size: workers[1] would keep other blocks",
    ),
    "no price": (USUAL.replace("h100-sxm", "a40") + "[prices]", "prices.a40: no price of a40 is known"),
    "price of nothing": (USUAL + "[prices]\nh10 = 1", "prices.h10: 'h10' is unknown"),
    "negative": (USUAL + "[network]\nlatency_s = -1", "network.latency_s: a number that is 0 or more"),
    "class": (USUAL + "[slo]\npriority_class = 5", "slo.priority_class: from 0 to 2"),
    "tier without room": (
        USUAL + '[[tiers]]\nkind = "host"\nbytes = "1MiB"',
        "tiers[0].bytes: a block of this model's KV takes 2097152 bytes",
    ),
    "unknown node": (USUAL + 'node = "x"' + PLACED, "workers[0].node: 'x' is unknown"),
    "remote tier on no node": (
        USUAL + '[[tiers]]\nkind = "host"\nbytes = "64GiB"\n[[tiers]]\nkind = "remote"\nbytes = "1TB"\nnode = "store"',
        "tiers[1].node: 'store' needs [topology], which has the nodes",
    ),
    "weights of no node": (
        USUAL + 'weights_node = "store"',
        "workers[0].weights_node: needs [topology], which has the nodes",
    ),
    "weights of no model": (
        "[[workers]]\ncosts = { step_s = 1 }\nkv_blocks = 9\nweights_bytes_s = 2e9",
        "workers[0].weights_bytes_s: needs a [model]",
    ),
    "unknown fault": (
        USUAL + '[[faults]]\nkind = "crush"',
        "faults[0].kind: 'crush' is unknown; did you mean 'crash'?",
    ),
    "calibration of a host": (
        USUAL + '[host]\ncalibration = "none.json"',
        "host.calibration: calibrations cannot be read here",
    ),
    "front end twice": (
        USUAL + '[host]\ncalibration = "none.json"\nfront_token_s = 1e-5',
        "host.calibration: says what the front end computes",
    ),
    "calibration": (
        '[[workers]]\ncalibration = "none.json"\nkv_blocks = 9',
        "workers[0].calibration: calibrations cannot be read here",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_one_line(name: str) -> None:
    text, wanted = BAD[name]
    with pytest.raises(ConfigError) as raised:
        read_deployment(text)
    assert wanted in raised.value.message and "\n" not in raised.value.message


def test_settings_are_changed_by_their_dotted_names() -> None:
    table = parse(USUAL)
    changed = with_changes(table, {"workers[0].count": 5, "engine.max_num_seqs": 9})
    assert len(read_deployment(changed).workers) == 5 and read_deployment(changed).workers[0].config.max_num_seqs == 9
    assert len(read_deployment(table).workers) == 2
    for key in ("workers[1].count", "workers.count", "model.name.more", "workers[x].count"):
        with pytest.raises(ConfigError):
            with_changes(table, {key: 1})
