"""A random scenario from a seed: an engine's settings, and who asks for what, when, and when they lose interest.

Sizes are small and pools often tiny, so that preemption, eviction, refusal and every border case of a block happen
within a few hundred steps. Everything is drawn from one seeded generator in a fixed order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ..core.block import BlockKey, KVGroupSpec, full_groups, window_group
from ..core.config import EngineConfig
from ..core.cost import Costs
from ..core.request import EXPORT, IMPORT, Request, SamplingParams
from ..kv.connector.scheduler.saves import SAVE_BYTES
from .executor import NO_DRAFTER, ToyDrafter
from .store import Slots, Stored, blocks_of
from .toy_model import mark_of, solo_answer

VOCAB_SIZE = 64
EOS = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """Requests submitted in one message at `at_s`."""

    at_s: float
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The client of `request_id` goes away at `at_s`, whatever has come of the request by then."""

    at_s: float
    request_id: str


@dataclass(frozen=True, slots=True)
class Scenario:
    """`stored`: what a store holds as the engine starts; None: there is no store. `drafter`: as in ToyExecutor."""

    config: EngineConfig
    costs: Costs
    failure_rate: float
    arrivals: tuple[Arrival, ...]
    cancellations: tuple[Cancellation, ...]
    stored: Stored | None = None
    drafter: ToyDrafter = NO_DRAFTER

    @property
    def requests(self) -> list[Request]:
        return [request for arrival in self.arrivals for request in arrival.requests]


def make_scenario(seed: int) -> Scenario:
    """The scenario of `seed`; equal on every machine and under every hash seed."""
    rng = random.Random(seed)
    config = _make_config(rng)
    num_requests = rng.randint(4, 40)
    span_s = rng.choice([0.0, 0.05, 0.5, 2.0])
    prefixes = [tuple(_tokens(rng, rng.randint(1, config.max_model_len // 2))) for _ in range(3)]
    cancel_rate = rng.choice([0.0, 0.1, 0.4])
    arrivals: list[Arrival] = []
    cancellations: list[Cancellation] = []
    for index in range(num_requests):
        at_s = rng.random() * span_s
        requests = _make_requests(rng, config, prefixes, f"r{index}", at_s)
        arrivals.append(Arrival(at_s, requests))
        for request in requests:
            if rng.random() < cancel_rate:
                cancellations.append(Cancellation(at_s + rng.random() * rng.choice([0.001, 0.05, 0.5]), request.id))
    scenario = Scenario(
        config,
        Costs(step_s=rng.choice([0.001, 0.004]), token_s=rng.choice([0.0, 0.0001])),
        rng.choice([0.0, 0.0, 0.03, 0.15]),
        tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)),
        tuple(sorted(cancellations, key=lambda cancellation: cancellation.at_s)),
    )
    return _with_store(rng, scenario) if rng.random() < 0.5 else scenario


def known_blocks(scenario: Scenario) -> dict[tuple[int, BlockKey], Slots]:
    """Every block that the scenario's requests can fill, and what it holds then."""
    known: dict[tuple[int, BlockKey], Slots] = {}
    for request in scenario.requests:
        answer = solo_answer(request, VOCAB_SIZE).tokens
        known |= blocks_of(request, answer, scenario.config, mark_of(request.adapter))
    return known


def _with_store(rng: random.Random, scenario: Scenario) -> Scenario:
    """With a store that holds some of these blocks, and pools of which a few blocks are saved at a time. Some requests
    hand their KV over, or expect that others have."""
    share = rng.choice([0.0, 0.5, 0.9, 1.0])
    groups = tuple(replace(group, bytes_per_block=SAVE_BYTES // 3) for group in scenario.config.groups)
    stored = {place: slots for place, slots in known_blocks(scenario).items() if rng.random() < share}
    handoffs = rng.choice([("",), ("", EXPORT, IMPORT), ("", "", "", EXPORT, IMPORT)])
    if not scenario.config.caches_prefixes:
        handoffs = ("",)
    arrivals = tuple(
        Arrival(each.at_s, tuple(replace(request, handoff=rng.choice(handoffs)) for request in each.requests))
        for each in scenario.arrivals
    )
    return replace(scenario, config=replace(scenario.config, groups=groups), arrivals=arrivals, stored=stored)


def _make_config(rng: random.Random) -> EngineConfig:
    block_size = rng.choice([1, 2, 4, 8, 16])
    num_blocks = rng.choice([6, 10, 20, 60, 150])
    config = EngineConfig(
        groups=full_groups(num_blocks),
        max_model_len=max(4, min(80, num_blocks * block_size + rng.choice([0, 8]))),
        block_size=block_size,
        max_num_seqs=rng.choice([1, 3, 8, 32]),
        max_num_batched_tokens=rng.choice([2, 7, 16, 33, 64]),
        max_num_waiting=rng.choice([3, 1000, 1000, 1000]),
        enable_prefix_caching=rng.random() < 0.85,
        steps_in_flight=rng.randint(1, 3),
    )
    kind = rng.choice(["full", "full", "both", "both", "window"])
    if kind == "full":
        return config
    local = _window_group(rng, block_size)
    groups = (*config.groups, local) if kind == "both" else (local,)
    if rng.random() < 0.3:
        groups = (_window_group(rng, block_size), *groups)
    return replace(config, groups=groups)


def _window_group(rng: random.Random, block_size: int) -> KVGroupSpec:
    window = rng.choice([1, 2, 3, 5, 8, 13, 31, 70])
    fewest = 1 + -(-(window - 1) // block_size)
    return window_group(max(1, fewest + rng.choice([-fewest // 2, 0, 1, 3, 10, 100])), window)


def _make_requests(
    rng: random.Random, config: EngineConfig, prefixes: list[tuple[int, ...]], name: str, at_s: float
) -> tuple[Request, ...]:
    """One prompt, as one request or as several choices of it."""
    longest = config.max_model_len - 1
    prefix = rng.choice([*prefixes, ()])[: rng.choice([longest, longest // 2])]
    prompt = (*prefix, *_tokens(rng, rng.randint(0, 12)))[:longest] or (1,)
    if rng.random() < 0.5:
        max_tokens = rng.randint(1, max(1, config.max_model_len - len(prompt)))
    else:
        max_tokens = rng.randint(1, 12)
    if rng.random() > 0.05:
        max_tokens = min(max_tokens, config.max_model_len - len(prompt))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, min(2, max_tokens), max_tokens]),
        temperature=rng.choice([0.0, 1.0]),
        stop_token_ids=rng.choice([(), (5,), (5, 9)]),
        ignore_eos=rng.random() < 0.2,
        logprobs=rng.choice([None, 0]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
    )
    first = Request(
        id=f"{name}-0",
        prompt_tokens=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        seed=rng.getrandbits(64),
        eos_token_ids=(EOS,),
        priority=rng.choice([0, 0, 0, -1, 1]),
        cache_salt=rng.choice(["", "", "", "other"]),
        arrival_s=at_s,
    )
    num_choices = rng.choice([1, 1, 1, 2, 4])
    requests = [replace(first, id=f"{name}-{choice}", choice=choice) for choice in range(num_choices)]
    return tuple(_resume(rng, request) if rng.random() < 0.15 else request for request in requests)


def _resume(rng: random.Random, request: Request) -> Request:
    """The same request, as it would come back after some of its output was delivered elsewhere."""
    answer = solo_answer(request, VOCAB_SIZE).tokens
    num_done = rng.randint(0, len(answer))
    if num_done >= request.max_tokens:
        num_done = request.max_tokens - 1
    return replace(request, output_tokens=answer[:num_done])


def _tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)]
