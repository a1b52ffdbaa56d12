"""Service level objectives: the profiles of use, what their targets come to on this machine, and which profile traffic
resembles. Pure.

A profile says how soon the first token of an answer is wanted (TTFT), and how much time each further one may take on
average (TPOT). A target that no machine of this speed could hold with any load on it is raised to twice what the
profile's median prompt takes when nobody else is served.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .cost import Costs, Work

# Which profile of use traffic resembles, by its shape: lengths, their spread, prefix reuse and rate.
#
# Five numbers are taken of the last requests, the logarithms to base 2 of prompt and output lengths (mean and spread)
# and the share of prompts that was cached. Each known shape says how these are distributed, as independent normal
# distributions; the traffic has the profile of the shape that makes them most likely (naive Bayes). One rule comes
# first: calls that nobody reads as they come, sent faster than anyone could, are a batch.
#
# The numbers of the shapes are from one half of each trace (see `source`); tests/unit/test_recognise.py holds them
# against the other half. The spread of agents' prompts is widened: contexts here may be shorter than theirs.
# docs/operate/slo.md has the table of confusions.


ENOUGH = 20
"""Requests before a first verdict."""
_KEPT = 2 * ENOUGH
_BATCH_GAP_S = 0.02
_SURE = 1.0
"""By so much a new verdict must be more likely than the last one, as a logarithm."""

FEATURES = ("prompt_log2", "output_log2", "reuse", "prompt_spread", "output_spread")
Features = tuple[float, float, float, float, float]


class Shape(NamedTuple):
    """means, spreads: of each feature, over windows of 20 requests."""

    profile: str
    source: str
    means: Features
    spreads: Features


SHAPES: Sequence[Shape] = (
    Shape("chat", "azure_llm_2023_conv", (9.65, 7.26, 0.0, 1.32, 1.19), (0.39, 0.48, 0.15, 0.31, 0.2)),
    Shape("chat", "mooncake_conversation", (12.63, 7.7, 0.39, 1.7, 1.9), (0.41, 0.41, 0.15, 0.21, 0.43)),
    Shape("code", "azure_llm_2023_code", (10.14, 3.99, 0.0, 1.79, 1.13), (0.48, 0.3, 0.15, 0.45, 0.29)),
    Shape("rag", "arxiv_summarization", (11.12, 7.48, 0.0, 0.92, 1.08), (0.3, 0.3, 0.15, 0.56, 0.33)),
    Shape("rag", "mooncake_synthetic", (11.52, 5.68, 0.42, 3.47, 2.37), (1.51, 0.98, 0.31, 1.0, 0.38)),
    Shape("agent", "agentic_coding", (16.54, 8.13, 0.95, 0.22, 0.99), (2.0, 0.61, 0.15, 0.25, 0.34)),
    Shape("edge", "servegen_m-small", (6.72, 3.6, 0.0, 0.33, 0.95), (1.74, 1.86, 0.15, 0.37, 0.64)),
    Shape("content", "servegen_deepseek-r1", (8.43, 9.57, 0.0, 1.1, 0.66), (2.31, 0.81, 0.15, 1.01, 0.33)),
)


class Verdict(NamedTuple):
    """profile   what the traffic resembles
    reason    the shape, or the rule
    features  what was looked at, by FEATURES
    distances  of each feature from the shape, in its spreads; empty: a rule decided
    lead      by which it is more likely than the best shape of another profile, as a logarithm
    """

    profile: str
    reason: str
    features: Features
    distances: tuple[float, ...] = ()
    lead: float = 0.0


class Traffic:
    """The last requests of one tenant or client, and what they resemble. verdict: None before there are enough."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.verdict: Verdict | None = None
        self._ended: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)
        self._came: deque[tuple[float, bool, int]] = deque(maxlen=ENOUGH)

    def came(self, now: float, is_streamed: bool) -> None:
        """A call came."""
        self._came.append((now, is_streamed, self.num_seen))

    def ended(self, num_prompt: int, num_output: int, num_cached: int) -> None:
        """A request was answered."""
        self.num_seen += 1
        self._ended.append(
            (math.log2(max(1, num_prompt)), math.log2(max(1, num_output)), min(1.0, num_cached / max(1, num_prompt)))
        )
        if self.num_seen >= ENOUGH and self.num_seen % (ENOUGH // 4) == 0:
            self.verdict = self._judge()

    def _judge(self) -> Verdict:
        found = features(self._ended)
        if self._is_burst:
            return Verdict("batch", f"{ENOUGH} calls at once within {_BATCH_GAP_S * ENOUGH:g} s, none streamed", found)
        best = recognise(found)
        last = self.verdict
        if last is None or last.profile == best.profile or not last.distances or best.lead > _SURE:
            return best
        return last._replace(features=found)

    @property
    def _is_burst(self) -> bool:
        came = self._came
        if len(came) < ENOUGH or any(is_streamed for _, is_streamed, _ in came):
            return False
        is_fast = came[-1][0] - came[0][0] < _BATCH_GAP_S * (ENOUGH - 1)
        return is_fast and came[-1][2] - came[0][2] < ENOUGH // 2  # or else each waits for the one before


def features(ended: Sequence[tuple[float, float, float]]) -> Features:
    """Of requests as (logarithm of the prompt's length, of the output's, share cached)."""
    num = len(ended)
    prompts, outputs, reuse = ([each[part] for each in ended] for part in range(3))
    prompt, output = sum(prompts) / num, sum(outputs) / num
    prompt_spread = math.sqrt(sum((each - prompt) ** 2 for each in prompts) / num)
    output_spread = math.sqrt(sum((each - output) ** 2 for each in outputs) / num)
    return (prompt, output, sum(reuse) / num, prompt_spread, output_spread)


def recognise(found: Features) -> Verdict:
    """The profile whose shape makes the features most likely."""
    scored = sorted(((_likelihood(found, shape), shape) for shape in SHAPES), key=lambda each: -each[0])
    best_score, best = scored[0]
    other = next(score for score, shape in scored if shape.profile != best.profile)
    distances = tuple(
        (each - mean) / spread for each, mean, spread in zip(found, best.means, best.spreads, strict=True)
    )
    return Verdict(best.profile, best.source, found, distances, best_score - other)


def _likelihood(found: Features, shape: Shape) -> float:
    """Its logarithm, but for what is the same for all."""
    return sum(
        -(((each - mean) / spread) ** 2) / 2 - math.log(spread)
        for each, mean, spread in zip(found, shape.means, shape.spreads, strict=True)
    )


OFF, AUTO = "off", "auto"
RAISED = 2.0
"""A target is at least so many times what is needed without load."""

MAX_TARGET_S = 3600.0


class Targets(NamedTuple):
    """Seconds to the first token, and for each further one on average. 0: none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


class Profile(NamedTuple):
    """summary: who uses it. num_prompt, num_output: tokens of the median request. source: of targets and lengths."""

    summary: str
    targets: Targets
    num_prompt: int
    num_output: int
    source: str


PROFILES: Mapping[str, Profile] = {
    "chat": Profile(
        "a person reads the answer as it comes",
        Targets(0.2, 0.02),
        1035,
        140,
        "lengths: azure_llm_2023_conv (Patel et al., Splitwise, ISCA 2024)",
    ),
    "code": Profile(
        "an editor completes code while it is typed: long prompts, few tokens",
        Targets(0.1, 0.02),
        1465,
        13,
        "lengths: azure_llm_2023_code (Splitwise); TPOT as chat",
    ),
    "rag": Profile(
        "answers from documents that were found for the question: long prompts with little in common",
        Targets(0.5, 0.05),
        2722,
        167,
        "TPOT: Dynamo's planner, 50 ms; lengths: arxiv_summarization (Vidur, MLSys 2024)",
    ),
    "agent": Profile(
        "a program calls tools in many turns, each with all that came before",
        Targets(0.5, 0.05),
        8192,
        213,
        "targets: Dynamo's planner, 500 and 50 ms; outputs: agentic_coding; prompts: what is new or not cached of them",
    ),
    "batch": Profile(
        "nobody waits: throughput alone counts",
        Targets(),
        1024,
        256,
        "no targets",
    ),
    "content": Profile(
        "long texts are written from short instructions",
        Targets(2.0, 0.1),
        256,
        1024,
        "TTFT: MLPerf Inference, Llama 2 70B in the server scenario; TPOT: Mooncake (Qin et al., FAST'25), 100 ms",
    ),
    "edge": Profile(
        "short questions on a small machine: assistants, devices, classifiers",
        Targets(0.25, 0.1),
        128,
        32,
        "targets: DistServe (Zhong et al., OSDI 2024), OPT-13B on ShareGPT",
    ),
}


class Wish(NamedTuple):
    """What a request says of its objectives. profile "": none named; targets 0: not given."""

    profile: str = ""
    ttft_s: float = 0.0
    tpot_s: float = 0.0


NO_WISH = Wish()


def unloaded(costs: Costs, num_prompt: int, step_tokens: int) -> Targets:
    """Seconds that a prompt's first token, and each further one, takes with nobody else there. 0: not yet measured."""
    if not costs.predict(Work(1, 1, num_prompt)):
        return Targets()
    ttft_s, start = 0.0, 0
    while start < num_prompt:
        num_new = min(step_tokens, num_prompt - start) if step_tokens else num_prompt
        ttft_s += costs.predict(Work(1, num_new, num_new * start + num_new * (num_new - 1) // 2, start))
        start += num_new
    return Targets(ttft_s, costs.predict(Work(1, 1, num_prompt, num_prompt)))


_LENT = 0.5
"""Of its lead, what a sequence that is ahead of its pace lends to a step."""
_MARGIN = 0.9
"""Of what a step may take, what it is planned to take: predictions have errors."""
_FLOOR = 16


def paced_s(tpot_s: float, lead_s: float) -> float:
    """Seconds that a step is planned to take where a sequence that draws has a target for each token, and is so much
    ahead of it (below 0: behind). The engine sizes steps by it, and the front end predicts them."""
    return _MARGIN * (tpot_s + (_LENT * lead_s if lead_s > 0 else max(lead_s, -tpot_s / 2)))


def least_tokens(step_tokens: int, block_size: int = 16) -> int:
    """Prompt tokens in a step, whatever the targets, so that prompts progress. step_tokens: of a full one."""
    return max(2 * block_size, step_tokens // _FLOOR)


def raised(targets: Targets, alone: Targets) -> Targets:
    """Targets that can be held where a request alone takes as long as `alone`. What has no target keeps none."""
    return Targets(
        max(targets.ttft_s, RAISED * alone.ttft_s) if targets.ttft_s else 0.0,
        max(targets.tpot_s, RAISED * alone.tpot_s) if targets.tpot_s else 0.0,
    )
