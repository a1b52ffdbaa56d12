"""The draw is an exponential race: each id wins as often as its share says, however small that is, and two
distributions draw alike as often as they can."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.ops.api import NEVER, SampleBatch
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import available_isas
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_sample import exponentials

needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))


@pytest.fixture(params=["numpy", pytest.param("native", marks=needs_native)])
def ops(request):
    made = ReferenceOps() if request.param == "numpy" else NativeOps(2)
    yield made
    made.close()


def _how(num_draws: int, seed: int, first: int = 0, **settings: float) -> SampleBatch:
    """Draws of the positions from `first` on, at temperature 1."""
    return SampleBatch(
        temperature_L=np.ones(num_draws, np.float32),
        top_k_L=np.full(num_draws, settings.get("top_k", 0), np.int32),
        top_p_L=np.full(num_draws, settings.get("top_p", 1), np.float32),
        min_p_L=np.full(num_draws, settings.get("min_p", 0), np.float32),
        seed_L=np.full(num_draws, seed, np.uint64),
        choice_L=np.zeros(num_draws, np.int32),
        position_L=np.arange(first, first + num_draws, dtype=np.int32),
    )


def _repeated(logits_V, num_draws: int) -> np.ndarray:
    return np.tile(np.array(logits_V, np.float32), (num_draws, 1))


def test_draws_follow_softmax(ops):
    """Chi-square over 40 ids: 61.2 would be passed once in a hundred times with 38 degrees of freedom."""
    rng = np.random.default_rng(1)
    logits_V = rng.normal(0, 1.5, 39)
    share_V = np.exp(logits_V) / np.exp(logits_V).sum()
    num_draws = 6000
    found_V = np.bincount(ops.sample(_repeated(logits_V, num_draws), _how(num_draws, seed=4)), minlength=39)
    chi_square = ((found_V - num_draws * share_V) ** 2 / (num_draws * share_V)).sum()
    assert chi_square < 61.2, chi_square


@needs_native
@pytest.mark.parametrize(("tail", "least", "most"), [(0.25, 320, 430), (0.001, 0, 7)])
def test_a_tail_of_tiny_probabilities_keeps_its_mass(tail: float, least: int, most: int) -> None:
    """262,143 ids of less than one in a million each win as often as all of them together should, within four standard
    deviations. Words rounded to 1, or small masses to 0, would show."""
    num_ids, num_draws = 2**18, 1500
    logits_V = np.full(num_ids, np.log(tail / (num_ids - 1) / (1 - tail)), np.float32)
    logits_V[777] = 0
    backend = NativeOps(2)
    drawn = [backend.sample(_repeated(logits_V, 50), _how(50, 9, first)) for first in range(0, num_draws, 50)]
    backend.close()
    assert least <= (np.concatenate(drawn) != 777).sum() <= most


def test_two_distributions_draw_alike(ops):
    """The same words for both: they agree with the probability sum_x 1 / sum_y max(P_y / P_x, Q_y / Q_x), which is at
    least (1 - d) / (1 + d) for a total variation distance of d."""
    rng = np.random.default_rng(3)
    logits_2V = rng.normal(0, 2, 30) + rng.normal(0, 0.4, (2, 30))
    p_V, q_V = (np.exp(row) / np.exp(row).sum() for row in logits_2V)
    alike = (1 / np.maximum(p_V[None] / p_V[:, None], q_V[None] / q_V[:, None]).sum(axis=1)).sum()
    distance = np.abs(p_V - q_V).sum() / 2
    assert alike >= (1 - distance) / (1 + distance)
    num_draws = 4000
    drawn = [ops.sample(_repeated(row, num_draws), _how(num_draws, seed=8)) for row in logits_2V]
    found = (drawn[0] == drawn[1]).mean()
    assert abs(found - alike) < 4 * np.sqrt(alike * (1 - alike) / num_draws), (found, alike)


@needs_native
@pytest.mark.exact
@pytest.mark.parametrize("num_ids", [1, 15, 33, 1000, 49152])
def test_instruction_sets_and_lists_draw_alike(num_ids: int) -> None:
    """Every instruction set gives what float64 gives, whether all ids race, a long list of them or a short one."""
    rng = np.random.default_rng(num_ids)
    num_draws = 40
    logits_LV = rng.normal(0, 4, (num_draws, num_ids)).astype(np.float32)
    for settings in ({}, {"top_k": 5}, {"top_k": num_ids * 2 // 3}, {"min_p": 1e-7}, {"top_p": 0.999}):
        how = _how(num_draws, seed=num_ids, **settings)
        expected = ReferenceOps().sample(logits_LV, how)
        for isa in available_isas():
            backend = NativeOps(1, isa)
            assert np.array_equal(backend.sample(logits_LV, how), expected), (isa, settings)
            backend.close()


@needs_native
def test_times_are_exact_at_both_ends() -> None:
    """Races of two ids, one with one of the least or greatest of a million words, the other with the mass that makes
    the times equal but for a few parts in a million, one way and the other."""
    num_ids, num_positions = 2**16, 16
    times_LV = np.stack([exponentials(5, 0, position, num_ids) for position in range(num_positions)])
    order = times_LV[:, 1:].argsort(axis=None)
    positions, ids = np.unravel_index(np.concatenate([order[:12], order[-12:]]), (num_positions, num_ids - 1))
    rows, ids = np.arange(24), ids + 1
    backend = NativeOps(1)
    for nudge, first_wins in ((3e-6, True), (-3e-6, False)):
        logits_LV = np.full((24, num_ids), NEVER, np.float32)
        ratio = times_LV[positions, 0] / times_LV[positions, ids]
        logits_LV[rows, 0] = np.maximum(np.log(ratio), 0) + nudge
        logits_LV[rows, ids] = np.maximum(-np.log(ratio), 0)
        how = _how(24, 5)
        how.position_L = positions.astype(np.int32)
        assert np.array_equal(backend.sample(logits_LV, how), np.where(first_wins, 0, ids))
    backend.close()
