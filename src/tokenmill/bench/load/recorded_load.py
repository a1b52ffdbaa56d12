"""The load of a result measured earlier, made again from what the result says of it: the recorded command line, the
seed, the form of the bodies. Whether it is the same load is not believed but checked, by the digest of what was sent.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ...core.errors import ConfigError
from . import options
from .body import BodyFormat, BodyWriter
from .material import Vocabulary
from .plan import Plan
from .run import Load

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """load: with the seed of the run. body: the form in which its requests were sent. digest: the run's, which the
    load made again has too. lengths: index of a request that was answered -> tokens of its answer."""

    load: Load
    body: BodyFormat
    digest: str
    lengths: dict[int, int] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """When each request is due, and of what parts it is made."""
        load = self.load
        return load.schedule.apply(load.make_plan(load.num_prompts, load.seed, load.schedule.request_rate))

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for runs of which a simulation is the same: what was sent, when, by which clients, how long answers
        were, and what is measured of it."""
        load = self.load
        clients = load.schedule, load.retry_policy, load.give_up
        measured = load.window, load.percentiles, tuple(sorted(load.objectives.items()))
        return self.digest, load.seed, load.num_warmups, clients, measured, tuple(sorted(self.lengths.items()))

    @property
    def answered(self) -> Load:
        """The load with answers of the lengths that they had: how long a model's answer is, no server decides."""
        make_plan, lengths = self.load.make_plan, self.lengths

        def with_lengths(num: int, seed: int, rate: float | None) -> Plan:
            plan = make_plan(num, seed, rate)
            if num != self.load.num_prompts or seed != self.load.seed:
                return plan  # that of the warm-up
            calls = (replace(call, output_tokens=lengths.get(call.index, call.output_tokens)) for call in plan.calls)
            return replace(plan, calls=tuple(calls))

        return replace(self.load, make_plan=with_lengths)


def recorded_load(run: Json, read_vocabulary: Callable[[str], Vocabulary] | None = None) -> RecordedLoad:
    """The load of a run of `bench serve`, or of the cold phase of `bench compare`. read_vocabulary: of the model that
    --tokenizer names. Raises ConfigError where the run does not say enough, or where what is made from it is not what
    was sent."""
    args = _parse(run.get("argv") or ())
    if getattr(args, "sweep_rates", None) or getattr(args, "sweep_concurrency", None):
        raise ConfigError("A run of a sweep cannot be made again from its command line.", param="against")
    vocabulary = None
    if args.tokenizer is not None:
        if read_vocabulary is None:
            raise ConfigError("This load's text comes from a tokenizer (--tokenizer), which is not here.")
        vocabulary = read_vocabulary(args.tokenizer)
    try:
        load = replace(options.make_load(args, run["argv"], vocabulary), seed=int(run["dataset"]["seed"]))
        digest, endpoint = str(run["dataset"]["digest"]), run["endpoint"]
        body = BodyFormat(
            endpoint["api"],
            endpoint["prompt_format"],
            endpoint["model"],
            bool(endpoint["ignore_eos"]),
            dict(endpoint["extra_body"]),
            bool(endpoint["scripted_replies"]),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"The live result does not say its load: {error} is missing.", param="against") from None
    rows = run.get("requests") or ()
    lengths = {row["index"]: row["output_tokens"] for row in rows if row["ok"] and row["output_tokens"]}
    recorded = RecordedLoad(load, body, digest, lengths)
    made = digest_of(recorded)
    if made != digest:
        raise ConfigError(
            f"The load made from the live result's command has another digest ({made[:12]}) than what was sent"
            f" ({digest[:12]}): its data set, or the version that drew it, has changed. Measure again.",
            param="against",
        )
    return recorded


def digest_of(recorded: RecordedLoad) -> str:
    """What a result says of what would be sent."""
    load, body = recorded.load, recorded.body
    writer = BodyWriter(body, load.make_material(load.seed, body.prompt_format))
    plan = recorded.plan
    writer.prepare(plan)
    return writer.digest(plan)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The words after `bench serve` or `bench compare`. Raises ConfigError."""
    words = list(argv)
    kinds = {"serve": options.add_serve_arguments, "compare": options.add_compare_arguments}
    for i, (command, kind) in enumerate(pairwise(words)):
        if command == "bench" and kind in kinds:
            parser = argparse.ArgumentParser(prog=f"bench {kind}", exit_on_error=False)
            kinds[kind](parser)
            try:
                return parser.parse_args(words[i + 2 :])
            except (argparse.ArgumentError, SystemExit):
                raise ConfigError(
                    "The live result's argv is not one that this version reads.", param="against"
                ) from None
    raise ConfigError(
        "The live result was not written by `tokenmill bench serve`: its argv has no such command.", param="against"
    )
