"""Policies of a simulated service, by name and from a file: the engines and the gateway that it has are asked."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.bench.load.options import add_serve_arguments, make_load
from tokenmill.cli.simulate.command import add_policy_argument
from tokenmill.cluster.gateway import Gateway
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.errors import ConfigError
from tokenmill.plan.play import About, Simulated, digest_of, simulate
from tokenmill.plan.policies import KINDS, NAMES, read_policies
from tokenmill.sim.deployment import Deployment, WorkerPlan
from tokenmill.sim.service import Service
from tokenmill.sim.tier_plan import TierSpec, TierSpecs

CONFIG = EngineConfig(full_groups(400), max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=256)
COSTS = Costs(step_s=0.01, token_s=0.0002)
DEPLOYMENT = Deployment(tuple(WorkerPlan(f"w{number}", "mixed", CONFIG, COSTS) for number in range(3)))
FILE = '''
from dataclasses import dataclass

from tokenmill.cluster.routing import Route


class Last:
    """All go to the worker that joined last."""

    uses_keys = False

    def choose(self, request, links, now):
        return Route(links[max(links)], "mine")

    def leave(self, link):
        pass

    def note_fetch(self, num_tokens, took_s):
        pass


@dataclass(frozen=True)
class LongAnswers:
    """The most tokens first."""

    summary: str = "most tokens to draw"
    num_refreshed: int = 0
    patience: int = 0

    def due(self, waiting):
        return -waiting.request.max_tokens


class OneAtATime:
    def judge(self, newcomer, calls, now):
        from tokenmill.core.policy import Refusal, Verdict

        return Verdict(Refusal("busy", "One at a time", 1.0) if calls.num_open else None)
'''


def play(*policies: str, load: str = "--num-prompts 40 --random-range-ratio 0.9") -> Simulated[Service]:
    chosen = read_policies(policies)
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    flags = ["--url", "http://h", "--num-warmups", "0", *load.split()]
    wanted = make_load(parser.parse_args(flags), flags, None)

    def set_up(gateway: Gateway) -> None:
        gateway.router.choose_by("least_load")
        chosen.set_up(gateway)

    deployment = chosen.deployment(DEPLOYMENT)
    return simulate(lambda loop, seed: Service(deployment, loop, seed=seed, set_up=set_up), wanted, About())


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE, "utf8")
    return str(path)


def test_routing_by_name_and_from_a_file(file: str) -> None:
    usual, turns, last = play(), play("round_robin"), play(f"{file}:Last")
    assert set(usual.service.report.reasons) == {"load"} and set(turns.service.report.reasons) == {"turn"}
    assert set(last.service.report.reasons) == {"mine"}
    steps = last.service.report.steps
    assert steps["w2"] and not steps["w0"] and not steps["w1"]
    assert last.run.num_ok == usual.run.num_ok == 40


def test_engines_are_served_in_the_order_of_a_file(file: str) -> None:
    """All come at once to one worker with four rows: those that draw most are first."""
    found = play(f"{file}:Last", f"scheduling={file}:LongAnswers")
    rows = sorted(found.run.requests, key=lambda row: row.first_s or 0.0)
    drawn = [row.output_tokens or 0 for row in rows]
    assert sum(drawn[:8]) / 8 > 1.5 * sum(drawn[-8:]) / 8, drawn


def test_admission_from_a_file(file: str) -> None:
    found = play(f"{file}:OneAtATime")
    assert found.service.report.refused["busy"] == 39 and found.run.num_ok == 1


def test_a_policy_changes_when_and_never_what(file: str) -> None:
    runs = [play(*each).run for each in ((), ("least_load",), (f"{file}:Last",))]
    answers = [[row.output_tokens for row in sorted(run.requests, key=lambda row: row.index)] for run in runs]
    assert answers[0] == answers[1] == answers[2]
    digests = [digest_of(run.requests) for run in runs]
    assert digests[0] == digests[1] != digests[2], "the default of this test is least_load"
    first, *rest = runs[0].requests
    assert digest_of([replace(first, first_s=1.0), *rest]) != digests[0]


def test_every_kind_has_names(file: str) -> None:
    assert sorted(NAMES) == sorted(kind.name for kind in KINDS)
    chosen = read_policies(["eviction=lru", "always", "migration=off", "second-use"])
    wanted = {"eviction": "lru", "disaggregation": "always", "migration": "off", "tier-admission": "second-use"}
    assert chosen.facts() == wanted
    assert read_policies(["priority"]).config(CONFIG).scheduling_policy == "fcfs"
    parser = argparse.ArgumentParser()
    add_policy_argument(parser)
    assert parser.parse_args(["--policy", "lpm", "--policy", file]).policy == ["lpm", file]


BAD = {
    "least_loaded": "--policy must be one of .*Did you mean 'least_load'",
    "lru": "--policy lru is ambiguous: say eviction=lru or tiering=lru",
    "on": "ambiguous: say migration=on or replication=on",
    "eviction=fifo": "--policy eviction=... must be one of lru, lfu, recompute-seconds",
    "evicting=lru": "The kind in --policy KIND=NAME must be one of .*Did you mean 'eviction'",
    "none.py": "--policy none.py: the file cannot be read",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_policy_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match=BAD[text]) as told:
        read_policies([text])
    assert told.value.param == "policy" and "\n" not in told.value.message


def test_one_policy_of_a_kind_and_of_what_there_is() -> None:
    with pytest.raises(ConfigError, match="two routing policies, least_load and round_robin"):
        read_policies(["least_load", "round_robin"])
    with pytest.raises(ConfigError, match=r"needs \[\[tiers\]\]"):
        read_policies(["tiering=lru"]).deployment(DEPLOYMENT)


def test_policies_of_tiers_reach_the_tiers_that_have_them() -> None:
    """Host memory and disks replace, what is below host memory admits; others stay as the file says."""
    kinds = [
        TierSpec(kind, 1 << 30, 1e9, 1e9, 0.0, policy="cost", admission="all") for kind in ("host", "disk", "remote")
    ]
    parts = replace(DEPLOYMENT.parts, tiers=TierSpecs(tuple(kinds)))
    chosen = read_policies(["tiering=lru", "tier-admission=second-use"])
    made = chosen.deployment(replace(DEPLOYMENT, parts=parts)).parts.tiers
    assert made is not None
    assert [tier.policy for tier in made.tiers] == ["lru", "lru", "cost"]
    assert [tier.admission for tier in made.tiers] == ["all", "second-use", "second-use"]
