"""A load of bench on a simulated service: the plan, the rules and the figures are those of a live run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tokenmill.bench.load import datasets
from tokenmill.bench.load.datasets import Lengths
from tokenmill.bench.load.material import token_material
from tokenmill.bench.load.plan import Call, Drawn, Literal, Message, Plan, Reply
from tokenmill.bench.load.retries import EarlyStop, RetryPolicy
from tokenmill.bench.load.run import Load
from tokenmill.bench.load.schedule import Schedule
from tokenmill.bench.result import Run
from tokenmill.cluster.admission import BoundedWait
from tokenmill.cluster.gateway import Gateway
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.plan.client import REFUSAL_S
from tokenmill.plan.config import Config
from tokenmill.plan.evaluate import Evaluation, evaluate
from tokenmill.plan.play import About, simulate
from tokenmill.plan.prompts import PromptWriter
from tokenmill.plan.sweep import repeats
from tokenmill.sim.deployment import Deployment, WorkerPlan
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.service import Service

CONFIG = EngineConfig(groups=full_groups(512), max_model_len=4096, max_num_batched_tokens=256, max_num_seqs=16)
COSTS = Costs(step_s=0.01, token_s=0.0001)
MakePlan = Callable[[int, int], Plan]


def workers_of(num: int) -> tuple[WorkerPlan, ...]:
    return tuple(WorkerPlan(f"w{number}", "mixed", CONFIG, COSTS) for number in range(num))


def begin(num_workers: int = 1, set_up: Callable[[Gateway], None] = lambda gateway: None) -> Any:
    def made(loop: VirtualLoop, seed: int) -> Service:
        return Service(Deployment(workers_of(num_workers)), loop, seed=seed, set_up=set_up)

    return made


def load(schedule: Schedule, num: int, plan: MakePlan | None = None, **rest: Any) -> Load:
    make = plan or (lambda num, seed: datasets.random_prompts(num, seed, Lengths(64, 8, 0.5)))
    return Load(
        lambda num, seed, rate: make(num, seed), lambda seed, how: token_material(seed, 1, 9), schedule, num, 3, **rest
    )


def played(schedule: Schedule, num: int, plan: MakePlan | None = None, about: About | None = None, **rest: Any) -> Run:
    return simulate(begin(), load(schedule, num, plan, **rest), about or About()).run


def test_an_open_loop_is_measured_by_benchs_definitions() -> None:
    """Every request has all its tokens, counted from when it was due; nothing was late."""
    run = played(Schedule(request_rate=20.0), 200, objectives={"ttft_s": 0.5})
    assert (run.num_requests, run.num_ok) == (200, 200) and run.slo.attainment == 1.0
    assert run.output_tokens == sum(row.wanted_output_tokens for row in run.requests)
    assert run.input_tokens == sum(row.wanted_input_tokens or 0 for row in run.requests)
    assert run.lateness_s.max == pytest.approx(0.0, abs=1e-6)
    for row in run.requests:
        assert row.event_s is not None and len(row.event_s) == row.output_tokens
        assert row.event_s == sorted(row.event_s) and row.event_s[0] >= 0.01
    assert not run.warnings and run.endpoint["simulated"] and run.client.cpu_s == 0.0
    assert run.timeline and sum(bucket.output_tokens for bucket in run.timeline) == run.output_tokens


def test_equal_seeds_are_equal_results() -> None:
    """To the last digit of the JSON; another seed is another load."""
    first, again = (played(Schedule(request_rate=20.0), 50).to_json() for _ in range(2))
    assert json.dumps(first) == json.dumps(again)
    other = simulate(begin(), replace(load(Schedule(request_rate=20.0), 50), seed=4), About()).run
    assert other.dataset["plan_digest"] != first["dataset"]["plan_digest"]


def test_a_prefix_cache_finds_what_prompts_share() -> None:
    """The groups' prefixes, and the turns before; nothing where prompts share nothing."""
    alone = played(Schedule(concurrency=4), 40)
    assert alone.prefix_hit_tokens == 0
    shared = played(
        Schedule(concurrency=4), 40, lambda num, seed: datasets.shared_prefixes(num, seed, Lengths(16, 4), 2, 128)
    )
    assert shared.prefix_hit_share is not None and shared.prefix_hit_share > 0.8

    def talk(num: int, seed: int) -> Plan:
        return datasets.conversations(num, seed, Lengths(64, 32), 4, think_time_s=1.0)

    drawn = played(Schedule(concurrency=4), 40, talk)
    quoted = played(Schedule(concurrency=4), 40, talk, About(real_replies=True))
    assert drawn.input_tokens == quoted.input_tokens
    # What was answered is in the cache, what was drawn in its place is not.
    assert quoted.prefix_hit_tokens is not None and drawn.prefix_hit_tokens is not None
    assert quoted.prefix_hit_tokens > drawn.prefix_hit_tokens > 0


def test_clients_ask_again_and_leave() -> None:
    """An admission that refuses is asked again after the pause that it names; without patience nobody waits."""

    def bound(gateway: Gateway) -> None:
        gateway.admission = BoundedWait(max_open=40, max_tokens=10**6, max_wait_s=1e9)

    many = load(Schedule(request_rate=200.0), 200)
    refused = simulate(begin(set_up=bound), many, About()).run
    assert {error.kind for error in refused.errors} == {"http_429"} and 0 < refused.num_ok < 200
    again = simulate(begin(set_up=bound), replace(many, retry_policy=RetryPolicy(50)), About()).run
    assert again.num_ok == 200 and sum(row.num_refused for row in again.requests) > 0
    left = simulate(begin(), replace(many, retry_policy=RetryPolicy(0, 0.3)), About()).run
    assert {error.kind for error in left.errors} == {"gave_up"} and 0 < left.num_ok < 200
    assert all((row.first_s or 0.0) - row.due_s <= 0.3 for row in left.requests if row.ok)


def test_clients_that_are_refused_at_once_do_not_stop_the_clock() -> None:
    """A closed loop that lasts ends also where every call is refused."""

    def shut(gateway: Gateway) -> None:
        gateway.admission = BoundedWait(max_open=1, max_tokens=10**6, max_wait_s=1e9)

    lasting = load(Schedule(concurrency=20, stop_after_s=0.2), 20, num_warmups=0, give_up=EarlyStop(1.0))
    run = simulate(begin(set_up=shut), lasting, About()).run
    assert {error.kind for error in run.errors} == {"http_429"} and run.num_ok > 0
    assert 0.2 <= run.duration_s < 0.5 and run.num_requests < 20 * 0.2 / REFUSAL_S + 20


def test_a_service_that_is_too_slow_times_out() -> None:
    """A client waits for the whole answer no longer than its timeout, as live."""
    run = played(Schedule(), 64, about=About(timeout_s=0.5))
    assert {error.kind for error in run.errors} == {"timeout"} and run.num_ok > 0


def test_repeats_are_of_other_seeds() -> None:
    """Each on a service of its own; intervals are of bench's own figures."""

    def once(config: Config, seeded: Load, repeat: int) -> Evaluation:
        return evaluate(config, seeded, repeat=repeat)

    found, services = repeats(Config(Deployment(workers_of(2))), load(Schedule(request_rate=20.0), 40), 3, once)
    assert len(services) == 3 and all(service.report.steps["w0"] for service in services)
    assert len({run.dataset["plan_digest"] for run in found.runs}) == 3
    assert found.pooled.num_requests == 120 and found.intervals["ttft_s.mean"].mean > 0


def test_equal_parts_are_equal_tokens() -> None:
    """The longer of two begins with the shorter; keys, seeds and texts that differ are other tokens."""

    def tokens(writer: PromptWriter, *parts: Drawn | Literal | Reply) -> tuple[int, ...]:
        return writer.write(Call(0, (Message("user", parts),), 1), lambda index: None).prompt

    writer = PromptWriter(1)
    long = tokens(writer, Drawn("a", 100))
    assert tokens(PromptWriter(1), Drawn("a", 37)) == long[:37] == tokens(writer, Drawn("a", 37))
    assert tokens(PromptWriter(1), Drawn("a", 37), Drawn("a", 100))[37:] == long
    assert len({long, tokens(writer, Drawn("b", 100)), tokens(PromptWriter(2), Drawn("a", 100))}) == 3
    assert not writer.has_guessed
    first, second = (tokens(writer, Literal(text)) for text in ("x" * 40 + "one", "x" * 40 + "two"))
    assert first[:10] == second[:10] and first != second and len(first) == 11 and writer.has_guessed
    assert tokens(writer, Reply(7, 5)) == tokens(writer, Drawn("reply/7", 5))
    answers = PromptWriter(1, is_scripted=False, answered=lambda index: (1,) * index)
    assert tokens(answers, Drawn("a", 2), Reply(3, 5)) == (*long[:2], 1, 1, 1)


def test_a_lean_run_has_the_same_figures() -> None:
    """All but the rows and ITL are equal to the last digit; ITL is known to a two-thousandth, its mean exactly."""

    def talk(num: int, seed: int) -> Plan:
        return datasets.conversations(num, seed, Lengths(64, 8, 0.5), 3, think_time_s=2.0)

    rest: dict[str, Any] = {"objectives": {"ttft_s": 0.018, "itl_s": 0.02}, "retry_policy": RetryPolicy(0, 0.025)}
    whole = played(Schedule(request_rate=0.8), 300, talk, **rest)
    lean = played(Schedule(request_rate=0.8), 300, talk, is_lean=True, **rest)
    assert 0 < (whole.slo.attainment or 0.0) < 1 and whole.num_failed > 0 and not lean.requests
    kept, other = whole.to_json(), lean.to_json()
    for name in ("requests", "itl_s", "timeline", "client"):
        kept.pop(name), other.pop(name)
    assert kept == other
    assert lean.client.num_events == whole.client.num_events
    assert lean.itl_s.mean == pytest.approx(whole.itl_s.mean) and lean.itl_s.num == whole.itl_s.num
    assert lean.itl_s.p99 == pytest.approx(whole.itl_s.p99, rel=1e-3)
    assert [bucket.output_tokens for bucket in lean.timeline] == [bucket.output_tokens for bucket in whole.timeline]
