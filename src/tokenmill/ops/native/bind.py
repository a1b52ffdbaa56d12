"""A step's arrays as the C structs that one call takes.

Asking an array for its address costs more than all else here, and most arrays of a step are those of the step before:
the last array of each place is held and its address remembered.

T tokens  S sequences  L draws
"""

from __future__ import annotations

import numpy as np

from ..api import Draws, SampleBatch, StepBatch
from .library import DrawsStruct, SamplingStruct, StepStruct


class Binder:
    """num_tables: block tables of a sequence. logits: the buffer that draws read. draw_scratch: the address of memory
    that drawing uses."""

    def __init__(self, num_tables: int, logits: int, draw_scratch: int) -> None:
        self._num_tables = num_tables
        self._logits = logits
        self._draw_scratch = draw_scratch
        self._arrays: dict[str, np.ndarray] = {}
        self._addresses: dict[str, int] = {}

    def step(self, batch: StepBatch) -> StepStruct:
        num_tokens, num_seqs = len(batch.tokens_T), len(batch.context_lens_S)
        assert len(batch.positions_T) == num_tokens, (len(batch.positions_T), num_tokens)
        assert len(batch.row_starts_S1) == num_seqs + 1, (len(batch.row_starts_S1), num_seqs)
        assert len(batch.block_tables_SB) == num_seqs * self._num_tables, (len(batch.block_tables_SB), num_seqs)
        for array in (batch.adapters_T, batch.places_T):
            assert array is None or len(array) == num_tokens, (len(array), num_tokens)
        address = self._address
        return StepStruct(
            address("tokens", batch.tokens_T),
            address("positions", batch.positions_T),
            address("row_starts", batch.row_starts_S1),
            address("context_lens", batch.context_lens_S),
            address("block_tables", batch.block_tables_SB),
            address("logit_rows", batch.logit_rows_L),
            None if batch.adapters_T is None else address("adapters", batch.adapters_T),
            None if batch.places_T is None else address("places", batch.places_T),
            num_tokens,
            num_seqs,
            batch.block_tables_SB.shape[1],
            len(batch.logit_rows_L),
        )

    def draws(self, draws: Draws) -> DrawsStruct:
        assert len(draws.tokens_L) == len(draws.slots_L), (len(draws.tokens_L), len(draws.slots_L))
        return DrawsStruct(
            self.sampling(draws.how, len(draws.slots_L)),
            self._address("slots", draws.slots_L),
            self._address("drawn_now", draws.tokens_L),
            self._address("drawn", draws.drawn),
            self._draw_scratch,
            len(draws.slots_L),
            len(draws.drawn),
            self._logits,
        )

    def sampling(self, how: SampleBatch, num_rows: int) -> SamplingStruct:
        address = self._address
        columns = (
            how.temperature_L,
            how.top_k_L,
            how.top_p_L,
            how.min_p_L,
            how.seed_L,
            how.choice_L,
            how.position_L,
        )
        for column in columns:
            assert len(column) == num_rows, (len(column), num_rows)
        return SamplingStruct(
            address("temperature", how.temperature_L, np.float32),
            address("top_k", how.top_k_L),
            address("top_p", how.top_p_L, np.float32),
            address("min_p", how.min_p_L, np.float32),
            address("seed", how.seed_L, np.uint64),
            address("choice", how.choice_L),
            address("position", how.position_L),
        )

    def _address(self, place: str, array: np.ndarray, dtype: type[np.generic] = np.int32) -> int:
        if self._arrays.get(place) is not array:
            assert array.dtype == dtype and array.flags.c_contiguous, (place, array.dtype, array.shape)
            self._arrays[place] = array
            self._addresses[place] = array.ctypes.data
        return self._addresses[place]
