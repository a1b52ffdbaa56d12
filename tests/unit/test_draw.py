"""The draw is an exponential race: each id wins as often as its share says, however small that is, and two
distributions draw alike as often as they can."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tokenmill.core.sampling import FILTERS, SamplingParams
from tokenmill.ops.api import RawTensor, StepBatch, StepLimits
from tokenmill.ops.draws import ALWAYS, MASK_LATE, NEVER, Adjustment, Adjustments, Draws, Mask, SampleBatch
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import available_isas
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_sample import PURPOSE_XTC, exponentials, words_of_ids

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
        filters={name: np.full(num_draws, settings.get(name, off), np.float32) for name, (_, off) in FILTERS.items()},
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
    """The same words for both: they agree with the probability sum_x 1 / sum_y max(P_y / P_x, Q_y / Q_x), at least
    (1 - d) / (1 + d) for a total variation distance of d."""
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
    all_settings: list[dict[str, float]] = [
        {}, {"top_k": 5}, {"top_k": num_ids * 2 // 3}, {"min_p": 1e-7}, {"min_p": 0.2}, {"top_p": 0.999},
        {"top_p": 0.3}, {"top_p": 0.9}, {"typical_p": 0.8}, {"typical_p": 0.2, "top_p": 0.9, "min_p": 0.5},
        {"top_k": 40, "typical_p": 0.5}, {"xtc_probability": 1, "xtc_threshold": 0.02},
    ]  # fmt: skip
    for settings in all_settings:
        how = _how(num_draws, seed=num_ids, **settings)
        expected = ReferenceOps().sample(logits_LV, how)
        for isa in available_isas():
            backend = NativeOps(1, isa)
            assert np.array_equal(backend.sample(logits_LV, how), expected), (isa, settings)
            backend.close()


@needs_native
@pytest.mark.exact
@pytest.mark.parametrize("largest", [0, 1e4, -1e30])
@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 0.7, 100, 1e38])
def test_races_of_all_ids_bear_any_scale(temperature: float, largest: float) -> None:
    """What bounds leave out of a race would not have won it, however steep or flat the row is and wherever it lies. Ids
    that are ruled out come first, so that a worse id leads until others come."""
    rng = np.random.default_rng(6)
    num_draws, num_ids = 25, 20_000
    logits_LV = (rng.normal(0, 3, (num_draws, num_ids)) + largest).astype(np.float32)
    logits_LV[:, :700] = NEVER
    logits_LV[::2, 9000] += 12
    how = replace(_how(num_draws, seed=2), temperature_L=np.full(num_draws, temperature, np.float32))
    expected = ReferenceOps().sample(logits_LV, how)
    for isa in available_isas():
        backend = NativeOps(1, isa)
        assert np.array_equal(backend.sample(logits_LV, how), expected), isa
        backend.close()


@pytest.mark.parametrize("share", [0.25, 0.75])
@pytest.mark.parametrize("filter_", ["top_p", "typical_p"])
def test_of_equal_ids_the_lower_ones_are_kept(ops, filter_: str, share: float) -> None:
    """5,000 equal ids and a share of them: the first ones alone are drawn, and all through."""
    drawn = ops.sample(np.zeros((400, 5000), np.float32), _how(400, 3, **{filter_: share}))
    assert drawn.max() < 5000 * share and np.ptp(drawn) > 4800 * share


@needs_native
@pytest.mark.exact
@pytest.mark.parametrize("top_p", [0.31, 0.5, 0.8, 0.97, 0.9999])
def test_a_winner_is_kept_or_drawn_again(top_p: float) -> None:
    """top_p alone, by the winner among all ids: steep rows, flat ones, ones with many equal ids, and ones most of
    which is ruled out, draw what the whole order of float64 masses gives, on every instruction set."""
    rng = np.random.default_rng(12)
    logits_LV = (rng.normal(0, 1, (120, 6000)) * np.repeat([0.1, 1, 3, 9], 30)[:, None]).astype(np.float32)
    logits_LV[::3] = np.rint(logits_LV[::3] * 4) / 4
    logits_LV[::5, :5900] = NEVER
    how = replace(_how(120, 4, top_p=top_p), temperature_L=np.tile(np.array([0.2, 1, 3], np.float32), 40))
    expected = ReferenceOps().sample(logits_LV, how)
    for isa in available_isas():
        backend = NativeOps(1, isa)
        assert np.array_equal(backend.sample(logits_LV, how), expected), isa
        backend.close()


def test_flat_rows_keep_as_many_ids_as_the_share_says(ops) -> None:
    """3,000 ids of nearly equal logits: what top_p and typical_p leave out is never drawn, what they keep is."""
    rng = np.random.default_rng(5)
    logits_V = rng.normal(0, 0.3, 3000).astype(np.float32)
    mass_V = np.exp(logits_V.astype(np.float64))
    share_V = mass_V / mass_V.sum()
    typical_V = np.abs(np.log(share_V) - (share_V * np.log(share_V)).sum())
    for filter_, key_V in (("top_p", -mass_V), ("typical_p", typical_V)):
        order = np.argsort(key_V, kind="stable")
        ranks_V = np.empty(3000, int)
        ranks_V[order] = np.arange(3000)
        num_kept = 1 + int(np.searchsorted(np.cumsum(share_V[order]), 0.6))
        ranks = ranks_V[ops.sample(_repeated(logits_V, 1000), _how(1000, 7, **{filter_: 0.6}))]
        assert num_kept * 0.98 < ranks.max() < num_kept, filter_
        assert np.bincount(ranks // 200)[:5].min() > 50, filter_


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


def _kept_slowly(logits: list[float], row: dict[str, float], xtc_word: int) -> set[int]:
    """The filters, id by id in plain Python."""
    highest = max(logits)
    mass = {i: math.exp((value - highest) / row["temperature"]) for i, value in enumerate(logits)}
    kept = set(mass)
    if row["top_n_sigma"] > 0:
        possible = [value for value in logits if value > NEVER]
        mean = sum(possible) / len(possible)
        sigma = math.sqrt(sum((value - mean) ** 2 for value in possible) / len(possible))
        kept = {i for i in kept if logits[i] >= highest - row["top_n_sigma"] * sigma}
    if row["top_k"]:
        kept = set(sorted(kept, key=lambda i: (-mass[i], i))[: int(row["top_k"])])

    def reaching(order: list[int], share: float) -> set[int]:
        total, reached, found = sum(mass[i] for i in order), 0.0, set()
        for i in order:
            if reached < share * total:
                found.add(i)
            reached += mass[i]
        return found

    if row["typical_p"] < 1:
        total = sum(mass[i] for i in kept)
        surprise = {i: -math.log(mass[i] / total) for i in kept if mass[i] > 1e-30}
        entropy = sum(mass[i] / total * value for i, value in surprise.items())
        kept = reaching(sorted(surprise, key=lambda i: (abs(surprise[i] - entropy), i)), row["typical_p"])
    if row["top_p"] < 1:
        kept = reaching(sorted(kept, key=lambda i: (-mass[i], i)), row["top_p"])
    most = max(mass[i] for i in kept)
    kept = {i for i in kept if mass[i] >= row["min_p"] * most}
    if (xtc_word + 0.5) / 2**32 < row["xtc_probability"]:
        total = sum(mass[i] for i in kept)
        top = sorted((i for i in kept if mass[i] >= row["xtc_threshold"] * total), key=lambda i: (-mass[i], i))
        kept -= set(top[:-1])
    return kept


def test_every_filter_against_the_definition(ops):
    """300 rows with every mixture of filters draw the winner of the race among what the definitions keep."""
    rng = np.random.default_rng(6)
    choices = {
        "temperature": (0.5, 1.0, 1.7), "top_n_sigma": (0, -1, 0.7, 1.5), "top_k": (0, 0, 9),
        "typical_p": (1, 0.9, 0.4), "top_p": (1, 1, 0.8), "min_p": (0, 0, 0.1),
        "xtc_probability": (0, 0.5, 1), "xtc_threshold": (0.05, 0.1, 0.3),
    }  # fmt: skip
    rows = [{name: float(np.float32(rng.choice(values))) for name, values in choices.items()} for _ in range(300)]
    logits_LV = rng.normal(0, 2, (300, 40)).astype(np.float32)
    logits_LV[::5, :10] = NEVER
    column = {name: np.array([row[name] for row in rows], np.float32) for name in choices}
    how = _how(300, seed=2)
    how.top_k_L = column.pop("top_k").astype(np.int32)
    how.filters = {name: column.pop(name) for name in FILTERS}
    for name, values in column.items():
        setattr(how, f"{name}_L", values)
    drawn = ops.sample(logits_LV, how).tolist()
    for place, row in enumerate(rows):
        xtc_word = int(words_of_ids(2, 0, place, PURPOSE_XTC, 1)[0])
        logits = logits_LV[place].tolist()
        times = exponentials(2, 0, place, 40)
        kept = _kept_slowly(logits, row, xtc_word)
        mass = {i: math.exp((logits[i] - max(logits)) / row["temperature"]) for i in kept if logits[i] > NEVER}
        winner = min(mass, key=lambda i: times[i] / mass[i])
        assert drawn[place] == winner, (place, row)


def test_a_threshold_too_small_for_a_float_leaves_a_token(ops):
    """XTC's lightest token is one that can be drawn at all, whatever rounding has made of a tiny threshold."""
    logits_LV = np.tile(np.arange(40, dtype=np.float32), (3, 1))
    how = _how(3, seed=1, top_k=5)
    how.temperature_L[:] = 1e-3
    how.filters |= {"xtc_probability": np.ones(3, np.float32), "xtc_threshold": np.zeros(3, np.float32)}
    assert ops.sample(logits_LV, how).tolist() == [39] * 3


def _masked_step(backend, mask: Mask, adjustment: Adjustment | None = None):
    """A step of two rows of equal logits, of which the first draws by the mask, and where their tokens will lie."""
    vocab_size = 64
    given = backend.pack([RawTensor("f32", 2, vocab_size, np.zeros((2, vocab_size), np.float32).view(np.uint8))])
    program = backend.compile(
        lambda ops, batch: ops.gather_rows(ops.embed(given, batch.tokens_T), batch.logit_rows_L), StepLimits(2, 2, 1, 2)
    )
    rows, ones = np.arange(2, dtype=np.int32), np.ones(2, np.int32)
    batch = StepBatch(rows, rows * 0, np.arange(3, dtype=np.int32), ones, np.zeros((2, 1), np.int32), rows)
    adjustment = adjustment or Adjustment(np.zeros(9, np.int32), 3, mask=mask)
    tokens_L = np.full(2, -7, np.int32)
    draws = Draws(_how(2, 1), rows, tokens_L, np.zeros(2, np.int32), Adjustments([adjustment, None]))
    return partial(program, batch, draws), tokens_L, adjustment


@needs_native
def test_only_the_row_whose_mask_is_late_waits() -> None:
    """A mask is published while the step that draws by it runs: the other row has its token by then."""
    backend, mask = NativeOps(2), Mask(64)
    step, tokens_L, adjustment = _masked_step(backend, mask)
    thread = threading.Thread(target=step)
    thread.start()
    give_up_s = time.monotonic() + 4
    while tokens_L[1] == -7 and time.monotonic() < give_up_s:
        time.sleep(1e-3)
    waited = tokens_L.tolist()
    mask.allow(np.array([41]))
    backend.publish(mask, 1)
    thread.join()
    backend.close()
    assert waited[0] == -7 and waited[1] >= 0
    assert tokens_L[0] == 41 == adjustment.history[3] and tokens_L[1] == waited[1]


def test_a_mask_that_does_not_come_is_told(ops):
    """A row whose mask is that of earlier positions only waits no longer than it is to, and says why it drew nothing;
    the other row has its token."""
    mask = Mask(64, wait_s=0.02)
    mask.allow(np.array([41]))
    step, tokens_L, _ = _masked_step(ops, mask)
    step()
    assert tokens_L[0] == MASK_LATE and tokens_L[1] >= 0
    ops.publish(mask, 1)
    step()
    assert tokens_L[0] == 41


def test_what_is_held_back_gives_way_to_a_mask(ops):
    """Tokens held back are drawn where the mask allows nothing else, and only there."""
    held_back = np.array([7, 41], np.int32)
    for allowed, expected in (([7, 41], {7, 41}), ([7, 20, 41], {20})):
        mask = Mask(64)
        mask.allow(np.array(allowed))
        ops.publish(mask, ALWAYS)
        adjustment = Adjustment(np.zeros(9, np.int32), 3, SamplingParams(min_tokens=4), held_back=held_back, mask=mask)
        step, tokens_L, _ = _masked_step(ops, mask, adjustment)
        step()
        assert tokens_L[0] in expected
