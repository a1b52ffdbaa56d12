"""A step's arrays as the bytes of the C structs that one call takes.

Asking an array for its address costs more than all else here, and most arrays of a step are those of the step before:
the last array of each place is held, and its address and what has been checked of it go for the next step too.

T tokens  S sequences  L draws
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from ...core.sampling import PENALTIES
from ..api import StepBatch
from ..draws import COLUMN_DTYPES, Adjustment, Adjustments, Draws
from .library import DRAWS, STEP, AdjustmentStruct

_FLOAT, _INT = np.float32, np.int32
_SCORES: tuple[type[np.generic], ...] = (_INT, _FLOAT, _INT, _INT, _FLOAT)


class Binder:
    """num_tables: block tables of a sequence. logits: the buffer that draws read. draw_scratch: the address of memory
    that drawing uses."""

    def __init__(self, num_tables: int, logits: int, draw_scratch: int) -> None:
        self._num_tables = num_tables
        self._logits = logits
        self._draw_scratch = draw_scratch
        self._step = _Addresses([np.int32] * 8)
        self._draws = _Addresses([*COLUMN_DTYPES.values(), np.uint64, *_SCORES, np.int32, np.int32, np.int32])

    def step(self, batch: StepBatch) -> bytes:
        """A tm_step."""
        num_tokens, num_seqs = len(batch.tokens_T), len(batch.context_lens_S)
        num_rows, table_width = batch.block_tables_SB.shape
        assert len(batch.positions_T) == num_tokens, (len(batch.positions_T), num_tokens)
        assert len(batch.row_starts_S1) == num_seqs + 1, (len(batch.row_starts_S1), num_seqs)
        assert num_rows == num_seqs * self._num_tables, (num_rows, num_seqs)
        for array in (batch.adapters_T, batch.places_T):
            assert array is None or len(array) == num_tokens, (len(array), num_tokens)
        addresses = self._step.addresses(
            (
                batch.tokens_T,
                batch.positions_T,
                batch.row_starts_S1,
                batch.context_lens_S,
                batch.block_tables_SB,
                batch.logit_rows_L,
                batch.adapters_T,
                batch.places_T,
            )
        )
        return STEP.pack(*addresses, num_tokens, num_seqs, table_width, len(batch.logit_rows_L))

    def draws(self, draws: Draws) -> bytes:
        """A tm_draws."""
        num_rows, scores = len(draws.slots_L), draws.scores
        reported: tuple[np.ndarray | None, ...] = (None,) * 5
        if scores is not None:
            reported = (
                scores.num_top_L,
                scores.logprobs_L,
                scores.ranks_L,
                scores.top_ids_Ln,
                scores.top_logprobs_Ln,
            )
        arrays = (*draws.how.columns(), _packed(draws.adjustments), *reported, draws.slots_L, draws.tokens_L)
        for array in arrays:
            assert array is None or len(array) == num_rows, (len(array), num_rows)
        addresses = self._draws.addresses((*arrays, draws.drawn))
        top_width = 0 if scores is None else scores.top_ids_Ln.shape[1]
        return DRAWS.pack(*addresses, self._draw_scratch, num_rows, len(draws.drawn), self._logits, top_width)


def _packed(adjustments: Adjustments | None) -> np.ndarray | None:
    """The address of each row's tm_adjustment, 0 for none."""
    if adjustments is None:
        return None
    if adjustments.packed is None:
        adjustments.packed = np.array([0 if one is None else _address(one) for one in adjustments.rows], np.uint64)
    packed: np.ndarray = adjustments.packed
    return packed


def _address(one: Adjustment) -> int:
    if one.packed is None:
        assert one.history.dtype == np.int32 and one.history.flags.c_contiguous, one.history.dtype
        one.packed = AdjustmentStruct(
            history=one.history.ctypes.data,
            num_prompt=one.num_prompt,
            min_tokens=one.params.min_tokens,
            **{name: getattr(one.params, name) for name in PENALTIES},
            num_dry_breakers=len(one.dry_breakers),
            num_bias=len(one.bias_ids),
            num_held_back=len(one.held_back),
            num_bad_words=max(0, len(one.bad_starts) - 1),
            mask_wait_us=0 if one.mask is None else int(1e6 * one.mask.wait_s),
            dry_breakers=_ids(one.dry_breakers),
            bias_ids=_ids(one.bias_ids),
            bias=one.bias.ctypes.data,
            mask=None if one.mask is None else one.mask.place[0],
            mask_until=None if one.mask is None else one.mask.until_at,
            held_back=_ids(one.held_back),
            bad_tokens=_ids(one.bad_tokens),
            bad_starts=_ids(one.bad_starts),
        )
    return ctypes.addressof(one.packed)


def _ids(array: np.ndarray) -> int:
    assert array.dtype == np.int32 and array.flags.c_contiguous, array.dtype
    address: int = array.ctypes.data
    return address


class _Addresses:
    """The addresses of a fixed number of arrays, each of its own dtype; 0 for one that is not there."""

    def __init__(self, dtypes: Sequence[type[np.generic]]) -> None:
        self._dtypes = dtypes
        self._arrays: list[np.ndarray | None] = [None] * len(dtypes)
        self._addresses = [0] * len(dtypes)

    def addresses(self, arrays: Sequence[np.ndarray | None]) -> list[int]:
        held = self._arrays
        for place, array in enumerate(arrays):
            if array is held[place]:
                continue
            held[place] = array
            if array is None:
                self._addresses[place] = 0
                continue
            assert array.dtype == self._dtypes[place] and array.flags.c_contiguous, (place, array.dtype, array.shape)
            self._addresses[place] = array.ctypes.data
        return self._addresses
