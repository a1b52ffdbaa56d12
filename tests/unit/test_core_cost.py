"""The cost model, against machines whose steps are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tokenmill.core.cost import CostFitter, CostModel, Costs, Work, work_of
from tokenmill.core.step import PlanRow

TRUTH = Costs(0.002, 0.0005, 0.0004, 4e-7, 1e-6)


def step_of(rng: random.Random, num_decodes: int, num_chunk: int = 0) -> Work:
    rows = [PlanRow(i, rng.randrange(20, 900), (7,)) for i in range(num_decodes)]
    if num_chunk:
        rows.append(PlanRow(num_decodes, rng.randrange(0, 1500, 16), (7,) * num_chunk))
    return work_of(rows)


def taught(
    truth: Callable[[Work], float], steps: list[Work], noise: float = 0.0, seed: int = 1
) -> tuple[CostFitter, random.Random]:
    model, rng = CostFitter(), random.Random(seed)
    for work in steps:
        model.note(work, truth(work) * rng.uniform(1 - noise, 1 + noise))
    return model, rng


def mixed(rng: random.Random, num: int) -> list[Work]:
    return [step_of(rng, rng.randrange(1, 40), rng.choice([0, 0, 16, 100, 500])) for _ in range(num)]


def test_the_work_of_a_step_counts_rows_tokens_and_what_they_attend_to() -> None:
    """A decode attends to all before it, a chunk to that and to its own tokens; each row reads what is before it."""
    rows = [PlanRow(0, 10, (), 3, sample=True), PlanRow(1, 100, (7,) * 4)]
    assert work_of(rows) == Work(2, 5, 10 + 4 * 100 + 6, 110, 1)


def test_fitted_costs_are_a_cost_model() -> None:
    """What is fitted to live steps stands wherever a cost model is asked for, and what only other cost models use
    changes nothing."""
    cost_model: CostModel = TRUTH
    assert cost_model.predict(Work(2, 5, 416, 110, 2, 16)) == cost_model.predict(Work(2, 5, 416, 110))


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_steps_of_all_kinds_are_predicted_within_noise(scale: float) -> None:
    """A linear machine, slow or fast, is known after some hundred noisy steps, its single steps and its large ones."""
    rng = random.Random(3)
    model, _ = taught(lambda work: scale * TRUTH.predict(work), mixed(rng, 400), noise=0.2)
    for work in mixed(rng, 100):
        assert model.costs.predict(work) == pytest.approx(scale * TRUTH.predict(work), rel=0.12)
    assert 0.02 < model.error < 0.2


def test_many_decodes_do_not_make_it_forget_what_a_prompt_takes() -> None:
    """After two thousand small steps a large one is predicted as before."""
    rng = random.Random(4)
    steps = mixed(rng, 200) + [step_of(rng, 4) for _ in range(2000)]
    model, _ = taught(TRUTH.predict, steps, noise=0.1)
    assert model.costs.predict(step_of(rng, 4, 500)) == pytest.approx(TRUTH.predict(step_of(rng, 4, 500)), rel=0.2)


def test_a_stall_changes_little_and_a_slower_machine_is_followed() -> None:
    """One step of twenty seconds moves predictions by less than a tenth; a machine at half the speed is known soon."""
    rng = random.Random(5)
    model, _ = taught(TRUTH.predict, mixed(rng, 300))
    work = step_of(rng, 8, 100)
    before = model.costs.predict(work)
    model.note(work, 20.0)
    for each in mixed(rng, 16):
        model.note(each, TRUTH.predict(each))
    assert model.costs.predict(work) == pytest.approx(before, rel=0.1)
    for each in mixed(rng, 900):
        model.note(each, 2 * TRUTH.predict(each))
    assert model.costs.predict(work) == pytest.approx(2 * before, rel=0.1)


def test_steps_as_predicted_are_seldom_fitted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is known costs a step little; when it changes, the model is fitted as often as at first."""
    fits: list[int] = []
    fit = CostFitter._fit
    monkeypatch.setattr(CostFitter, "_fit", lambda self: (fits.append(1), fit(self))[1])
    rng = random.Random(6)
    model, _ = taught(TRUTH.predict, mixed(rng, 400), noise=0.05)
    steps = [step_of(rng, 8) for _ in range(768)]
    fits.clear()
    for each in steps:
        model.note(each, TRUTH.predict(each))
    assert 2 <= len(fits) <= 4
    fits.clear()
    for each in steps[:64]:
        model.note(each, 3 * TRUTH.predict(each))
    assert len(fits) == 4


@pytest.mark.parametrize("num_known", [1, 500])
def test_what_was_never_seen_is_assumed_within_an_order_of_magnitude(num_known: int) -> None:
    """One step of one size gives a prediction of every size, that grows with the work."""
    model = CostFitter()
    assert not model.costs.is_known and model.costs.predict(Work(1, 1, 0)) == 0.0
    for _ in range(3):
        model.note(Work(1, num_known, 0), TRUTH.predict(Work(1, num_known, 0)))
    sizes = (1, 8, 64, 500)
    predicted = [model.costs.predict(Work(1, size, 0)) for size in sizes]
    assert predicted == sorted(predicted) and predicted[0] > 0
    for size, each in zip(sizes, predicted, strict=True):
        truth = TRUTH.predict(Work(1, size, 0))
        assert truth / 10 < each < truth * 10, (size, each, truth)


def test_nothing_is_negative_whatever_is_told() -> None:
    """Durations that fall as work grows, and nonsense, give coefficients of at least 0."""
    rng = random.Random(6)
    model = CostFitter()
    for _ in range(300):
        work = step_of(rng, rng.randrange(1, 60), rng.choice([0, 100]))
        model.note(work, rng.choice([0.0, -1.0, 1 / work.num_tokens, rng.expovariate(10)]))
        assert min(model.costs) >= 0.0
    assert model.costs.is_known


def test_equal_steps_say_nothing_of_positions() -> None:
    """Steps that are all alike cannot tell a token's cost from a position's: it is counted to the token."""
    model = CostFitter(block_size=16)
    for _ in range(50):
        model.note(work_of([PlanRow(0, 512, (7,) * 64)]), 0.1)
    assert model.attention == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_a_few_short_answers_do_not_make_long_prompts_seem_endless(seed: int) -> None:
    """Noise of decodes is not taken for the cost of positions: a prompt of 512 is predicted within ten times."""
    rng = random.Random(seed)
    short = [work_of([PlanRow(0, 0, (7,) * 9)]), *(Work(1, 1, 9 + i, 9 + i) for i in range(12))]
    model, _ = taught(TRUTH.predict, short, noise=0.4, seed=seed)
    for work in (work_of([PlanRow(0, 0, (7,) * 512)]), Work(1, 1, 2000, 2000), step_of(rng, 8, 500)):
        assert model.costs.predict(work) < 10 * TRUTH.predict(work), (work, model.costs)


@pytest.mark.parametrize("token_s", [1e-3, 1e-5])
def test_what_attention_costs_is_measured(token_s: float) -> None:
    """Steps of chunks at all depths tell what a position costs, as a share of what a token costs."""
    model, rng = CostFitter(block_size=16), random.Random(2)
    for _ in range(400):
        work = work_of([PlanRow(0, rng.randrange(0, 4000, 16), (7,) * rng.choice([64, 128, 256]))])
        seconds = token_s * (work.num_tokens + 0.001 * work.num_positions)
        model.note(work, seconds * rng.uniform(0.95, 1.05))
    assert model.attention == pytest.approx(16 * 0.001, rel=0.25)


def test_one_short_step_does_not_make_long_prompts_slow() -> None:
    """What a step of 20 tokens took is not put down to the few positions that they attend to."""
    model = CostFitter()
    model.note(Work(1, 20, 190), 0.001)
    assert model.costs.predict(Work(1, 8000, 8000 * 7999 / 2)) < 8000 / 20 * 0.001 * 2


def test_experts_that_a_step_reads_are_told_from_the_rest() -> None:
    """A mixture reads few experts for a token, most for sixteen: single decodes, batches and prompts are all known."""
    share = 8 / 64
    truth = TRUTH._replace(experts_s=0.08, chosen=share)
    rng = random.Random(7)
    model = CostFitter(chosen=share)
    for work in mixed(rng, 400):
        model.note(work, truth.predict(work) * rng.uniform(0.95, 1.05))
    for work in [*mixed(rng, 50), *(step_of(rng, num) for num in (1, 2, 4, 8, 16, 32))]:
        assert model.costs.predict(work) == pytest.approx(truth.predict(work), rel=0.06), work
    assert model.costs.chosen == share and model.error < 0.06
    assert truth.weights_s(1) == pytest.approx(0.002 + 0.08 * share) and truth.weights_s(1000) == pytest.approx(0.082)
    dense, _ = taught(truth.predict, mixed(random.Random(7), 400), noise=0.05)
    assert dense.costs.predict(step_of(rng, 1)) > 1.3 * truth.predict(step_of(rng, 1)), "what it is for"
