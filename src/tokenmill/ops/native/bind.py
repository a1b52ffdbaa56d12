"""A step's arrays as the bytes of the C structs that one call takes.

Asking an array for its address costs more than all else here, and most arrays of a step are those of the step before:
the last array of each place is held, and its address and what has been checked of it go for the next step too.

T tokens  S sequences  L draws
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..api import Draws, StepBatch
from .library import DRAWS, STEP

_SAMPLING = (np.float32, np.int32, np.float32, np.float32, np.uint64, np.int32, np.int32)


class Binder:
    """num_tables: block tables of a sequence. logits: the buffer that draws read. draw_scratch: the address of memory
    that drawing uses."""

    def __init__(self, num_tables: int, logits: int, draw_scratch: int) -> None:
        self._num_tables = num_tables
        self._logits = logits
        self._draw_scratch = draw_scratch
        self._step = _Places([np.int32] * 8)
        self._draws = _Places([*_SAMPLING, np.int32, np.int32, np.int32])

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
        how, num_rows = draws.how, len(draws.slots_L)
        arrays = (
            how.temperature_L,
            how.top_k_L,
            how.top_p_L,
            how.min_p_L,
            how.seed_L,
            how.choice_L,
            how.position_L,
            draws.slots_L,
            draws.tokens_L,
        )
        for array in arrays:
            assert len(array) == num_rows, (len(array), num_rows)
        addresses = self._draws.addresses((*arrays, draws.drawn))
        return DRAWS.pack(*addresses, self._draw_scratch, num_rows, len(draws.drawn), self._logits, 0)


class _Places:
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
