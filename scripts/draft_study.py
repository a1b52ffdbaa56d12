"""What other ways to draft would gain, on greedy answers that `draft_answers.py` recorded.

    python scripts/draft_study.py suffix answers.json --costs smollm2    # other settings of the suffix drafter
    python scripts/draft_study.py trees pair.json --costs coder-1.5b     # trees of drafts instead of chains
    python scripts/draft_study.py pool answers.json --costs smollm2      # n-grams that were drawn behind wrong drafts

Speeds are tokens a second behind the first token of an answer, as a multiple of those without drafts, by a table of
what steps take (COSTS). Nothing is timed: equal files give equal figures. Making drafts without a model takes nothing,
and every step waits for the one before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import draft_pool
import draft_trees
from draft_answers import Answer, Recorded, load
from tokenmill.core.cost import Costs, Work
from tokenmill.core.speculation import MOST_DRAFTS, NGRAM, SUFFIX, SpeculationConfig
from tokenmill.core.terms import USUAL
from tokenmill.engine.speculation import Candidate, Speculation
from tokenmill.ops.drafts import Wanted
from tokenmill.ops.native.drafter import NativeDrafter
from tokenmill.sim.acceptance import num_equal

COSTS = {
    "smollm2": (1.0, 1.05, 1.14, 1.15, 1.26, 1.32, 1.35, 1.37),
    "coder-1.5b": (1.0, 1.06, 1.13, 1.14, 1.22, 1.31, 1.33, 1.39),
    "coder-0.5b": (1.0, 1.06, 1.10, 1.13, 1.22, 1.30, 1.41, 1.42),
}
"""What a step with 1 to 8 rows of one sequence takes, as a multiple of one with one row: medians on two cores of an
EPYC with AVX-512. The first of these models is Q4_1; the others, of Qwen2.5-Coder, are Q4_K_M."""
MORE_COSTS = {9: 1.6, 16: 2.35}
"""Of all of them. Between and beyond these it is assumed to lie on straight lines."""
DRAFTER, DRAFTER_STEP = "coder-0.5b", 17.2 / 40.8
"""The draft model, and what a step of it takes of the 1.5B's."""


def costs_of(model: str) -> list[float]:
    """By number of rows; of none it is 0."""
    (first, one), (last, most) = MORE_COSTS.items()
    slope, end = (most - one) / (last - first), 2 * MOST_DRAFTS
    points = {0: 0.0, **dict(enumerate(COSTS[model], 1)), **MORE_COSTS, end: most + slope * (end - last)}
    return [float(cost) for cost in np.interp(np.arange(end), list(points), list(points.values()))]


# ---- settings of the suffix drafter ----

_DEFAULTS = SpeculationConfig(methods=(SUFFIX,))
_TRIED: dict[str, tuple[float, ...]] = {
    "suffix_decoding_max_tree_depth": (8, 12, 16, 32, 48),
    "suffix_decoding_max_spec_factor": (0.5, 1.5, 2.0, 4.0, 64.0),
    "suffix_decoding_min_token_prob": (0.0, 0.2, 0.3, 0.5),
    "num_speculative_tokens": (4, 8, 16, 48),
}
_LEAST_MATCHES = (2, 3, 4)


def settings() -> Iterator[tuple[str, SpeculationConfig, int]]:
    """What is tried: its name, the settings, the shortest match that is drafted from."""
    yield "as it is", _DEFAULTS, 1
    for key, values in _TRIED.items():
        for value in values:
            changed: dict[str, Any] = {key: value}
            yield f"`{key.removeprefix('suffix_decoding_')}` {value}", replace(_DEFAULTS, **changed), 1
    for least in _LEAST_MATCHES:
        yield f"matches of {least} tokens at least", _DEFAULTS, least
    for least in (5, 2):
        yield f"`ngram` of {least} to 5", SpeculationConfig(methods=(NGRAM,), prompt_lookup_min=least), 1


class Drafter:
    """A native drafter. least: matches of fewer tokens are not drafted from, which a second one tells: it drafts as
    many tokens as match."""

    def __init__(self, config: SpeculationConfig, vocab_size: int, least: int) -> None:
        self._most, self._least = config.num_speculative_tokens, least
        unbounded = replace(config, suffix_decoding_max_spec_factor=1.0, suffix_decoding_min_token_prob=0.0)
        self._all = [NativeDrafter(each, vocab_size) for each in ((config,) if least <= 1 else (config, unbounded))]

    def begin(self, seq: int, num_prompt: int) -> None:
        for each in self._all:
            each.begin(seq, "", num_prompt, num_prompt)

    def propose(self, seq: int, tokens: Sequence[int]) -> Any:
        found = [each.propose([Wanted(seq, tokens, self._most)])[0] for each in self._all]
        return None if found[-1] is None or len(found[-1].tokens) < self._least else found[0]

    def end(self, seq: int, tokens: Sequence[int]) -> None:
        for each in self._all:
            each.propose([Wanted(seq, tokens, 0)])
            each.end(seq)

    def close(self) -> None:
        for each in self._all:
            each.close()


def replay(answers: Iterable[Answer], drafter: Drafter, config: SpeculationConfig, costs: Sequence[float]) -> float:
    """The speed, where the engine's own policy chooses how many are verified. Earlier answers draft for later ones."""
    chooser, first = Speculation(config), costs[2] - costs[1]
    known, work = Costs(step_s=costs[1] - first, token_s=first), Work(1, 1, 0)
    num_tokens, seconds = 0, 0.0
    for seq, each in enumerate(answers):
        drafter.begin(seq, len(each.prompt))
        at, drawn = 1, each.answer[:1]
        new = each.prompt + drawn
        while at < len(each.answer):
            chooser.note_tokens(seq, drawn, drafter.propose(seq, new), 0)
            proposal = chooser.proposed.pop(seq, None)
            candidates = [] if proposal is None else [Candidate(seq, proposal, MOST_DRAFTS, at, USUAL)]
            num_drafts = sum(chooser.choose(candidates, work, known, MOST_DRAFTS))
            drafts = () if proposal is None else proposal.drafts.tokens[:num_drafts]
            new = drawn = each.answer[at : at + num_equal(drafts, each.answer[at:]) + 1]
            at, num_tokens, step_s = at + len(new), num_tokens + len(new), costs[1 + num_drafts]
            chooser.note_step(work, num_drafts, known, step_s)
            seconds += step_s
        chooser.forget(seq)
        drafter.end(seq, new)
    drafter.close()
    return num_tokens / seconds


def study_suffix(recorded: Recorded, costs: Sequence[float]) -> None:
    print("| |", " | ".join(recorded.answers), "|")
    usual: list[float] = []
    for name, config, least in settings():
        speeds = [
            replay(those, Drafter(config, recorded.vocab_size, least), config, costs)
            for those in recorded.answers.values()
        ]
        if not usual:
            usual, cells = speeds, [f"{speed:.2f}" for speed in speeds]
        else:
            cells = [f"{100 * (speed / one - 1):+.1f} %" for speed, one in zip(speeds, usual, strict=True)]
        print(f"| {name} |", " | ".join(cells), "|", flush=True)


# ---- trees, and the pool ----


def study_trees(recorded: Recorded, costs: Sequence[float]) -> None:
    free = draft_trees.Prices(costs, [0.0] * len(costs))
    with_model = draft_trees.Prices(costs, [DRAFTER_STEP * cost for cost in costs_of(DRAFTER)])
    for name, answers in recorded.answers.items():
        drafters = {SUFFIX: (list(draft_trees.suffix_roots(answers)), free)}
        if all(each.tops for each in answers):
            drafters["draft model"] = (list(draft_trees.model_roots(answers)), with_model)
        for drafter, (roots, prices) in drafters.items():
            for kind, (nodes, tokens, speed) in draft_trees.compare(roots, prices).items():
                print(f"| {name} | {drafter} | {kind} | {nodes} | {tokens:.2f} | {speed:.3f} |", flush=True)


def study_pool(recorded: Recorded, costs: Sequence[float], model: str, num_answers: int) -> None:
    greedy = draft_pool.Greedy(model)
    for name, answers in recorded.answers.items():
        for k in (3, 7):
            found = draft_pool.compare(greedy, answers[:num_answers], recorded.vocab_size, k, costs)
            for way, (tokens, speed) in found.items():
                print(f"| {name} | {k} | {way} | {tokens:.2f} | {speed:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("suffix", "trees", "pool"))
    parser.add_argument("answers", type=Path)
    parser.add_argument("--costs", choices=tuple(COSTS), required=True)
    parser.add_argument("--model", default="smollm2", help="pool: the model that gave the answers (default: smollm2)")
    parser.add_argument("--num-answers", type=int, default=5, help="pool: of each source (default: 5)")
    args = parser.parse_args()
    recorded, costs = load(args.answers), costs_of(args.costs)
    if args.study == "suffix":
        study_suffix(recorded, costs)
    elif args.study == "trees":
        study_trees(recorded, costs)
    else:
        study_pool(recorded, costs, args.model, args.num_answers)


if __name__ == "__main__":
    main()
