"""Whatever the settings and the mix, every request gives the tokens of its solo run (hypothesis shrinks the mix).

`run_scenario` makes the comparison, and checks conservation after every event and plan parity at the end.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.core.block import full_groups, window_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.request import Request, SamplingParams
from tokenmill.sched.budget import chunk_size
from tokenmill.sim.run import run_scenario
from tokenmill.sim.workload import EOS, Arrival, Cancellation, Scenario

MAX_MODEL_LEN = 24

# Layers that see everything, layers that see a window or one of two, in any order; pools down to sizes that refuse
# long requests.
full = st.integers(4, 24).map(lambda num_blocks: full_groups(num_blocks)[0])
local = st.builds(window_group, st.integers(1, 24), st.sampled_from([1, 2, 3, 5, 9, 24]))
configs = st.builds(
    EngineConfig,
    groups=st.one_of(st.tuples(full), st.tuples(full, local), st.tuples(local), st.tuples(local, full, local)),
    max_model_len=st.just(MAX_MODEL_LEN),
    block_size=st.sampled_from([1, 3, 4]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 20),
    enable_prefix_caching=st.booleans(),
    steps_in_flight=st.integers(1, 4),
)
# Two letters only, so that prefixes meet often.
prompts = st.lists(st.integers(1, 2), min_size=1, max_size=MAX_MODEL_LEN - 6).map(tuple)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.just(6),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 1.0]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
    logprobs=st.sampled_from([None, 1]),
)
asks = st.tuples(prompts, samplings, st.integers(-1, 1), st.integers(0, 20), st.sampled_from([None, None, 1, 9]))


@settings(max_examples=80, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configs, wanted=st.lists(asks, min_size=1, max_size=8), failure_rate=st.sampled_from([0.0, 0.1]))
def test_any_mix_gives_solo_answers(
    caplog: pytest.LogCaptureFixture,
    config: EngineConfig,
    wanted: list[tuple[tuple[int, ...], SamplingParams, int, int, int | None]],
    failure_rate: float,
) -> None:
    """Chunking, caching, preemption, cancellation, failure and overlap change nothing that a client sees."""
    caplog.set_level(logging.CRITICAL, logger="tokenmill.engine.shell")
    arrivals: list[Arrival] = []
    cancellations: list[Cancellation] = []
    for index, (prompt, sampling, priority, at_ms, cancel_ms) in enumerate(wanted):
        request = Request(f"r{index}", prompt, sampling, 6, index, eos_token_ids=(EOS, 3), priority=priority)
        arrivals.append(Arrival(at_ms / 1000, (replace(request, arrival_s=at_ms / 1000),)))
        if cancel_ms is not None:
            cancellations.append(Cancellation((at_ms + cancel_ms) / 1000, request.id))
    scenario = Scenario(
        config,
        Costs(0.001),
        failure_rate,
        tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)),
        tuple(sorted(cancellations, key=lambda cancellation: cancellation.at_s)),
    )
    report = run_scenario(scenario, failure_seed=len(wanted))
    assert sum(number for _, number in report.ends) == len(wanted)
    assert report.stats.num_held_blocks == 0


@given(
    start=st.integers(0, 100),
    num_left=st.integers(1, 100),
    budget=st.integers(0, 100),
    aim=st.integers(-20, 100),
    block_size=st.integers(1, 16),
    first=st.booleans(),
)
@settings(derandomize=True)
def test_chunks_stay_within_budget_and_stop_at_borders(
    start: int, num_left: int, budget: int, aim: int, block_size: int, first: bool
) -> None:
    """A chunk is affordable, ends the prompt or ends at a border, and the first prefill always progresses."""
    size = chunk_size(start, num_left, budget, aim, block_size, first)
    assert 0 <= size <= min(num_left, budget)
    if first and budget:
        assert size > 0
    if 0 < size < num_left and not first:
        assert (start + size) % block_size == 0
