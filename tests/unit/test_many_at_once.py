"""What is done at once is what is done one by one, to the last bit: where simulations make many steps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tokenmill.bench.load.histogram import Histogram
from tokenmill.cluster.totals import Totals
from tokenmill.core.cost import CostFitter, Costs, Work
from tokenmill.core.events import EngineStats
from tokenmill.engine.shell import Pace
from tokenmill.sim.hardware import hardware_named
from tokenmill.sim.models import model_named
from tokenmill.sim.roofline import Roofline


def books(model: CostFitter) -> list[Any]:
    kinds = [
        (key, tuple(kind.sums), kind.weight, kind.noted, kind.num_tokens, kind.duration_s)
        for key, kind in model._kinds.items()
    ]
    return [model.costs, model.error, model._off, model._num_noted, model._num_fitted, kinds]


@pytest.mark.parametrize("chosen", [0.0, 0.1])
def test_decodes_teach_the_cost_model_the_same_at_once(chosen: float) -> None:
    """Also where steps of prompts were of their kind, where one takes no time, and across fits."""
    for seed in range(20):
        rng = random.Random(seed)
        single, many = CostFitter(16, chosen), CostFitter(16, chosen)
        for _ in range(40):
            num_rows, context = rng.randint(1, 40), rng.randint(0, 5000)
            if rng.random() < 0.3:
                prompt = Work(num_rows, num_rows + rng.choice([0, 1, 300]), rng.randint(0, 9000), context)
                took_s = rng.uniform(0.01, 0.02)
                single.note(prompt, took_s)
                many.note(prompt, took_s)
            else:
                durations = [rng.choice([0.0, *[rng.uniform(0.005, 0.03)] * 30]) for _ in range(rng.randint(0, 100))]
                for nth, took_s in enumerate(durations):
                    at = context + nth * num_rows
                    single.note(Work(num_rows, num_rows, at, at), took_s)
                many.note_decodes(num_rows, context, durations)
            assert books(single) == books(many), seed


@pytest.mark.parametrize(
    "cost_model",
    [
        Costs(0.002, 0.0005, 0.0004, 4e-7, 1e-6),
        Costs(0.002, 0.0005, 0.0004, 4e-7, 1e-6, 0.01, 0.1),
        Roofline(model_named("llama-3-8b"), hardware_named("h100-sxm")),
        Roofline(model_named("mixtral-8x7b"), hardware_named("h200-sxm")),
    ],
    ids=["costs", "costs-moe", "roofline", "roofline-moe"],
)
def test_cost_models_predict_decodes_the_same_at_once(cost_model: Costs | Roofline) -> None:
    rng = random.Random(1)
    for _ in range(100):
        num_rows, context, num = rng.randint(1, 200), rng.randint(1, 400_000), rng.randint(0, 20)
        contexts = [context + nth * num_rows for nth in range(num)]
        alone = [cost_model.predict(Work(num_rows, num_rows, at, at, num_rows)) for at in contexts]
        assert cost_model.predict_decodes(num_rows, context, num) == alone


def test_alike_steps_set_the_pace_the_same_at_once() -> None:
    rng = random.Random(2)
    single, many = Pace(), Pace()
    for _ in range(100):
        num_tokens = rng.randint(1, 20)
        durations = [rng.uniform(0.01, 0.04) for _ in range(rng.randint(1, 9))]
        for took_s in durations:
            single.note(num_tokens, took_s)
        many.note_alike(num_tokens, durations)
        assert single._known == many._known


def test_a_histogram_takes_values_the_same_at_once() -> None:
    rng = random.Random(3)
    single, many = Histogram(), Histogram()
    for _ in range(20):
        values = [rng.choice([0.0, rng.expovariate(50.0)]) for _ in range(rng.randint(0, 40))]
        for value in values:
            single.add(value)
        many.add_all(values)
    assert vars(single) == vars(many)
    with pytest.raises(AssertionError, match="a length of time of"):
        many.add_all([1.0, -1.0])


def test_what_is_told_late_does_not_replace_what_was_told_last() -> None:
    """Sums are the same in any order; what is of the last step, and of who knows most, goes by when it was told."""
    rng = random.Random(4)
    for _ in range(50):
        ordered, late = Totals(), Totals()
        steps = []
        for link in range(3):
            for totals in (ordered, late):
                totals.join(link, 10, EngineStats())
            num = rng.randint(1, 4)
            steps += [
                (rng.random(), link, EngineStats(num_steps=nth, last_step_s=rng.random(), costs=Costs(link + 1.0)))
                for nth in range(1, num + 1)
            ]
        when = sorted(each[0] for each in steps)
        steps = [(at, link, stats) for at, (_, link, stats) in zip(when, _riffled(steps, rng), strict=True)]
        for at, link, stats in steps:
            ordered.step(link, stats, at)
        for at, link, stats in _riffled(steps, rng):
            late.step(link, stats, at)
        assert late.stats == ordered.stats


def _riffled(steps: list[Any], rng: random.Random) -> list[Any]:
    """Those of each link in their order, those of different links in any."""
    places = [link for _, link, _ in steps]
    rng.shuffle(places)
    queues = {link: iter([step for step in steps if step[1] == link]) for link in places}
    return [next(queues[link]) for link in places]
