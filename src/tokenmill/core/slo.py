"""Service level objectives: the profiles of use, and what their targets come to on this machine. Pure.

A profile says how soon the first token of an answer is wanted (TTFT), and how much time each further one may take on
average (TPOT). A target that no machine of this speed could hold with any load on it is raised to twice what the
profile's median prompt takes when nobody else is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .cost import Costs, Work

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
